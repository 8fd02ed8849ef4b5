"""Predictions of one analysis beside real runs: of storage, cache, workers, reuse and jobs."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from benchmarks.analyze_work import Setting, Telling, analysed, at_pace, measured, shared
from benchmarks.arguments import positive
from benchmarks.benchmark import Benchmark
from benchmarks.measure import progress
from benchmarks.pace import Pace
from benchmarks.report import Found, Table
from penstock.diagnose.analyze.model import Change, predict
from penstock.diagnose.analyze.report import AnalysisReport

STORAGE = (30e6, 90e6, 300e6)
HELD = (0.0, 0.5)
STEPS = (0.02, 0.08)
WORKERS = (1, 2, 4)
REUSE = (2, 3)
SLEEP = 0.002
JOBS = (2, 4)

MEDIAN, WORST, WORST_OTHER = 0.03, 0.08, 0.10
"""Errors that are aimed at: over the grid, and for reuse and jobs."""


@dataclass
class Line:
    """One setting: in each round, what was found, and what that round's analysis says of it: for
    the pace of the cores while it ran, and ``unpaced``, as if that were the analysis's."""

    title: str
    change: Change
    measure: Callable[[float, float], float]
    found: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    unpaced: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    """What min(F, P, G) says."""
    verdict: str = ""

    def predict(self, paced: AnalysisReport, report: AnalysisReport) -> None:
        made = predict(paced, self.change)
        self.predicted.append(made.speed)
        self.unpaced.append(predict(report, self.change).speed)
        self.bound.append(min(made.fetch_rate, made.prep_rate, made.ingestion))
        self.verdict = made.bound

    @property
    def errors(self) -> list[float]:
        return self._off(self.predicted)

    @property
    def error(self) -> float:
        """That of the middle round."""
        return median(self.errors)

    @property
    def unpaced_error(self) -> float:
        return median(self._off(self.unpaced))

    @property
    def plain_error(self) -> float:
        return median(self._off(self.bound))

    def _off(self, said: Sequence[float]) -> list[float]:
        """By how much of what was found this is off, round by round."""
        return [one / was - 1 for one, was in zip(said, self.found, strict=True)]

    def row(self) -> tuple[str, ...]:
        return (
            self.title,
            f"{median(self.found):,.0f}",
            f"{median(self.predicted):,.0f}",
            f"{self.error:+.1%}",
            f"{min(self.errors):+.0%} to {max(self.errors):+.0%}",
            f"{self.unpaced_error:+.1%}",
            f"{self.plain_error:+.1%}",
            self.verdict,
        )


def run(options: Namespace) -> Found:
    base = Setting(str(options.data), 90e6, 0.0, 0.04, options.workers, options.batch)
    if options.sleeping:
        base = replace(base, sleep=SLEEP)
    augmented = replace(base, storage=1e9, step=0.005, augment=True)
    grid = [
        Line(_title(one), one.change(base), partial(measured, one))
        for one in (
            replace(base, storage=storage, held=held, step=step, workers=workers)
            for storage in STORAGE
            for held in HELD
            for step in STEPS
            for workers in WORKERS
        )
    ]
    others = [
        Line(
            f"RandAugment, refurbish with reuse {reuse}" if reuse > 1 else "RandAugment",
            Change(reuse=reuse),
            partial(measured, replace(augmented, reuse=reuse)),
        )
        for reuse in (1, *REUSE)
    ]
    others += [
        Line(
            f"RandAugment, {jobs} jobs that share, each",
            Change(jobs=jobs, share=True),
            partial(shared, augmented, jobs),
        )
        for jobs in JOBS
    ]
    _compare(base, grid, options)
    if options.sleeping:
        return _found(grid, ())
    _compare(augmented, others, options)
    return _found(grid, others)


def _compare(base: Setting, lines: Sequence[Line], options: Namespace) -> None:
    """In each round, analyse one setting and run all of them."""
    with Pace(options.data) as pace:
        for number in range(options.rounds):
            says = f"analyze: round {number + 1} of {options.rounds}"
            progress(f"{says}: the analysis")
            telling = Telling()
            report = analysed(base, options.analysis, telling)
            then = pace.between(*telling.during("workers"))
            then_reused = pace.between(*telling.during("refurbish"))
            for line in lines:
                progress(f"{says}: {line.title}")
                began = time.perf_counter()
                line.found.append(line.measure(options.warm_up, options.seconds))
                now = pace.between(began, time.perf_counter())
                line.predict(at_pace(report, now / then, now / then_reused), report)
                progress(f"  {line.found[-1]:,.0f}/s, predicted {line.predicted[-1]:,.0f}")


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
    "in single rounds",
    "if pace were not known",
    "error of min(F, P, G)",
    "bound",
)


def _found(grid: Sequence[Line], others: Sequence[Line]) -> Found:
    errors = sorted(abs(line.error) for line in grid)
    unpaced = sorted(abs(line.unpaced_error) for line in grid)
    plain = sorted(abs(line.plain_error) for line in grid)
    notes = [
        f"analyze: median error {median(errors):.1%}, target at most {MEDIAN:.0%}: "
        f"{_verdict(median(errors) <= MEDIAN)}",
        f"analyze: worst error {errors[-1]:.1%}, target at most {WORST:.0%}: "
        f"{_verdict(errors[-1] <= WORST)}",
        f"analyze: if the pace of the cores were not known: median {median(unpaced):.1%}, worst "
        f"{unpaced[-1]:.1%}",
        f"analyze: of min(F, P, G): median {median(plain):.1%}, worst {plain[-1]:.1%}",
    ]
    tables = [
        Table(
            f"analyze: {len(grid)} settings predicted by one analysis; the accelerator is "
            "simulated (it sleeps)",
            HEADS,
            tuple(line.row() for line in grid),
        )
    ]
    if others:
        other = max(abs(line.error) for line in others)
        notes.append(
            f"analyze: reuse and jobs: worst error {other:.1%}, target at most "
            f"{WORST_OTHER:.0%}: {_verdict(other <= WORST_OTHER)}"
        )
        tables.append(Table("analyze: reuse and jobs", HEADS, tuple(line.row() for line in others)))
    data = {
        line.title: {
            "found": line.found,
            "predicted": line.predicted,
            "unpaced": line.unpaced,
            "bound": line.bound,
        }
        for line in (*grid, *others)
    }
    return Found(tuple(tables), tuple(notes), data=data)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--analysis", type=positive, default=60.0, metavar="SECONDS", help="of each analysis (60)"
    )
    parser.add_argument(
        "--sleeping",
        action="store_true",
        help="simulate preparing too: the model by itself, however busy the machine is",
    )


BENCHMARK = Benchmark(
    "analyze",
    "predictions of one analysis beside real runs, in 36 settings; reuse; jobs that share",
    run,
    _arguments,
    needs_data=True,
)
