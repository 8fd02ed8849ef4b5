"""Counting and timing at the joints: tallies that workers fill, snapshots that users read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Clock = Callable[[], float]

LISTED_BAD_SAMPLES = 100
"""How many bad samples are listed by name; all are counted."""


RECENT_BATCHES = 512


class Totals(NamedTuple):
    """What a meter has added up so far; ``seconds[i]`` includes the stages above stage i."""

    samples: Sequence[int]
    seconds: Sequence[float]
    delivered: int
    wait: float
    now: float


class Tally:
    """What one worker counted during one task: plain lists, cheap to fill and to send.

    ``seconds[i]`` is the time spent in stage i *and everything above it*; the time of a stage
    alone is the difference of neighbours, so no stop has to know what it waited for.
    """

    __slots__ = ("bytes_read", "corrupt", "hits", "misses", "samples", "seconds")

    def __init__(self, stages: int, holds: int) -> None:
        self.samples = [0] * stages
        self.seconds = [0.0] * stages
        self.bytes_read = 0
        self.hits = [0] * holds
        self.misses = [0] * holds
        self.corrupt = 0

    def clear(self) -> None:
        """Back to nothing, in place: stops hold on to the lists."""
        for counts in (self.samples, self.seconds, self.hits, self.misses):
            counts[:] = [0] * len(counts)
        self.bytes_read = self.corrupt = 0

    def as_list(self) -> list[Any]:
        """A copy, to add up later: the tally itself goes on counting."""
        return [
            self.samples[:],
            self.seconds[:],
            self.bytes_read,
            self.hits[:],
            self.misses[:],
            self.corrupt,
        ]


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stop of the road: how many samples it handled, and the time spent in it alone."""

    name: str
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One cache: what it answered, and what it holds."""

    hits: int
    misses: int
    admitted: int
    used: int
    budget: int
    full: bool


@dataclass(frozen=True, slots=True)
class RefurbishStats:
    """A refurbish stop: ``fresh`` samples came from above it, ``reused`` ones from its store.

    It keeps ``kept`` samples at most (the others are always fresh); the store takes ``used`` bytes.
    """

    fresh: int
    reused: int
    kept: int
    used: int


@dataclass(frozen=True, slots=True)
class EchoStats:
    """An echo: of ``fresh`` samples it made ``delivered``; ``factor`` is that of this epoch."""

    fresh: int
    delivered: int
    factor: float


class Held(NamedTuple):
    """What the stops that keep samples have to say."""

    caches: tuple[CacheStats, ...] = ()
    refurbish: RefurbishStats | None = None
    echo: EchoStats | None = None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The workers: ``busy`` is their working time added up, ``utilisation`` its share of all."""

    kind: str
    workers: int
    busy: float
    utilisation: float
    restarts: int


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that failed and was skipped or substituted."""

    index: int
    name: str
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Stats:
    """A frozen snapshot of a loader's counters since it was made.

    ``wait`` is the time the consumer spent waiting for a batch, ``elapsed`` the time since the
    first batch was asked for; ``wait / elapsed`` is the share of time training stood still.
    ``refurbish`` and ``echo`` are ``None`` on a road without one.
    """

    samples: int
    batches: int
    bytes: int
    bytes_read: int
    elapsed: float
    wait: float
    stages: tuple[StageStats, ...]
    caches: tuple[CacheStats, ...]
    pool: PoolStats
    retries: int
    corrupt: int
    bad: int
    bad_samples: tuple[BadSample, ...]
    refurbish: RefurbishStats | None = None
    echo: EchoStats | None = None

    @property
    def stall(self) -> float:
        """The share of time the consumer waited, 0 to 1."""
        return min(1.0, self.wait / self.elapsed) if self.elapsed > 0 else 0.0


@dataclass
class _Counts:
    samples: int = 0
    batches: int = 0
    bytes: int = 0
    bytes_read: int = 0
    wait: float = 0.0
    busy: float = 0.0
    retries: int = 0
    corrupt: int = 0
    bad: int = 0
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)


class Meter:
    """Adds up what workers tallied and what the consumer saw. Thread-safe."""

    def __init__(self, stages: Sequence[str], holds: int, clock: Clock) -> None:
        self.clock = clock
        self._stages = tuple(stages)
        self._lock = threading.Lock()
        self._samples = [0] * len(stages)
        self._seconds = [0.0] * len(stages)
        self._counts = _Counts(hits=[0] * holds, misses=[0] * holds)
        self._bad: deque[BadSample] = deque(maxlen=LISTED_BAD_SAMPLES)
        self.batch_times: deque[float] = deque(maxlen=RECENT_BATCHES)
        """Seconds that workers spent on each of the last batches."""
        self._started: float | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = self.clock()

    def worked(self, seconds: float) -> None:
        with self._lock:
            self._counts.busy += seconds

    def add(self, tally: Sequence[Any]) -> None:
        samples, seconds, bytes_read, hits, misses, corrupt = tally
        with self._lock:
            counts = self._counts
            for i, (n, t) in enumerate(zip(samples, seconds, strict=True)):
                self._samples[i] += n
                self._seconds[i] += t
            for i, (h, m) in enumerate(zip(hits, misses, strict=True)):
                counts.hits[i] += h
                counts.misses[i] += m
            counts.bytes_read += bytes_read
            counts.corrupt += corrupt

    def delivered(self, samples: int, nbytes: int) -> None:
        with self._lock:
            self._counts.samples += samples
            self._counts.bytes += nbytes
            self._counts.batches += 1

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._counts.wait += seconds

    def retried(self, times: int = 1) -> None:
        with self._lock:
            self._counts.retries += times

    def bad(self, sample: BadSample) -> None:
        with self._lock:
            self._counts.bad += 1
            self._bad.append(sample)

    def answered(self) -> list[tuple[int, int]]:
        """Hits and misses of every hold."""
        with self._lock:
            return list(zip(self._counts.hits, self._counts.misses, strict=True))

    def totals(self) -> Totals:
        """What is added up so far, to be compared with an earlier reading."""
        with self._lock:
            samples, seconds = tuple(self._samples), tuple(self._seconds)
            counts = self._counts
            return Totals(samples, seconds, counts.samples, counts.wait, self.clock())

    def snapshot(
        self,
        kind: str,
        workers: int,
        restarts: int,
        held: Held,
    ) -> Stats:
        """Everything so far."""
        with self._lock:
            counts = self._counts
            elapsed = self.clock() - self._started if self._started is not None else 0.0
            above = 0.0
            stages = []
            for name, n, t in zip(self._stages, self._samples, self._seconds, strict=True):
                stages.append(StageStats(name, n, max(0.0, t - above)))
                above = t
            room = elapsed * max(1, workers)
            return Stats(
                samples=counts.samples,
                batches=counts.batches,
                bytes=counts.bytes,
                bytes_read=counts.bytes_read,
                elapsed=elapsed,
                wait=counts.wait,
                stages=tuple(stages),
                caches=held.caches,
                pool=PoolStats(
                    kind,
                    workers,
                    counts.busy,
                    min(1.0, counts.busy / room) if room > 0 else 0.0,
                    restarts,
                ),
                retries=counts.retries,
                corrupt=counts.corrupt,
                bad=counts.bad,
                bad_samples=tuple(self._bad),
                refurbish=held.refurbish,
                echo=held.echo,
            )
