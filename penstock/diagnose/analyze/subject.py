"""What a probe works on: a loader whose data can be replaced by cached and by cold data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import fmean
from typing import Any, Protocol

from penstock.diagnose.analyze.pagecache import drop
from penstock.diagnose.analyze.reading import by_threads
from penstock.diagnose.analyze.report import Operation, Setup
from penstock.diagnose.profile.result import StageCost

CHUNK = 1 << 20
"""Of a large file, so much is read at a time, here and there."""


BATCHES = 24
"""So many batches are used over and over: enough that what one finds warm was not read just now."""

SIZES = 256
"""So many sizes stand for those of all samples: enough that a few large ones are among them."""


class Subject(Protocol):
    """A loader under analysis. Iterators that it gives have no end; ``close`` ends them."""

    @property
    def setup(self) -> Setup: ...

    notes: list[str]

    reads_to_prepare: bool
    """Whether preparing cached samples includes reading them, out of the system's memory."""

    sizes: tuple[float, ...]
    """How large samples are, as parts of the mean; none where all are alike, or nobody knows."""

    def learn(self) -> None:
        """Choose the samples that are used from now on, and find out where they lie."""

    def cached(self, workers: int | None = None, late: Sequence[float] = ()) -> Iterator[Any]:
        """Batches of data that need not be fetched, made by so many workers (as it is). Each sample
        comes as ``late`` as this says in turn for one batch after the other (with one worker), or
        is fetched; that cannot be where ``reads_to_prepare``."""

    def cold(self) -> Iterator[Any] | None:
        """Batches of data that must be fetched; ``None`` where that cannot be brought about."""

    def reused(self) -> tuple[Iterator[Any], int] | None:
        """Batches with refurbish where it is best, all fresh for so many batches and all kept
        after; ``None`` where it cannot stand."""

    def replaced(self) -> Iterator[Any] | None:
        """Batches that Penstock's loader makes of cached data in place of this one, with as many
        workers; ``None`` where it is Penstock's already, or cannot be."""

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        """Bytes as they are read, and nothing else is done with them."""

    def operations(self) -> Sequence[Operation]: ...

    def batch_times(self) -> Sequence[float]: ...

    def close(self) -> None: ...


class Device(Protocol):
    """Where the step is done."""

    name: str

    def to_device(self, batch: Any) -> Any:
        """The same batch, where the accelerator has it."""

    def again(self, batch: Any) -> Any:
        """A batch for one more step: itself, or a copy if the loop has written into it."""

    def copying(self, batch: Any) -> float:
        """Seconds that moving a batch to the device takes."""

    def sync(self) -> None:
        """Wait until the accelerator has done what it was told."""

    def agree(self, over: bool) -> bool:
        """Whether all ranks think so."""


class Host:
    """A step that is done where the batch is."""

    name = "cpu"

    def to_device(self, batch: Any) -> Any:
        return batch

    def again(self, batch: Any) -> Any:
        return batch

    def copying(self, batch: Any) -> float:
        return 0.0

    def sync(self) -> None:
        pass

    def agree(self, over: bool) -> bool:
        return over


class Files:
    """The files that samples lie in, and how they are made cold while they are used.

    Each time a batch is handed out, a part of the files is dropped, so that each is dropped once
    between two readings of it: in a thread, so that the loop is not kept waiting.
    """

    def __init__(self, paths: Sequence[str], parts: int) -> None:
        self.paths = list(dict.fromkeys(paths))
        parts = max(1, parts)
        self._parts = [self.paths[at::parts] for at in range(parts)]
        self._turns = count()
        self._thread: ThreadPoolExecutor | None = None

    def drop_all(self) -> None:
        drop(self.paths)

    def drop_some(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-cold")
        self._thread.submit(drop, self._parts[next(self._turns) % len(self._parts)])

    def sizes(self) -> list[int]:
        return [_size(path) for path in self.paths]

    def reading(self, threads: int, *, cold: bool) -> Iterator[int]:
        """Read them by so many threads, without end; cold, where that is asked for."""

        def chunks() -> Iterator[tuple[str, int]]:
            while True:
                if cold:
                    self.drop_all()
                for path in self.paths:
                    yield from ((path, at) for at in range(0, max(1, _size(path)), CHUNK))

        return by_threads(_read, chunks(), threads)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None


def operations_of(rows: Sequence[StageCost]) -> list[Operation]:
    """What a profile says of stops or their parts, with the share of each."""
    total = sum(row.ms for row in rows) or 1.0
    return [
        Operation(row.name, row.kind, row.ms, row.ms / total, row.random, row.nbytes)
        for row in rows
    ]


def relative_sizes(sizes: Sequence[int]) -> tuple[float, ...]:
    """As parts of their mean, in order: of many, some that stand for all; none if all are alike.

    >>> relative_sizes([150, 50, 100]), relative_sizes([100, 100])
    ((0.5, 1.0, 1.5), ())
    """
    ordered = sorted(sizes)
    if not ordered or ordered[0] == ordered[-1]:
        return ()
    count = min(len(ordered), SIZES)
    some = [ordered[(2 * at + 1) * len(ordered) // (2 * count)] for at in range(count)]
    mean = fmean(some)
    return tuple(round(one / mean, 6) for one in some)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _read(chunk: tuple[str, int]) -> int:
    path, at = chunk
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return len(os.pread(fd, CHUNK, at))
    finally:
        os.close(fd)


def children() -> list[int]:
    """All processes below this one."""
    found: list[int] = []
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
                    new = [int(one) for one in listed.read().split()]
            except (OSError, ValueError):
                continue
            found += new
            waiting += new
    return found
