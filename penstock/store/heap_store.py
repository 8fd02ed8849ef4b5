"""A sample store in the memory of this process, for the threads of one loader."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NoReturn

from penstock.config import show_size
from penstock.store.value import (
    Buffer,
    Lent,
    PutItem,
    Value,
    ValueHeader,
    copy_pieces,
    cost,
    default_overshoot,
    put_all,
    to_buffer,
)

_Entry = tuple[int | None, Buffer | Lent, int]
"""(tag, value, cost). Plain tuples: making a batch of named ones takes several times as long."""


class HeapStore:
    """A ``SampleStore`` that only this process can use.

    A value is copied once when it is stored and once when it is read. A ``Lent`` value is never
    copied. Values have no checksum: no other process can reach this memory.

    >>> store = HeapStore(budget=1_000_000)
    >>> store.put_tagged([(7, 0, b"seven"), (7, 1, b"again")])
    [True, True]
    >>> store.get_tagged([7, 7], [0, 1])[0] is None, bytes(store.get_tagged([7], [1])[0])
    (True, b'again')
    """

    cost = staticmethod(cost)
    persistent = False
    place = None

    def __init__(self, budget: int, *, overshoot: int | None = None) -> None:
        self.budget = budget
        self.overshoot = default_overshoot(budget) if overshoot is None else overshoot
        self.corrupt = 0
        self.full = 0
        """Number of values that were refused because there was no room."""
        self.sealed = False
        self.used = 0
        self._values: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._removed: deque[list[_Entry]] = deque()
        """Values to free. The training loop removes values, and freeing large ones takes long, so
        the next worker that uses the store does it."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a HeapStore cannot be sent to another process; worker processes need an LmdbStore"
        )

    def __repr__(self) -> str:
        return f"HeapStore(budget={self.budget})"

    def open(self) -> None:
        """Do nothing: a store in the heap is always open."""

    def get_many(self, keys: Sequence[int]) -> list[Any]:
        """See ``SampleStore.get_many``."""
        self._removed.clear()
        with self._lock:
            entries = list(map(self._values.get, keys))
        return [None if entry is None else _handed_out(entry[1]) for entry in entries]

    def get_tagged(self, keys: Sequence[int], tags: Sequence[int]) -> list[Any]:
        """See ``SampleStore.get_tagged``."""
        self._removed.clear()
        with self._lock:
            entries = list(map(self._values.get, keys))
        # Copied outside the lock: stored values are replaced, never changed.
        return [
            None
            if entry is None or entry[0] != tag
            else entry[1]
            if type(entry[1]) is Lent
            else _handed_out(entry[1])
            for entry, tag in zip(entries, tags, strict=True)
        ]

    def put_many(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """See ``SampleStore.put_many``."""
        self._removed.clear()
        return self._put([_item(key, None, value) for key, value in items])

    def put_tagged(self, items: Sequence[tuple[int, int, Value | Lent]]) -> list[bool]:
        """See ``SampleStore.put_tagged``."""
        self._removed.clear()
        if self._put_new(items):
            return [True] * len(items)
        return self._put([_item(*item) for item in items])

    def _put_new(self, items: Sequence[tuple[int, int, Value | Lent]]) -> bool:
        """Store ``Lent`` values all at once, in a fifth of the time that one after the other takes.

        Returns false if they must be looked at one by one: some are not ``Lent``, replace others,
        or do not fit.
        """
        new: dict[int, _Entry] = {
            key: (tag, value, cost(value.nbytes, tagged=True))
            for key, tag, value in items
            if type(value) is Lent
        }
        needed = sum([entry[2] for entry in new.values()])
        with self._lock:
            room = 0 if self.sealed else self.budget + self.overshoot - self.used
            whole = len(new) == len(items) and needed <= room
            if not whole or not self._values.keys().isdisjoint(new):
                return False
            self._values.update(new)
            self.used += needed
        return True

    def _put(self, items: Sequence[PutItem]) -> list[bool]:
        with self._lock:
            room = None if self.sealed else self.budget + self.overshoot - self.used
            held, refused = put_all(self, items, room)
            self.full += refused
            first = refused > 0 and self.full == refused and not self.sealed
        if first:
            warnings.warn(
                f"the samples kept in memory have reached {show_size(self.used)}, past their "
                f"budget of {show_size(self.budget)}: samples that do not fit are prepared again "
                "each time they are needed. Give a larger budget.",
                RuntimeWarning,
                stacklevel=4,
            )
        return held

    def header(self, key: int) -> ValueHeader | None:
        """See ``PutTarget.header``; only for ``put_all``, under the lock."""
        entry = self._values.get(key)
        return None if entry is None else ValueHeader(0, len(entry[1]), 0, entry[0])

    def put(self, key: int, framed: Any, tag: int | None) -> None:
        """See ``PutTarget.put``; only for ``put_all``, under the lock."""
        old, needed = self._values.get(key), cost(len(framed), tagged=tag is not None)
        self._values[key] = (tag, framed, needed)
        self.used += needed - (0 if old is None else old[2])

    def holds_pickles(self) -> bool:
        """True: only this process has put values in, so reading them runs no foreign code."""
        return True

    def check(self, keys: Sequence[int]) -> None:
        """See ``SampleStore.check``. Does nothing: its values are in the memory of this process."""

    def drop_unreadable(self, keys: Sequence[int]) -> None:
        """See ``SampleStore.drop_unreadable``."""
        self.delete_many(keys)
        with self._lock:
            self.corrupt += len(keys)

    def delete_many(self, keys: Sequence[int]) -> int:
        """See ``SampleStore.delete_many``."""
        with self._lock:
            found = map(self._values.pop, keys, repeat(None))
            dropped = [entry for entry in found if entry is not None]
            self.used -= sum([entry[2] for entry in dropped])
        if dropped:
            self._removed.append(dropped)
        return len(dropped)

    def seal(self) -> None:
        """See ``SampleStore.seal``."""
        self.sealed = True

    def keys(self) -> list[int]:
        """The keys of all values, in ascending order."""
        with self._lock:
            return sorted(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """Drop all values. The store accepts none afterwards."""
        self.destroy()

    def destroy(self) -> None:
        """Drop all values. The store accepts none afterwards."""
        with self._lock:
            self.sealed = True
            self._values.clear()
            self.used = 0
        self._removed.clear()


def _handed_out(value: Buffer | Lent) -> memoryview | Lent:
    """A copy for the caller; a ``Lent`` value itself."""
    return value if isinstance(value, Lent) else copy_pieces([memoryview(value)])


def _item(key: int, tag: int | None, value: Value | Lent) -> PutItem:
    stored: Any = value if isinstance(value, Lent) else to_buffer(value)
    return PutItem(key, stored, tag, cost(len(stored), tagged=tag is not None))
