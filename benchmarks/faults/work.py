"""The data of the members: small samples that carry their index and random pixels, so that no two
epochs have an equal batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.faults.verdict import BatchRecord

SHAPE = (16, 16, 3)
"""Shape of a sample: small, because preparation is not measured here."""

SEED = 0


@dataclass(frozen=True)
class NumberedSamples:
    """A dataset of numbered samples. ``kind``: kind of the node's workers."""

    samples: int
    batch: int
    kind: Literal["threads", "processes"] = "threads"

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.samples // self.batch)

    @property
    def bytes(self) -> int:
        """Size of a batch in a slot, in whole pages."""
        size = self.batch * (int(np.prod(SHAPE)) + 8)
        return -(-size // 4096) * 4096

    def loader(self, **options: Any) -> Any:
        import penstock as ps

        road = ps.from_dataset(np.arange(self.samples)).map(random_sample)
        return road.batch(self.batch).loader(seed=SEED, kind=self.kind, **options)


def random_sample(index: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Random pixels, and the index of the sample."""
    return rng.integers(0, 256, SHAPE, dtype=np.uint8), index


def record_batch(at: float, epoch: int, batch: tuple[Any, Any]) -> BatchRecord:
    """The record of a batch received at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for field in batch:
        digest.update(np.ascontiguousarray(field).tobytes())
    return BatchRecord(at, epoch, tuple(batch[1].tolist()), digest.hexdigest())


def epochs(work: NumberedSamples, count: int) -> Iterator[tuple[int, list[BatchRecord]]]:
    """The epochs of an unshared loader, with their batches."""
    with work.loader(workers=1) as loader:
        for epoch in range(count):
            yield epoch, [record_batch(0.0, epoch, batch) for batch in loader]
