"""The caches of one loader: opens their stores, and admits into them in the order of batches."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config import disk_dir
from penstock.errors import FingerprintError
from penstock.fingerprint import fingerprint
from penstock.meter import CacheStats
from penstock.order import Admission
from penstock.pipeline import Pipeline
from penstock.source.source import Source
from penstock.stops.cache import Cache
from penstock.stops.stop import Stop
from penstock.store import RunDir, Store

Offer = tuple[int, int, int]
"""What a worker put into a store: (which cache, sample, what it occupies)."""


class Caches:
    """Workers put what they miss into the stores at once; which of it stays is decided here, in
    the order in which batches are handed out, and so does not depend on who was faster."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self._admissions: dict[int, Admission] = {}
        self._stores: dict[int, Store] = {}
        self._found: dict[int, int] = {}
        self._open = False
        road = pipeline.road(seed)
        stops: list[Stop] = []
        for stop in road.stops:
            if isinstance(stop, Cache):
                store = _store(stop, road.source, tuple(stops))
                self._stores[stop.number] = store
                stop = replace(stop, store=store)
            stops.append(stop)
        self.road = replace(road, stops=tuple(stops))

    def open(self) -> None:
        """Make the stores ready before any worker asks for them."""
        for number, store in self._stores.items():
            store.open()
            # What an earlier run left in a store on disk counts against its budget.
            self._found[number] = store.used if len(store) else 0
            room = 0 if store.sealed else max(0, store.budget - self._found[number])
            self._admissions[number] = Admission(room)
        self._open = True

    def admit(self, offers: list[Offer]) -> None:
        """Decide on what a batch put in, in its order."""
        refused: defaultdict[int, list[int]] = defaultdict(list)
        for number, index, cost in offers:
            if not self._admissions[number].offer(index, cost):
                refused[number].append(index)
        for number, indices in refused.items():
            store = self._stores[number]
            if not store.sealed:
                store.seal()
            store.delete_many(indices)

    def discard(self, offers: list[Offer]) -> None:
        """Take out what a batch put in that nobody will see, unless another put it in too."""
        dropped: defaultdict[int, list[int]] = defaultdict(list)
        for number, index, _ in offers:
            if index not in self._admissions[number]:
                dropped[number].append(index)
        for number, indices in dropped.items():
            self._stores[number].delete_many(indices)

    def settled(self) -> bool:
        """Nothing more will be admitted: each cache is full, or holds all there is."""
        samples = len(self.road.source)
        return all(store.sealed or len(store) >= samples for store in self._stores.values())

    def stats(self, answered: Sequence[tuple[int, int]]) -> tuple[CacheStats, ...]:
        """What each cache answered, given hits and misses of all holds, and what it has."""
        found = []
        for number, store in self._stores.items():
            hits, misses = answered[number]
            if self._open:
                used = self._found[number] + self._admissions[number].used
                one = CacheStats(hits, misses, len(store), used, store.budget, store.sealed)
            else:
                one = CacheStats(hits, misses, 0, 0, store.budget, False)
            found.append(one)
        return tuple(found)

    def close(self) -> None:
        for store in self._stores.values():
            if store.persistent:
                store.close()
            else:
                store.destroy()
        self._open = False


def _store(stop: Cache, source: Source, above: tuple[Stop, ...]) -> Store:
    if stop.where == "memory":
        place = RunDir.current().path / uuid.uuid4().hex
        return Store(place, stop.budget, overshoot=_overshoot(stop.budget))
    try:
        made_of = (source.identity(), [stop.fingerprint() for stop in above])
    except FingerprintError as error:
        raise FingerprintError(
            f"cache(where={stop.where!r}) outlives this run and must know what it holds: {error}"
        ) from error
    identity = fingerprint(made_of)
    root = disk_dir() / "stores" if stop.where == "disk" else Path(stop.where)
    return Store(
        root / identity,
        stop.budget,
        identity=identity,
        persistent=True,
        overshoot=_overshoot(stop.budget),
    )


def _overshoot(budget: int) -> int:
    """Room for what workers put in before it is decided that it stays: a few batches."""
    return (1 << 30) + budget // 8
