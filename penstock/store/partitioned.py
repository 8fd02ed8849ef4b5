"""A cache that several machines divide: the part of this machine, and samples of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol

from penstock.store.admission import Admission
from penstock.store.sample_store import SampleStore
from penstock.store.value import Lent, Value


class Division(Protocol):
    """How several machines divide one cache, as seen by one of them."""

    def host(self, dealt: bytes, ranks: Collection[int]) -> None:
        """This machine trains these ranks. ``dealt``: the rank of each sample in the first epoch.

        A machine keeps the samples that its ranks are dealt in the first epoch, so that no sample
        has to be sent to another machine then. ``dealt`` is packed, and the same on all machines.
        """

    def open(self, admission: Admission) -> None:
        """Begin to serve other machines. ``admission``: decides what this machine has room for."""

    def admit(self, offers: Sequence[tuple[int, int]]) -> list[int]:
        """Decide on samples that workers put into the store. ``offers``: (index, bytes).

        Returns the samples that this machine does not keep. Their values are read from the store
        before this returns, and sent to the machines that keep them later.
        """

    @property
    def full(self) -> bool:
        """Whether no machine has room for further samples."""

    def fetch(self, batch: Hashable, indices: Sequence[int], done: Callable[[], None]) -> bool:
        """Borrow the samples of a batch that other machines keep.

        Returns whether nothing has to be waited for. Otherwise ``done`` is called once, in another
        thread, within a limited time; samples that did not arrive by then are to be prepared here.
        """

    def release(self, batch: Hashable) -> None:
        """Give back what was borrowed for this batch: it is prepared, or not wanted any more."""

    def close(self) -> None:
        """Serve and fetch no more samples of this cache."""


class Divide(Protocol):
    """Divides the cache with this content over several machines."""

    def __call__(
        self, content: str, own: SampleStore, arrivals: SampleStore, *, lends: bool, samples: int
    ) -> Division:
        """``lends``: both stores hold samples themselves, not packed ones. ``samples``: of the
        source."""


class PartitionedStore:
    """A ``SampleStore`` of two: ``own`` has what this machine keeps, ``arrivals`` what it borrows.

    Samples of other machines arrive before the batches that need them are prepared, and leave with
    these batches. Budget, size and seal are those of ``own``.
    """

    def __init__(self, own: SampleStore, arrivals: SampleStore) -> None:
        self.own = own
        self.arrivals = arrivals

    @property
    def budget(self) -> int:
        return self.own.budget

    @property
    def used(self) -> int:
        return self.own.used

    @property
    def sealed(self) -> bool:
        return self.own.sealed

    @property
    def corrupt(self) -> int:
        return self.own.corrupt + self.arrivals.corrupt

    @property
    def persistent(self) -> bool:
        return self.own.persistent

    def cost(self, nbytes: int, *, tagged: bool = False) -> int:
        """See ``SampleStore.cost``."""
        return self.own.cost(nbytes, tagged=tagged)

    def open(self) -> None:
        """See ``SampleStore.open``."""
        self.own.open()
        self.arrivals.open()

    def get_many(self, keys: Sequence[int]) -> list[Any]:
        """See ``SampleStore.get_many``."""
        return self._with_arrivals(
            self.own.get_many(keys), lambda at: self.arrivals.get_many([keys[i] for i in at])
        )

    def get_tagged(self, keys: Sequence[int], tags: Sequence[int]) -> list[Any]:
        """See ``SampleStore.get_tagged``."""
        return self._with_arrivals(
            self.own.get_tagged(keys, tags),
            lambda at: self.arrivals.get_tagged([keys[i] for i in at], [tags[i] for i in at]),
        )

    def _with_arrivals(
        self, values: list[Any], borrowed: Callable[[list[int]], list[Any]]
    ) -> list[Any]:
        missing = [i for i, value in enumerate(values) if value is None]
        if missing and len(self.arrivals):
            for i, value in zip(missing, borrowed(missing), strict=True):
                values[i] = value
        return values

    def put_many(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """See ``SampleStore.put_many``."""
        return self.own.put_many(items)

    def put_tagged(self, items: Sequence[tuple[int, int, Value | Lent]]) -> list[bool]:
        """See ``SampleStore.put_tagged``."""
        return self.own.put_tagged(items)

    def holds_pickles(self) -> bool:
        """See ``SampleStore.holds_pickles``. No machine sends pickles to another."""
        return self.own.holds_pickles()

    def drop_unreadable(self, keys: Sequence[int]) -> None:
        """See ``SampleStore.drop_unreadable``."""
        self.own.drop_unreadable(keys)
        self.arrivals.delete_many(keys)

    def check(self, keys: Sequence[int]) -> None:
        """See ``SampleStore.check``."""
        self.own.check(keys)
        self.arrivals.check(keys)

    def delete_many(self, keys: Sequence[int]) -> int:
        """See ``SampleStore.delete_many``."""
        return self.own.delete_many(keys)

    def keys(self) -> list[int]:
        """See ``SampleStore.keys``."""
        return self.own.keys()

    def seal(self) -> None:
        """See ``SampleStore.seal``."""
        self.own.seal()

    def close(self) -> None:
        """See ``SampleStore.close``."""
        self.own.close()
        self.arrivals.close()

    def destroy(self) -> None:
        """See ``SampleStore.destroy``."""
        self.own.destroy()
        self.arrivals.destroy()

    def __len__(self) -> int:
        return len(self.own)

    def __bool__(self) -> bool:
        return True
