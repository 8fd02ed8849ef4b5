"""What a store keeps: the first samples that fit, for ever, or the latest versions of samples."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError

_INDICES, _VERSIONS = 1 << 40, 1 << 22
"""More samples than any source has, and more versions than any sample."""


def version_key(index: int, version: int) -> int:
    """One number for a version of a sample: for the first version, the index."""
    return version * _INDICES + index


def index_of(key: int) -> int:
    """The index of the sample with this key."""
    return key % _INDICES


def version_keys(
    indices: NDArray[np.int64], versions: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """``version_key`` of many samples; without ``versions`` all are the first. Raises ValueError.

    >>> keys = version_keys(np.array([3, 4]), np.array([0, 2]))
    >>> [part.tolist() for part in split_keys(keys)]
    [[3, 4], [0, 2]]
    """
    if len(indices) and indices.max() >= _INDICES:
        raise ValueError(f"a sample with index {indices.max()}")
    if versions is None:
        return indices
    if len(versions) and versions.max() >= _VERSIONS:
        raise ValueError(f"version {versions.max()} of a sample")
    return versions * _INDICES + indices


def split_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices and versions of keys."""
    return keys % _INDICES, keys // _INDICES


def version_slot(key: int) -> int:
    """The place of a version: two versions of a sample have room at a time.

    The next epoch may need the new version while this epoch still needs the old one.
    """
    return 2 * (key % _INDICES) + key // _INDICES % 2


class KeptSet(Protocol):
    """Which samples a machine keeps, by ``version_key``."""

    @property
    def closed(self) -> bool:
        """Whether no further sample will ever be kept."""

    def accepts(self, key: int) -> bool:
        """Whether this sample may be kept, if there is room."""

    def offer(self, key: int, cost: int) -> bool:
        """Whether this sample, which takes ``cost`` bytes, is kept."""

    def remove(self, keys: Iterable[int]) -> None:
        """These samples are not kept any more."""

    def keys(self) -> NDArray[np.int64]:
        """All samples that are kept."""

    def __contains__(self, key: int) -> bool: ...


class Versions:
    """The latest versions of samples, at most two of each. The store decides what there is room
    for.

    >>> versions = Versions()
    >>> [versions.offer(version_key(5, version), 10) for version in (0, 1, 2, 0)]
    [True, True, True, False]
    >>> split_keys(versions.keys())[1].tolist()
    [2, 1]
    """

    closed = False

    def __init__(self) -> None:
        self._by_slot = array("q")

    def accepts(self, key: int) -> bool:
        """See ``KeptSet.accepts``. False for a version older than the one in its place."""
        slot = version_slot(key)
        return slot >= len(self._by_slot) or self._by_slot[slot] <= key // _INDICES

    def offer(self, key: int, cost: int) -> bool:
        """See ``KeptSet.offer``."""
        if not self.accepts(key):
            return False
        slot = version_slot(key)
        missing = slot + 1 - len(self._by_slot)
        if missing > 0:
            self._by_slot.extend([-1] * max(missing, len(self._by_slot) // 4))
        self._by_slot[slot] = key // _INDICES
        return True

    def remove(self, keys: Iterable[int]) -> None:
        """See ``KeptSet.remove``."""
        for key in keys:
            if key in self:
                self._by_slot[version_slot(key)] = -1

    def keys(self) -> NDArray[np.int64]:
        """See ``KeptSet.keys``."""
        versions = np.array(self._by_slot, np.int64)
        slots = np.flatnonzero(versions >= 0)
        return version_keys(slots // 2, versions[slots])

    def __contains__(self, key: int) -> bool:
        slot = version_slot(key)
        return slot < len(self._by_slot) and self._by_slot[slot] == key // _INDICES


class Admission:
    """MinIO's rule, applied to samples offered in the order of the first epoch.

    Samples are admitted while their running total fits. The first one that does not fit closes
    the admission for good, even for smaller ones after it: the admitted samples are then always
    the first ones of the first epoch, whatever their sizes.

    >>> admission = Admission(budget=10)
    >>> [admission.offer(key, cost) for key, cost in [(3, 6), (8, 4), (5, 1), (3, 6)]]
    [True, True, False, True]
    >>> admission.admitted, admission.used, admission.closed
    (2, 10, True)
    """

    __slots__ = ("_admitted", "_bits", "_budget", "_closed", "_used")

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise PipelineError(f"The budget of a cache is {budget} bytes; it cannot be negative.")
        self._budget = budget
        # A bit for each key: a set would take 60 bytes, and there may be millions.
        self._bits = bytearray()
        self._admitted = 0
        self._used = 0
        self._closed = False

    def offer(self, key: int, cost: int) -> bool:
        """Whether this sample is admitted. A sample that already is costs nothing more."""
        if cost < 0:
            raise PipelineError(f"The cost of sample {key} is {cost} bytes; it cannot be negative.")
        if key in self:
            return True
        if self._closed:
            return False
        if self._used + cost > self._budget:
            self._closed = True
            return False
        missing = key // 8 + 1 - len(self._bits)
        if missing > 0:
            self._bits.extend(bytes(max(missing, len(self._bits))))
        self._bits[key // 8] |= 1 << key % 8
        self._admitted += 1
        self._used += cost
        return True

    def offer_many(self, offers: Sequence[tuple[int, int]]) -> list[int]:
        """Offer samples in this order. Returns the keys of those that are refused.

        The thread of the training loop calls it for every batch until the cache is full.
        """
        costs = [cost for _, cost in offers]
        if self._closed or min(costs, default=0) < 0 or self._used + sum(costs) > self._budget:
            return [key for key, cost in offers if not self.offer(key, cost)]
        # All of them fit, so no order has to be kept.
        bits = self._bits
        missing = max([key for key, _ in offers], default=0) // 8 + 1 - len(bits)
        if missing > 0:
            bits.extend(bytes(max(missing, len(bits))))
        admitted = used = 0
        for key, cost in offers:
            place, bit = key >> 3, 1 << (key & 7)
            if not bits[place] & bit:
                bits[place] |= bit
                admitted += 1
                used += cost
        self._admitted += admitted
        self._used += used
        return []

    def accepts(self, key: int) -> bool:
        """Whether this sample may be admitted, if there is room."""
        return not self._closed or key in self

    def restore(self, keys: Iterable[int]) -> None:
        """These samples are in the store already, and their bytes are not part of the budget."""
        for key in keys:
            missing = key // 8 + 1 - len(self._bits)
            if missing > 0:
                self._bits.extend(bytes(max(missing, len(self._bits))))
            if key not in self:
                self._bits[key // 8] |= 1 << key % 8
                self._admitted += 1

    def remove(self, keys: Iterable[int]) -> None:
        """These samples were lost. Their bytes are not given back: nothing is admitted for them."""
        for key in keys:
            if key in self:
                self._bits[key // 8] &= ~(1 << key % 8)
                self._admitted -= 1

    def keys(self) -> NDArray[np.int64]:
        """All admitted samples."""
        bits = np.frombuffer(bytes(self._bits), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))

    def __contains__(self, key: int) -> bool:
        return key // 8 < len(self._bits) and bool(self._bits[key // 8] >> key % 8 & 1)

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def used(self) -> int:
        """Total cost of the admitted samples, in bytes."""
        return self._used

    @property
    def admitted(self) -> int:
        """Number of admitted samples."""
        return self._admitted

    @property
    def closed(self) -> bool:
        """Whether a sample has been refused: no further samples are admitted."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Admission {state}: {self.admitted} samples, {self._used} of {self._budget} bytes>"
