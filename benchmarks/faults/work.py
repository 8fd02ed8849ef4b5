"""What members of a group are given where faults are provoked: small samples that know who they
are, with something random in each, so that no two epochs have an equal batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.faults.verdict import Batch

SHAPE = (16, 16, 3)
"""Of a sample: small, because it is not preparing that is measured."""

SEED = 0


@dataclass(frozen=True)
class Numbered:
    """``samples`` in batches; ``kind`` are the node's workers."""

    samples: int
    batch: int
    kind: Literal["threads", "processes"] = "threads"

    @property
    def batches(self) -> int:
        """In an epoch."""
        return -(-self.samples // self.batch)

    @property
    def bytes(self) -> int:
        """Of a batch in memory, in whole pages as slots are."""
        size = self.batch * (int(np.prod(SHAPE)) + 8)
        return -(-size // 4096) * 4096

    def loader(self, **options: Any) -> Any:
        import penstock as ps

        road = ps.from_dataset(np.arange(self.samples)).map(drawn)
        return road.batch(self.batch).loader(seed=SEED, kind=self.kind, **options)


def drawn(index: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    return rng.integers(0, 256, SHAPE, dtype=np.uint8), index


def as_batch(at: float, epoch: int, batch: tuple[Any, Any]) -> Batch:
    """What there is to say of a batch."""
    digest = hashlib.blake2b(digest_size=16)
    for field in batch:
        digest.update(np.ascontiguousarray(field).tobytes())
    return Batch(at, epoch, tuple(batch[1].tolist()), digest.hexdigest())


def epochs(work: Numbered, count: int) -> Iterator[tuple[int, list[Batch]]]:
    """What a loader delivers that shares with nobody."""
    with work.loader(workers=1) as loader:
        for epoch in range(count):
            yield epoch, [as_batch(0.0, epoch, batch) for batch in loader]
