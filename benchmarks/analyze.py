"""Predictions of one analysis beside real runs: of storage, cache, workers, reuse and jobs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from benchmarks.analyze_work import Pace, Setting, analysed, at_pace, measured, shared
from benchmarks.arguments import positive
from benchmarks.benchmark import Benchmark
from benchmarks.measure import progress
from benchmarks.report import Found, Table
from penstock.analysis.model import Change, predict
from penstock.analysis.report import Report

STORAGE = (30e6, 90e6, 300e6)
HELD = (0.0, 0.5)
STEPS = (0.02, 0.08)
WORKERS = (1, 2, 4)
REUSE = (2, 3)
JOBS = (2, 4)

MEDIAN, WORST, WORST_OTHER = 0.03, 0.08, 0.10
"""Errors that are aimed at: over the grid, and for reuse and jobs."""


@dataclass
class Line:
    """One setting, in each round: what was found, what was predicted for the pace of the cores at
    that time and for that of the analysis (``plain``), and what min(F, P, G) says."""

    title: str
    predicted: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    bound: str = ""

    def error(self, of: Sequence[float] | None = None) -> float:
        """The median over rounds: each has an analysis of its own."""
        predicted = self.predicted if of is None else of
        return median(one / found - 1 for one, found in zip(predicted, self.found, strict=True))

    def row(self) -> tuple[str, ...]:
        return (
            self.title,
            f"{median(self.found):,.0f}",
            f"{median(self.predicted):,.0f}",
            f"{self.error():+.1%}",
            f"{self.error(self.plain):+.1%}",
            f"{self.error(self.rates):+.1%}",
            self.bound,
        )


def run(options: Namespace) -> Found:
    base = Setting(str(options.data), 90e6, 0.0, 0.04, options.workers, options.batch)
    augmented = replace(base, storage=1e9, step=0.005, augment=True)
    grid = [
        replace(base, storage=storage, held=held, step=step, workers=workers)
        for storage in STORAGE
        for held in HELD
        for step in STEPS
        for workers in WORKERS
    ]
    lines = [Line(_title(one)) for one in grid]
    others = [Line(f"RandAugment, refurbish with reuse {reuse}") for reuse in (1, *REUSE)]
    several = [Line(f"RandAugment, {jobs} jobs that share, each") for jobs in JOBS]
    pace = Pace(base)
    run = _Run(options, pace)
    for number in range(options.rounds):
        run.says = f"analyze: round {number + 1} of {options.rounds}"
        run.analyse(base)
        for line, setting in zip(lines, grid, strict=True):
            run.compare(line, setting.change(base), partial(measured, setting))
        run.analyse(augmented)
        for line, reuse in zip(others, (1, *REUSE), strict=True):
            setting = replace(augmented, reuse=reuse)
            run.compare(line, Change(reuse=reuse), partial(measured, setting))
        for line, jobs in zip(several, JOBS, strict=True):
            change = Change(jobs=jobs, share=True, storage=1e12)
            run.compare(line, change, partial(shared, augmented, jobs))
    pace.close()
    return _found(lines, [*others, *several])


class _Run:
    """One analysis after the other, and what is held against each."""

    def __init__(self, options: Namespace, pace: Pace) -> None:
        self.says = ""
        self._options = options
        self._pace = pace
        self._report: Report | None = None
        self._then = 1.0

    def analyse(self, base: Setting) -> None:
        progress(f"{self.says}: the analysis")
        before = self._pace()
        self._report = analysed(base, self._options.analysis)
        self._then = (before + self._pace()) / 2

    def compare(self, line: Line, change: Change, measure: Callable[[float, float], float]) -> None:
        progress(f"{self.says}: {line.title}")
        if self._report is None:
            raise RuntimeError("there is no analysis to predict from")
        before = self._pace()
        found = measure(self._options.warm_up, self._options.seconds)
        now = (before + self._pace()) / 2
        made = predict(at_pace(self._report, now / self._then), change)
        line.found.append(found)
        line.predicted.append(made.speed)
        line.plain.append(predict(self._report, change).speed)
        line.rates.append(min(made.fetch_rate, made.prep_rate, made.ingestion))
        line.bound = made.bound


def _title(one: Setting) -> str:
    return (
        f"{one.storage / 1e6:.0f} MB/s, {one.held:.0%} cached, step {one.step * 1e3:.0f} ms, "
        f"{one.workers} workers"
    )


HEADS = (
    "setting",
    "found/s",
    "predicted/s",
    "error",
    "at another pace",
    "min(F, P, G)",
    "bound",
)


def _found(grid: Sequence[Line], others: Sequence[Line]) -> Found:
    errors = sorted(abs(line.error()) for line in grid)
    plain = sorted(abs(line.error(line.plain)) for line in grid)
    rates = sorted(abs(line.error(line.rates)) for line in grid)
    other = max(abs(line.error()) for line in others)
    notes = (
        f"analyze: median error {median(errors):.1%}, target at most {MEDIAN:.0%}: "
        f"{_verdict(median(errors) <= MEDIAN)}",
        f"analyze: worst error {errors[-1]:.1%}, target at most {WORST:.0%}: "
        f"{_verdict(errors[-1] <= WORST)}",
        f"analyze: where cores changed their pace meanwhile and nobody knew: median "
        f"{median(plain):.1%}, worst {plain[-1]:.1%}",
        f"analyze: of min(F, P, G): median {median(rates):.1%}, worst {rates[-1]:.1%}",
        f"analyze: reuse and jobs: worst error {other:.1%}, target at most {WORST_OTHER:.0%}: "
        f"{_verdict(other <= WORST_OTHER)}",
    )
    tables = (
        Table(
            f"analyze: {len(grid)} settings predicted by one analysis; the accelerator is "
            "simulated (it sleeps)",
            HEADS,
            tuple(line.row() for line in grid),
        ),
        Table("analyze: reuse and jobs", HEADS, tuple(line.row() for line in others)),
    )
    data = {
        line.title: {
            "found": line.found,
            "predicted": line.predicted,
            "plain": line.plain,
            "rates": line.rates,
        }
        for line in (*grid, *others)
    }
    return Found(tables, notes, data=data)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--analysis", type=positive, default=30.0, metavar="SECONDS", help="of each analysis (30)"
    )


BENCHMARK = Benchmark(
    "analyze",
    "predictions of one analysis beside real runs, in 36 settings; reuse; jobs that share",
    run,
    _arguments,
    needs_data=True,
)
