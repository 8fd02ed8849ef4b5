"""Notices changes of an open store's files that none of its users made.

LMDB maps its files: if another program truncates or overwrites them, the next access can kill the
process. Before each transaction the data file is compared with the record that the last writer left
in the guard file. If it differs, the whole index is checked before LMDB touches it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from penstock.store.claim import lock_byte, unlock_byte
from penstock.store.guard import FileRecord, Guard
from penstock.store.index_check import IndexDamage

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MARK = 8
"""Bytes at the beginning of LMDB's lock file that never change: its magic number and format."""


class StoreLost(Exception):
    """The store cannot be used any more by this process. The text says why.

    ``advice``: what to do.
    """

    def __init__(
        self,
        reason: str,
        advice: str = "It is made anew when a process opens it while no other one has it open",
    ) -> None:
        super().__init__(reason)
        self.advice = advice


class FileWatch:
    """Watches LMDB's files in one process. ``check_index`` checks the index of an open file.

    Files that were removed or replaced stay usable for the processes that have them open; others
    must not open what is in their place.

    It is made before LMDB opens the files and closed after LMDB has closed them: closing a
    descriptor of the lock file would release LMDB's own lock on it.
    """

    def __init__(
        self, data: Path, lock: Path, guard: Guard, check_index: Callable[[int], int]
    ) -> None:
        self._guard = guard
        self._check_index = check_index
        self._known: FileRecord | None = None
        self._mutex = threading.Lock()
        self._lost: StoreLost | None = None
        self._data = _open(data)
        try:
            self._lock = _open(lock)
        except BaseException:
            os.close(self._data)
            raise
        self._lock_nbytes = os.fstat(self._lock).st_size
        self._lock_mark = b""
        self._inodes = (os.fstat(self._data).st_ino, os.fstat(self._lock).st_ino)
        self._largest = 0
        self._number = 0

    def start(self) -> None:
        """LMDB has opened the files: from now on they may change only in the known ways."""
        self._lock_nbytes = os.fstat(self._lock).st_size
        self._lock_mark = os.pread(self._lock, _MARK, 0)
        self._largest = os.fstat(self._data).st_size

    def check_shared(self) -> None:
        """Raise StoreLost if other processes have other files open than those found here."""
        record = self._guard.read_record()
        if record is None:
            raise StoreLost("its guard file is damaged while other processes use it")
        if (record.data, record.lock) != self._inodes:
            raise StoreLost("its files were replaced while other processes use them")

    def check(self) -> None:
        """Raise StoreLost if the files were changed so that LMDB must not touch them."""
        record = self._look()
        known = self._known
        if known is not None and record == known[:2]:
            return
        last = self._guard.read_record()
        if last is not None and record == last[:2]:
            self._known = last
            return
        # While another thread or process writes, the file differs from the record as it must.
        if not self._mutex.acquire(blocking=False):
            return
        try:
            if lock_byte(self._data, 0, wait=False):
                try:
                    self._settle()
                finally:
                    unlock_byte(self._data, 0)
        finally:
            self._mutex.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other writers out, and record how the file looks afterwards. Raises StoreLost."""
        with self._mutex:
            lock_byte(self._data, 0)
            try:
                self._number = self._settle().transaction
                try:
                    yield
                finally:
                    self._record_change()
            finally:
                unlock_byte(self._data, 0)

    def check_now(self) -> None:
        """Check the index even if the file looks unchanged. Raises StoreLost."""
        with self._mutex:
            lock_byte(self._data, 0)
            try:
                self._settle(trusting=False)
            finally:
                unlock_byte(self._data, 0)

    def wrote(self, transaction: int) -> None:
        """Note the number of a transaction that was committed. Only while ``writing``."""
        self._number = transaction

    def _record_change(self) -> None:
        stat = os.fstat(self._data)
        record = FileRecord(stat.st_size, stat.st_ctime_ns, self._number, *self._inodes)
        self._known = record
        # If it cannot be written, the next process checks the index.
        with suppress(OSError):
            self._guard.write_record(record)

    def _look(self) -> tuple[int, int]:
        """Size and time of change of the data file. Raises StoreLost."""
        if self._lost is not None:
            raise self._lost
        if self._guard.declared_damaged:
            self._lose(StoreLost("another process has found it damaged"))
        # Read first: another thread may find the file larger than this one is about to.
        largest = self._largest
        data, lock = os.fstat(self._data), os.fstat(self._lock)
        if data.st_size < largest or lock.st_size < self._lock_nbytes:
            self._lose(StoreLost("its files were truncated while it was in use"))
        if os.pread(self._lock, _MARK, 0) != self._lock_mark:
            self._lose(StoreLost("its lock file was overwritten while it was in use"))
        self._largest = max(self._largest, data.st_size)
        return data.st_size, data.st_ctime_ns

    def _settle(self, *, trusting: bool = True) -> FileRecord:
        """Make sure that the file is as its last writer left it. No other process writes now.

        ``trusting``: a file that looks unchanged needs no check.
        """
        record = self._look()
        last = self._guard.read_record()
        if trusting and last is not None and record == last[:2]:
            self._known = last
            return last
        try:
            transaction = self._check_index(self._data)
        except IndexDamage as damage:
            changed = last is None or record != last[:2]
            by_whom = "its file was changed by another program, and " if changed else ""
            self._lose(StoreLost(f"{by_whom}its index is damaged: {damage}"))
        except OSError as error:
            self._lose(StoreLost(f"its file cannot be read: {error}"))
        # A writer that was killed before it could record its change was one transaction ahead, and
        # one that changed nothing used no number. Any other number means that the file was
        # exchanged for a copy. LMDB would go by the numbers in its lock file.
        if last is not None and abs(transaction - last.transaction) > 1:
            self._lose(StoreLost("its file was exchanged for another one"))
        if self._known is not None and transaction < self._known.transaction - 1:
            self._lose(StoreLost("its file was exchanged for an older one"))
        found = FileRecord(*record, transaction, *self._inodes)
        self._known = found
        with suppress(OSError):
            self._guard.write_record(found)
        return found

    def _lose(self, reason: StoreLost) -> NoReturn:
        """Give the store up. Raises the reason."""
        self._lost = reason
        self.mend_sizes()
        raise reason

    def mend_sizes(self) -> None:
        """Extend truncated files to their former size: LMDB reads them once more on closing, and
        other threads may be reading just now."""
        with suppress(OSError):
            for fd, nbytes in ((self._data, self._largest), (self._lock, self._lock_nbytes)):
                present = os.fstat(fd).st_size
                if present < nbytes:
                    # Not by truncate: another process may have made the file longer meanwhile.
                    os.posix_fallocate(fd, present, nbytes - present)

    def close(self) -> None:
        for fd in (self._data, self._lock):
            os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except OSError as error:
        raise StoreLost(f"its file {path.name} was removed or replaced: {error.strerror}") from None
