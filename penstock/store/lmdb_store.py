"""A sample store in LMDB, shared by several processes or kept for later runs."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from penstock.config import show_size
from penstock.errors import PipelineError, StoreError
from penstock.store import opening
from penstock.store.environment import Environment, EnvironmentClosed, SampleTable, registry
from penstock.store.file_watch import StoreLost
from penstock.store.index_check import IndexDamage
from penstock.store.value import (
    Lent,
    PutItem,
    PutResult,
    Value,
    cost,
    default_overshoot,
    put_all,
    unpack_key,
)

T = TypeVar("T")

_SEALED = b"sealed"
_PICKLES = b"pickles"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_ALMOST_FULL = 1 << 20
"""Free bytes below which a write that failed half-way has filled the disk."""


class LmdbStore:
    """A ``SampleStore`` shared by all threads and processes that open the same directory.

    Each process opens it on first use. It can be sent to another process by pickle or fork. A
    damaged value, a full disk or a damaged file means misses and one warning, never an exception.
    Only ``open`` raises StoreError, if the place is not one for a store of this user and content.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "store"
    >>> store = LmdbStore(place, budget=1_000_000)
    >>> store.put_many([(7, b"seven"), (8, [b"ei", b"ght"])])
    [True, True]
    >>> [value and bytes(value) for value in store.get_many([7, 8, 9])]
    [b'seven', b'eight', None]
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
        self.overshoot = default_overshoot(budget) if overshoot is None else overshoot
        self.corrupt = 0
        self.full = 0
        """Number of values this process could not store, for lack of room or after an error."""
        self._environment: Environment | None = None
        self._unavailable = False
        self._destroyed = False
        self._sealed = False
        self._pickles = False
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.place, self.budget, self.identity, self.persistent, self.overshoot)
        return _rebuild, arguments

    def __repr__(self) -> str:
        return f"LmdbStore({str(self.place)!r}, budget={self.budget})"

    @property
    def map_size(self) -> int:
        """Largest size of the file, in bytes.

        Values of differing sizes leave gaps: with a third of 1,000 values of 560 KB replaced 30
        times from two processes the file was 4 % larger than its content if all had one size, and
        9 % if sizes differed (log-normal, sigma 0.5), so a quarter is allowed. The rest is for
        pages that are freed but cannot be reused yet.
        """
        most = self.budget + self.overshoot
        return -(-(most + most // 4 + (64 << 20)) // (1 << 20)) << 20

    def open(self) -> None:
        """See ``SampleStore.open``."""
        try:
            self._attach()
        except (OSError, opening.load().Error, StoreLost, IndexDamage) as error:
            self._give_up(error)

    def get_many(self, keys: Sequence[int]) -> list[memoryview | None]:
        """See ``SampleStore.get_many``. Each value is checked against its checksum."""
        return self._get(keys, None)

    def get_tagged(self, keys: Sequence[int], tags: Sequence[int]) -> list[memoryview | None]:
        """See ``SampleStore.get_tagged``. Each value is checked against its checksum."""
        return self._get(keys, tags)

    def _get(self, keys: Sequence[int], tags: Sequence[int] | None) -> list[memoryview | None]:
        damaged: list[int] = []

        def look(environment: Environment, transaction: Any) -> list[memoryview | None]:
            table = environment.samples(transaction)
            values: list[memoryview | None] = []
            for i, key in enumerate(keys):
                value, intact = table.get(key, None if tags is None else tags[i])
                if not intact:
                    damaged.append(key)
                values.append(value)
            return values

        values = self._read(look, None)
        if damaged:
            self._drop_damaged(damaged)
        return [None] * len(keys) if values is None else values

    def put_many(self, items: Sequence[tuple[int, Value | Lent]]) -> list[bool]:
        """See ``SampleStore.put_many``. All items are stored in one transaction."""
        return self._put(len(items), lambda: [PutItem.of(key, value) for key, value in items])

    def put_tagged(self, items: Sequence[tuple[int, int, Value | Lent]]) -> list[bool]:
        """See ``SampleStore.put_tagged``. All items are stored in one transaction."""
        return self._put(len(items), lambda: [PutItem.of(key, v, tag) for key, tag, v in items])

    def _put(self, count: int, make: Callable[[], list[PutItem]]) -> list[bool]:
        environment = self._attached()
        if environment is None or not count:
            return [False] * count
        # Outside the transaction: no other process should wait while values are serialised and
        # their checksums computed.
        items = make()
        pickled = any(item.pickled for item in items)

        def put(transaction: Any) -> PutResult:
            room: int | None = self.budget + self.overshoot - environment.used(transaction)
            if self._is_sealed(environment, transaction):
                self._sealed = True
                room = None
            if pickled and environment.record(transaction, _PICKLES) is None:
                environment.set_record(transaction, _PICKLES, b"1")
            return put_all(environment.samples(transaction), items, room)

        try:
            held, refused = self._write(environment, put)
        except EnvironmentClosed:
            return [False] * count
        except (environment.lmdb.Error, StoreLost) as error:
            self._count_full(count)
            self._report(environment, error, "no more samples are kept")
            return [False] * count
        if refused and not self._sealed:
            self._count_full(refused)
            self._warn(
                "full",
                f"the store {self.place} has reached {show_size(self.budget + self.overshoot)}, "
                f"past its budget of {show_size(self.budget)}: samples that do not fit are "
                "prepared again each time they are needed. Give a larger budget.",
            )
        return held

    def delete_many(self, keys: Sequence[int]) -> int:
        """See ``SampleStore.delete_many``."""
        environment = self._attached()
        if environment is None or not keys:
            return 0

        def delete(transaction: Any) -> int:
            table = environment.samples(transaction)
            return sum(table.delete(key) for key in keys)

        return self._change(environment, delete, 0)

    def check(self, keys: Sequence[int]) -> None:
        """See ``SampleStore.check``. The whole index is read, 60 us a page."""
        environment = self._attached()
        if environment is None:
            return
        try:
            environment.check_now(keys)
        except EnvironmentClosed:
            pass
        except (environment.lmdb.Error, StoreLost) as error:
            self._report(environment, error, "the samples it holds are prepared again")

    def seal(self) -> None:
        """See ``SampleStore.seal``. A process with a larger budget still stores values."""
        environment = self._attached()
        if environment is not None:

            def seal(transaction: Any) -> None:
                if not self._is_sealed(environment, transaction):
                    environment.set_record(transaction, _SEALED, str(self.budget).encode())

            self._change(environment, seal, None)
        self._sealed = True

    @property
    def sealed(self) -> bool:
        if not self._sealed:
            self._sealed = self._read(self._is_sealed, False)
        return self._sealed

    def _is_sealed(self, environment: Environment, transaction: Any) -> bool:
        """Whether the store was sealed under this budget or a larger one."""
        found = environment.record(transaction, _SEALED)
        return found is not None and (not found.isdigit() or int(found) >= self.budget)

    @property
    def used(self) -> int:
        """Bytes of the pages that hold samples, with the tree and partly filled pages."""
        return self._read(lambda environment, transaction: environment.used(transaction), 0)

    def keys(self) -> list[int]:
        """See ``SampleStore.keys``."""

        def look(_: Environment, transaction: Any) -> list[int]:
            with transaction.cursor() as cursor:
                return [unpack_key(key) for key in cursor.iternext(keys=True, values=False)]

        return self._read(look, [])

    def __len__(self) -> int:
        return self._read(lambda environment, transaction: environment.count(transaction), 0)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """Release the store in this process; the next use opens it again.

        A store that is never closed is closed at exit. Closing a persistent store syncs it to
        disk.
        """
        with registry.lock:
            environment, self._environment = self._environment, None
            if _is_open(environment):
                registry.detach(environment)

    def destroy(self) -> None:
        """See ``SampleStore.destroy``. The files of the store are removed."""
        with registry.lock:
            self._destroyed = True
            environment, self._environment = self._environment, None
            if _is_open(environment):
                registry.destroy(environment)
            opening.remove(self.place)

    def _attached(self) -> Environment | None:
        """The environment of this process, opened if necessary; ``None`` if it is unavailable."""
        environment = self._environment
        if _is_open(environment):
            return environment
        try:
            return self._attach()
        except (OSError, opening.load().Error, StoreError, StoreLost, IndexDamage) as error:
            self._give_up(error)
        return None

    def _attach(self) -> Environment | None:
        with registry.lock:
            environment = self._environment
            if environment is not None and environment.pid == os.getpid():
                if not environment.closed:
                    return environment
                self._destroyed = self._destroyed or environment.destroyed
            if self._destroyed or self._unavailable or registry.ended:
                return None
            try:
                self._environment = registry.attach(
                    self.place, self.identity, self.map_size, persistent=self.persistent
                )
            except BaseException:
                self._unavailable = True
                raise
            return self._environment

    def _give_up(self, error: Exception) -> None:
        """The store cannot be opened: this object has only misses from now on."""
        failed, advice = (
            "opened",
            "Remove the store once no process uses it, or choose another place",
        )
        if _no_room(error):
            failed, advice = "created", "Free some space there"
        elif isinstance(error, StoreLost):
            advice = error.advice
        self._warn(
            "unavailable",
            f"the store {self.place} cannot be {failed} ({error}): no samples are kept, and every "
            f"sample is prepared again each time. {advice}.",
        )

    def _read(self, look: Callable[[Environment, Any], T], missing: T) -> T:
        environment = self._attached()
        if environment is None:
            return missing
        try:
            return environment.read(lambda transaction: look(environment, transaction))
        except EnvironmentClosed:
            return missing
        except (environment.lmdb.Error, StoreLost) as error:
            self._report(environment, error, "the samples it holds are prepared again")
            return missing

    def _write(self, environment: Environment, change: Callable[[Any], T]) -> T:
        try:
            return environment.write(change)
        except environment.lmdb.MapFullError:
            environment.reclaim()
        return environment.write(change)

    def _change(self, environment: Environment, change: Callable[[Any], T], missing: T) -> T:
        try:
            return self._write(environment, change)
        except EnvironmentClosed:
            return missing
        except (environment.lmdb.Error, StoreLost) as error:
            self._report(environment, error, "it cannot be changed")
            return missing

    def holds_pickles(self) -> bool:
        """See ``SampleStore.holds_pickles``."""
        if not self._pickles:
            self._pickles = self._read(
                lambda environment, transaction: (
                    environment.record(transaction, _PICKLES) is not None
                ),
                False,
            )
        return self._pickles

    def drop_unreadable(self, keys: Sequence[int]) -> None:
        """See ``SampleStore.drop_unreadable``."""
        self.delete_many(keys)
        self._count_corrupt(
            keys, "bytes that are not a sample", "another program has written to it"
        )

    def _drop_damaged(self, keys: Sequence[int]) -> None:
        def drop(table: SampleTable) -> None:
            for key in keys:
                # Another process may have stored an intact value in the meantime.
                if not table.get(key)[1]:
                    table.delete(key)

        environment = self._attached()
        if environment is not None:
            self._change(
                environment, lambda transaction: drop(environment.samples(transaction)), None
            )
        self._count_corrupt(keys, "damaged bytes", "the disk or the memory is failing")

    def _count_corrupt(self, keys: Sequence[int], found: str, cause: str) -> None:
        with registry.lock:
            self.corrupt += len(keys)
        self._warn(
            "corrupt",
            f"the store {self.place} returned {found} for sample {keys[0]}: the sample is prepared "
            f"again. If this happens repeatedly, {cause}; remove the store.",
        )

    def _count_full(self, values: int) -> None:
        with registry.lock:
            self.full += values

    def _report(self, environment: Environment, error: Exception, outcome: str) -> None:
        lmdb = environment.lmdb
        if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, StoreLost)):
            environment.lose()
            outcome += ", and the store is made anew when it is next opened"
        problem = str(error)
        full = _no_room(error) or isinstance(error, lmdb.MapFullError)
        if not full and os.strerror(errno.EIO) in problem and _is_full(self.place):
            # The disk took a part of what LMDB wrote; LMDB calls that an input/output error.
            full, problem = True, os.strerror(errno.ENOSPC)
        self._warn(
            "full" if full else "error", f"the store {self.place} failed ({problem}): {outcome}."
        )

    def _warn(self, kind: str, message: str) -> None:
        with registry.lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _is_open(environment: Environment | None) -> TypeGuard[Environment]:
    """Whether the environment is open in this process: a forked child has only a copy."""
    return environment is not None and environment.pid == os.getpid() and not environment.closed


def _no_room(error: Exception) -> bool:
    """Whether the file system is full. LMDB's errors name the error number only in their text."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return any(os.strerror(number) in str(error) for number in _NO_ROOM)


def _is_full(place: Path) -> bool:
    try:
        found = os.statvfs(place)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < _ALMOST_FULL


def _rebuild(
    place: Path, budget: int, identity: str, persistent: bool, overshoot: int
) -> LmdbStore:
    return LmdbStore(place, budget, identity, persistent=persistent, overshoot=overshoot)
