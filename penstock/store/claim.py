"""Claims: who prepares a sample that several workers need at once, so that it is prepared once."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_LOCK = getattr(fcntl, "F_OFD_SETLKW", None)
# l_type, l_whence, l_start, l_len, l_pid, as the C compiler lays them out.
_FLOCK = struct.Struct("@hhqqi0q")


class Claims:
    """Locks by number on one file, for threads and processes alike.

    They belong to the open file, so each worker has a ``Claims`` of its own; the system takes
    them back from a worker that dies. Where there are no such locks (they are Linux's), or no file,
    every claim is granted: then a sample may be prepared twice, with the same outcome.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd: int | None = None
        self._pid = 0

    @contextmanager
    def claim(self, number: int) -> Iterator[None]:
        """Nobody else has this number inside; waits until that is so."""
        fd = self._open()
        if fd is None or _LOCK is None:
            yield
            return
        fcntl.fcntl(fd, _LOCK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        try:
            yield
        finally:
            fcntl.fcntl(fd, _LOCK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))

    def _open(self) -> int | None:
        if self._path is None:
            return None
        if self._fd is None or self._pid != os.getpid():  # a fork would share its parent's claims
            with suppress(OSError):
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._pid = os.getpid()
        return self._fd

    def __del__(self) -> None:
        if self._fd is not None and self._pid == os.getpid():
            with suppress(OSError):
                os.close(self._fd)


class Turns:
    """The same for the threads of one process, which all have this one.

    The system's locks would give up the GIL, and wait to have it back, at every claim.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[threading.Lock, int]] = {}

    @contextmanager
    def claim(self, number: int) -> Iterator[None]:
        """Nobody else has this number inside; waits until that is so."""
        with self._lock:
            mine, users = self._held.get(number, (None, 0))
            mine = mine or threading.Lock()
            self._held[number] = (mine, users + 1)
        try:
            with mine:
                yield
        finally:
            with self._lock:
                users = self._held[number][1] - 1
                if users:
                    self._held[number] = (mine, users)
                else:
                    del self._held[number]

    def __reduce__(self) -> NoReturn:
        raise TypeError("turns are taken by threads; processes need Claims on a file")


def claims_of(made: Path | Turns | None) -> Claims | Turns:
    """What a worker claims with."""
    return made if isinstance(made, Turns) else Claims(made)
