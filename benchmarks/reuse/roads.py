"""Pipelines that reuse prepared photographs, and pipelines to compare them with.

All decode a photograph, apply RandAugment to the whole of it, then crop and flip the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from benchmarks.harness.measure import Contestant, Make
from benchmarks.harness.workloads import RAND_AUGMENT, image_files
from penstock.loader import Loader
from penstock.order import Generations, Shuffled
from penstock.stops.refurbish import Refurbish

SEED = 0


@dataclass(frozen=True)
class ReuseWorkload:
    """Photographs of a folder. ``reuse``: the factors to compare.

    With fewer files than ``samples``, files are repeated: an epoch must be long compared with the
    few batches that are prepared ahead, as in real training.
    """

    data: Path
    samples: int
    batch: int
    workers: int
    reuse: tuple[int, ...]
    side: int = 224

    @property
    def cycle(self) -> int:
        """Epochs after which all samples have been prepared equally often, with any factor."""
        return math.lcm(*self.reuse)

    def files(self) -> ps.Pipeline:
        """The source: files spread over all classes."""
        paths, labels = image_files(self.data)
        chosen = [number * len(paths) // self.samples for number in range(self.samples)]
        return ps.from_files([paths[i] for i in chosen], [labels[i] for i in chosen])


class ReferenceCount(Generations):
    """Eviction by reference counts: a sample is prepared again after ``reuse`` uses.

    So all samples are renewed in the same epoch, and none in the others.

    >>> [ReferenceCount(n=4, reuse=2, kept=4, seed=0).fresh(epoch) for epoch in range(5)]
    [4, 0, 4, 0, 4]
    """

    def generation(self, index: int, epoch: int) -> int:
        return epoch // self.reuse

    def generations(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return np.full(len(indices), epoch // self.reuse)

    def span(self, epoch: int) -> tuple[int, int]:
        return 0, 0 if epoch % self.reuse else self.kept


class PlainShuffle:
    """A plain shuffle. With ``Shuffled`` itself, Penstock would use its cache-aware shuffle."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return Shuffled().indices(n, seed, epoch)

    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return Shuffled().at(n, seed, epoch, places)

    def length(self, n: int) -> int:
        return n


def _above(work: ReuseWorkload) -> ps.Pipeline:
    return work.files().map(ps.image.decode()).map(ps.image.rand_augment(*RAND_AUGMENT))


def _below(above: ps.Pipeline, work: ReuseWorkload) -> ps.Pipeline:
    return above.map(ps.image.random_resized_crop(work.side)).map(ps.image.random_flip())


def _loader(
    pipeline: ps.Pipeline, work: ReuseWorkload, order: PlainShuffle | None = None
) -> Loader:
    batched = pipeline.batch(work.batch)
    return batched.loader(workers=work.workers, kind="threads", seed=SEED, order=order)


def standard(work: ReuseWorkload) -> Make:
    """No reuse: every sample is prepared from the file."""
    return lambda: _loader(_below(_above(work), work), work)


def simplified(work: ReuseWorkload) -> Make:
    """No reuse and no RandAugment: faster, but with less augmentation."""
    return lambda: _loader(_below(work.files().map(ps.image.decode()), work), work)


def echoed(work: ReuseWorkload, reuse: int) -> Make:
    """Echo after augmentation: identical copies of each sample."""
    return lambda: _loader(_below(_above(work), work).echo(reuse), work)


def refurbished(work: ReuseWorkload, reuse: int) -> Make:
    """Refurbish as Penstock does it: balanced eviction and cache-aware shuffle."""
    return lambda: _loader(_below(_above(work).refurbish(reuse), work), work)


def counted(work: ReuseWorkload, reuse: int) -> Make:
    """Refurbish with eviction by reference counts and a plain shuffle."""
    renewal = ReferenceCount(work.samples, reuse, kept=work.samples, seed=SEED)

    def make() -> Loader:
        built = _below(_above(work).refurbish(reuse), work)
        stops = tuple(
            replace(stop, generations=renewal) if isinstance(stop, Refurbish) else stop
            for stop in built.stops
        )
        return _loader(replace(built, stops=stops), work, PlainShuffle())

    return make


NEEDS = ("simplejpeg", "cv2", "lmdb")

STANDARD = Contestant("standard", standard, NEEDS, ours=True)
SIMPLIFIED = Contestant("simplified: no RandAugment", simplified, NEEDS, ours=True)


def echo(reuse: int) -> Contestant[ReuseWorkload]:
    prepare = partial(echoed, reuse=reuse)
    return Contestant(f"echo after augmentation, {reuse} times", prepare, NEEDS, ours=True)


def as_built(reuse: int) -> Contestant[ReuseWorkload]:
    return Contestant(
        f"refurbish, {reuse} times", partial(refurbished, reuse=reuse), NEEDS, ours=True
    )


def reference_count(reuse: int) -> Contestant[ReuseWorkload]:
    prepare = partial(counted, reuse=reuse)
    return Contestant(f"refurbish by counting, {reuse} times", prepare, NEEDS, ours=True)


def all_contestants(reuse: Sequence[int]) -> list[Contestant[ReuseWorkload]]:
    """The contestants for these factors."""
    reusing = [make(number) for number in reuse for make in (echo, reference_count, as_built)]
    return [STANDARD, SIMPLIFIED, *reusing]
