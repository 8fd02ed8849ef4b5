"""Predictions of one analysis compared with real runs: storage, cache, workers, reuse and jobs."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.analyze.pace import Pace
from benchmarks.analyze.truth import run_truth
from benchmarks.analyze.work import (
    PhaseLog,
    Scenario,
    measure_rate,
    measure_shared_rate,
    run_analysis,
    scale_costs,
)
from benchmarks.harness.arguments import positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.diagnose.analyze.model import Change, predict
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.errors import PenstockError

STORAGE = (30e6, 90e6, 300e6)
CACHED = (0.0, 0.5)
STEPS = (0.02, 0.08)
WORKERS = (1, 2, 4)
REUSE = (2, 3)
SLEEP = 0.002
JOBS = (2, 4)

MEDIAN, WORST, WORST_OTHER = 0.03, 0.08, 0.10
"""Targets for the errors: median and worst over the grid, and worst for reuse and jobs."""


@dataclass
class Comparison:
    """Measured and predicted rates of one scenario, by round.

    ``predicted``: prediction of the round's analysis, corrected for the pace of the cores while the
    scenario ran. ``unpaced``: without that correction. ``bound``: min(F, P, G).
    """

    title: str
    change: Change
    measure: Callable[[float, float], float]
    rates: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    unpaced: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    verdict: str = ""

    def predict(self, paced: AnalysisReport, report: AnalysisReport) -> None:
        """Add the predictions of a round. ``paced``: the report corrected for the pace."""
        made = predict(paced, self.change)
        self.predicted.append(made.speed)
        self.unpaced.append(predict(report, self.change).speed)
        self.bound.append(min(made.fetch_rate, made.prep_rate, made.ingestion))
        self.verdict = made.bound

    @property
    def errors(self) -> list[float]:
        return self._relative_errors(self.predicted)

    @property
    def error(self) -> float:
        """Median of the errors of all rounds."""
        return median(self.errors)

    @property
    def unpaced_error(self) -> float:
        return median(self._relative_errors(self.unpaced))

    @property
    def plain_error(self) -> float:
        return median(self._relative_errors(self.bound))

    def _relative_errors(self, predictions: Sequence[float]) -> list[float]:
        """Errors relative to the measured rate, by round."""
        pairs = zip(predictions, self.rates, strict=True)
        return [predicted / rate - 1 for predicted, rate in pairs]

    def row(self) -> tuple[str, ...]:
        return (
            self.title,
            f"{median(self.rates):,.0f}",
            f"{median(self.predicted):,.0f}",
            f"{self.error:+.1%}",
            f"{min(self.errors):+.0%} to {max(self.errors):+.0%}",
            f"{self.unpaced_error:+.1%}",
            f"{self.plain_error:+.1%}",
            self.verdict,
        )


def run(options: Namespace) -> Result:
    if options.truth:
        return run_truth(options)
    if options.data is None:
        raise PenstockError("give --data, a folder of JPEGs, or --truth, which needs none.")
    base = Scenario(str(options.data), 90e6, 0.0, 0.04, options.workers, options.batch)
    if options.sleeping:
        base = replace(base, sleep=SLEEP)
    augmented = replace(base, storage=1e9, step=0.005, augment=True)
    grid = [
        Comparison(_title(scenario), scenario.change(base), partial(measure_rate, scenario))
        for scenario in (
            replace(base, storage=storage, cached=cached, step=step, workers=workers)
            for storage in STORAGE
            for cached in CACHED
            for step in STEPS
            for workers in WORKERS
        )
    ]
    reuse_and_jobs = [
        Comparison(
            f"RandAugment, refurbish with reuse {reuse}" if reuse > 1 else "RandAugment",
            Change(reuse=reuse),
            partial(measure_rate, replace(augmented, reuse=reuse)),
        )
        for reuse in (1, *REUSE)
    ]
    reuse_and_jobs += [
        Comparison(
            f"RandAugment, {jobs} jobs that share, each",
            Change(jobs=jobs, share=True),
            partial(measure_shared_rate, augmented, jobs),
        )
        for jobs in JOBS
    ]
    _compare(base, grid, options)
    if options.sleeping:
        return _make_result(grid, ())
    _compare(augmented, reuse_and_jobs, options)
    return _make_result(grid, reuse_and_jobs)


def _compare(base: Scenario, comparisons: Sequence[Comparison], options: Namespace) -> None:
    """In each round, analyse the scenario ``base`` and run all scenarios."""
    with Pace(options.data) as pace:
        for number in range(options.rounds):
            label = f"analyze: round {number + 1} of {options.rounds}"
            progress(f"{label}: the analysis")
            phases = PhaseLog()
            report = run_analysis(base, options.analysis, phases)
            then = pace.between(*phases.during("workers"))
            then_reused = pace.between(*phases.during("refurbish"))
            for comparison in comparisons:
                progress(f"{label}: {comparison.title}")
                began = time.perf_counter()
                comparison.rates.append(comparison.measure(options.warm_up, options.seconds))
                now = pace.between(began, time.perf_counter())
                comparison.predict(scale_costs(report, now / then, now / then_reused), report)
                progress(
                    f"  {comparison.rates[-1]:,.0f}/s, predicted {comparison.predicted[-1]:,.0f}"
                )


def _title(scenario: Scenario) -> str:
    return (
        f"{scenario.storage / 1e6:.0f} MB/s, {scenario.cached:.0%} cached, "
        f"step {scenario.step * 1e3:.0f} ms, {scenario.workers} workers"
    )


HEADS = (
    "setting",
    "measured/s",
    "predicted/s",
    "error",
    "range of rounds",
    "error without pace correction",
    "error of min(F, P, G)",
    "bound",
)


def _make_result(grid: Sequence[Comparison], reuse_and_jobs: Sequence[Comparison]) -> Result:
    errors = sorted(abs(comparison.error) for comparison in grid)
    unpaced = sorted(abs(comparison.unpaced_error) for comparison in grid)
    plain = sorted(abs(comparison.plain_error) for comparison in grid)
    notes = [
        f"analyze: median error {median(errors):.1%}, target at most {MEDIAN:.0%}: "
        f"{_verdict(median(errors) <= MEDIAN)}",
        f"analyze: worst error {errors[-1]:.1%}, target at most {WORST:.0%}: "
        f"{_verdict(errors[-1] <= WORST)}",
        f"analyze: without correction for the pace of the cores: median {median(unpaced):.1%}, "
        f"worst {unpaced[-1]:.1%}",
        f"analyze: of min(F, P, G): median {median(plain):.1%}, worst {plain[-1]:.1%}",
    ]
    tables = [
        Table(
            f"analyze: {len(grid)} settings, predicted by one analysis; the accelerator is "
            "simulated (it sleeps)",
            HEADS,
            tuple(comparison.row() for comparison in grid),
        )
    ]
    if reuse_and_jobs:
        worst_other = max(abs(comparison.error) for comparison in reuse_and_jobs)
        notes.append(
            f"analyze: reuse and jobs: worst error {worst_other:.1%}, target at most "
            f"{WORST_OTHER:.0%}: {_verdict(worst_other <= WORST_OTHER)}"
        )
        tables.append(
            Table(
                "analyze: reuse and jobs",
                HEADS,
                tuple(comparison.row() for comparison in reuse_and_jobs),
            )
        )
    data = {
        comparison.title: {
            "found": comparison.rates,
            "predicted": comparison.predicted,
            "unpaced": comparison.unpaced,
            "bound": comparison.bound,
        }
        for comparison in (*grid, *reuse_and_jobs)
    }
    return Result(tuple(tables), tuple(notes), data=data)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--analysis",
        type=positive,
        default=60.0,
        metavar="SECONDS",
        help="seconds of each analysis (60)",
    )
    parser.add_argument(
        "--truth",
        action="store_true",
        help="verdicts and gains for scripts whose bottleneck is known; needs no --data",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help="with --truth: only scripts with all these words in their title, such as --only "
        "'sleep|python' '0 busy' torch",
    )
    parser.add_argument(
        "--part",
        type=int,
        choices=(1, 2, 3),
        default=0,
        help="with --truth: a third of the scripts, in which each bottleneck and step meets every "
        "machine and every kind of script once",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="with --truth: keep what was measured in DIR, and measure only what is missing there",
    )
    parser.add_argument(
        "--stop-after",
        type=positive,
        metavar="SECONDS",
        help="with --truth: begin no further script after this time; go on with --results later",
    )
    parser.add_argument(
        "--sleeping",
        action="store_true",
        help="simulate preparation by sleeping too: tests the model alone, on a busy machine too",
    )


BENCHMARK = Benchmark(
    "analyze",
    "predictions of one analysis compared with real runs: 36 settings, reuse, jobs that share",
    run,
    _arguments,
)
