"""Claims: locks by number, so that a sample needed by several workers at once is prepared once."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Protocol

_WAIT = getattr(fcntl, "F_OFD_SETLKW", None)
_TRY = getattr(fcntl, "F_OFD_SETLK", None)
# l_type, l_whence, l_start, l_len, l_pid, as the C compiler lays them out.
_FLOCK = struct.Struct("@hhqqi0q")


def lock_byte(fd: int, number: int, *, wait: bool = True) -> bool:
    """Lock one byte of an open file; false if it is locked and ``wait`` is false.

    The lock belongs to the open file, not to the process. On a system without such locks, every
    lock is granted.
    """
    command = _WAIT if wait else _TRY
    if command is not None:
        try:
            fcntl.fcntl(fd, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
    return True


def unlock_byte(fd: int, number: int) -> None:
    if _TRY is not None:
        fcntl.fcntl(fd, _TRY, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))


class Claims(Protocol):
    """Locks by number, shared by the workers of one loader."""

    def claim(self, number: int) -> AbstractContextManager[None]:
        """Hold the lock of this number; wait until no other worker holds it."""


class FileClaims:
    """Claims of threads and processes, as locks on one file.

    The locks belong to the open file, so each worker has a ``FileClaims`` of its own. The system
    releases the locks of a worker that dies. On a system without such locks (they exist on Linux),
    or without a file, every claim is granted: then a sample may be prepared twice, with the same
    result.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd: int | None = None
        self._pid = 0

    @contextmanager
    def claim(self, number: int) -> Iterator[None]:
        """See ``Claims.claim``."""
        fd = self._open()
        if fd is None:
            yield
            return
        lock_byte(fd, number)
        try:
            yield
        finally:
            unlock_byte(fd, number)

    def _open(self) -> int | None:
        if self._path is None:
            return None
        # A forked child opens the file itself: with the parent's file it would share its locks.
        if self._fd is None or self._pid != os.getpid():
            with suppress(OSError):
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._pid = os.getpid()
        return self._fd

    def __del__(self) -> None:
        if self._fd is not None and self._pid == os.getpid():
            with suppress(OSError):
                os.close(self._fd)


class ThreadClaims:
    """Claims of the threads of one process, which share one ``ThreadClaims``.

    File locks would release the GIL, and wait for it again, at every claim.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[threading.Lock, int]] = {}

    @contextmanager
    def claim(self, number: int) -> Iterator[None]:
        """See ``Claims.claim``."""
        with self._lock:
            lock, users = self._held.get(number, (None, 0))
            lock = lock or threading.Lock()
            self._held[number] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users = self._held[number][1] - 1
                if users:
                    self._held[number] = (lock, users)
                else:
                    del self._held[number]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "ThreadClaims cannot be sent to another process; worker processes need FileClaims"
        )


def claims_of(made: Path | ThreadClaims | None) -> Claims:
    """The claims that a worker uses: those of its threads, or locks on a file if ``made`` is a
    path."""
    return made if isinstance(made, ThreadClaims) else FileClaims(made)
