"""Sources that are slow on purpose: limited by a token bucket, or by a simulated disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from penstock.diagnose.analyze.loader_subject import nbytes_of
from penstock.operation import Spec
from penstock.source.source import Source

MIN_SLEEP = 0.001
"""The shortest sleep in seconds. While the clock is stopped, shorter ones would busy-wait."""


class Stopwatch:
    """Seconds since it was made, not counting the time it was stopped."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lost = clock()
        self._stopped: float | None = None

    def __call__(self) -> float:
        stopped = self._stopped
        return (self._clock() if stopped is None else stopped) - self._lost

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the watch inside a ``with`` block."""
        since = self._clock()
        self._stopped = since
        try:
            yield
        finally:
            # In this order a concurrent reader may see too little time, but never too much.
            self._lost += self._clock() - since
            self._stopped = None


class Bucket:
    """A token bucket: gains ``rate`` tokens per second, and holds at most ``burst``.

    A caller that takes more tokens than there are waits, after earlier callers. The bucket gains
    no tokens while ``clock`` is stopped.
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
        # The time at which the last token taken is gained. The bucket is empty at first.
        self._taken = clock()

    def take(self, tokens: int) -> None:
        """Take tokens, waiting until there are enough."""
        with self._lock:
            self._taken = max(self._taken, self._clock() - self._saved) + tokens / self.rate
            due = self._taken
        while (left := due - self._clock()) > 0:
            self._sleep(max(left, MIN_SLEEP))


class _Delayed(Source):
    """Wraps a source to delay its samples. For threads of one process only (a node's, for
    instance): several processes would each have their own bucket or disk."""

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


class Throttled(_Delayed):
    """Wraps a source so that every sample costs a token."""

    def __init__(self, source: Source, bucket: Bucket) -> None:
        super().__init__(source)
        self._bucket = bucket

    def read(self, indices: Sequence[int]) -> list[Any]:
        self._bucket.take(len(indices))
        return self._source.read(indices)


class Disk:
    """A simulated disk: ``rate`` bytes per second, one reader after the other."""

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free = clock()

    def __reduce__(self) -> tuple[type[Disk], tuple[float]]:
        return Disk, (self.rate,)

    def serve(self, nbytes: int) -> None:
        """Wait until the disk has read ``nbytes`` bytes."""
        with self._lock:
            self._free = max(self._free, self._clock()) + nbytes / self.rate
            due = self._free
        left = due - self._clock()
        if left > 0:
            self._sleep(left)


class OnDisk(_Delayed):
    """Wraps a source so that its samples seem to come from a slow disk.

    Its samples have no file names, because the real files are on another device.
    """

    def __init__(self, source: Source, disk: Disk) -> None:
        super().__init__(source)
        self.disk = disk

    def read(self, indices: Sequence[int]) -> list[Any]:
        samples = self._source.read(indices)
        # One after the other, as a reader of files does.
        for sample in samples:
            self.disk.serve(nbytes_of(sample))
        return samples

    def name(self, index: int) -> str:
        return f"sample {index}"
