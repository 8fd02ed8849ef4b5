"""The pipelines that ``wide`` runs, by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import penstock as ps
from benchmarks.audio.recordings import Recordings
from benchmarks.harness.workloads import RAND_AUGMENT, Photos, image_files
from benchmarks.peers import penstock_audio, penstock_dropin, penstock_pipeline

PYTHON_SECONDS, ASLEEP_SECONDS = 0.2e-3, 8e-3
"""The road ``python``: seconds of pure Python for a sample, and seconds of native work."""


@dataclass(frozen=True)
class RoadPlan:
    """A pipeline of ``wide``. ``native``: the compiled kernel runs it by itself.

    ``make`` takes the photographs and returns a function that makes the loader. ``epochs``: the
    number of epochs in which every sample is prepared anew equally often. ``simulated``: the same
    with longer epochs, in place of ``make`` where the kernel sleeps. ``sounds``: the data is
    recordings instead, as for the benchmark ``audio``.
    """

    title: str
    make: Callable[[Photos], Callable[[], Iterable[Any]]]
    native: bool = True
    epochs: int = 1
    simulated: Callable[[Photos], Callable[[], Iterable[Any]]] | None = None
    sounds: bool = False


def _uint8(work: Photos) -> Callable[[], Iterable[Any]]:
    return penstock_pipeline.photos(replace(work, form="uint8"))


def _float32(work: Photos) -> Callable[[], Iterable[Any]]:
    return penstock_pipeline.photos(replace(work, form="float32"))


def _augmented(work: Photos) -> Callable[[], Iterable[Any]]:
    return penstock_pipeline.photos(replace(work, form="float32", augment=True))


REUSE = 3

REPEATS = 32
"""How often each file counts in the simulation of refurbish. The batches in preparation must be few
of an epoch, as in real training: a batch waits for one that renews a sample which both need."""


def _refurbished(work: Photos, repeats: int = 1) -> Callable[[], Iterable[Any]]:
    paths, labels = image_files(work.data)
    pipeline = (
        ps.from_files(paths * repeats, labels * repeats)
        .map(ps.image.decode())
        .map(ps.image.rand_augment(*RAND_AUGMENT))
        .refurbish(REUSE)
        .map(ps.image.random_resized_crop(work.side))
        .map(ps.image.random_flip())
        .batch(work.batch)
    )
    return lambda: pipeline.loader(workers=work.workers, kind="threads")


def _drop_in(work: Photos) -> Callable[[], Iterable[Any]]:
    return penstock_dropin.photos(replace(work, form="float32"))


def busy(value: Any) -> Any:
    """Hold the GIL for a while, as transforms written in Python do, then sleep without it."""
    end = time.thread_time() + PYTHON_SECONDS
    while time.thread_time() < end:
        pass
    time.sleep(ASLEEP_SECONDS)
    return value


def _python(work: Photos) -> Callable[[], Iterable[Any]]:
    pipeline = ps.from_dataset(np.arange(100_000.0)).map(busy, random=False).batch(work.batch)
    return lambda: pipeline.loader(workers=work.workers, kind="crew")


def _audio(work: Photos) -> Callable[[], Iterable[Any]]:
    return penstock_audio.recordings(Recordings(work.data, work.batch, work.workers))


ROADS: dict[str, RoadPlan] = {
    "uint8": RoadPlan("crop and flip, uint8", _uint8),
    "float32": RoadPlan("crop, flip, normalise, float32", _float32),
    "randaugment": RoadPlan("the same with RandAugment(2, 9)", _augmented),
    "refurbish": RoadPlan(
        "RandAugment on whole photographs, kept for 3 uses, then crop and flip",
        _refurbished,
        epochs=REUSE,
        simulated=partial(_refurbished, repeats=REPEATS),
    ),
    "drop-in": RoadPlan("drop-in, torchvision ImageFolder, float32", _drop_in),
    "python": RoadPlan("0.2 ms of Python and 8 ms asleep a sample", _python, native=False),
    "audio": RoadPlan(
        "WAV to 16 kHz, random crop, log-mel, SpecAugment, from files", _audio, sounds=True
    ),
}
