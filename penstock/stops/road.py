"""The road: a source and its stops, joined; every joint counts and times what passes.

A road is asked for samples by key. Each stop asks upstream only for what it does not have, so a
cache hit visibly skips everything above it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from penstock.keyed import Keyed, Keys, preserved_globals, seed_globals
from penstock.source.source import Source
from penstock.stats import Clock, Tally
from penstock.stops.stop import Rows, Site, StageFailure, Step, Stop, Upstream, names_of

SOURCE = "source"


@dataclass(frozen=True)
class Road:
    """What runs above the engine; travels to workers by pickle."""

    source: Source
    stops: tuple[Stop, ...]
    seed: int

    @property
    def stages(self) -> list[str]:
        return [SOURCE, *names_of(self.stops)]

    @property
    def holds(self) -> int:
        """How many stops keep samples."""
        return sum(stop.keeps for stop in self.stops)

    @property
    def together(self) -> int:
        """How many samples that take long are best asked for at a time."""
        return max([1, *(stop.together for stop in self.stops)])

    @property
    def global_random(self) -> bool:
        """Something on it may draw from the global generators."""
        return draws_globally(self.source) or any(stop.global_random for stop in self.stops)

    def open(self, clock: Clock = time.perf_counter) -> OpenRoad:
        return OpenRoad(self, clock)


def draws_globally(source: Source) -> bool:
    """A dataset of the user's may augment inside ``__getitem__``."""
    return bool(getattr(source, "random", False))


class OpenRoad:
    """A road in one worker: steps made, joints in place. Not shared between threads."""

    def __init__(self, road: Road, clock: Clock) -> None:
        self.road = road
        self._clock = clock
        self.site = Site(road.seed, Tally(len(road.stages), road.holds))
        get: Upstream = _nothing
        self.rows = Rows()
        """Where the samples that are asked for next will stand; see ``Rows``."""
        sites = [self.site] * len(road.stops)
        sites[-1:] = [replace(self.site, rows=self.rows)]
        self._sites = sites
        steps = [
            self._source_step(),
            *(stop.step(site) for stop, site in zip(road.stops, sites, strict=False)),
        ]
        for number, step in enumerate(steps):
            get = self._joint(number, step, get)
        self.get = get
        """The samples of some keys. Raises StageFailure."""

    def begin(self, *, trial: bool = False) -> None:
        """Start counting afresh: for one task, or for a trial of which nothing is to be kept."""
        for site in self._sites:
            site.trial = trial
        self.site.tally.clear()
        self.site.offers.clear()
        self.rows.clear()

    def _joint(self, number: int, step: Step, upstream: Upstream) -> Upstream:
        tally, clock = self.site.tally, self._clock

        def get(keys: Keys) -> list[Any]:
            started = clock()
            samples = step(keys, upstream)
            tally.seconds[number] += clock() - started
            tally.samples[number] += len(samples)
            return samples

        return get

    def _source_step(self) -> Step:
        source, tally = self.road.source, self.site.tally
        keyed = Keyed(self.road.seed, SOURCE) if draws_globally(source) else None

        def one_by_one(keys: Keys) -> list[Any]:
            samples = []
            for key in keys:
                if keyed is not None:
                    seed_globals(keyed.at(key))
                try:
                    samples.append(source.read([key.index])[0])
                except Exception as error:
                    raise StageFailure(SOURCE, key.index) from error
            return samples

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            if keyed is not None or len(keys) == 1:
                samples = one_by_one(keys)
            else:
                try:
                    samples = source.read(keys.indices)
                except Exception as error:
                    # Read one at a time to find out which it was; the caller does that too.
                    raise StageFailure(SOURCE, keys.indices[0]) from error
            if samples and type(samples[0]) not in (float, int):
                tally.bytes_read += sum([_nbytes(sample) for sample in samples])
            return samples

        return step


def _nothing(keys: Keys) -> list[Any]:
    return []


def _nbytes(sample: Any) -> int:
    """The bytes of a sample's large parts, one level deep: what a source had to read."""
    kind = type(sample)
    if kind is bytes:
        return len(sample)
    if kind is tuple or kind is list or isinstance(sample, Mapping):
        values = sample.values() if isinstance(sample, Mapping) else sample
        return sum([len(v) if type(v) is bytes else getattr(v, "nbytes", 0) for v in values])
    nbytes = getattr(sample, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0


def scope_of(road: Road, *, own_process: bool) -> AbstractContextManager[None]:
    """Keeps the user's own generators untouched where a road draws from them in their process."""
    if own_process or not road.global_random:
        return nullcontext()
    return preserved_globals()
