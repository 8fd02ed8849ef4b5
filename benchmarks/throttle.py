"""Sources that are slow on purpose: a token bucket, or a disk of a stated rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from penstock.diagnose.analyze.loader_subject import nbytes_of
from penstock.operation import Spec
from penstock.source.source import Source

NAP = 0.001
"""The shortest sleep: who is due while the clock stands still would else not sleep at all."""


class Stopwatch:
    """Seconds since it was made, without those in which it was stopped."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lost = clock()
        self._stopped: float | None = None

    def __call__(self) -> float:
        stopped = self._stopped
        return (self._clock() if stopped is None else stopped) - self._lost

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it stand still."""
        since = self._clock()
        self._stopped = since
        try:
            yield
        finally:
            # First what was lost: it may show less for a moment, but never more.
            self._lost += self._clock() - since
            self._stopped = None


class Bucket:
    """A token bucket: ``rate`` tokens fall into it a second, and it holds ``burst`` at most.

    Whoever takes more than there are waits, after those who came before. Its clock is an argument:
    where that stands still, no tokens fall.
    """

    def __init__(
        self,
        rate: float,
        burst: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._saved = burst / rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        # When the last token that was taken falls: the bucket is empty at first.
        self._taken = clock()

    def take(self, tokens: int) -> None:
        """Wait until so many were there."""
        with self._lock:
            self._taken = max(self._taken, self._clock() - self._saved) + tokens / self.rate
            due = self._taken
        while (left := due - self._clock()) > 0:
            self._sleep(max(left, NAP))


class _Held(Source):
    """Another source, whose samples are kept waiting. It serves threads of one process, a node's
    for instance: each process would have a bucket, or a disk, of its own."""

    threadsafe: ClassVar[bool] = True

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def identity(self) -> str:
        return self._source.identity()

    def fields(self) -> dict[str | int, Spec] | Spec:
        return self._source.fields()


class Throttled(_Held):
    """Another source, of which every sample costs a token."""

    def __init__(self, source: Source, bucket: Bucket) -> None:
        super().__init__(source)
        self._bucket = bucket

    def read(self, indices: Sequence[int]) -> list[Any]:
        self._bucket.take(len(indices))
        return self._source.read(indices)


class Disk:
    """A device that gives so many bytes a second, to one reader after the other."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._free = clock()

    def __reduce__(self) -> tuple[type[Disk], tuple[float]]:
        return Disk, (self.rate,)

    def serve(self, nbytes: int) -> None:
        """Wait until it has given so many."""
        with self._lock:
            self._free = max(self._free, self._clock()) + nbytes / self.rate
            due = self._free
        left = due - self._clock()
        if left > 0:
            time.sleep(left)


class OnDisk(_Held):
    """Another source, whose samples come from a slow device.

    They have no files: those they are read from lie on another device.
    """

    def __init__(self, source: Source, disk: Disk) -> None:
        super().__init__(source)
        self.disk = disk

    def read(self, indices: Sequence[int]) -> list[Any]:
        samples = self._source.read(indices)
        # One after the other, as files are read.
        for sample in samples:
            self.disk.serve(nbytes_of(sample))
        return samples

    def name(self, index: int) -> str:
        return f"sample {index}"
