"""The node's log: lines with date and time, a limited size, and no failure if the disk is full."""

from __future__ import annotations

import io
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

LARGEST, KEPT = 10 << 20, 5 << 20
"""Bytes. A log that is larger than the first is cut to its last lines, of the second size."""


class _Lossy(io.RawIOBase):
    """Writes to a descriptor. What cannot be written is lost without an error."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with suppress(OSError):  # a full disk must not stop the node
            os.write(self._fd, view)
        return len(view)


def log_stream(fd: int) -> TextIO:
    """A stream that writes text to a descriptor at once, and never fails."""
    return io.TextIOWrapper(  # type: ignore[type-var]
        _Lossy(fd),
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )


class LogHandler(logging.Handler):
    """Writes log lines with date and time to a stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()


def trim(path: Path, largest: int = LARGEST, kept: int = KEPT) -> None:
    """Cut a log that is larger than ``largest`` to its last ``kept`` bytes, in whole lines.

    All who write to it append, so they go on after the lines that are kept.
    """
    with suppress(OSError):
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags)
        try:
            size = os.fstat(fd).st_size
            if size <= largest:
                return
            tail = os.pread(fd, kept, size - kept)
            tail = tail[tail.find(b"\n") + 1 :]
            os.ftruncate(fd, 0)
            os.write(fd, b"(earlier lines were removed)\n" + tail)
        finally:
            os.close(fd)
