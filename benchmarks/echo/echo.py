"""Data echoing with a slow source: time and fresh samples until a small CNN reaches a target.

The source is throttled so that reading a sample takes ``--ratio`` times as long as everything after
it. Samples are then repeated: before augmentation, after it, or as whole batches.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.echo.work import (
    BASE,
    PLACES,
    WINDOW,
    EchoOutcome,
    EchoSetting,
    EchoWork,
    measure_pace,
    settings,
    train_on_fresh,
    train_to_target,
)
from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count, positive, share
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.plot import Figure, Point, Range, Series, add_plot_argument, write
from benchmarks.harness.report import Result, Table
from benchmarks.harness.training import DATA, Recipe, check_files, find_files, training_environment

FACTORS = (1, 2, 3, 4, 5)

RATIO, TARGET, LIMIT, SEEDS = 6.0, 0.5, 180.0, 2

RECIPE = Recipe(width=12, rate=0.05)
"""A narrow network, so that it reaches a target within minutes and after many steps."""

PAPER = "the best in the paper was 3.25 times, with factor 5 before augmentation"

HEADS = (
    "echo",
    "reached",
    "seconds to target",
    "speed-up",
    "fresh samples",
    "relative to no echo",
    "samples seen",
    "upstream / downstream",
    "time waiting",
)


FINAL_HEADS = ("echo", "batch", "top-1 at the end", "error", "fresh samples", "samples seen")


def run(options: Namespace) -> Result:
    train, test = find_files(options.data, options.test)
    check_files(train, test, options.samples, options.batch)
    if options.fresh is not None:
        return final_errors(train, test, options)
    work = EchoWork(
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
            measure_pace, work, options.seconds, timeout=timeout, environment=training_environment()
        ).value
    except AloneError as error:
        progress(error.printed)
        raise SystemExit(f"cannot measure the pace of training: {error}") from error
    work = replace(work, rate=downstream / options.ratio)
    progress(
        f"  {downstream:,.0f} samples/s, so the source is limited to {work.rate:,.0f} samples/s"
    )
    outcomes: dict[EchoSetting, list[EchoOutcome]] = {
        setting: [] for setting in settings(options.factors)
    }
    wrong = []
    for seed in range(options.seeds):
        for setting, runs in outcomes.items():
            progress(f"echo: seed {seed + 1} of {options.seeds}: {setting.title}")
            try:
                value: EchoOutcome = run_alone(
                    train_to_target,
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
            runs.append(value)
            end = value.last
            progress(f"  {end.accuracy:.1%} in {end.seconds:.1f} s, {end.fresh:,} fresh samples")
    result = make_result(work, downstream, options.ratio, outcomes, tuple(wrong))
    if options.plot is not None:
        write(options.plot, figure(result.data))
    return result


def final_errors(train: Path, test: Path, options: Namespace) -> Result:
    """The error at the end of trainings that read equally many fresh samples."""
    chosen = [
        (EchoSetting(PLACES[0], factor, window), batch)
        for batch in options.batches or (options.batch,)
        for factor in options.factors
        for window in (options.windows if factor > 1 else options.windows[:1])
    ]
    cells, data, wrong = [], [], []
    for setting, batch in chosen:
        work = EchoWork(
            train, test, options.samples, batch, options.workers, 1.0, 0.0, options.recipe
        )
        ends = []
        for seed in range(options.seeds):
            progress(f"echo: batches of {batch}: {setting.title}: seed {seed + 1}")
            try:
                value: EchoOutcome = run_alone(
                    train_on_fresh,
                    work,
                    setting,
                    seed,
                    options.fresh,
                    timeout=3600,
                    environment=training_environment(),
                ).value
            except AloneError as error:
                progress(error.printed or f"  {error}")
                wrong.append(f"echo: {setting.title}, seed {seed}: failed: {error}")
                continue
            progress(f"  {value.last.accuracy:.1%} in {value.last.seconds:.0f} s")
            ends.append(value.last)
        data.append({**asdict(setting), "batch": batch, "runs": [asdict(end) for end in ends]})
        if ends:
            top = [end.accuracy for end in ends]
            cells.append(
                (
                    setting.title,
                    str(batch),
                    _span(top, "{:.1%}"),
                    f"{1 - statistics.mean(top):.1%}",
                    f"{statistics.mean(end.fresh for end in ends):,.0f}",
                    f"{ends[0].seen:,}",
                )
            )
    title = f"echo: error after {options.fresh:,} fresh samples of CIFAR-10, {options.seeds} seeds"
    return Result((Table(title, FINAL_HEADS, tuple(cells)),), (), tuple(wrong), {"ends": data})


def make_result(
    work: EchoWork,
    downstream: float,
    ratio: float,
    outcomes: Mapping[EchoSetting, Sequence[EchoOutcome]],
    wrong: tuple[str, ...] = (),
) -> Result:
    """One row per setting. Notes name the runs that did not reach the target."""
    rate = work.rate or downstream / ratio
    base = list(outcomes.get(BASE, ()))
    data: dict[str, Any] = {
        "target": work.target,
        "limit": work.limit,
        "downstream": downstream,
        "upstream": rate,
        "settings": {
            setting.title: {**asdict(setting), "runs": [_run_data(run, rate) for run in runs]}
            for setting, runs in outcomes.items()
        },
    }
    cells = [_row(setting.title, runs, base, rate) for setting, runs in outcomes.items()]
    notes = []
    best = max(
        ((_speedup(runs, base), setting.title) for setting, runs in outcomes.items()),
        key=lambda one: one[0] or 0.0,
        default=(None, ""),
    )
    if best[0] is not None:
        notes.append(f"echo: best speed-up {best[0]:.2f} times, {best[1]}; {PAPER}")
    for setting, runs in outcomes.items():
        short = [run for run in runs if not run.reached]
        if short:
            top = max(run.last.accuracy for run in short)
            notes.append(
                f"echo: {setting.title}: {len(short)} of {len(runs)} runs did not reach "
                f"{work.target:.0%} in {work.limit:g} s (at most {top:.1%})"
            )
    title = (
        f"echo: CIFAR-10 to {work.target:.0%}, {rate:,.0f} samples/s read, {downstream:,.0f} "
        f"trained, batches of {work.batch}, {work.workers} workers"
    )
    return Result((Table(title, HEADS, tuple(cells)),), tuple(notes), wrong, data)


def _run_data(run: EchoOutcome, rate: float) -> dict[str, Any]:
    return {**asdict(run), "ratio": _ratio(run, rate)}


def _ratio(run: EchoOutcome, rate: float) -> float | None:
    """Time to read a sample over the time of everything after it, in this run."""
    return 1 / rate / run.step if run.step > 0 else None


def _row(
    title: str, runs: Sequence[EchoOutcome], base: Sequence[EchoOutcome], rate: float
) -> tuple[str, ...]:
    reached = [run.last for run in runs if run.reached]
    cells = [title, f"{len(reached)} of {len(runs)}"]
    speedup = _speedup(runs, base)
    if reached:
        cells.append(_span([mark.seconds for mark in reached], "{:.1f}"))
        cells.append("-" if speedup is None else f"{speedup:.2f}")
        cells.append(f"{statistics.mean(mark.fresh for mark in reached):,.0f}")
        share = _mean_share(runs, base, "fresh")
        cells.append("-" if share is None else f"{share:.0%}")
        cells.append(f"{statistics.mean(mark.seen for mark in reached):,.0f}")
    else:
        cells += ["never", *["-"] * 4]
    ratios = [ratio for run in runs if (ratio := _ratio(run, rate)) is not None]
    cells.append(f"{statistics.mean(ratios):.1f}" if ratios else "-")
    cells.append(f"{statistics.mean(run.waited for run in runs):.0%}" if runs else "-")
    return tuple(cells)


def _mean_share(
    runs: Sequence[EchoOutcome], base: Sequence[EchoOutcome], what: Literal["seconds", "fresh"]
) -> float | None:
    """Value ``what`` relative to training without echo: the mean over the seeds with which both
    reached the target."""
    others = {run.seed: run.last for run in base if run.reached}
    shares = [
        getattr(run.last, what) / getattr(others[run.seed], what)
        for run in runs
        if run.reached and run.seed in others
    ]
    return statistics.mean(shares) if shares else None


def _speedup(runs: Sequence[EchoOutcome], base: Sequence[EchoOutcome]) -> float | None:
    share = _mean_share(runs, base, "seconds")
    return None if share is None else 1 / share


def _span(values: Sequence[float], form: str) -> str:
    middle = form.format(statistics.mean(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} - {form.format(max(values))})"


def figure(data: Mapping[str, Any]) -> Figure:
    """A plot of the time to the target over the echo factor."""
    places: dict[str, list[Point]] = {place: [] for place in PLACES}
    notes = []
    for title, entry in data["settings"].items():
        reached = [one["marks"][-1]["seconds"] for one in entry["runs"] if one["reached"]]
        if len(reached) < len(entry["runs"]):
            missed = len(entry["runs"]) - len(reached)
            notes.append(f"{title}: {missed} of {len(entry['runs'])} runs did not reach the target")
        if reached:
            factor = float(entry["factor"])
            seconds = Range(statistics.mean(reached), min(reached), max(reached))
            places[entry["place"]].append(Point(Range(factor, factor, factor), seconds))
    series = tuple(
        Series(place, tuple(points), joined=len(points) > 1)
        for place, points in places.items()
        if points
    )
    title = f"echo: seconds until {data['target']:.0%} of the test set is right"
    return Figure(title, "echo factor", "seconds", series, zero=True, notes=tuple(notes))


def _factors(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "test", type=Path, nargs="?", metavar="TEST", help="the test set, if --data is one file"
    )
    parser.add_argument(
        "--seeds", type=count, default=SEEDS, help=f"number of seeds per setting ({SEEDS})"
    )
    parser.add_argument(
        "--factors",
        type=_factors,
        default=FACTORS,
        metavar="LIST",
        help=f"echo factors before augmentation ({','.join(map(str, FACTORS))})",
    )
    parser.add_argument(
        "--target", type=share, default=TARGET, help=f"accuracy to reach on the test set ({TARGET})"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=LIMIT,
        metavar="SECONDS",
        help=f"end of a run that does not reach the target ({LIMIT:g})",
    )
    parser.add_argument(
        "--ratio",
        type=positive,
        default=RATIO,
        help=f"time to read a sample, relative to everything after reading ({RATIO:g})",
    )
    parser.add_argument(
        "--fresh",
        type=count,
        metavar="SAMPLES",
        help="train on this number of fresh samples and their copies, and show the error at the "
        "end instead of the time to a target",
    )
    parser.add_argument(
        "--windows",
        type=_factors,
        default=(WINDOW,),
        metavar="LIST",
        help=f"with --fresh: batches over which copies are spread ({WINDOW})",
    )
    parser.add_argument(
        "--batches", type=_factors, metavar="LIST", help="with --fresh: sizes of batches (--batch)"
    )
    add_plot_argument(parser)
    parser.set_defaults(seconds=6.0, recipe=RECIPE)
    parser.epilog = (
        "Here --samples is the number of training images to use (all), and --seconds is how long "
        "the pace of training is measured (6); --rounds and --warm-up have no effect."
    )


BENCHMARK = Benchmark(
    "echo",
    "time and fresh samples to a target accuracy with a slow source (trains on CIFAR-10)",
    run,
    _arguments,
    needs_data=True,
    data=DATA,
    files=(".parquet",),
)
