"""The contract of a sample store: values by integer key, with tags, a byte budget and a seal."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.store.heap_store import HeapStore
from penstock.store.rundir import RunDir
from penstock.store.value import Lent, Value


class SampleStore(Protocol):
    """Values by integer key, for the threads and processes of one loader.

    ``HeapStore`` keeps them in the memory of this process, ``LmdbStore`` in a file that other
    processes and later runs can open.

    The caller keeps within ``budget`` by adding up ``cost``. The store itself refuses only values
    beyond ``budget + overshoot``. A full or damaged store means misses and one warning. It never
    raises an exception while samples are read or stored.
    """

    @property
    def budget(self) -> int:
        """Bytes that the values should occupy at most, measured by ``cost``."""

    @property
    def used(self) -> int:
        """Bytes that the stored values occupy."""

    @property
    def sealed(self) -> bool:
        """Whether the store accepts no new values any more."""

    @property
    def corrupt(self) -> int:
        """Number of damaged values that this process has found and dropped."""

    @property
    def place(self) -> Path | None:
        """Its directory; ``None`` if it is in the memory of this process."""

    @property
    def persistent(self) -> bool:
        """Whether the values stay on disk after ``close``, for later runs."""

    def cost(self, nbytes: int, *, tagged: bool = False) -> int:
        """Bytes that a value of ``nbytes`` occupies. It is the same in every store, so which
        samples fit into a budget does not depend on the kind of workers."""

    def open(self) -> None:
        """Open the store now, so that a wrong place is reported before training starts.

        Without this call the first use opens it.
        """

    def get_many(self, keys: Sequence[int]) -> list[Any]:
        """The values under these keys, all as of one moment; ``None`` for a missing value.

        Each value is a writable copy that belongs to the caller. Only a value that was stored as
        ``Lent`` is returned as the same ``Lent`` object.
        """

    def get_tagged(self, keys: Sequence[int], tags: Sequence[int]) -> list[Any]:
        """Like ``get_many``, but ``None`` also for a value whose tag is not the one given for it.

        Only the tag of such a value is read, so a stale value costs next to nothing.
        """

    def put_many(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """Store (key, value) pairs; return for each whether the store holds its key now.

        A key that has a value keeps it. ``Lent`` values are for a ``HeapStore`` only.
        """

    def put_tagged(self, items: Sequence[tuple[int, int, Value | Lent]]) -> list[bool]:
        """Store (key, tag, value) triples; return for each whether the store holds it now.

        A stored value is replaced, unless it has the same tag, or the next one (``tag + 1``): then
        it is newer than the given one.
        """

    def holds_pickles(self) -> bool:
        """Whether values may be pickles, which can run any code when they are read.

        A store says so itself, from the first pickle on that it has accepted.
        """

    def drop_unreadable(self, keys: Sequence[int]) -> None:
        """Remove values whose bytes are intact but are no samples; they count as damaged."""

    def check(self, keys: Sequence[int]) -> None:
        """Give the store up, in all processes, if reading these values could kill a process.

        For the values that a process may have been reading when it died.
        """

    def delete_many(self, keys: Sequence[int]) -> int:
        """Remove the values under these keys; return how many there were."""

    def keys(self) -> list[int]:
        """The keys of all values."""

    def seal(self) -> None:
        """Accept no new values any more, from any process with this budget or a smaller one.

        Values can still be deleted.
        """

    def close(self) -> None:
        """Release the store in this process.

        A ``HeapStore`` is emptied. An ``LmdbStore`` is opened again by the next use.
        """

    def destroy(self) -> None:
        """Remove the store and its values. Afterwards it returns no values and accepts none."""

    def __len__(self) -> int:
        """Number of values."""

    def __bool__(self) -> bool:
        """Always true: an empty store is not a missing store."""


def memory_store(budget: int, overshoot: int | None = None, *, shared: bool) -> SampleStore:
    """A new store in memory. ``shared``: other processes use it too."""
    if not shared:
        return HeapStore(budget, overshoot=overshoot)
    from penstock.store.lmdb_store import LmdbStore

    return LmdbStore(RunDir.current().path / uuid.uuid4().hex, budget, overshoot=overshoot)
