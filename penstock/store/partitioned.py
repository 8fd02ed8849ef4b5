"""What several machines divide: the part that this machine keeps, and samples of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.order import Generations
from penstock.serialize import split_frame
from penstock.store.admission import KeptSet, split_keys, version_slot
from penstock.store.plain import is_plain, pack_sample, unpack_sample
from penstock.store.sample_store import SampleStore
from penstock.store.value import Lent, Value

RanksIn = Callable[[int], NDArray[np.int32]]
"""Returns the rank that is dealt each sample in an epoch; -1 for samples that no rank is dealt."""


def to_send(value: Any) -> Any | None:
    """A value of a store as other machines can read it; ``None`` if it needs a pickle."""
    if isinstance(value, Lent):
        packed = pack_sample(value.sample)
        return None if packed.pickled else memoryview(packed.tobytes())
    return value if is_plain(value) else None


def to_store(value: memoryview, *, lends: bool) -> Any | None:
    """A value of another machine in the form of a store; ``None`` if it is damaged or a pickle.

    ``lends``: the store holds samples themselves. They are views of ``value``.
    """
    try:
        if not is_plain(value):
            return None
        if not lends:
            split_frame(value)
            return value
        return Lent(unpack_sample(value, lambda: False), len(value))
    except ValueError:
        return None


class Division(Protocol):
    """How several machines divide what one stop keeps, as seen by one of them.

    Samples are known by ``version_key``: for a cache, their index.
    """

    @property
    def content(self) -> str:
        """Identity of what is kept, equal on all machines."""

    def host(self, dealt: bytes, ranks: Collection[int], ranks_in: RanksIn | None = None) -> None:
        """This machine trains these ranks. ``dealt``: the rank of each sample in the first epoch.

        A machine keeps the samples that its ranks are dealt in the first epoch, so that no sample
        has to be sent to another machine then. ``dealt`` is packed, and the same on all machines.
        ``ranks_in``: the same of any epoch. A machine keeps the versions that it prepares; without
        this, those of the samples that its ranks are dealt in the first epoch.
        """

    def open(self, kept: KeptSet) -> None:
        """Begin to serve other machines. ``kept``: decides what this machine has room for."""

    def admit(self, offers: Sequence[tuple[int, int]]) -> list[int]:
        """Decide on samples that workers put into the store. ``offers``: (key, bytes).

        Returns the samples that this machine does not keep. Their values are read from the store
        before this returns, and sent to the machines that keep them later.
        """

    @property
    def full(self) -> bool:
        """Whether no machine has room for further samples."""

    @property
    def alone(self) -> bool:
        """Whether this machine trains all ranks."""

    def fetch(self, batch: Hashable, keys: Sequence[int], done: Callable[[], None]) -> bool:
        """Borrow the samples of a batch that other machines keep.

        Returns whether nothing has to be waited for. Otherwise ``done`` is called once, in another
        thread, within a limited time; samples that did not arrive by then are to be prepared here.
        """

    def to_prepare(self, batch: Hashable) -> list[int]:
        """The samples of a fetched batch that neither this machine has nor another sends."""

    def release(self, batch: Hashable) -> None:
        """Give back what was borrowed for this batch: it is prepared, or not wanted any more."""

    def holds(self, keys: Sequence[int]) -> list[bool]:
        """Whether each of these samples of an open batch is on this machine."""

    def keep_read(self, key: int, value: memoryview) -> int:
        """A worker of another machine has read a sample that this machine was to read.

        Puts it into the store, as a worker here does; it is not admitted by that. Returns its
        bytes there; 0 if the store has not taken it.
        """

    @property
    def needs_pickle(self) -> bool:
        """Whether samples are known that need a pickle, so that no other machine can read them."""

    def some_here(self, count: int) -> list[int]:
        """At most ``count`` of the samples that are on this machine."""

    def known(self) -> list[int]:
        """The samples that are here, and those of this machine that are on others."""

    def forget(self, keys: Sequence[int]) -> None:
        """Remove samples that no machine needs any more."""

    def measured(self, seconds: float) -> None:
        """To read a sample, and to prepare what is kept of it, takes this long."""

    def close(self) -> None:
        """Serve and fetch no more samples of this cache."""


class Divide(Protocol):
    """Divides what a stop with this content keeps over several machines."""

    def __call__(
        self,
        content: str,
        own: SampleStore,
        arrivals: SampleStore,
        *,
        lends: bool,
        samples: int,
        generations: Generations | None = None,
    ) -> Division:
        """``lends``: both stores hold samples themselves, not packed ones. ``samples``: of the
        source. ``generations``: samples have versions, and these say which are used when."""


class Shelf:
    """The values of a store by ``version_key``: samples without versions."""

    def __init__(self, store: SampleStore) -> None:
        self.store = store

    def get(self, keys: Sequence[int]) -> list[Any]:
        """The values of these samples; ``None`` for those that the store does not have."""
        return self.store.get_many(keys)

    def put(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """Store (key, value) pairs; return for each whether the store holds it now."""
        return self.store.put_many(items)

    def delete(self, keys: Sequence[int]) -> None:
        """Remove these samples."""
        self.store.delete_many(keys)

    def cost(self, nbytes: int) -> int:
        """Bytes that a value of ``nbytes`` occupies."""
        return self.store.cost(nbytes)

    def slot(self, key: int) -> int:
        """A small number for this sample, which no other has at the same time."""
        return key


class VersionShelf(Shelf):
    """The same for samples with versions: the place of a value has its version as a tag."""

    def get(self, keys: Sequence[int]) -> list[Any]:
        """See ``Shelf.get``."""
        return self.store.get_tagged([version_slot(key) for key in keys], _versions(keys))

    def put(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """See ``Shelf.put``."""
        versions = _versions([key for key, _ in items])
        return self.store.put_tagged(
            [
                (version_slot(key), version, value)
                for (key, value), version in zip(items, versions, strict=True)
            ]
        )

    def delete(self, keys: Sequence[int]) -> None:
        """See ``Shelf.delete``. A newer version in the place of one of these goes with it."""
        self.store.delete_many([version_slot(key) for key in keys])

    def cost(self, nbytes: int) -> int:
        """See ``Shelf.cost``."""
        return self.store.cost(nbytes, tagged=True)

    def slot(self, key: int) -> int:
        """See ``Shelf.slot``."""
        return version_slot(key)


def _versions(keys: Sequence[int]) -> list[int]:
    versions: list[int] = split_keys(np.array(keys, np.int64))[1].tolist()
    return versions


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
    def place(self) -> Path | None:
        return self.own.place

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
        self.arrivals.destroy()

    def destroy(self) -> None:
        """See ``SampleStore.destroy``."""
        self.own.destroy()
        self.arrivals.destroy()

    def __len__(self) -> int:
        return len(self.own)

    def __bool__(self) -> bool:
        return True
