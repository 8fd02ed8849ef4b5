"""Bytes by integer key in the memory of this process: a store for the threads of one loader."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from penstock.config import show_size
from penstock.store.putting import Item, put_all
from penstock.store.value import Buffer, Head, Lent, Value, copied, cost, laid_out, slack


class _Kept(NamedTuple):
    tag: int | None
    value: Buffer | Lent

    def taken(self) -> memoryview | Lent:
        """A copy that belongs to the caller, or what is lent."""
        return self.value if isinstance(self.value, Lent) else copied([memoryview(self.value)])


class Heap:
    """A ``Store`` that no other process sees: a value is copied once to put it, and once to get it.

    One that is ``Lent`` is not copied at all.

    Values cost what they cost in a ``Store``, so what a budget has room for does not depend on the
    kind of the workers. There is no proof to check: nothing but this object reaches what it holds.

    >>> store = Heap(budget=1_000_000)
    >>> store.put_tagged([(7, 0, b"seven"), (7, 1, b"again")])
    [True, True]
    >>> store.get_tagged([7, 7], [0, 1])[0] is None, bytes(store.get_tagged([7], [1])[0])
    (True, b'again')
    """

    cost = staticmethod(cost)
    persistent = False
    corrupt = 0

    def __init__(self, budget: int, *, overshoot: int | None = None) -> None:
        self.budget = budget
        self.overshoot = slack(budget) if overshoot is None else overshoot
        self.full = 0
        """Values that were not taken for want of room."""
        self.sealed = False
        self.used = 0
        """Bytes that the values are counted as."""
        self._kept: dict[int, _Kept] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Heap is this process's own; workers in other processes need a Store")

    def __repr__(self) -> str:
        return f"Heap(budget={self.budget})"

    def open(self) -> None:
        """It always is."""

    def get_many(self, keys: Sequence[int]) -> list[Any]:
        """See ``Store.get_many``. What was put as ``Lent`` comes back as that."""
        with self._lock:
            found = [self._kept.get(key) for key in keys]
        # Copied outside the lock: what is kept is replaced, never changed.
        return [None if one is None else one.taken() for one in found]

    def get_tagged(self, keys: Sequence[int], tags: Sequence[int]) -> list[Any]:
        """See ``Store.get_tagged``. What was put as ``Lent`` comes back as that."""
        with self._lock:
            found = [self._kept.get(key) for key in keys]
        return [
            None if one is None or one.tag != tag else one.taken()
            for one, tag in zip(found, tags, strict=True)
        ]

    def put_many(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """See ``Store.put_many``."""
        return self._put([_item(key, None, value) for key, value in items])

    def put_tagged(self, items: Sequence[tuple[int, int, Value | Lent]]) -> list[bool]:
        """See ``Store.put_tagged``."""
        return self._put([_item(*item) for item in items])

    def _put(self, items: Sequence[Item]) -> list[bool]:
        with self._lock:
            room = None if self.sealed else self.budget + self.overshoot - self.used
            held, refused = put_all(self, items, room)
            self.full += refused
            first = refused > 0 and self.full == refused and not self.sealed
        if first:
            warnings.warn(
                f"the samples kept in memory have reached {show_size(self.used)}, past their "
                f"budget of {show_size(self.budget)}: those that do not fit are prepared again "
                "each time. Give it a larger budget.",
                RuntimeWarning,
                stacklevel=4,
            )
        return held

    def head(self, key: int) -> Head | None:
        """What lies there; for ``put_all``."""
        found = self._kept.get(key)
        return None if found is None else Head(0, len(found.value), 0, found.tag)

    def put(self, key: int, framed: Any, tag: int | None) -> None:
        """Put it in place of any that is there; for ``put_all``."""
        self._drop(key)
        self._kept[key] = _Kept(tag, framed)
        self.used += cost(len(framed), tagged=tag is not None)

    def delete_many(self, keys: Sequence[int]) -> int:
        """Remove these; says how many were there."""
        with self._lock:
            return sum(self._drop(key) for key in keys)

    def _drop(self, key: int) -> bool:
        found = self._kept.pop(key, None)
        if found is not None:
            self.used -= cost(len(found.value), tagged=found.tag is not None)
        return found is not None

    def seal(self) -> None:
        """Accept nothing more."""
        self.sealed = True

    def keys(self) -> list[int]:
        """The keys of everything held."""
        with self._lock:
            return sorted(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        """Drop all it holds; from then on it takes nothing."""
        with self._lock:
            self.sealed = True
            self._kept.clear()
            self.used = 0


def _item(key: int, tag: int | None, value: Value | Lent) -> Item:
    made: Any = value if isinstance(value, Lent) else laid_out(value)
    return Item(key, made, tag, cost(len(made), tagged=tag is not None))
