"""The benchmark ``cooperate``: its bound, its ways to split the work, and a short run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cooperate
from benchmarks.__main__ import parse
from benchmarks.cooperate import (
    SPEEDS,
    WAYS,
    Case,
    Costs,
    best_possible,
    mini_batches,
    seconds,
)
from penstock import native
from penstock.device.fake import Times
from penstock.device.shared_schedule import cut, usual_tiny
from tests.support.jpegs import encode, picture

FREE = Times(launch=0.0, bus=float("inf"))
"""A device that costs nothing but its work."""


def stated(count: int, host: float) -> Costs:
    """Tiny-batches of different sizes; ``host``: the CPU's part of a device task."""
    whole = np.linspace(0.8, 1.2, count)
    ones = np.ones(count)
    return Costs(
        whole * 1e5, whole, whole * 0.8, whole * host, whole * 1e5, ones, ones * (1 - host)
    )


def photographs(samples: int) -> Costs:
    """Tiny-batches of photographs: costs follow their bytes, but not exactly."""
    rng = np.random.default_rng(samples)
    nbytes = rng.lognormal(11.5, 0.5, (240, samples))
    whole = 0.15e-3 + 4e-9 * nbytes * rng.lognormal(0.0, 0.2, nbytes.shape)
    host = 0.62 * whole * rng.lognormal(0.0, 0.08, nbytes.shape)
    ones = np.ones(nbytes.shape)
    parts = (nbytes, whole, 0.95 * whole, host, nbytes, ones, 0.38 * ones / samples)
    return Costs(*[part.sum(axis=1) for part in parts])


def test_the_bound_is_that_of_work_that_can_be_cut_at_will() -> None:
    costs = stated(8, host=0.0)
    case = Case("all of it", 3, 1.0, times=FREE)
    # Three workers and a device as fast as one of them.
    assert best_possible(case, costs) == pytest.approx(costs.whole.sum() / 4)
    # A device that is infinitely fast, and needs a half of the CPU time.
    case = replace(case, speed=1e9)
    assert best_possible(case, stated(8, host=0.5)) == pytest.approx(costs.whole.sum() / 6)


@pytest.mark.parametrize("speed", [0.25, 20.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_no_way_beats_the_bound_and_cooperation_beats_the_cpu(
    monkeypatch: pytest.MonkeyPatch, speed: float, heavy: bool
) -> None:
    monkeypatch.setattr(cooperate, "BATCHES", 30)
    monkeypatch.setattr(cooperate, "COUNTED", 10)
    batches = mini_batches({1: stated(40, host=0.5)}, 32, 1, heavy=heavy)
    case = Case("CPU alone", 4, speed)
    times = {way: seconds(replace(case, way=way), batches) for way in WAYS}
    best = np.mean([best_possible(case, costs) for costs in batches[-10:]])
    assert times["all of it"] <= times["CPU alone"]
    by_data = [way for way in WAYS if way not in ("device decodes", "CPU decodes")]
    assert all(times[way] >= best for way in by_data)
    if speed == 20.0:
        assert times["CPU alone"] / times["all of it"] > 1.5


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("speed", SPEEDS)
def test_cooperation_is_within_5_percent_of_the_bound_and_never_below_the_cpu(
    monkeypatch: pytest.MonkeyPatch, workers: int, speed: float
) -> None:
    monkeypatch.setattr(cooperate, "BATCHES", 16)
    monkeypatch.setattr(cooperate, "COUNTED", 10)
    tiny = usual_tiny(256, workers)
    costs = {count: photographs(count) for count in {count for _, count in cut(0, 256, tiny)}}
    batches = mini_batches(costs, 256, tiny, heavy=False)
    case = Case("all of it", workers, speed)
    together = seconds(case, batches)
    assert together <= seconds(replace(case, way="CPU alone"), batches)
    best = np.mean([best_possible(case, costs) for costs in batches[-10:]])
    assert best <= together <= 1.05 * best


def test_the_bound_has_the_longest_tiny_batch() -> None:
    costs = stated(2, host=0.5)
    assert best_possible(Case("all of it", 8, 0.01, times=FREE), costs) == pytest.approx(1.2)


def test_a_mini_batch_is_cut_as_a_loader_cuts_it() -> None:
    costs = {count: photographs(count) for count in (8, 4, 2)}
    (first, *_) = mini_batches(costs, 64, 8, heavy=True)
    assert first.samples.tolist() == [8] * 6 + [4] * 2 + [2] * 4


@pytest.mark.skipif(not native.kernel_available(), reason="needs the kernel")
def test_a_short_run_measures_both_pipelines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cooperate, "SPEEDS", (1.0,))
    monkeypatch.setattr(cooperate, "BATCHES", 4)
    monkeypatch.setattr(cooperate, "COUNTED", 2)
    (tmp_path / "a").mkdir()
    for number in range(4):
        (tmp_path / "a" / f"{number}.jpg").write_bytes(encode(picture(90, 80 + number), "420"))
    arguments = ["cooperate", "--data", str(tmp_path), "--measured", "4", "--batch", "4"]
    _, options = parse([*arguments, "--tiny", "2", "--rounds", "1"])
    result = cooperate.run(options)
    assert [len(table.rows) for table in result.tables] == [1] * 4
    assert set(result.data) == {
        f"{name}, {sizes}"
        for name in ("default", "RandAugment")
        for sizes in ("sizes of the data", "heavy-tailed sizes")
    }
    for values in result.data.values():
        assert isinstance(values, dict)
        assert set(values["1"]) == {*WAYS, "best possible"}
