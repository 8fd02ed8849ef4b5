"""The road: a source and its stops, with counters and timers between them.

A road returns samples by key. Each stop asks upstream only for the samples it does not have, so a
cache hit skips everything above it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.keyed import Keyed, Keys, SeededCalls, seed_globals, watched_globals
from penstock.source.source import Source
from penstock.stats import Clock, Tally
from penstock.stops.stop import Rows, StageFailure, Step, StepContext, Stop, Upstream, names_of

SOURCE = "source"


@dataclass(frozen=True)
class Road:
    """A source and its stops, ready to be sent to workers by pickle."""

    source: Source
    stops: tuple[Stop, ...]
    seed: int

    @property
    def stages(self) -> list[str]:
        return [SOURCE, *names_of(self.stops)]

    @property
    def holds(self) -> int:
        """The number of stops that keep samples."""
        return sum(stop.keeps for stop in self.stops)

    @property
    def preferred_group(self) -> int:
        """The group size with which the stops are fastest, for slow samples."""
        return max([1, *(stop.preferred_group for stop in self.stops)])

    @property
    def global_random(self) -> bool:
        """Whether the source or a stop may draw from the global generators."""
        return draws_globally(self.source) or any(stop.global_random for stop in self.stops)

    def open(self, clock: Clock = time.perf_counter) -> OpenRoad:
        return OpenRoad(self, clock)


def draws_globally(source: Source) -> bool:
    """Whether a source may draw from the global generators, as a dataset that augments does."""
    return bool(getattr(source, "random", False))


class OpenRoad:
    """A road in one worker, ready to run. Not shared between threads."""

    def __init__(self, road: Road, clock: Clock) -> None:
        self.road = road
        self._clock = clock
        self.context = StepContext(road.seed, Tally(len(road.stages), road.holds))
        get: Upstream = _no_upstream
        self.rows = Rows()
        """The rows of the batch for the next samples."""
        contexts = [self.context] * len(road.stops)
        contexts[-1:] = [replace(self.context, rows=self.rows)]
        self._contexts = contexts
        steps = [
            self._source_step(),
            *(stop.step(context) for stop, context in zip(road.stops, contexts, strict=False)),
        ]
        spans = [None, *(stop.span for stop in road.stops)]
        for number, (step, span) in enumerate(zip(steps, spans, strict=True)):
            get = self._timed(number, step, get, span)
        self.get = get
        """Returns the samples of some keys. Raises StageFailure."""

    def begin(self, *, trial: bool = False) -> None:
        """Reset the counters for the next task. ``trial``: nothing may be put into stores."""
        for context in self._contexts:
            context.trial = trial
        self.context.tally.clear()
        self.context.offers.clear()
        self.rows.clear()

    def read_together(self, keys: Keys) -> Any:
        """What the source returns for all samples of a batch. Raises StageFailure."""
        source, tally, started = self.road.source, self.context.tally, self._clock()
        try:
            if draws_globally(source):
                seed_globals(Keyed(self.road.seed, SOURCE).at(next(iter(keys))))
            samples = source.read_together(keys.indices)
        except Exception as error:
            raise StageFailure(SOURCE, keys.indices[0]) from error
        tally.seconds[0] += self._clock() - started
        tally.samples[0] += len(keys)
        return samples

    def _timed(
        self, number: int, step: Step, upstream: Upstream, span: tuple[int, int] | None
    ) -> Upstream:
        """A step joined to the one above it, with a timer and a counter."""
        tally, clock = self.context.tally, self._clock

        def get(keys: Keys) -> list[Any]:
            started = clock()
            samples = step(keys, upstream)
            tally.seconds[number] += clock() - started
            tally.samples[number] += len(samples)
            return samples

        if span is None:
            return get
        first, end = span

        def get_some(keys: Keys) -> list[Any]:
            samples = get(keys)
            tally.samples[number] -= sum([not first <= i < end for i in keys.indices])
            return samples

        return get_some

    def _source_step(self) -> Step:
        source, tally = self.road.source, self.context.tally
        seeded = None
        if draws_globally(source):
            seeded = SeededCalls(Keyed(self.road.seed, SOURCE))

        read_one = source.reader()

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            try:
                if seeded is not None:
                    samples = seeded(keys, read_one)
                elif len(keys) == 1:
                    samples = [read_one(keys.indices[0])]
                else:
                    samples = source.read(keys.indices)
            except Exception as error:
                # Of several samples, the caller reads one at a time to find the one that failed.
                raise StageFailure(SOURCE, keys.indices[0]) from error
            if samples:
                tally.bytes_read += _nbytes_of_all(samples)
            return samples

        return step


def _no_upstream(keys: Keys) -> list[Any]:
    return []


def _nbytes_of_all(samples: Sequence[Any]) -> int:
    """The bytes of several samples. Where they are numbers, one is looked at: small samples take
    less time than this otherwise would."""
    kind = type(samples[0])
    if kind is int or kind is float:
        return 0
    if issubclass(kind, np.generic):
        return len(samples) * int(samples[0].nbytes)
    if kind is tuple and len(samples) > 1 and {type(sample) for sample in samples} == {tuple}:
        return sum([_nbytes_of_all(column) for column in zip(*samples, strict=False)])
    if _own_nbytes(samples[0]):
        return sum([_own_nbytes(sample) for sample in samples])
    return sum([_nbytes(sample) for sample in samples])


def _nbytes(sample: Any) -> int:
    """The bytes that a source read for a sample: of its arrays and byte strings, one level deep."""
    kind = type(sample)
    if kind is bytes:
        return len(sample)
    if kind is tuple or kind is list or isinstance(sample, Mapping):
        values = sample.values() if isinstance(sample, Mapping) else sample
        return sum([len(v) if type(v) is bytes else _own_nbytes(v) for v in values])
    return _own_nbytes(sample)


def _own_nbytes(value: Any) -> int:
    """``nbytes`` of an array or a tensor; 0 for a value that has none."""
    try:
        nbytes = getattr(value, "nbytes", 0)
    except Exception:  # a sparse tensor has none, and a user's class may raise anything
        return 0
    return nbytes if isinstance(nbytes, int) else 0


def scope_of(road: Road, *, own_process: bool) -> AbstractContextManager[None]:
    """Restores the global generators afterwards, if a road uses them in the user's process."""
    if own_process or not road.global_random:
        return nullcontext()
    return watched_globals()
