"""Accuracy with and without reuse, for a small CNN on part of CIFAR-10.

Every setting trains on the same number of samples. Each partial augmentation draws a unique number,
which identifies its copies: so the distinct samples that the network saw are counted.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.courses import Throughput
from benchmarks.harness.measure import Contestant, Lane, Make, Spread, progress, race
from benchmarks.harness.plot import Figure, Point, Range, Series, add_plot_argument, write
from benchmarks.harness.report import Result, Table
from benchmarks.harness.training import (
    DATA,
    PADDING,
    SIDE,
    Recipe,
    Trainer,
    check_files,
    endless,
    find_files,
    normalize,
    read_images,
    read_rows,
    training_environment,
    with_stamp,
)

if TYPE_CHECKING:
    import penstock as ps

SAMPLES, EPOCHS, SEEDS, BATCH = 1_000, 72, 3, 64
"""Few samples and many epochs, because augmentation helps little if samples are seldom repeated:
with 4,000 samples and 12 epochs RandAugment lowered the accuracy. 72 is a multiple of 2 and 3, so
that an echo ends with an epoch."""

RECIPE = Recipe()

TIMEOUT = 3600.0
"""Limit for one training in seconds."""

HEADS = (
    "setting",
    "top-1",
    "least - most",
    "against the first",
    "partial augmentations",
    "images/s",
    "least - most",
    "CPU s per 1,000",
    "training s",
)


@dataclass(frozen=True)
class ReuseSetting:
    """How samples are reused: the factors of refurbish and echo.

    ``augment``: the policy of the partial augmentation. ``below``: how many of random crop and flip
    stand below refurbish. ``plain``: a plain shuffle in place of the cache-aware one.
    """

    title: str
    augment: Literal["RandAugment", "AutoAugment", "none"] = "RandAugment"
    refurbish: int = 1
    echo: int = 1
    below: int = 2
    plain: bool = False

    @property
    def order(self) -> Any:
        from benchmarks.reuse.roads import PlainShuffle

        return PlainShuffle() if self.plain else None

    def road(self, source: ps.Pipeline, batch: int) -> ps.Pipeline:
        """The pipeline: partial augmentation, final augmentation, batches."""
        import penstock as ps

        road = source.map(ps.image.decode())
        if self.augment == "RandAugment":
            road = road.map(ps.image.rand_augment(2, 9))
        elif self.augment == "AutoAugment":
            road = road.map(ps.image.auto_augment("cifar10"))
        for left, final in (
            (2, ps.image.random_crop(SIDE, padding=PADDING)),
            (1, ps.image.random_flip()),
        ):
            if self.refurbish > 1 and left == self.below:
                road = road.refurbish(reuse=self.refurbish)
            road = road.map(final)
        road = road.map(normalize())
        if self.echo > 1:
            road = road.echo(self.echo)
        return road.batch(batch, drop_last=True)


STANDARD = ReuseSetting("standard")
SETTINGS = (
    STANDARD,
    ReuseSetting("simplified: no RandAugment", augment="none"),
    ReuseSetting("echo 2, after augmentation", echo=2),
    ReuseSetting("echo 3, after augmentation", echo=3),
    ReuseSetting("refurbish, reuse 2", refurbish=2),
    ReuseSetting("refurbish, reuse 3", refurbish=3),
)

SETS: dict[str, tuple[ReuseSetting, ...]] = {
    "reuse": SETTINGS,
    "split": (
        STANDARD,
        ReuseSetting("reuse 3 above crop and flip", refurbish=3),
        ReuseSetting("reuse 3 above flip", refurbish=3, below=1),
        ReuseSetting("echo 3 below all", echo=3),  # refurbish must have a random map below it
    ),
    "auto_augment": (
        ReuseSetting("AutoAugment", "AutoAugment"),
        ReuseSetting("AutoAugment, reuse 2", "AutoAugment", refurbish=2),
        ReuseSetting("AutoAugment, reuse 3", "AutoAugment", refurbish=3),
    ),
    "shuffle": (
        ReuseSetting("reuse 3, cache-aware shuffle", refurbish=3),
        ReuseSetting("reuse 3, plain shuffle", refurbish=3, plain=True),
    ),
}
"""What ``--set`` compares. Others are compared with the first of a set."""


@dataclass(frozen=True)
class TrainingWork:
    """Training on the first ``samples`` of the training set for ``epochs`` epochs."""

    train: Path
    test: Path
    samples: int
    epochs: int
    batch: int
    workers: int
    recipe: Recipe

    @property
    def steps(self) -> int:
        return self.epochs * (self.samples // self.batch)


@dataclass(frozen=True)
class TrainingOutcome:
    """One training. ``fresh``: number of distinct partial augmentations among the samples ``seen``.
    ``waited``: share of the time that training waited for batches."""

    accuracy: float
    fresh: int
    seen: int
    seconds: float
    waited: float


def train_and_test(work: TrainingWork, setting: ReuseSetting, seed: int) -> TrainingOutcome:
    """Train and test. Runs in a fresh process."""
    import penstock as ps

    source = ps.from_dataset(read_rows(work.train, work.samples)).map(with_stamp)
    trainer = Trainer(work.recipe, seed, work.steps)
    stamps = []
    road = setting.road(source, work.batch)
    with road.loader(
        workers=work.workers, kind="processes", seed=seed, order=setting.order
    ) as loader:
        started = time.perf_counter()
        for pixels, labels, stamp in islice(endless(loader), work.steps):
            trainer.step(pixels, labels)
            stamps.append(stamp.copy())
        seconds = time.perf_counter() - started
        waited = loader.stats().stall
    seen = np.concatenate(stamps)
    accuracy = trainer.accuracy(read_images(work.test))
    return TrainingOutcome(accuracy, len(np.unique(seen)), len(seen), seconds, waited)


def prepare_loader(work: TrainingWork, setting: ReuseSetting) -> Make:
    """The function that makes the loader of a setting, to measure preparation without training."""
    import penstock as ps

    road = setting.road(ps.from_dataset(read_rows(work.train, work.samples)), work.batch)
    return lambda: road.loader(workers=work.workers, kind="processes", seed=0, order=setting.order)


def run(options: Namespace) -> Result:
    train, test = find_files(options.data, options.test)
    samples = options.samples or SAMPLES
    check_files(train, test, samples, options.batch)
    work = TrainingWork(
        train, test, samples, options.epochs, options.batch, options.workers, RECIPE
    )
    chosen = SETS[options.set]
    lanes = _race_preparation(work, chosen, options)
    runs: dict[str, list[TrainingOutcome]] = {setting.title: [] for setting in chosen}
    wrong = [f"accuracy: {lane.title}: {lane.why_not}" for lane in lanes if lane.why_not]
    started = time.perf_counter()
    for seed in range(options.seeds):
        for setting in chosen:
            progress(f"accuracy: seed {seed + 1} of {options.seeds}: {setting.title}")
            try:
                value: TrainingOutcome = run_alone(
                    train_and_test,
                    work,
                    setting,
                    seed,
                    timeout=TIMEOUT,
                    environment=training_environment(),
                ).value
            except AloneError as error:
                progress(error.printed or f"  {error}")
                wrong.append(f"accuracy: {setting.title}, seed {seed}: failed: {error}")
                continue
            runs[setting.title].append(value)
            progress(
                f"  {value.accuracy:.2%}, {value.fresh:,} partial augmentations among "
                f"{value.seen:,} samples, {value.seconds:.0f} s"
            )
    result = make_result(work, runs, lanes, time.perf_counter() - started, tuple(wrong))
    if options.plot is not None:
        write(options.plot, figure(result.data))
    return result


def _race_preparation(
    work: TrainingWork, settings: Sequence[ReuseSetting], options: Namespace
) -> list[Lane]:
    """Measure how fast each setting prepares batches, without training."""
    contestants = [
        Contestant(setting.title, partial(prepare_loader, setting=setting), ("cv2",), ours=True)
        for setting in settings
    ]
    # A whole epoch passes before the measurement, because the first has nothing to reuse.
    course = Throughput(options.seconds, work.samples, warm_up=options.warm_up)
    timeout = 240 + options.warm_up + 10 * options.seconds
    name = "accuracy, preparation"
    return race(name, contestants, work, course, rounds=options.rounds, timeout=timeout)


def make_result(
    work: TrainingWork,
    runs: Mapping[str, list[TrainingOutcome]],
    lanes: list[Lane],
    seconds: float,
    wrong: tuple[str, ...] = (),
) -> Result:
    """One row per setting, with ``-`` for missing values."""
    data: dict[str, Any] = {}
    cells: list[tuple[str, ...]] = []
    base = [run.accuracy for run in next(iter(runs.values()))]
    for lane in lanes:
        values = runs[lane.title]
        top = [run.accuracy for run in values]
        data[lane.title] = {
            "runs": [asdict(run) for run in values],
            "accuracy": _summary(top),
            "rate": asdict(lane.spread("rate")) if lane.runs else None,
            "cpu": asdict(lane.spread("cpu")) if lane.runs else None,
            "preparation": {number: run.values for number, run in lane.runs.items()},
        }
        shown = ("-",) * 3
        if top:
            over = f"{100 * (statistics.mean(top) - statistics.mean(base)):+.2f}" if base else "-"
            shown = (f"{statistics.mean(top):.2%}", _span(Spread.of(top), "{:.2%}"), over)
        fresh = f"{round(statistics.mean(run.fresh for run in values)):,}" if values else "-"
        rate = ("-",) * 3
        if lane.runs:
            spread = lane.spread("rate")
            cpu = f"{lane.spread('cpu').median:.3f}"
            rate = (f"{spread.median:,.0f}", _span(spread, "{:,.0f}"), cpu)
        took = f"{statistics.mean(run.seconds for run in values):.0f}" if values else "-"
        cells.append((lane.title, *shown, fresh, *rate, took))
    seeds = max((len(values) for values in runs.values()), default=0)
    title = (
        f"accuracy: {work.samples:,} images of CIFAR-10, {work.epochs} epochs, batches of "
        f"{work.batch}, {seeds} seeds, {work.workers} workers"
    )
    notes = (f"accuracy: all trainings together took {seconds / 60:.1f} minutes",)
    return Result((Table(title, HEADS, tuple(cells)),), notes, wrong, data)


def _summary(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


def _span(spread: Spread, form: str) -> str:
    return f"{form.format(spread.low)} - {form.format(spread.high)}"


def figure(data: Mapping[str, Any]) -> Figure:
    """A plot of the accuracy over the speed of preparation."""
    kinds: dict[str, list[Point]] = {"refurbish": [], "echo": [], "neither": []}
    for title, entry in data.items():
        top, rate = entry["accuracy"], entry["rate"]
        if top is None or rate is None:
            continue
        kind = next((kind for kind in kinds if title.startswith(kind)), "neither")
        across = Range(rate["median"], rate["low"], rate["high"])
        up = Range(*(100 * top[which] for which in ("mean", "low", "high")))
        kinds[kind].append(Point(across, up, title))
    series = [Series(kind, tuple(points)) for kind, points in kinds.items() if points]
    return Figure(
        "accuracy over preparation speed",
        "images prepared per second, without training",
        "top-1 on the test set, %",
        tuple(series),
    )


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "test", type=Path, nargs="?", metavar="TEST", help="the test set, if --data is one file"
    )
    parser.add_argument("--epochs", type=count, default=EPOCHS, help=f"number of epochs ({EPOCHS})")
    parser.add_argument(
        "--seeds", type=count, default=SEEDS, help=f"number of seeds per setting ({SEEDS})"
    )
    parser.add_argument(
        "--set",
        choices=SETS,
        default="reuse",
        help="what is compared: factors of reuse (default), the split between the stages above and "
        "below refurbish, AutoAugment, or the cache-aware with a plain shuffle",
    )
    add_plot_argument(parser)
    parser.set_defaults(batch=BATCH, rounds=3, seconds=2.0, warm_up=1.0)
    parser.epilog = (
        f"Here --samples is the number of training images to use ({SAMPLES}). The defaults are "
        f"--batch {BATCH}, and --rounds 3, --seconds 2 and --warm-up 1 for the measurement of "
        "preparation without training."
    )


BENCHMARK = Benchmark(
    "accuracy",
    "accuracy with refurbish and echo, and their speed of preparation (trains on CIFAR-10)",
    run,
    _arguments,
    needs_data=True,
    data=DATA,
    files=(".parquet",),
)
