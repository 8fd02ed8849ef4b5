"""Bytes by integer key, with a budget: what samples are kept in for several processes or runs."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import show_size
from penstock.errors import PipelineError, StoreError
from penstock.store import opening
from penstock.store.environment import Closed, Environment, registry
from penstock.store.putting import Item, Taken, put_all
from penstock.store.samples import Samples
from penstock.store.value import Value, cost, slack, unpack_key

T = TypeVar("T")

_SEALED = b"sealed"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Store:
    """Bytes by integer key, shared by all threads and processes that open the same place.

    It is opened on first use in each process, and travels to others by pickle or fork. What goes
    wrong with a single value, a full disk or a damaged file costs a miss and one warning, never
    an exception; StoreError is raised only on opening, where the place itself is wrong.

    ``budget`` is for the caller to keep, by adding up ``cost``; ``put_many`` refuses only what
    would pass ``budget + overshoot``.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "store"
    >>> store = Store(place, budget=1_000_000)
    >>> store.put_many([(7, b"seven"), (8, [b"ei", b"ght"])])
    [True, True]
    >>> store.get(7) == b"seven", store.get_many([8, 9])[1]
    (True, None)
    >>> store.destroy()
    """

    cost = staticmethod(cost)

    def __init__(
        self,
        place: Path,
        budget: int,
        identity: str = "",
        *,
        persistent: bool = False,
        overshoot: int | None = None,
    ) -> None:
        if budget < 0:
            raise PipelineError(f"the budget of a store is {budget}; it cannot be negative.")
        self.place = Path(place).absolute()
        self.budget = budget
        self.identity = identity
        self.persistent = persistent
        self.overshoot = slack(budget) if overshoot is None else overshoot
        self.corrupt = 0
        """Values this process has found damaged, and dropped."""
        self.full = 0
        """Values this process could not store for want of room, or because of an error."""
        self._environment: Environment | None = None
        self._unavailable = False
        self._destroyed = False
        self._sealed = False
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.place, self.budget, self.identity, self.persistent, self.overshoot)
        return _rebuild, arguments

    def __repr__(self) -> str:
        return f"Store({str(self.place)!r}, budget={self.budget})"

    @property
    def map_size(self) -> int:
        """The most the file can grow to.

        Values of differing sizes leave gaps: with a third of 1,000 values of 560 KB replaced 30
        times from two processes the file was 4 % larger than its content where all had one size,
        and 9 % where sizes differed (log-normal, sigma 0.5), so a quarter is allowed. The rest is
        for pages that are freed and not yet free to use.
        """
        most = self.budget + self.overshoot
        return -(-(most + most // 4 + (64 << 20)) // (1 << 20)) << 20

    def open(self) -> None:
        """Open it now, so that a wrong place is reported before training starts."""
        self._attached()

    def get(self, key: int) -> memoryview | None:
        """What was put under this key, verified."""
        return self.get_many((key,))[0]

    def get_many(self, keys: Sequence[int]) -> list[memoryview | None]:
        """What was put under these keys, as of one moment; ``None`` for what is not there.

        Each is a copy of the caller's own, and may be written to.
        """
        return self._get(keys, None)

    def get_tagged(self, keys: Sequence[int], tags: Sequence[int]) -> list[memoryview | None]:
        """The same, but only of values that were put with these tags; any other is not there.

        The tag is read before anything is copied, so a stale value costs next to nothing.
        """
        return self._get(keys, tags)

    def _get(self, keys: Sequence[int], tags: Sequence[int] | None) -> list[memoryview | None]:
        damaged: list[int] = []

        def look(here: Environment, transaction: Any) -> list[memoryview | None]:
            samples = here.samples(transaction)
            found: list[memoryview | None] = []
            for i, key in enumerate(keys):
                value, sound = samples.get(key, None if tags is None else tags[i])
                if not sound:
                    damaged.append(key)
                found.append(value)
            return found

        found = self._read(look, None)
        if damaged:
            self._drop_damaged(damaged)
        return [None] * len(keys) if found is None else found

    def put_many(self, items: Sequence[tuple[int, Value]]) -> list[bool]:
        """Store these, all in one transaction; says for each whether it is in the store now.

        A key that is there already keeps the value it has.
        """
        return self._put(len(items), lambda: [Item.of(key, value) for key, value in items])

    def put_tagged(self, items: Sequence[tuple[int, int, Value]]) -> list[bool]:
        """Store these (key, tag, value), all in one transaction; says which are in the store now.

        A value of another tag is replaced, but for one of the next tag (``tag + 1``): that is
        newer, and stays. One of the same tag stays too.
        """
        return self._put(len(items), lambda: [Item.of(key, v, tag) for key, tag, v in items])

    def _put(self, count: int, make: Callable[[], list[Item]]) -> list[bool]:
        here = self._attached()
        if here is None or not count:
            return [False] * count
        # Outside the transaction: no other process should wait while values are made and proved.
        items = make()

        def put(transaction: Any) -> Taken:
            room: int | None = self.budget + self.overshoot - here.used(transaction)
            if here.record(transaction, _SEALED) is not None:
                self._sealed = True
                room = None
            return put_all(here.samples(transaction), items, room)

        try:
            held, refused = self._write(here, put)
        except Closed:
            return [False] * count
        except here.lmdb.Error as error:
            self._count_full(count)
            self._report(here, error, "keeping no more samples")
            return [False] * count
        if refused and not self._sealed:
            self._count_full(refused)
            self._warn(
                "full",
                f"the store {self.place} has reached {show_size(self.budget + self.overshoot)}, "
                f"past its budget of {show_size(self.budget)}: samples that do not fit are "
                "prepared again each time. Give it a larger budget.",
            )
        return held

    def delete_many(self, keys: Sequence[int]) -> int:
        """Remove these; says how many were there."""
        here = self._attached()
        if here is None or not keys:
            return 0

        def delete(transaction: Any) -> int:
            samples = here.samples(transaction)
            return sum(samples.delete(key) for key in keys)

        return self._change(here, delete, 0)

    def seal(self) -> None:
        """Accept nothing more, from any process: what is here now is what it will hold."""
        here = self._attached()
        if here is not None:
            self._change(
                here, lambda transaction: here.set_record(transaction, _SEALED, b"1"), None
            )
        self._sealed = True

    @property
    def sealed(self) -> bool:
        if not self._sealed:
            self._sealed = self._read(
                lambda here, transaction: here.record(transaction, _SEALED) is not None, False
            )
        return self._sealed

    @property
    def used(self) -> int:
        """Bytes that the samples occupy, tree and page ends included."""
        return self._read(lambda here, transaction: here.used(transaction), 0)

    def keys(self) -> list[int]:
        """The keys of everything held."""

        def look(_: Environment, transaction: Any) -> list[int]:
            with transaction.cursor() as cursor:
                return [unpack_key(key) for key in cursor.iternext(keys=True, values=False)]

        return self._read(look, [])

    def __len__(self) -> int:
        return self._read(lambda here, transaction: here.count(transaction), 0)

    def __bool__(self) -> bool:
        return True  # an empty store is still a store

    def close(self) -> None:
        """Let go of it in this process; the next use opens it again.

        What is forgotten is closed at exit. Closing a persistent store puts it on disk for good.
        """
        with registry.lock:
            here, self._environment = self._environment, None
            if here is not None and here.pid == os.getpid() and not here.closed:
                registry.detach(here)

    def destroy(self) -> None:
        """Remove it and all it holds. From then on this object holds nothing and takes nothing."""
        with registry.lock:
            self._destroyed = True
            here, self._environment = self._environment, None
            if here is not None and here.pid == os.getpid() and not here.closed:
                registry.destroy(here)
            opening.remove(self.place)

    def _attached(self) -> Environment | None:
        """The environment in this process, opened if need be; ``None`` where there is none."""
        here = self._environment
        if here is not None and here.pid == os.getpid() and not here.closed:
            return here
        with registry.lock:
            here = self._environment
            if here is not None and here.pid == os.getpid():
                if not here.closed:
                    return here
                self._destroyed = self._destroyed or here.destroyed
            if self._destroyed or self._unavailable or registry.ended:
                return None
            try:
                self._environment = registry.attach(
                    self.place, self.identity, self.map_size, persistent=self.persistent
                )
            except (OSError, opening.load().Error) as error:
                if not _no_room(error):
                    raise StoreError(
                        f"the store {self.place} cannot be opened: {error}. A store needs a "
                        "local file system with locks; choose another place."
                    ) from error
                self._unavailable = True
                problem = error
            else:
                return self._environment
        self._warn(
            "unavailable",
            f"the store {self.place} cannot be created ({problem}): nothing is kept, and every "
            "sample is prepared again each time. Free some space there.",
        )
        return None

    def _read(self, look: Callable[[Environment, Any], T], missing: T) -> T:
        here = self._attached()
        if here is None:
            return missing
        try:
            return here.read(lambda transaction: look(here, transaction))
        except Closed:
            return missing
        except here.lmdb.Error as error:
            self._report(here, error, "samples it holds are prepared again")
            return missing

    def _write(self, here: Environment, change: Callable[[Any], T]) -> T:
        try:
            return here.write(change)
        except here.lmdb.MapFullError:
            here.reclaim()
        return here.write(change)

    def _change(self, here: Environment, change: Callable[[Any], T], missing: T) -> T:
        try:
            return self._write(here, change)
        except Closed:
            return missing
        except here.lmdb.Error as error:
            self._report(here, error, "it cannot be changed")
            return missing

    def _drop_damaged(self, keys: Sequence[int]) -> None:
        def drop(samples: Samples) -> None:
            for key in keys:
                # Another process may have put a sound value there in the meantime.
                if not samples.get(key)[1]:
                    samples.delete(key)

        here = self._attached()
        if here is not None:
            self._change(here, lambda transaction: drop(here.samples(transaction)), None)
        with registry.lock:
            self.corrupt += len(keys)
        self._warn(
            "corrupt",
            f"the store {self.place} returned damaged bytes for sample {keys[0]}: the sample is "
            "prepared again. If this goes on, the disk or the memory is failing; remove the store.",
        )

    def _count_full(self, values: int) -> None:
        with registry.lock:
            self.full += values

    def _report(self, here: Environment, error: Exception, outcome: str) -> None:
        if isinstance(error, (here.lmdb.CorruptedError, here.lmdb.PageNotFoundError)):
            here.guard.declare_damaged()
            outcome += ", and the store is started anew when it is next opened"
        kind = "full" if _no_room(error) or isinstance(error, here.lmdb.MapFullError) else "error"
        self._warn(kind, f"the store {self.place} failed ({error}): {outcome}.")

    def _warn(self, kind: str, message: str) -> None:
        with registry.lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _no_room(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return any(os.strerror(number) in str(error) for number in _NO_ROOM)


def _rebuild(place: Path, budget: int, identity: str, persistent: bool, overshoot: int) -> Store:
    return Store(place, budget, identity, persistent=persistent, overshoot=overshoot)
