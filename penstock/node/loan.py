"""The cache stop on a machine that prepares samples for another one, whose cache it is.

The other machine lends the samples that it has. What is read here goes back to it with the rows, as
if its own worker had read it. Nothing stays here after a tiny-batch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.stats import Held
from penstock.stops.cache import Cache
from penstock.stops.hold import Keeper, Opening
from penstock.store import SampleStore, memory_store
from penstock.store.partitioned import to_send, to_store


class Loan:
    """The samples of one cache that are here for the tiny-batches of other machines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: SampleStore | None = None
        self._lends = False
        self._users: Counter[int] = Counter()
        """By sample: the tiny-batches that need it."""

    def opened(self, store: SampleStore, *, lends: bool) -> None:
        """``store``: where workers find the samples. ``lends``: it holds samples themselves."""
        self._store, self._lends = store, lends

    def begin(self, indices: Collection[int], lent: Mapping[int, memoryview]) -> bool:
        """A tiny-batch of these samples begins. ``lent``: those that another machine has.

        Returns whether there is room for them. Call ``end`` in any case.
        """
        values = [(index, to_store(value, lends=self._lends)) for index, value in lent.items()]
        with self._lock:
            self._users.update(indices)
            if self._store is None or any(value is None for _, value in values):
                return False
            return all(self._store.put_many([(i, v) for i, v in values if v is not None]))

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The values of samples that were read here, to be sent; ``None`` for those not found.

        Raises ValueError for a value that needs a pickle.
        """
        if self._store is None:
            return [None] * len(indices)
        found = []
        for value in self._store.get_many(indices):
            packed = None if value is None else to_send(value)
            if value is not None and packed is None:
                raise ValueError("what the cache keeps needs a pickle, which is not sent")
            found.append(packed)
        return found

    def end(self, indices: Collection[int]) -> None:
        """The tiny-batch has ended: remove what no other one needs."""
        with self._lock:
            self._users.subtract(indices)
            unused = [index for index in indices if self._users[index] <= 0]
            for index in unused:
                del self._users[index]
            if self._store is not None:
                self._store.delete_many(unused)

    def drop_unneeded(self, indices: Collection[int]) -> None:
        """Workers have put these samples into the store, perhaps after their tiny-batch ended."""
        with self._lock:
            if self._store is not None:
                self._store.delete_many([index for index in indices if not self._users[index]])


@dataclass(frozen=True)
class LentCache(Cache):
    """A cache whose samples are in ``loan`` while they are needed. ``budget``: room for them."""

    loan: Loan | None = None

    def make_keeper(self, opening: Opening) -> LoanKeeper:
        store = memory_store(self.budget, self.budget, shared=opening.shared)
        # The loan stays in this process.
        stop = replace(
            self, number=opening.number, lends=opening.lends, store=store, where="memory", loan=None
        )
        return LoanKeeper(stop, store, self.loan or Loan())


class LoanKeeper(Keeper):
    """Keeps nothing: samples are removed with the tiny-batches that need them."""

    def __init__(self, stop: LentCache, store: SampleStore, loan: Loan) -> None:
        super().__init__(stop, store)
        self._loan = loan
        loan.opened(store, lends=stop.lends)

    def admit(self, offers: Sequence[tuple[int, int]], epoch: int) -> None:
        self._loan.drop_unneeded([index for index, _ in offers])

    def lacks(self, indices: list[int], epoch: int) -> list[int]:
        # Not as of the start of the epoch: samples are lent for each tiny-batch.
        here = set(self.store.keys())
        return [index for index in indices if index not in here]

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        return held
