"""The files that samples lie in: recorded as they are opened, dropped from memory, and read.

An audit hook sees every file that Python opens. It cannot be removed from its process, so it is
installed once, and only when a loader is analysed. Forked processes inherit it, and write the files
they see into a directory of the analysis.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from penstock.diagnose.analyze.reading import by_threads

CHUNK = 1 << 20
"""Bytes per read: large files are read in chunks of this size."""

_SKIPPED = (".py", ".pyc", ".so", ".pth", ".pyi", ".toml")

_recording: list[OpenedFiles] = []
"""At most one item: the latest ``OpenedFiles``, which receives the events of the audit hook."""


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and _recording[0].on:
        _recording[0].record_open(given)


class OpenedFiles:
    """Records the files that this process and its forks open while ``on`` is true.

    A fork keeps the value that ``on`` had when it was forked. Workers also note their batch times
    here.
    """

    def __init__(self, directory: Path) -> None:
        self.on = False
        self._directory = directory
        self._seen: set[str] = set()
        self._busy = False
        if not _recording:
            _recording.append(self)
            sys.addaudithook(_hook)
        _recording[0] = self

    def record_open(self, given: tuple[Any, ...]) -> None:
        """Record the file of one ``open`` audit event, given as its path and mode."""
        path, mode = given[0], given[1]
        if self._busy:
            return
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return
        name = os.path.abspath(os.fsdecode(path))
        if (
            name in self._seen
            or name.endswith(_SKIPPED)
            or name.startswith(("/proc/", "/dev/", "/sys/"))
        ):
            return
        self._seen.add(name)
        self._busy = True  # writing the note opens a file too
        try:
            self.note("files", os.fsencode(name) + b"\0")
        finally:
            self._busy = False

    def note(self, kind: str, text: bytes) -> None:
        """Append to the notes of this process; stop recording if the file cannot be written."""
        try:
            with open(self._directory / f"{os.getpid()}.{kind}", "ab", 0) as file:
                file.write(text)
        except OSError:
            self.on = False

    def files(self) -> list[str]:
        """The files opened by this process and its forks that still exist, each once."""
        names = b"".join(self._notes("files")).split(b"\0")
        unique = dict.fromkeys(os.fsdecode(name) for name in names if name)
        return [name for name in unique if os.path.isfile(name)]

    def times(self) -> list[float]:
        """Seconds per batch, as noted by the workers."""
        return [float(line) for part in self._notes("times") for line in part.split()]

    def places(self) -> Counter[str]:
        """How often workers were seen waiting, by place in the user's code, as they noted."""
        lines = b"".join(self._notes("places")).decode(errors="replace").splitlines()
        return Counter(line for line in lines if line)

    def _notes(self, kind: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self._directory.glob(f"*.{kind}"))]


class SampleFiles:
    """Files that are made cold again and again while a loader reads them.

    Each time a batch is handed out, ``drop_next_part`` drops one of ``parts`` parts of the files
    from memory, so that every file is dropped once between two reads of it. A thread does this, so
    that the training loop does not wait.
    """

    def __init__(self, paths: Sequence[str], parts: int) -> None:
        self.paths = list(dict.fromkeys(paths))
        parts = max(1, parts)
        self._parts = [self.paths[at::parts] for at in range(parts)]
        self._turns = count()
        self._thread: ThreadPoolExecutor | None = None

    def drop_all(self) -> None:
        drop(self.paths)

    def drop_next_part(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-cold")
        self._thread.submit(drop, self._parts[next(self._turns) % len(self._parts)])

    def sizes(self) -> list[int]:
        return [_size(path) for path in self.paths]

    def reading(self, threads: int, *, cold: bool) -> Iterator[int]:
        """Read the files with ``threads`` threads, endlessly; yield the bytes of each read.

        ``cold``: drop them from memory before each round.
        """

        def chunks() -> Iterator[tuple[str, int]]:
            while True:
                if cold:
                    self.drop_all()
                for path in self.paths:
                    yield from ((path, at) for at in range(0, max(1, _size(path)), CHUNK))

        return by_threads(_read_chunk, chunks(), threads)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _read_chunk(chunk: tuple[str, int]) -> int:
    path, at = chunk
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return len(os.pread(fd, CHUNK, at))
    finally:
        os.close(fd)


# The page cache of the system, without root.


def drop(paths: Iterable[str]) -> int:
    """Drop these files from the page cache; return their total size in bytes.

    Pages that another process has mapped, or has written and not yet saved, stay in memory.
    ``device_bytes`` shows how much is then read from the device.
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
    """Bytes read from devices so far by this process and ``pids``; ``None`` if unknown."""
    return _io_counter("read_bytes", pids)


def characters_read(pids: Iterable[int] = ()) -> int | None:
    """Bytes requested so far by this process and ``pids``, from memory or from devices."""
    return _io_counter("rchar", pids)


def _io_counter(field: str, pids: Iterable[int]) -> int | None:
    total = 0
    for pid in ("self", *pids):
        try:
            with open(f"/proc/{pid}/io") as lines:
                counters = dict(line.split(": ", 1) for line in lines)
            total += int(counters[field])
        except (OSError, KeyError, ValueError):
            if pid == "self":
                return None
    return total


def child_processes() -> list[int]:
    """The ids of all descendants of this process."""
    descendants: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/children") as listed:
                    children = [int(child) for child in listed.read().split()]
            except (OSError, ValueError):
                continue
            descendants += children
            waiting += children
    return descendants
