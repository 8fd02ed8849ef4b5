"""The one LMDB environment that a process may have open for each store."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.store.guard import Guard
from penstock.store.opening import PIECES, SAMPLES, check_identity, enter, load, open_lmdb
from penstock.store.samples import Samples

T = TypeVar("T")

# A reader is in the map for microseconds. A count that does not fall to zero was left by a thread
# that Ctrl-C caught between two lines, and must not keep the process from ending.
_PATIENCE = 10.0

_TURN = b"turn"


class Closed(Exception):
    """The environment was closed by another thread, or is kept busy by one."""


class Environment:
    """An open LMDB, shared by every Store object of this process that has the same place."""

    def __init__(
        self, place: Path, identity: str, guard: Guard, map_size: int, *, persistent: bool
    ) -> None:
        self.pid = os.getpid()
        self.identity = identity
        self.guard = guard
        self.persistent = persistent
        self.map_size = map_size
        self.users = 0
        self.closed = False
        self.destroyed = False
        self.lmdb = load()
        # Serialises the threads here; LMDB's own lock, which survives its holder's death,
        # serialises the processes.
        self._writer = threading.Lock()
        self._gate = threading.Condition()
        self._active = 0
        self._held = False
        self._env = open_lmdb(self.lmdb, place, map_size)
        try:
            self._samples = self._env.open_db(SAMPLES, integerkey=True, create=False)
            self._pieces = self._env.open_db(PIECES, create=False)
            self._main = self._env.open_db(None)
            self._env.reader_check()
        except BaseException:
            self._env.close()
            raise

    def read(self, look: Callable[[Any], T]) -> T:
        """What ``look`` finds in the samples as they are at one moment.

        Until it returns the map stays where it is, so views into it stay valid.
        """
        return self._following(lambda: self._run(look, write=False))

    def write(self, change: Callable[[Any], T]) -> T:
        """Change the samples: as a whole, or, where ``change`` raises, not at all."""
        with self._writer:
            return self._following(lambda: self._run(change, write=True))

    def _following(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except self.lmdb.MapResizedError:
            pass
        # Another process with a larger budget has grown the store past this process's map.
        with self._exclusive():
            self._env.set_mapsize(0)
        return run()

    def _run(self, work: Callable[[Any], T], *, write: bool) -> T:
        self._enter()
        transaction = None
        try:
            transaction = self._env.begin(db=self._samples, write=write, buffers=True)
            found = work(transaction)
            if write:
                transaction.commit()
            return found
        finally:
            if transaction is not None:
                transaction.abort()
            # It must be gone before another thread may close the environment.
            del transaction
            self._leave()

    def record(self, transaction: Any, name: bytes) -> bytes | None:
        """A record of the store's own, beside the samples."""
        found = transaction.get(name, db=self._main)
        return None if found is None else bytes(found)

    def set_record(self, transaction: Any, name: bytes, value: bytes) -> None:
        transaction.put(name, value, db=self._main)

    def samples(self, transaction: Any) -> Samples:
        return Samples(transaction, self._pieces)

    def used(self, transaction: Any) -> int:
        """Bytes in the pages that hold samples: LMDB counts them in every commit."""
        used = 0
        for database in (self._samples, self._pieces):
            stat = transaction.stat(database)
            pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            used += pages * stat["psize"]
        return used

    def count(self, transaction: Any) -> int:
        return int(transaction.stat(self._samples)["entries"])

    def grow(self, map_size: int) -> None:
        if map_size > self.map_size:
            with suppress(Closed), self._exclusive():
                self._env.set_mapsize(map_size)
                self.map_size = map_size

    def reclaim(self) -> None:
        """Free what can be freed once the map is full.

        Readers killed in the middle of a transaction still pin pages. And LMDB gives out what
        one transaction has freed only after another, which in a full map would never come.
        """
        self._env.reader_check()
        with suppress(self.lmdb.MapFullError):
            self.write(lambda transaction: self.set_record(transaction, _TURN, b""))

    def close(self) -> None:
        clean = False
        with suppress(Closed), self._exclusive():
            if self.closed:
                return
            self.closed = True
            if self.persistent and not self.destroyed:
                with suppress(self.lmdb.Error):
                    self._env.sync(True)
                    clean = True
            self._env.close()
        self.closed = True
        self.guard.leave(clean=clean)

    def _enter(self) -> None:
        with self._gate:
            while self._held:
                self._gate.wait()
            if self.closed:
                raise Closed
            self._active += 1

    def _leave(self) -> None:
        with self._gate:
            self._active -= 1
            if self._held:
                self._gate.notify_all()

    def hold(self) -> bool:
        """Keep every thread out of the map, until ``release``; false where one does not leave."""
        with self._gate:
            self._gate.wait_for(lambda: not self._held)
            self._held = True
            empty = False
            try:
                empty = self._gate.wait_for(lambda: not self._active, _PATIENCE)
            finally:
                if not empty:
                    self._held = False
                    self._gate.notify_all()
            return empty

    def release(self) -> None:
        with self._gate:
            self._held = False
            self._gate.notify_all()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self.hold():
            raise Closed
        try:
            yield
        finally:
            self.release()

    def discard(self) -> None:
        """Close the copy that a forked child has, while the parent holds every thread out.

        With no transaction under way LMDB's own closing touches nothing of the parent's; left
        open, the copy would keep the child from opening the store for itself.
        """
        self.closed = True
        self.guard.abandon()
        self._env.close()


class Registry:
    """The environments this process has open. LMDB breaks when one is opened twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._open: dict[str, Environment] = {}
        self._quiet: list[Environment] = []
        self._locked = False
        self.ended = False
        """The interpreter is shutting down: what is opened now would never be closed."""

    def attach(self, place: Path, identity: str, map_size: int, *, persistent: bool) -> Environment:
        """The environment of a place; the caller holds the lock."""
        name = os.path.realpath(place)
        found = self._open.get(name)
        if found is not None:
            check_identity(place, found.identity, identity)
            found.grow(map_size)
            found.persistent = found.persistent or persistent
        else:
            guard = enter(place, identity, map_size, persistent=persistent)
            try:
                found = Environment(place, identity, guard, map_size, persistent=persistent)
            except BaseException:
                guard.close()
                raise
            self._open[name] = found
        found.users += 1
        return found

    def detach(self, environment: Environment) -> None:
        """Give back what ``attach`` gave; the caller holds the lock."""
        environment.users -= 1
        if environment.users == 0:
            self._close(environment)

    def destroy(self, environment: Environment) -> None:
        """Close for every user in this process; the caller holds the lock."""
        environment.destroyed = True
        self._close(environment)

    def _close(self, environment: Environment) -> None:
        self._open = {name: env for name, env in self._open.items() if env is not environment}
        environment.close()

    def close_all(self) -> None:
        with self.lock:
            self.ended = True
            for environment in list(self._open.values()):
                self._close(environment)

    def before_fork(self) -> None:
        """Let no transaction be under way in any thread: a child cannot end one."""
        self._locked = self.lock.acquire(timeout=_PATIENCE)
        self._quiet = [environment for environment in self._open.values() if environment.hold()]

    def after_fork_in_parent(self) -> None:
        for environment in self._quiet:
            environment.release()
        self._quiet = []
        if self._locked:
            self.lock.release()

    def after_fork_in_child(self) -> None:
        self.lock = threading.Lock()
        for environment in self._quiet:
            environment.discard()
        self._quiet, self._open = [], {}


registry = Registry()
os.register_at_fork(
    before=registry.before_fork,
    after_in_parent=registry.after_fork_in_parent,
    after_in_child=registry.after_fork_in_child,
)
atexit.register(registry.close_all)
