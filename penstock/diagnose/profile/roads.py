"""A road with probes on it: run a few samples through, and know what each stage cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from penstock.diagnose.profile.batching import Batching
from penstock.diagnose.profile.probes import (
    Book,
    Clocks,
    Drawn,
    Probe,
    Spent,
    timed_source,
    timed_stop,
)
from penstock.keyed import Keys
from penstock.order import Generations
from penstock.source.source import Source
from penstock.stats import Tally
from penstock.stops.cache import Cache
from penstock.stops.echo import Echo
from penstock.stops.refurbish import Refurbish
from penstock.stops.road import SOURCE, Road
from penstock.stops.stop import Hold, Site, Step, Stop, names_of
from penstock.store import SampleStore, memory_store

ROOM = 256 << 20
"""Bytes that the store of a cache may hold during a profile before it is emptied."""


class _Missed(Exception):
    """A cache was asked for what it should hold, and does not."""


def _missed(keys: Keys) -> list[Any]:
    raise _Missed


class ProbedRoad:
    """A source and stops with a probe between them, in this thread.

    Stops that keep samples get stores of their own in memory, so that nothing of the user's is
    filled or read; ``shared`` ones where a loader would have workers in processes of their own.
    """

    def __init__(
        self,
        source: Source,
        stops: Sequence[Stop],
        seed: int,
        clocks: Clocks,
        *,
        shared: bool,
    ) -> None:
        self.stops = tuple(stops)
        self.names = [SOURCE, *names_of(self.stops)]
        self.book = Book(len(self.names), clocks)
        self.stores: dict[int, SampleStore] = {}
        self.kept: dict[int, float] = {}
        """Bytes that a sample takes in each store."""
        self._source = source
        opened: list[Stop] = []
        self._hits: dict[int, Step] = {}
        for stage, stop in enumerate(self.stops, start=1):
            if isinstance(stop, Hold):
                self.stores[stage] = memory_store(2 * ROOM, shared=shared)
                stop = _opened(stop, self.stores[stage], len(source), seed)
                self._hits[stage] = stop.step(Site(seed, Tally(1, stop.number + 1)))
            # Nothing stands below the last stop, which may write straight into the batch: ``get``
            # is its probe.
            opened += [Probe(stage - 1, self.book), timed_stop(stop, stage, self.book)]
        self._road = Road(timed_source(source, self.book), tuple(opened), seed).open(clocks.wall)

    def get(
        self, indices: Sequence[int], batching: Batching | None = None, *, keep: bool = False
    ) -> list[Any]:
        """The samples, on their way into a batch; the book then has what they cost.

        Raises StageFailure.
        """
        self.book.clear()
        self.book.keep = keep
        self._road.begin()
        if batching is not None:
            batching.aim(self._road.rows, len(indices))
        keys = Keys(0, list(indices))
        started = self.book.clocks.now()
        samples = self._road.get(keys)
        self.book.saw(len(self.stops), self.book.clocks.now().minus(started), samples)
        return samples

    def hits(self, indices: Sequence[int]) -> dict[int, Spent]:
        """What asking each cache again for these costs, by stage, where it holds them all."""
        now = self.book.clocks.now
        keys = Keys(0, list(indices))
        found = {}
        for stage, step in self._hits.items():
            started = now()
            try:
                step(keys, _missed)
            except _Missed:
                continue
            found[stage] = now().minus(started)
        return found

    def restart(self, indices: Sequence[int]) -> None:
        """As if these had never been asked for."""
        for stage, store in self.stores.items():
            only = isinstance(self.stops[stage - 1], Cache)
            store.delete_many(list(indices) if only else store.keys())
        if isinstance(self._source, Drawn):
            self._source.restart()

    def tidy(self) -> None:
        """Keep the stores small."""
        for stage, store in self.stores.items():
            used, held = store.used, len(store)
            if held:
                self.kept[stage] = used / held
            if used > ROOM:
                store.delete_many(store.keys())

    def close(self) -> None:
        for store in self.stores.values():
            store.destroy()
        if isinstance(self._source, Drawn):
            self._source.restart()


def _opened(stop: Hold, store: SampleStore, samples: int, seed: int) -> Hold:
    """A stop that keeps samples, with a store of its own and every sample in its first version."""
    if isinstance(stop, Cache):
        return replace(stop, store=store)
    if isinstance(stop, Refurbish):
        return replace(stop, store=store, renewal=Generations(samples, 2, samples, seed))
    if isinstance(stop, Echo):
        return replace(stop, store=store)
    raise TypeError(f"{stop.name} is not known to keep samples")


Round = tuple[Spent, int]
"""What a stage took in one round, and for how many samples."""


class Ledger:
    """What the rounds of one road cost, stage by stage; the last stage is the batch.

    ``parts`` has (time, how often) by (stage, part), over all rounds.
    """

    def __init__(self, stages: int) -> None:
        self.rounds: list[list[Round]] = [[] for _ in range(stages)]
        self.hits: list[list[Round]] = [[] for _ in range(stages)]
        self.parts: dict[tuple[int, str], Round] = {}
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._samples = 0
        self._spent = [Spent()] * len(self.rounds)
        self._hits: dict[int, Round] = {}

    def add(self, book: Book, samples: int, batching: Spent) -> None:
        """What a few samples cost."""
        above = Spent()
        for stage, spent in enumerate(book.spent):
            self._spent[stage] = self._spent[stage].plus(spent.minus(above))
            above = spent
        self.batched(batching)
        for name, part in book.parts.items():
            self.parts[name] = _sum(self.parts.get(name), part)
        self._samples += samples

    def batched(self, spent: Spent) -> None:
        self._spent[-1] = self._spent[-1].plus(spent)

    def hit(self, stage: int, spent: Spent, samples: int) -> None:
        self._hits[stage] = _sum(self._hits.get(stage), (spent, samples))

    def end(self) -> None:
        """End the round; one without samples is none."""
        if not self._samples:
            return
        for stage, spent in enumerate(self._spent):
            self.rounds[stage].append((spent, self._samples))
        for stage, hit in self._hits.items():
            self.hits[stage].append(hit)

    def take(self, stage: int, other: Ledger, there: int) -> None:
        """Count what another road measured of the same stop as measured here."""
        self.rounds[stage] += other.rounds[there]
        self.hits[stage] += other.hits[there]
        for (at, name), part in other.parts.items():
            if at == there:
                self.parts[stage, name] = _sum(self.parts.get((stage, name)), part)


def pooled(roads: Sequence[ProbedRoad], ledgers: Sequence[Ledger]) -> list[Ledger]:
    """The ledgers, with one figure for a stop that stands on several roads: it is the same work,
    and what the machine did meanwhile is no difference between the roads.

    The source is the exception: the second road to read a sample finds it in the system's memory,
    so the first reading alone tells what reading costs.
    """
    out = []
    for mine in roads:
        made = Ledger(len(mine.names) + 1)
        for road, ledger in zip(roads, ledgers, strict=True):
            there = {id(stop): stage for stage, stop in enumerate(road.stops, start=1)}
            for stage, stop in enumerate(mine.stops, start=1):
                if id(stop) in there:
                    made.take(stage, ledger, there[id(stop)])
            made.take(0, ledger, 0)
            made.take(len(mine.stops) + 1, ledger, len(road.stops) + 1)
        out.append(made)
    return out


def middle(rounds: Sequence[Round]) -> Spent:
    """Seconds a sample in the median round: what ran beside it for a while is not seen."""
    if not rounds:
        return Spent()
    return Spent(
        max(0.0, median(spent.wall / samples for spent, samples in rounds)),
        max(0.0, median(spent.cpu / samples for spent, samples in rounds)),
    )


def _sum(one: Round | None, other: Round) -> Round:
    return other if one is None else (one[0].plus(other[0]), one[1] + other[1])
