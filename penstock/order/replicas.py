"""The how-many-th time an index is dealt: what tells apart the copies of one sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def replicas(indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """For each entry, how many equal ones stand before it; ``None`` when nothing repeats.

    >>> replicas(np.array([4, 7, 4, 4, 7])).tolist()
    [0, 0, 1, 2, 1]
    >>> replicas(np.array([4, 7, 5])) is None
    True
    """
    places = _places_of_repeated(indices)
    if places is None:
        return None
    repeated = indices[places]
    by_index = np.argsort(repeated, kind="stable")
    ordered = repeated[by_index]
    ranks = np.arange(len(ordered), dtype=np.int64)
    starts = np.empty(len(ordered), dtype=bool)
    starts[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=starts[1:])
    found = np.zeros(len(indices), dtype=np.int64)
    found[places[by_index]] = ranks - np.maximum.accumulate(np.where(starts, ranks, 0))
    return found


def _places_of_repeated(indices: NDArray[np.int64]) -> NDArray[np.intp] | None:
    """Where the entries stand that occur more than once; only these need sorting."""
    if len(indices) < 2:
        return None
    # A table by index is several times faster than sorting, as long as it stays small.
    if indices.min() >= 0 and indices.max() < 4 * len(indices):
        counts = np.bincount(indices)
        if counts.max() < 2:
            return None
        return np.flatnonzero(counts[indices] > 1)
    ordered = np.sort(indices)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    return np.arange(len(indices), dtype=np.intp)


class Occurrences:
    """Replica numbers of a sequence that comes in chunks and may never end.

    Indices are places in a source, so a table as long as the largest of them is affordable.

    >>> seen = Occurrences()
    >>> seen.count(np.array([4, 7])) is None
    True
    >>> seen.count(np.array([7, 5, 7])).tolist()
    [1, 0, 2]
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int32)

    def count(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The replica numbers of the next chunk; ``None`` when all are first occurrences."""
        if len(indices) == 0:
            return None
        largest = int(indices.max())
        if largest >= len(self._counts):
            grown = np.zeros(max(largest + 1, 2 * len(self._counts)), dtype=np.int32)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        found = self._counts[indices].astype(np.int64)
        within = replicas(indices)
        if within is not None:
            found += within
        # Of equal indices the last assignment stays, and the last has the highest number.
        self._counts[indices] = found + 1
        return found if found.any() else None
