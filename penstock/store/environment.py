"""LMDB environments: one per process and store, and the samples in it.

An untagged value is one LMDB entry. A tagged value, which will be replaced, is stored in pieces of
equal size. A large value needs consecutive pages, and the gap it leaves when it is replaced fits
only a smaller one: with a third of 500 decoded photographs replaced 30 times the file grew to 1.48
times its content, and went on growing. With pieces of equal size it is 1.09 times, and stays there.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.store.file_watch import StoreLost
from penstock.store.guard import Guard
from penstock.store.opening import (
    PIECES,
    SAMPLES,
    check_identity,
    load,
    open_guard,
    open_lmdb,
    watch_files,
)
from penstock.store.value import (
    PIECE,
    Buffer,
    ValueHeader,
    own_pages,
    pack_key,
    payload,
    read_header,
)

T = TypeVar("T")

# Seconds to wait until no thread uses the map. A thread uses it for microseconds. A count that
# does not fall to zero was left behind by a thread that Ctrl-C interrupted between two lines; it
# must not keep the process from exiting.
_PATIENCE = 10.0

_TURN = b"turn"

# Big-endian, so that the pieces of a value are adjacent and in order.
_PIECE_NUMBER = struct.Struct(">I")

# The header of a page that a large value begins with: page number, padding, flags, pages.
_PAGE_HEAD = struct.Struct("<QHHI")
_OVERFLOW = 4


class EnvironmentClosed(Exception):
    """Another thread has closed the environment, or does not let go of it."""


class SampleTable:
    """The samples as one transaction sees them.

    ``pieces`` is the LMDB database of all pieces except the first one of each value.
    """

    __slots__ = ("_page", "_pieces", "_transaction", "_written")

    def __init__(self, transaction: Any, pieces: Any) -> None:
        self._transaction = transaction
        self._pieces = pieces
        self._page: int = 0
        self._written: set[int] = set()

    def header(self, key: int) -> ValueHeader | None:
        """The header of a value; ``None`` if there is no value, or its header is damaged."""
        first = self._transaction.get(pack_key(key))
        return None if first is None else read_header(first)

    def get(self, key: int, tag: int | None = None) -> tuple[memoryview | None, bool]:
        """A copy of the value and whether it is intact; ``(None, True)`` if there is none.

        With ``tag``, a value with another tag counts as missing. The tag is compared before the
        value is read.
        """
        packed = pack_key(key)
        first = self._transaction.get(packed)
        if first is None:
            return None, True
        if tag is not None:
            header = read_header(first)
            if header is not None and header.tag != tag:
                return None, True
        value = payload(key, first, lambda: self._pieces_after_first(packed))
        return value, value is not None

    def check_readable(self, key: int) -> None:
        """Raise StoreLost if a page of this value cannot be read, as on a failing disk.

        The kernel kills a process that touches such a page; a system call only gets an error.
        """
        packed = pack_key(key)
        first = self._transaction.get(packed)
        if first is not None and not all(map(readable, (first, *self._pieces_after_first(packed)))):
            raise StoreLost("a page of a value cannot be read")

    def put(self, key: int, framed: Buffer, tag: int | None) -> None:
        """Store a value, replacing any value under the key."""
        packed, view = pack_key(key), memoryview(framed)
        if key in self._written:
            # LMDB would leave a value of this transaction in its pages, however many they are.
            self.delete(key)
        self._written.add(key)
        self._check_pages(self._transaction.get(packed))
        end = len(view) if tag is None else PIECE
        self._transaction.put(packed, view[:end])
        number = 0
        for number, start in enumerate(range(end, len(view), PIECE), start=1):
            piece = packed + _PIECE_NUMBER.pack(number)
            self._transaction.put(piece, view[start : start + PIECE], db=self._pieces)
        self._delete_pieces(packed, number + 1)

    def delete(self, key: int) -> bool:
        """Remove a value; return whether there was one."""
        packed = pack_key(key)
        self._delete_pieces(packed, 1)
        first = self._transaction.get(packed)
        self._check_pages(first)
        return first is not None and bool(self._transaction.delete(packed))

    def _pieces_after_first(self, packed: bytes) -> list[memoryview]:
        pieces = []
        with self._transaction.cursor(db=self._pieces) as cursor:
            more = cursor.set_key(packed + _PIECE_NUMBER.pack(1))
            while more and cursor.key()[: len(packed)] == packed:
                pieces.append(cursor.value())
                more = cursor.next()
        return pieces

    def _delete_pieces(self, packed: bytes, first: int) -> None:
        """Remove the pieces of a value from number ``first`` on."""
        with self._transaction.cursor(db=self._pieces) as cursor:
            more = cursor.set_range(packed + _PIECE_NUMBER.pack(first))
            while more and cursor.key()[: len(packed)] == packed:
                self._check_pages(cursor.value(), len(packed) + _PIECE_NUMBER.size)
                more = cursor.delete()

    def _check_pages(self, value: memoryview | None, key: int = 8) -> None:
        """Raise StoreLost if LMDB would free other pages than those of this value.

        LMDB frees as many pages as the header of the first one says. Reading a value does not
        need that header, and the check of the index does not read it.
        """
        self._page = self._page or self._transaction.stat(self._pieces)["psize"]
        if value is None or not (expected := own_pages(len(value), self._page, key)):
            return
        # The header is in the map, directly before the value.
        address = np.frombuffer(value, np.uint8).ctypes.data - _PAGE_HEAD.size
        _, _, flags, pages = _PAGE_HEAD.unpack(ctypes.string_at(address, _PAGE_HEAD.size))
        if flags & _OVERFLOW == 0 or pages != expected:
            raise StoreLost("the first page of a value is damaged")


def readable(view: memoryview) -> bool:
    """Whether all bytes of a view of mapped memory can be read."""
    fd = os.memfd_create("penstock-check")
    try:
        at = 0
        while at < len(view):
            at += os.pwrite(fd, view[at : at + PIECE], 0)
    except OSError as error:
        return error.errno != errno.EFAULT
    finally:
        os.close(fd)
    return True


class Environment:
    """An open LMDB environment, shared by all ``LmdbStore`` objects of this process and place."""

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
        self.lost = False
        self.lmdb = load()
        # Serialises the threads of this process. LMDB's own lock serialises the processes; it is
        # released when its holder dies.
        self._writer = threading.Lock()
        self._gate = threading.Condition()
        self._active = 0
        self._held = False
        self._watch = watch_files(place, guard)
        try:
            self._watch.check_shared()
            self._env = open_lmdb(self.lmdb, place, map_size)
        except BaseException:
            self._watch.close()
            raise
        try:
            self._watch.start()
            self._watch.check()
            self._samples = self._env.open_db(SAMPLES, integerkey=True, create=False)
            self._pieces = self._env.open_db(PIECES, create=False)
            self._main = self._env.open_db(None)
            self._env.reader_check()
        except BaseException:
            self._close_files()
            raise

    def _close_files(self) -> None:
        self._watch.mend_sizes()
        self._env.close()
        self._watch.close()

    def read(self, look: Callable[[Any], T]) -> T:
        """The result of ``look``, called with a read transaction.

        The map is not moved until it returns, so views into it stay valid.
        """
        return self._remapped(lambda: self._run(look))

    def write(self, change: Callable[[Any], T]) -> T:
        """The result of ``change``, called with a write transaction.

        If it raises an exception, nothing is changed.
        """
        with self._writer:
            return self._remapped(lambda: self._run_write(change))

    def _remapped(self, run: Callable[[], T]) -> T:
        """The result of ``run``, after mapping the file again if another process has grown it."""
        try:
            return run()
        except self.lmdb.MapResizedError:
            pass
        # Another process with a larger budget has grown the store beyond this process's map.
        with self._exclusive():
            self._env.set_mapsize(0)
        return run()

    def _run(self, look: Callable[[Any], T]) -> T:
        self._enter()
        transaction = None
        try:
            self._watch.check()
            transaction = self._env.begin(db=self._samples, buffers=True)
            return look(transaction)
        finally:
            if transaction is not None:
                transaction.abort()
            # It must be freed before another thread may close the environment.
            del transaction
            self._leave()

    def _run_write(self, change: Callable[[Any], T]) -> T:
        self._enter()
        transaction = None
        try:
            with self._watch.writing():
                try:
                    transaction = self._env.begin(db=self._samples, write=True, buffers=True)
                    number = transaction.id()
                    result = change(transaction)
                    transaction.commit()
                    self._watch.wrote(number)
                    return result
                finally:
                    if transaction is not None:
                        transaction.abort()
        finally:
            del transaction
            self._leave()

    def check_now(self, keys: Sequence[int]) -> None:
        """Raise StoreLost if the index is damaged, or a value under these keys is unreadable."""
        self._enter()
        try:
            self._watch.check_now()
        finally:
            self._leave()

        def look(transaction: Any) -> None:
            table = self.samples(transaction)
            for key in keys:
                table.check_readable(key)

        self.read(look)

    def record(self, transaction: Any, name: bytes) -> bytes | None:
        """A record of the store itself, kept next to the samples."""
        found = transaction.get(name, db=self._main)
        return None if found is None else bytes(found)

    def set_record(self, transaction: Any, name: bytes, value: bytes) -> None:
        transaction.put(name, value, db=self._main)

    def samples(self, transaction: Any) -> SampleTable:
        return SampleTable(transaction, self._pieces)

    def used(self, transaction: Any) -> int:
        """Bytes of the pages that hold samples. LMDB updates their number with every commit."""
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
            with suppress(EnvironmentClosed), self._exclusive():
                self._env.set_mapsize(map_size)
                self.map_size = map_size

    def reclaim(self) -> None:
        """Free pages after the map has become full.

        Readers killed in the middle of a transaction still pin pages. LMDB reuses the pages freed
        by one transaction only after another one, which would never succeed in a full map.
        """
        self._env.reader_check()
        with suppress(self.lmdb.MapFullError):
            self.write(lambda transaction: self.set_record(transaction, _TURN, b""))

    def lose(self) -> None:
        """Use the store no more: its index is damaged. It is made anew when it is next opened."""
        self.lost = True
        self.guard.declare_damaged()

    def close(self) -> None:
        clean = False
        with suppress(EnvironmentClosed), self._exclusive():
            if self.closed:
                return
            self.closed = True
            if self.persistent and not self.destroyed and not self.lost:
                with suppress(self.lmdb.Error):
                    self._env.sync(True)
                    clean = True
            self._close_files()
        self.closed = True
        self.guard.leave(clean=clean)

    def _enter(self) -> None:
        with self._gate:
            while self._held:
                self._gate.wait()
            if self.closed or self.lost:
                raise EnvironmentClosed
            self._active += 1

    def _leave(self) -> None:
        with self._gate:
            self._active -= 1
            if self._held:
                self._gate.notify_all()

    def hold(self) -> bool:
        """Keep all threads out of the map until ``release``.

        Return false, without holding it, if a thread does not leave the map in time.
        """
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
            raise EnvironmentClosed
        try:
            yield
        finally:
            self.release()

    def discard(self) -> None:
        """Close a forked child's copy, while the parent keeps all threads out of the map.

        Without a running transaction LMDB's close changes nothing for the parent. An open copy
        would keep the child from opening the store itself.
        """
        self.closed = True
        self.guard.abandon()
        self._close_files()


class Registry:
    """The open environments of this process. LMDB must not open the same one twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._open: dict[str, Environment] = {}
        self._quiet: list[Environment] = []
        self._locked = False
        self.ended = False
        """The interpreter is shutting down: an environment opened now would never be closed."""

    def attach(self, place: Path, identity: str, map_size: int, *, persistent: bool) -> Environment:
        """The environment of a place, opened if necessary. The caller holds the lock."""
        name = os.path.realpath(place)
        environment = self._open.get(name)
        if environment is not None:
            check_identity(place, environment.identity, identity)
            environment.grow(map_size)
            environment.persistent = environment.persistent or persistent
        else:
            guard = open_guard(place, identity, map_size, persistent=persistent)
            try:
                environment = Environment(place, identity, guard, map_size, persistent=persistent)
            except BaseException:
                guard.close()
                raise
            self._open[name] = environment
        environment.users += 1
        return environment

    def detach(self, environment: Environment) -> None:
        """Release an environment from ``attach``; the last user closes it. The caller holds the
        lock."""
        environment.users -= 1
        if environment.users == 0:
            self._close(environment)

    def destroy(self, environment: Environment) -> None:
        """Close the environment for all its users in this process. The caller holds the lock."""
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
        """Wait until no thread is in a transaction: a child could not end it."""
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
