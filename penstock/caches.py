"""The caches of one loader: what goes into their stores is admitted in the order of batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from penstock.stats import CacheStats
from penstock.store import AnyStore
from penstock.store.admission import Admission
from penstock.store.shared import Commons

Offer = tuple[int, int, int]
"""What a worker put into a store: (which cache, sample, what it occupies)."""


class Caches:
    """Workers put what they miss into the stores at once; which of it stays is decided here, in
    the order in which batches are handed out, and so does not depend on who was faster.

    ``stores`` has the store of every cache, by its number; ``samples`` is how many there are to
    keep.
    """

    def __init__(
        self, stores: Mapping[int, AnyStore], samples: int, commons: Commons | None = None
    ) -> None:
        self._admissions: dict[int, Admission] = {}
        self._stores = stores
        self._samples = samples
        self._commons = commons
        # What is had in common is admitted to by several engines.
        self._admitting = nullcontext() if commons is None else commons.admitting
        self._found: dict[int, int] = {}
        self._open = False

    def open(self) -> None:
        """Make the stores ready before any worker asks for them."""
        for number, store in self._stores.items():
            store.open()
            self._admissions[number] = self._admission(number, store)
        self._open = True

    def _admission(self, number: int, store: AnyStore) -> Admission:
        # What an earlier run left in a store on disk counts against its budget.
        found = self._found[number] = store.used if store.persistent and len(store) else 0
        admission = Admission(0 if store.sealed else max(0, store.budget - found))
        if self._commons is None:
            return admission
        return self._commons.admission(store, admission)

    def admit(self, offers: list[Offer]) -> None:
        """Decide on what a batch put in, in its order."""
        refused: defaultdict[int, list[int]] = defaultdict(list)
        with self._admitting:
            for number, index, cost in offers:
                if not self._admissions[number].offer(index, cost):
                    refused[number].append(index)
        for number, indices in refused.items():
            store = self._stores[number]
            if not store.sealed:
                store.seal()
            store.delete_many(indices)

    def discard(self, offers: list[Offer]) -> None:
        """Take out what a batch put in that nobody will see, unless another put it in too."""
        dropped: defaultdict[int, list[int]] = defaultdict(list)
        for number, index, _ in offers:
            if index not in self._admissions[number]:
                dropped[number].append(index)
        for number, indices in dropped.items():
            self._stores[number].delete_many(indices)

    def settled(self) -> bool:
        """Nothing more will be admitted: each cache is full, or holds all there is."""
        return all(store.sealed or len(store) >= self._samples for store in self._stores.values())

    def stats(self, answered: Sequence[tuple[int, int]]) -> tuple[CacheStats, ...]:
        """What each cache answered, given hits and misses of all holds, and what it has."""
        found = []
        for number, store in self._stores.items():
            hits, misses = answered[number]
            if self._open:
                used = self._found[number] + self._admissions[number].used
                one = CacheStats(hits, misses, len(store), used, store.budget, store.sealed)
            else:
                one = CacheStats(hits, misses, 0, 0, store.budget, False)
            found.append(one)
        return tuple(found)

    def close(self) -> None:
        self._open = False
