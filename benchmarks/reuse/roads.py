"""Roads that prepare photographs once for several uses, and what Penstock's way is compared with.

All of them decode and run RandAugment on the whole photograph, then crop and flip what comes of it.
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
class Reused:
    """Photographs of a folder; ``reuse`` are the factors to compare.

    Where there are fewer files than ``samples`` each is several of them: an epoch has to be long
    beside the few batches that are prepared ahead, as it is where people train.
    """

    data: Path
    samples: int
    batch: int
    workers: int
    reuse: tuple[int, ...]
    side: int = 224

    @property
    def cycle(self) -> int:
        """Epochs after which everything was prepared anew equally often, whatever the factor."""
        return math.lcm(*self.reuse)

    def files(self) -> ps.Pipeline:
        """The source: files of all classes."""
        paths, labels = image_files(self.data)
        chosen = [number * len(paths) // self.samples for number in range(self.samples)]
        return ps.from_files([paths[i] for i in chosen], [labels[i] for i in chosen])


class ReferenceCount(Generations):
    """Eviction by counting: a sample is prepared anew when it was used ``reuse`` times.

    So all are due in the same epoch, and none in the others.

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
    """Shuffles as ever; Penstock would put its own shuffle, that knows what is kept, in place of
    ``Shuffled``."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return Shuffled().indices(n, seed, epoch)

    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return Shuffled().at(n, seed, epoch, places)

    def length(self, n: int) -> int:
        return n


def _above(work: Reused) -> ps.Pipeline:
    return work.files().map(ps.image.decode()).map(ps.image.rand_augment(*RAND_AUGMENT))


def _below(above: ps.Pipeline, work: Reused) -> ps.Pipeline:
    return above.map(ps.image.random_resized_crop(work.side)).map(ps.image.random_flip())


def _loader(pipeline: ps.Pipeline, work: Reused, order: PlainShuffle | None = None) -> Loader:
    batched = pipeline.batch(work.batch)
    return batched.loader(workers=work.workers, kind="threads", seed=SEED, order=order)


def standard(work: Reused) -> Make:
    """Everything is prepared anew every time."""
    return lambda: _loader(_below(_above(work), work), work)


def simplified(work: Reused) -> Make:
    """The same without RandAugment: fast, for want of augmentation."""
    return lambda: _loader(_below(work.files().map(ps.image.decode()), work), work)


def echoed(work: Reused, reuse: int) -> Make:
    """Echo after augmentation: the very same sample comes several times."""
    return lambda: _loader(_below(_above(work), work).echo(reuse), work)


def refurbished(work: Reused, reuse: int) -> Make:
    """As Penstock builds it: balanced eviction, and a shuffle that knows what is kept."""
    return lambda: _loader(_below(_above(work).refurbish(reuse), work), work)


def counted(work: Reused, reuse: int) -> Make:
    """Refurbished too, but evicted by counting, and plainly shuffled."""
    renewal = ReferenceCount(work.samples, reuse, kept=work.samples, seed=SEED)

    def make() -> Loader:
        built = _below(_above(work).refurbish(reuse), work)
        stops = tuple(
            replace(stop, renewal=renewal) if isinstance(stop, Refurbish) else stop
            for stop in built.stops
        )
        return _loader(replace(built, stops=stops), work, PlainShuffle())

    return make


NEEDS = ("simplejpeg", "cv2", "lmdb")

STANDARD = Contestant("standard", standard, NEEDS, ours=True)
SIMPLIFIED = Contestant("simplified: no RandAugment", simplified, NEEDS, ours=True)


def echo(reuse: int) -> Contestant[Reused]:
    prepare = partial(echoed, reuse=reuse)
    return Contestant(f"echo after augmentation, {reuse} times", prepare, NEEDS, ours=True)


def as_built(reuse: int) -> Contestant[Reused]:
    return Contestant(
        f"refurbish, {reuse} times", partial(refurbished, reuse=reuse), NEEDS, ours=True
    )


def reference_count(reuse: int) -> Contestant[Reused]:
    prepare = partial(counted, reuse=reuse)
    return Contestant(f"refurbish by counting, {reuse} times", prepare, NEEDS, ours=True)


def everyone(reuse: Sequence[int]) -> list[Contestant[Reused]]:
    """Who runs for these factors, each only once."""
    several = [make(number) for number in reuse for make in (echo, reference_count, as_built)]
    return [STANDARD, SIMPLIFIED, *several]
