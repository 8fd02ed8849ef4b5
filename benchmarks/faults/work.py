"""The data of the members: small samples that carry their index and random pixels, so that no two
epochs have an equal batch. Some samples are slow, crash or hang on purpose."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.faults.verdict import BatchRecord, Reference

SEED = 0

BAD_FILE = b"caf\xe9.txt"
"""The name of an unreadable file: Latin-1, which is not valid UTF-8."""

SECONDS_OF_A_HANG = 1000.0

Stages = Literal["random", "memory", "disk", "refurbish", "echo", "files", "images"]
"""The stages of a pipeline: a random map alone; with a cache in memory or on disk above it; between
the two halves of a refurbished one; echoed; from files that hold numbers; from photographs."""

Trouble = Literal["", "raise", "crash", "hang", "gil"]
"""What a bad sample does: nothing, raise an error, crash, hang, or hang in C and hold the GIL."""


@dataclass(frozen=True)
class NumberedSamples:
    """A dataset of numbered samples of ``edge`` x ``edge`` pixels. ``kind``: kind of the workers.

    A sample takes ``cost`` seconds, and sample ``bad`` makes ``trouble``; it creates the file
    ``mark`` before. ``place``: the directory of the disk cache, or of the files. ``budget``: bytes
    of the cache; 0 leaves it out.
    """

    samples: int
    batch: int
    kind: Literal["threads", "processes"] = "threads"
    stages: Stages = "random"
    edge: int = 16
    cost: float = 0.0
    trouble: Trouble = ""
    bad: int = -1
    mark: str = ""
    place: str = ""
    budget: int = 1 << 30

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.samples // self.batch)

    @property
    def bytes(self) -> int:
        """Size of a batch in a slot, in whole pages."""
        size = self.batch * (3 * self.edge**2 + 8)
        return -(-size // 4096) * 4096

    @property
    def undisturbed(self) -> NumberedSamples:
        """Work with the same batches, which keeps nothing and whose bad sample only raises."""
        # A slow sample stays a stage of the pipeline, because stages are numbered in random keys.
        trouble: Trouble = "raise" if self.trouble or self.cost else ""
        bad = -1 if self.trouble == "gil" else self.bad
        return replace(self, kind="threads", budget=0, cost=0.0, trouble=trouble, bad=bad, mark="")

    @property
    def bad_samples(self) -> set[int]:
        """The samples that a loader with ``on_error="skip"`` leaves out."""
        return {self.bad} if self.bad >= 0 else set()

    def loader(self, **options: Any) -> Any:
        return self._road().batch(self.batch).loader(seed=SEED, kind=self.kind, **options)

    def _road(self) -> Any:
        import penstock as ps

        draw = RandomSample(self.edge)
        if self.stages in ("files", "images"):
            road = ps.from_files(self._paths(), labels=list(range(self.samples)))
            if self.stages == "files":
                return road.map(parse_number, random=False).map(draw)
            road = road.map(ps.image.decode()).map(ps.image.random_resized_crop(self.edge))
            return road.map(ps.image.random_flip())
        road = ps.from_dataset(np.arange(self.samples))
        if self.stages in ("memory", "disk"):
            road = road.map(widen, random=False)
            if self.budget:
                road = road.cache(self.budget, where=self.place or "memory")
            road = road.map(narrow, random=False)
        if self.cost or self.trouble:
            # With share= the samples of all jobs must be prepared by equal code.
            job = os.getpid() if self.trouble == "gil" else 0
            hazard = Hazard(self.cost, self.trouble, self.bad, self.mark, job)
            road = road.map(hazard, random=False)
        if self.stages == "refurbish":
            return road.map(draw).refurbish(reuse=2).map(add_noise)
        if self.stages == "echo":
            return road.echo(2, window=2 * self.batch).map(draw)
        return road.map(draw)

    def _paths(self) -> list[str]:
        suffix = "txt" if self.stages == "files" else "png"
        paths = [str(Path(self.place) / f"{number}.{suffix}") for number in range(self.samples)]
        if self.bad >= 0:
            paths[self.bad] = str(Path(self.place) / BAD_FILE.decode(errors="surrogateescape"))
        return paths

    def write_files(self) -> None:
        """Write the files that the stages "files" and "images" read."""
        for number, path in enumerate(self._paths()):
            if number == self.bad:
                Path(path).write_bytes(b"junk")
            elif self.stages == "files":
                Path(path).write_text(str(number))
            else:
                write_photograph(Path(path), number)


@dataclass(frozen=True)
class RandomSample:
    """Random pixels, and the index of the sample."""

    edge: int

    def __call__(self, index: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        number = index[1] if isinstance(index, tuple) else index
        return rng.integers(0, 256, (self.edge, self.edge, 3), dtype=np.uint8), np.int64(number)


@dataclass(frozen=True)
class Hazard:
    """Takes ``cost`` seconds for each sample, and makes ``trouble`` at the sample ``bad``.

    A job may prepare samples itself while its workers start. Those that hold the GIL are for its
    workers only: from ``bad`` on, all samples outside of the process ``job``.
    """

    cost: float
    trouble: Trouble
    bad: int
    mark: str
    job: int

    def __call__(self, index: Any) -> Any:
        if self.cost:
            time.sleep(self.cost)
        if self.job:
            troubled = int(index) >= self.bad and os.getpid() != self.job
        else:
            troubled = int(index) == self.bad
        if self.trouble and troubled:
            if self.mark:
                Path(self.mark).touch()
            make_trouble(self.trouble)
        return index


def make_trouble(trouble: Trouble) -> None:
    if trouble == "raise":
        raise ValueError("a bad sample")
    if trouble == "crash":
        ctypes.string_at(0)
    if trouble == "hang":
        time.sleep(SECONDS_OF_A_HANG)
    if trouble == "gil":
        # This expression takes exponential time, in C code that never releases the GIL.
        re.match(r"(a+)+$", "a" * 60 + "b")


def add_noise(sample: tuple[Any, Any], rng: np.random.Generator) -> tuple[Any, Any]:
    pixels, index = sample
    return pixels ^ rng.integers(0, 256, pixels.shape, dtype=np.uint8), index


def widen(index: Any) -> Any:
    """The index, repeated: a sample that takes some room in a cache."""
    return np.full(1024, index, np.int64)


def narrow(sample: Any) -> Any:
    if not (sample == sample[0]).all():
        raise ValueError("a cached sample is damaged")
    return sample[0]


def parse_number(sample: tuple[Any, Any]) -> tuple[int, Any]:
    content, label = sample
    return int(bytes(content)), label


def write_photograph(path: Path, number: int) -> None:
    import cv2

    pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(path), pixels)


def record_batch(at: float, epoch: int, batch: tuple[Any, Any]) -> BatchRecord:
    """The record of a batch received at a time."""
    return BatchRecord(at, epoch, tuple(batch[1].tolist()), digest_of(batch))


def digest_of(batch: tuple[Any, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for field in batch:
        digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()


def epochs(
    work: NumberedSamples, count: int, **options: Any
) -> Iterator[tuple[int, list[BatchRecord]]]:
    """The epochs of an unshared loader that nobody disturbs, with their batches."""
    with work.undisturbed.loader(workers=1, **options) as loader:
        for epoch in range(count):
            yield epoch, [record_batch(0.0, epoch, batch) for batch in loader]


class References:
    """The batches that members should receive, each computed once, on first use."""

    DECISIVE = ("shuffle", "on_error", "rank", "world", "tail")
    """The options of a loader that decide its batches."""

    def __init__(self) -> None:
        self._known: dict[Any, Reference] = {}

    def of(self, work: NumberedSamples, count: int, options: Mapping[str, Any]) -> Reference:
        """The batches of ``count`` epochs of a loader with these options."""
        decisive = {name: options[name] for name in self.DECISIVE if name in options}
        key = work.undisturbed, tuple(sorted(decisive.items()))
        if len(self._known.get(key, ())) < count:
            self._known[key] = dict(epochs(work, count, **decisive))
        return {epoch: self._known[key][epoch] for epoch in range(count)}
