"""Pipelines with an echo in one of three places, and training up to a target accuracy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.harness.throttle import Bucket, Stopwatch, Throttled
from benchmarks.harness.training import (
    PADDING,
    SIDE,
    Recipe,
    Trainer,
    endless,
    normalize,
    read_images,
    read_rows,
    with_stamp,
)

if TYPE_CHECKING:
    import penstock as ps
    from penstock.loader import Loader

Where = Literal["before augmentation", "after augmentation", "after batch"]
PLACES: tuple[Where, ...] = ("before augmentation", "after augmentation", "after batch")

PLACES_FACTOR = 2
"""The factor with which the three places are compared."""

WINDOW = 32
"""Batches over which copies are spread: with 8, factor 5 took half as many fresh samples again. The
loader prefetches as many batches: a window begins with most of its fresh samples and ends with
copies, and reading must continue during the copies."""

TESTED, EVERY = 2_000, 10
"""Test images per test, and steps between tests. A test takes about a third of a second, which is
not counted."""

WARM_UP = 20
"""Steps before the pace of training is measured."""


@dataclass(frozen=True)
class EchoSetting:
    """The place of the echo in the pipeline, and its factor."""

    place: Where
    factor: int
    window: int = WINDOW
    """Batches over which copies are spread."""

    @property
    def title(self) -> str:
        if self.factor == 1:
            return "no echo"
        spread = "" if self.window == WINDOW else f", window of {self.window} batches"
        return f"{self.place}, factor {self.factor}{spread}"

    def road(self, source: ps.Pipeline, batch: int) -> ps.Pipeline:
        """The pipeline from a source of encoded images to batches."""
        import penstock as ps

        window = self.window * batch
        road = source.map(with_stamp).map(ps.image.decode())
        if self.factor > 1 and self.place == "before augmentation":
            road = road.echo(self.factor, window=window)
        road = road.map(ps.image.random_crop(SIDE, padding=PADDING)).map(ps.image.random_flip())
        road = road.map(normalize())
        if self.factor > 1 and self.place == "after augmentation":
            road = road.echo(self.factor, window=window)
        road = road.batch(batch, drop_last=True)
        if self.factor > 1 and self.place == "after batch":
            road = road.echo(self.factor, window=self.window)
        return road


BASE = EchoSetting(PLACES[0], 1)


@dataclass(frozen=True)
class EchoWork:
    """The data, the loader and the target of a training. ``rate``: samples per second of the
    source; ``None`` is unlimited."""

    train: Path
    test: Path
    samples: int | None
    batch: int
    workers: int
    target: float
    limit: float
    recipe: Recipe
    rate: float | None = None


@dataclass(frozen=True)
class Mark:
    """Progress at one test: seconds without tests, fresh samples, samples seen, accuracy."""

    seconds: float
    fresh: int
    seen: int
    accuracy: float


@dataclass(frozen=True)
class EchoOutcome:
    """One training. ``marks``: one per test, the last at the end. ``step``: seconds per sample
    without waiting. ``waited``: share of the time that training waited for batches."""

    seed: int
    reached: bool
    marks: tuple[Mark, ...]
    step: float
    waited: float

    @property
    def last(self) -> Mark:
        return self.marks[-1]


def measure_pace(work: EchoWork, seconds: float) -> float:
    """Samples per second of training with an unlimited source. Runs in a fresh process."""
    trainer = Trainer(work.recipe, 0)
    with _loader(work, BASE, 0, Stopwatch()) as loader:
        batches = endless(loader)
        for pixels, labels, _ in islice(batches, WARM_UP):
            trainer.step(pixels, labels)
        steps, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds or not steps:
            pixels, labels, _ = next(batches)
            trainer.step(pixels, labels)
            steps += 1
    return steps * work.batch / elapsed


def train_to_target(work: EchoWork, setting: EchoSetting, seed: int) -> EchoOutcome:
    """Train until the target or the time limit. Runs in a fresh process."""
    images = read_images(work.test, TESTED)
    trainer = Trainer(work.recipe, seed)
    marks: list[Mark] = []
    stamps: set[int] = set()
    seen = 0
    watch = Stopwatch()
    with _loader(work, setting, seed, watch) as loader:
        for pixels, labels, stamp in endless(loader):
            trainer.step(pixels, labels)
            stamps.update(stamp.tolist())
            seen += len(labels)
            late = watch() >= work.limit
            if trainer.steps_taken % EVERY and not late:
                continue
            with watch.stopped():
                accuracy = trainer.accuracy(images)
            marks.append(Mark(watch(), len(stamps), seen, accuracy))
            if late or accuracy >= work.target:
                break
        wait = loader.stats().wait
    end = marks[-1]
    step = max(end.seconds - wait, 0.0) / seen
    return EchoOutcome(seed, end.accuracy >= work.target, tuple(marks), step, wait / end.seconds)


def train_on_fresh(work: EchoWork, setting: EchoSetting, seed: int, fresh: int) -> EchoOutcome:
    """Train on this number of fresh samples and all copies of them, with a schedule of the learning
    rate that ends there. Runs in a fresh process. The outcome does not depend on time."""
    images = read_images(work.test)
    steps = max(1, fresh * setting.factor // work.batch)
    trainer = Trainer(work.recipe, seed, steps)
    stamps: set[int] = set()
    started = time.perf_counter()
    with _loader(work, setting, seed, Stopwatch()) as loader:
        for pixels, labels, stamp in islice(endless(loader), steps):
            trainer.step(pixels, labels)
            stamps.update(stamp.tolist())
    seconds, seen = time.perf_counter() - started, steps * work.batch
    mark = Mark(seconds, len(stamps), seen, trainer.accuracy(images))
    return EchoOutcome(seed, True, (mark,), seconds / seen, 0.0)


def _loader(work: EchoWork, setting: EchoSetting, seed: int, watch: Stopwatch) -> Loader:
    import penstock as ps
    from penstock.source import DatasetSource
    from penstock.source.source import Source

    source: Source = DatasetSource(read_rows(work.train, work.samples))
    if work.rate is not None:
        # The bucket saves at most one batch while the workers do something else.
        source = Throttled(source, Bucket(work.rate, work.batch, watch))
    road = setting.road(ps.Pipeline(source), work.batch)
    # Threads, because all workers must share one bucket.
    return road.loader(workers=work.workers, kind="threads", seed=seed, prefetch=WINDOW)


def settings(factors: Sequence[int]) -> list[EchoSetting]:
    """No echo, each factor before augmentation, and the other places with one factor."""
    chosen = [BASE, *(EchoSetting(PLACES[0], factor) for factor in factors if factor > 1)]
    if PLACES_FACTOR in factors:
        chosen += [EchoSetting(place, PLACES_FACTOR) for place in PLACES[1:]]
    return chosen
