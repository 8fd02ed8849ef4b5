"""Admission to a cache that never evicts: the first samples that fit its budget are kept."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PipelineError


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
