"""Making reads cold, and telling whether they were: the page cache of files, without root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


def drop(paths: Iterable[str]) -> int:
    """Let the system forget these files; how many bytes they have.

    What another process has mapped or written and not yet saved stays: ``device_bytes`` shows what
    came of it.
    """
    total = 0
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            size = os.fstat(fd).st_size
            if hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):
                    # Pages that are not saved yet cannot be dropped.
                    os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            total += size
        except OSError:
            continue
        finally:
            os.close(fd)
    return total


def can_drop() -> bool:
    return hasattr(os, "posix_fadvise")


def device_bytes(pids: Iterable[int] = ()) -> int | None:
    """Bytes that this process, and those, had the device read so far; ``None`` if nobody says."""
    return _counted("read_bytes", pids)


def characters_read(pids: Iterable[int] = ()) -> int | None:
    """Bytes that they asked for, wherever those came from."""
    return _counted("rchar", pids)


def _counted(what: str, pids: Iterable[int]) -> int | None:
    total = 0
    for pid in ("self", *pids):
        try:
            with open(f"/proc/{pid}/io") as lines:
                found = dict(line.split(": ", 1) for line in lines)
            total += int(found[what])
        except (OSError, KeyError, ValueError):
            if pid == "self":
                return None
    return total
