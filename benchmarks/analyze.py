"""Predictions of one analysis beside real runs: of storage, cache, workers, reuse and jobs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.analyze_work import Setting, analysed, measured, shared
from benchmarks.arguments import positive
from benchmarks.benchmark import Benchmark
from benchmarks.measure import progress
from benchmarks.report import Found, Table
from penstock.analysis.model import Change, predict

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
    """One setting: what was predicted in each round, what was found, what min(F, P, G) says."""

    title: str
    predicted: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    bound: str = ""

    @property
    def error(self) -> float:
        return median(self.predicted) / median(self.found) - 1

    @property
    def plain_error(self) -> float:
        return median(self.rates) / median(self.found) - 1

    def row(self) -> tuple[str, ...]:
        return (
            self.title,
            f"{median(self.found):,.0f}",
            f"{median(self.predicted):,.0f}",
            f"{self.error:+.1%}",
            f"{self.plain_error:+.1%}",
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
    for number in range(options.rounds):
        of = f"analyze: round {number + 1} of {options.rounds}"
        progress(f"{of}: the analysis")
        report = analysed(base, options.analysis)
        for line, setting in zip(lines, grid, strict=True):
            progress(f"{of}: {line.title}")
            _compare(line, report, setting.change(base), measured(setting, *_times(options)))
        progress(f"{of}: the analysis of RandAugment")
        report = analysed(augmented, options.analysis)
        for line, reuse in zip(others, (1, *REUSE), strict=True):
            progress(f"{of}: {line.title}")
            speed = measured(replace(augmented, reuse=reuse), *_times(options))
            _compare(line, report, Change(reuse=reuse), speed)
        for line, jobs in zip(several, JOBS, strict=True):
            progress(f"{of}: {line.title}")
            speeds = shared(augmented, jobs, *_times(options))
            change = Change(jobs=jobs, share=True, storage=1e12)
            _compare(line, report, change, median(speeds))
    return _found(lines, [*others, *several])


def _compare(line: Line, report: object, change: Change, found: float) -> None:
    made = predict(report, change)  # type: ignore[arg-type]
    line.predicted.append(made.speed)
    line.found.append(found)
    line.rates.append(min(made.fetch_rate, made.prep_rate, made.ingestion))
    line.bound = made.bound


def _times(options: Namespace) -> tuple[float, float]:
    return options.warm_up, options.seconds


def _title(one: Setting) -> str:
    return (
        f"{one.storage / 1e6:.0f} MB/s, {one.held:.0%} cached, step {one.step * 1e3:.0f} ms, "
        f"{one.workers} workers"
    )


HEADS = ("setting", "found/s", "predicted/s", "error", "error of min(F, P, G)", "bound")


def _found(grid: Sequence[Line], others: Sequence[Line]) -> Found:
    errors = sorted(abs(line.error) for line in grid)
    plain = sorted(abs(line.plain_error) for line in grid)
    other = max(abs(line.error) for line in others)
    notes = (
        f"analyze: median error {median(errors):.1%}, target at most {MEDIAN:.0%}: "
        f"{_verdict(median(errors) <= MEDIAN)}",
        f"analyze: worst error {errors[-1]:.1%}, target at most {WORST:.0%}: "
        f"{_verdict(errors[-1] <= WORST)}",
        f"analyze: of min(F, P, G): median {median(plain):.1%}, worst {plain[-1]:.1%}",
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
        line.title: {"found": line.found, "predicted": line.predicted, "rates": line.rates}
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
