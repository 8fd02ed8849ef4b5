"""Checks that contestants did the same work, by comparing summaries of their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = 0.1
"""Allowed difference of means and of deviations, as a share of the deviation. Contestants draw
their own crops and orders, so a few hundred samples agree to a few per cent."""


@dataclass(frozen=True)
class Look:
    """Summary of the first field of some batches: shape of a sample, dtype, mean and deviation."""

    shape: tuple[int, ...]
    dtype: str
    mean: float
    deviation: float

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {size}, mean {self.mean:.3g}, deviation {self.deviation:.3g}"


def first_leaf(batch: Any) -> Any:
    """The first array or tensor in a batch."""
    while isinstance(batch, (tuple, list, Mapping)):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch


def look(batches: Iterator[Any], samples: int) -> Look:
    """Summarise the next batches, up to at least ``samples`` samples."""
    count, total, squares, seen = 0, 0.0, 0.0, 0
    shape: tuple[int, ...] = ()
    dtype = ""
    while seen < samples:
        array = np.asarray(first_leaf(next(batches)))
        shape, dtype = array.shape[1:], str(array.dtype)
        # Sample by sample: a whole batch in float64 would raise the contestant's peak memory.
        for sample in array:
            wide = sample.astype(np.float64)
            count += wide.size
            total += float(wide.sum())
            squares += float(np.square(wide).sum())
        seen += len(array)
        # A batch kept while the next is requested would count as memory of the loader.
        del array, sample
    mean = total / count
    return Look(shape, dtype, mean, max(0.0, squares / count - mean * mean) ** 0.5)


def difference(one: Look, other: Look) -> str | None:
    """How two summaries differ, in words; ``None`` if they agree."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{other}, but the first contestant gives {one}"
    allowed = TOLERANCE * max(one.deviation, other.deviation)
    if abs(one.mean - other.mean) > allowed or abs(one.deviation - other.deviation) > allowed:
        return f"{other}, but the first contestant gives {one}: more than {TOLERANCE:.0%} apart"
    return None
