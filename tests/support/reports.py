"""Invented reports for tests: an image pipeline on a slow disk, and variations of it."""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.diagnose.analyze.model import Change, predict
from penstock.diagnose.analyze.remedies import Remedy
from penstock.diagnose.analyze.report import (
    AnalysisReport,
    Costs,
    OperationTime,
    Phase,
    PhaseName,
    Rate,
    Setup,
    Wait,
)

SETUP = Setup(
    loader="torch.utils.data.DataLoader",
    samples=50_000,
    batch=64,
    workers=4,
    kind="processes",
    ahead=8,
    piece=64,
    cores=8,
    sample_bytes=110_000.0,
)

COSTS = Costs(
    compute=1 / 2_000,
    prep=2e-3,
    scaling={1: 1.0, 4: 3.8},
    storage=100e6,
    cache=6e9,
    latency=1e-3,
)


def remedy(title: str, gain: float, code: str, why: str = "") -> Remedy:
    """A remedy whose change is a cache of all the data."""
    change = Change(cache=5_500_000_000)
    return Remedy(title, gain, code, why, predict(report(), change), change)


def report(**changed: object) -> AnalysisReport:
    """A fetch-bound report, with fields of ``Setup`` and ``Costs`` changed as given.

    Storage delivers 909 samples per second, four workers prepare 1,900, the device takes 2,000.
    """
    setup = {name: value for name, value in changed.items() if hasattr(SETUP, name)}
    costs = {name: value for name, value in changed.items() if hasattr(COSTS, name)}
    phases: list[tuple[PhaseName, float]] = [
        ("replay", 2_000),
        ("cached", 1_880),
        ("cold", 900),
        ("prep", 1_900),
        ("storage", 909),
        ("cache", 54_000),
    ]
    return AnalysisReport(
        setup=replace(SETUP, **setup),  # type: ignore[arg-type]
        costs=replace(COSTS, **costs),  # type: ignore[arg-type]
        phases=tuple(
            Phase(name, Rate(rate, rate * 0.98, rate * 1.02), 40, 40 * 64 / rate)
            for name, rate in phases
        ),
        operations=(
            OperationTime("decode", "map", 1.2, 0.60, nbytes=562_500),
            OperationTime("random_resized_crop", "map", 0.5, 0.25, random=True, nbytes=150_528),
            OperationTime("random_flip", "map", 0.1, 0.05, random=True, nbytes=150_528),
            OperationTime("normalize", "map", 0.2, 0.10, nbytes=602_112),
        ),
        batch_times=tuple(0.128 + 0.002 * (n % 9) for n in range(60)),
        waits=tuple(
            Wait(0.07 * n, "cold" if n >= 30 else "cached", 0.035 if n >= 30 else 0.002, 0.034)
            for n in range(60)
        ),
        device_reads=0.97,
        command="python train.py --epochs 90",
        made="2025-01-01T12:00:00",
        machine="8 cores, 64.0 GB",
    )


def bound_by(bound: str, **changed: object) -> AnalysisReport:
    """The same script with the given bottleneck, and phases to match."""
    rates: dict[str, dict[PhaseName, float]] = {
        "fetch": {"replay": 2_000, "cached": 1_880, "cold": 900, "prep": 1_900, "storage": 909},
        "prep": {"replay": 2_000, "cached": 840, "cold": 800, "prep": 850, "storage": 9_090},
        "compute": {"replay": 500, "cached": 498, "cold": 495, "prep": 1_900, "storage": 9_090},
    }
    costs: dict[str, dict[str, object]] = {
        "fetch": {},
        "prep": {"prep": 3.8 / 850, "storage": 1e9},
        "compute": {"compute": 1 / 500, "storage": 1e9},
    }
    made = report(**costs[bound], **changed)
    phases = tuple(
        Phase(name, Rate(rate, rate * 0.98, rate * 1.02), 40, 40 * 64 / rate)
        for name, rate in rates[bound].items()
    )
    return replace(made, phases=phases)


def rich(**changed: object) -> AnalysisReport:
    """A report with everything that a page can show: two ranks, notes and scattered times."""
    chance = random.Random(0)
    waits, now = [], 0.0
    phases: list[tuple[PhaseName, float]] = [("replay", 2e-4), ("cached", 3e-3), ("cold", 0.037)]
    for phase, middle in phases:
        for _ in range(80):
            wait, step = chance.lognormvariate(0, 0.5) * middle, 0.032 * chance.uniform(0.98, 1.04)
            waits.append(Wait(now, phase, wait, step))
            now += wait + step
        now += 5.0
    made = replace(
        report(**changed),
        batch_times=tuple(0.1 + 0.03 * chance.lognormvariate(0, 0.45) for _ in range(240)),
        waits=tuple(waits),
        notes=("Preparation was timed on 240 batches.",),
    )
    costs = replace(made.costs, prep=5.2e-3)
    other = replace(made, setup=replace(made.setup, rank=1, world=2), costs=costs)
    return replace(made, setup=replace(made.setup, world=2), ranks=(other,))
