"""Verdicts and gains of analyses, compared with scripts whose bottleneck is known.

The truth comes from how a script was made, and from two of its own measurements: how long its loop
waits for batches, and how long its steps take with one batch in memory and no loader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.analyze.truth_script import Script
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.remedies import Remedy, remedies
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.errors import PenstockError

EXPECTED = {
    "decode": {"prep"},
    "python": {"prep"},
    "sleep": {"latency"},
    "open": {"latency"},
    # A server that sends slowly: workers wait for bytes, and that is storage, too.
    "bytes": {"latency", "fetch"},
    "lock": {"latency"},
    "cache": {"latency", "fetch"},
    "mixed": {"latency", "prep"},
    "compute": {"prep"},
}
"""The bottlenecks of a script that waits for batches, by how it was made."""

SMALL, UNSURE = 0.05, 0.03
"""A wait of this share of the time is a bottleneck; so close to it, both verdicts are right."""

CONTENDED = 0.10
"""Steps that are longer by this share of the time, beside a loader, are contention."""

STEPS = {
    "compute": (0.05, 0.5),
    "decode": (0.005, 0.5),
    "python": (0.005, 0.1, 2.0),
    "sleep": (0.005, 0.1, 2.0),
    "open": (0.005, 0.5),
    "bytes": (0.005, 0.5),
    "lock": (0.005, 0.5),
    "cache": (0.005, 0.5),
    "mixed": (0.005, 0.5),
}
"""Seconds of a step, by bottleneck."""

LIMITS = {0: (0.05, 0.15), 1: (0.10, 0.30), 2: (0.10, 0.30)}
"""Goals for the error of the predicted gain, median and worst, by the number of busy cores."""


@dataclass(frozen=True)
class Cell:
    """A script, and the number of cores that other programs keep busy."""

    script: Script
    busy: int

    @property
    def title(self) -> str:
        step = f"{self.script.step * 1e3:g} ms"
        return f"{self.script.bottleneck}, step {step}, {self.busy} busy, {self.script.kind}"


@dataclass
class Outcome:
    """What one cell has shown. ``gains``: predicted and measured, of the top remedy."""

    cell: Cell
    accepted: set[str]
    verdict: str | None
    said: str
    remedy: str = ""
    predicted: float = 0.0
    measured: float = 0.0

    @property
    def wrong(self) -> bool:
        return self.verdict is not None and self.verdict not in self.accepted

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.measured else None

    def row(self) -> tuple[str, ...]:
        state = "refused" if self.verdict is None else "WRONG" if self.wrong else "right"
        gains = ("", "", "")
        if self.error is not None:
            gains = (f"{self.predicted:.2f}", f"{self.measured:.2f}", f"{self.error:+.0%}")
        truth = " or ".join(sorted(self.accepted))
        return (self.cell.title, truth, self.verdict or "-", state, self.remedy, *gains)


def grid() -> list[Cell]:
    """All cells: each bottleneck and step, on three machines, with three kinds of scripts."""
    return [
        Cell(Script(bottleneck, step, kind), busy)
        for bottleneck, steps in STEPS.items()
        for step, busy, kind in product(steps, (0, 1, 2), ("torch", "ours", "lightning"))
    ]


def chosen(only: Sequence[str]) -> list[Cell]:
    """The cells whose title contains all of these words; each word may have alternatives (a|b)."""
    return [
        cell
        for cell in grid()
        if all(any(one in cell.title for one in word.split("|")) for word in only)
    ]


def accepted(bottleneck: str, plain: dict[str, float], constant: dict[str, float]) -> set[str]:
    """The right verdicts, from the script's own measurements with and without its loader.

    >>> sorted(accepted("sleep", {"wait": 0.9, "step": 0.1}, {"wait": 0.0, "step": 0.1}))
    ['latency']
    >>> sorted(accepted("python", {"wait": 0.0, "step": 0.2}, {"wait": 0.0, "step": 0.1}))
    ['contention']
    """
    whole = plain["wait"] + plain["step"]
    waits = plain["wait"] / whole
    slower = max(0.0, plain["step"] - constant["step"]) / whole
    found: set[str] = set()
    if waits > SMALL - UNSURE:
        found |= EXPECTED[bottleneck]
    if slower > CONTENDED - UNSURE:
        found.add("contention")
    if waits < SMALL + UNSURE and slower < CONTENDED + UNSURE:
        found.add("compute")
    return found


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Other programs that keep this many cores busy."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run_truth(options: Namespace) -> Result:
    cells = chosen(options.only)
    if not cells:
        raise PenstockError(f"no script matches --only {' '.join(options.only)}")
    outcomes = []
    for number, cell in enumerate(cells):
        progress(f"analyze: {number + 1} of {len(cells)}: {cell.title}")
        with busy_cores(cell.busy):
            outcome = judge(cell, options.analysis, options.seconds, options.rounds)
        progress(f"  {' | '.join(outcome.row()[1:])}")
        outcomes.append(outcome)
    return result_of_outcomes(outcomes)


def judge(cell: Cell, analysis: float, seconds: float, rounds: int) -> Outcome:
    """Measure the truth, analyse the script, and measure its top remedy."""
    script = replace(cell.script, seconds=seconds)
    constant = _run(replace(script, constant=True).words())
    plain = _run(script.words())
    truth = accepted(script.bottleneck, plain, constant)
    with tempfile.TemporaryDirectory(prefix="penstock-truth-") as place:
        report = _analyse(cell.script, analysis, Path(place))
    if report is None:
        return Outcome(cell, truth, None, "no report")
    result = result_of(report)
    outcome = Outcome(cell, truth, result.bound, result.verdict.refusal or result.verdict.reason)
    for remedy in remedies(report, result=result) if result.trust.numbers else []:
        command = _command(script, remedy)
        if command is None:
            continue
        outcome.remedy, outcome.predicted = remedy.title, remedy.gain
        pairs = [(_run(script.words()), _run(command)) for _ in range(rounds)]
        outcome.measured = median(after["speed"] / before["speed"] for before, after in pairs)
        break
    return outcome


def _command(script: Script, remedy: Remedy) -> list[str] | None:
    """The arguments of Python with which the remedy is applied; ``None`` if it cannot be here."""
    options = remedy.options
    if options is None or not remedy.tried or options.echo or options.share or options.reuse:
        return None
    if script.kind == "ours":
        workers = script.workers if options.workers is None else options.workers
        return replace(script, workers=workers, cache=options.cache or 0).words()
    return ["-m", "penstock", "run", *options.words, "--", sys.executable, *script.words()]


def _run(words: Sequence[str]) -> dict[str, float]:
    """Run Python with these arguments; what the script printed at its end."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise PenstockError(f"a script of the grid has failed:\n{done.stderr[-2000:]}") from None
    return found


def _analyse(script: Script, seconds: float, place: Path) -> AnalysisReport | None:
    output = place / "report"
    words = ["-m", "penstock", "analyze", "--seconds", f"{seconds:g}", "--output", str(output)]
    subprocess.run(
        [sys.executable, *words, "--", sys.executable, "-W", "ignore", *script.words()],
        capture_output=True,
        env={**os.environ},
        timeout=60 + 5 * seconds,
        check=False,
    )
    path = output.with_suffix(".json")
    return AnalysisReport.load(path) if path.exists() else None


HEADS = (
    "script",
    "truth",
    "verdict",
    "",
    "top remedy",
    "predicted gain",
    "measured gain",
    "error",
)


def result_of_outcomes(outcomes: Sequence[Outcome]) -> Result:
    """The table, and how it compares with the goals."""
    wrong = sum(outcome.wrong for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.verdict is None]
    idle = sum(outcome.cell.busy == 0 for outcome in refused)
    notes = [
        f"analyze: {wrong} of {len(outcomes)} verdicts are wrong, goal 0",
        f"analyze: {len(refused) / len(outcomes):.0%} refused, goal at most 15%; {idle} of them on "
        "an idle machine, goal 0",
    ]
    for busy, (middle, worst) in LIMITS.items():
        errors = sorted(
            abs(outcome.error)
            for outcome in outcomes
            if outcome.cell.busy == busy and outcome.error is not None
        )
        if errors:
            notes.append(
                f"analyze: {busy} busy cores, {len(errors)} gains: median error "
                f"{median(errors):.0%} (goal {middle:.0%}), worst {errors[-1]:.0%} "
                f"(goal {worst:.0%})"
            )
    table = Table(
        f"analyze: {len(outcomes)} scripts with a known bottleneck",
        HEADS,
        tuple(outcome.row() for outcome in outcomes),
    )
    data: dict[str, Any] = {
        outcome.cell.title: {
            "accepted": sorted(outcome.accepted),
            "verdict": outcome.verdict,
            "said": outcome.said,
            "remedy": outcome.remedy,
            "predicted": outcome.predicted,
            "measured": outcome.measured,
        }
        for outcome in outcomes
    }
    return Result((table,), tuple(notes), data=data)
