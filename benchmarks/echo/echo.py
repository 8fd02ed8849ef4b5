"""Data echoing where reading is slow: time, and fresh samples, until a small CNN is good enough.

The source is throttled so that reading a sample takes ``--ratio`` times as long as everything after
it. Then what is read is used several times: before augmentation, after it, or as whole batches.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from benchmarks.echo.table import figure, found
from benchmarks.echo.work import Outcome, Setting, Work, pace, settings, until_good
from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count, positive, share
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.plot import add_plot_argument, write
from benchmarks.harness.report import Result
from benchmarks.harness.training import DATA, Recipe, check_files, find_files, training_environment

FACTORS = (1, 2, 3, 4, 5)

RATIO, TARGET, LIMIT, SEEDS = 6.0, 0.5, 180.0, 2

RECIPE = Recipe(width=12, rate=0.05)
"""Narrow, so that steps are many and a target is reached within minutes."""


def run(options: Namespace) -> Result:
    train, test = find_files(options.data, options.test)
    check_files(train, test, options.samples, options.batch)
    work = Work(
        train,
        test,
        options.samples,
        options.batch,
        options.workers,
        options.target,
        options.limit,
        RECIPE,
    )
    progress("echo: measuring the pace of training")
    timeout = 240 + 10 * options.seconds
    try:
        downstream: float = run_alone(
            pace, work, options.seconds, timeout=timeout, environment=training_environment()
        ).value
    except AloneError as error:
        progress(error.printed)
        raise SystemExit(f"no pace to set the source by, for training failed: {error}") from error
    work = replace(work, rate=downstream / options.ratio)
    progress(f"  {downstream:,.0f} samples/s, so {work.rate:,.0f} may be read a second")
    outcomes: dict[Setting, list[Outcome]] = {one: [] for one in settings(options.factors)}
    wrong = []
    for seed in range(options.seeds):
        for setting, found_so_far in outcomes.items():
            progress(f"echo: seed {seed + 1} of {options.seeds}: {setting.title}")
            try:
                value: Outcome = run_alone(
                    until_good,
                    work,
                    setting,
                    seed,
                    timeout=600 + 5 * work.limit,
                    environment=training_environment(),
                ).value
            except AloneError as error:
                progress(error.printed or f"  {error}")
                wrong.append(f"echo: {setting.title}, seed {seed}: failed: {error}")
                continue
            found_so_far.append(value)
            end = value.last
            progress(f"  {end.accuracy:.1%} in {end.seconds:.1f} s, {end.fresh:,} fresh samples")
    result = found(work, downstream, options.ratio, outcomes, tuple(wrong))
    if options.plot is not None:
        write(options.plot, figure(result.data))
    return result


def _factors(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("test", type=Path, nargs="?", metavar="TEST", help="second file of --data")
    parser.add_argument("--seeds", type=count, default=SEEDS, help=f"of each setting ({SEEDS})")
    parser.add_argument(
        "--factors",
        type=_factors,
        default=FACTORS,
        metavar="LIST",
        help=f"before augmentation ({','.join(map(str, FACTORS))})",
    )
    parser.add_argument(
        "--target", type=share, default=TARGET, help=f"share of the test set ({TARGET})"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=LIMIT,
        metavar="SECONDS",
        help=f"after which nobody goes on ({LIMIT:g})",
    )
    parser.add_argument(
        "--ratio",
        type=positive,
        default=RATIO,
        help=f"how much longer reading takes than all that follows ({RATIO:g})",
    )
    add_plot_argument(parser)
    parser.set_defaults(seconds=6.0)
    parser.epilog = (
        "Here --samples is how many of the training set are used (all), and --seconds for how long "
        "the pace of training is measured (6); --rounds and --warm-up do nothing."
    )


BENCHMARK = Benchmark(
    "echo",
    "time and fresh samples to a target accuracy where reading is slow (trains on CIFAR-10)",
    run,
    _arguments,
    needs_data=True,
    data=DATA,
    files=(".parquet",),
)
