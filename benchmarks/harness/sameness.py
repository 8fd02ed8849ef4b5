"""Whether contestants did the same work: what their batches look like, compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = 0.1
"""How far mean and deviation may be apart, as a share of the deviation: contestants draw crops and
orders of their own, so that a few hundred samples agree to a few per cent."""


@dataclass(frozen=True)
class Look:
    """The first field of some batches: shape of a sample, type, mean and deviation."""

    shape: tuple[int, ...]
    dtype: str
    mean: float
    deviation: float

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {size}, mean {self.mean:.3g}, deviation {self.deviation:.3g}"


def first_leaf(batch: Any) -> Any:
    """The array or tensor that a batch begins with."""
    while isinstance(batch, (tuple, list, Mapping)):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch


def look(batches: Iterator[Any], samples: int) -> Look:
    """Take batches until so many samples were seen, and say what they look like."""
    count, total, squares, seen = 0, 0.0, 0.0, 0
    shape: tuple[int, ...] = ()
    dtype = ""
    while seen < samples:
        array = np.asarray(first_leaf(next(batches)))
        shape, dtype = array.shape[1:], str(array.dtype)
        # Sample by sample: a batch in doubles would be the most memory that anybody takes.
        for sample in array:
            wide = sample.astype(np.float64)
            count += wide.size
            total += float(wide.sum())
            squares += float(np.square(wide).sum())
        seen += len(array)
        # Kept while the next is asked for, it would count as memory of the loader.
        del array, sample
    mean = total / count
    return Look(shape, dtype, mean, max(0.0, squares / count - mean * mean) ** 0.5)


def difference(one: Look, other: Look) -> str | None:
    """What sets two looks apart, in words; ``None`` if it was the same work."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{other} where the first gives {one}"
    allowed = TOLERANCE * max(one.deviation, other.deviation)
    if abs(one.mean - other.mean) > allowed or abs(one.deviation - other.deviation) > allowed:
        return f"{other} where the first gives {one}; more than {TOLERANCE:.0%} apart"
    return None
