"""Claims: who prepares a sample that several workers need at once, so that it is prepared once."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
