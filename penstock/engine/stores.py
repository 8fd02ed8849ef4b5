"""The stores of one loader: opened, admitted to in the order of batches, cleared and closed."""

from __future__ import annotations

import uuid
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from penstock.config import disk_dir, memory
from penstock.errors import FingerprintError
from penstock.fingerprint import fingerprint
from penstock.keyed import Key, Keyed, Keys
from penstock.options import Options
from penstock.order import BatchKeys, Generations
from penstock.source.source import Source
from penstock.stats import CacheStats, EchoStats, Held, RefurbishStats
from penstock.stops.cache import Cache
from penstock.stops.echo import Echo
from penstock.stops.refurbish import Refurbish
from penstock.stops.road import Road, scope_of
from penstock.stops.stop import Hold, StageFailure, Stop
from penstock.store import LmdbStore, RunDir, SampleStore, ThreadClaims, memory_store
from penstock.store.admission import Admission
from penstock.store.encoding import Encoding
from penstock.store.shared import SharedStores

Offer = tuple[int, int, int]
"""What a worker put into a store: (which cache, sample, what it occupies)."""


class Caches:
    """Workers put what they miss into the stores at once; which of it stays is decided here, in
    the order in which batches are handed out, and so does not depend on who was faster.

    ``stores`` has the store of every cache, by its number; ``samples`` is how many there are to
    keep.
    """

    def __init__(
        self, stores: Mapping[int, SampleStore], samples: int, commons: SharedStores | None = None
    ) -> None:
        self._admissions: dict[int, Admission] = {}
        self._stores = stores
        self._samples = samples
        self._commons = commons
        # What is had in common is admitted to by several engines.
        self._admitting = nullcontext() if commons is None else commons.admitting
        self._found: dict[int, int] = {}
        self._open = False

    def open(self) -> None:
        """Make the stores ready before any worker asks for them."""
        for number, store in self._stores.items():
            store.open()
            self._admissions[number] = self._admission(number, store)
        self._open = True

    def _admission(self, number: int, store: SampleStore) -> Admission:
        # What an earlier run left in a store on disk counts against its budget.
        found = self._found[number] = store.used if store.persistent and len(store) else 0
        admission = Admission(0 if store.sealed else max(0, store.budget - found))
        if self._commons is None:
            return admission
        return self._commons.admission(store, admission)

    def admit(self, offers: list[Offer]) -> None:
        """Decide on what a batch put in, in its order."""
        refused: defaultdict[int, list[int]] = defaultdict(list)
        with self._admitting:
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
        return all(store.sealed or len(store) >= self._samples for store in self._stores.values())

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
        self._open = False


UNBOUNDED = 1 << 40
"""The budget of a store on disk where none is given: the disk is the limit."""

WEIGHED, ROOMY = 16, 0.85
"""Samples that are prepared to learn how large one is, where refurbish has a budget, and how much
of it they may be taken to fill: so few tell it within a tenth, samples lie there in two generations
while one takes the other's place, and the file is a tenth larger than what it holds."""


class Holds:
    """Opens a store for every stop that keeps samples, and has the road they stand on.

    ``kept`` is how many samples refurbish keeps; where it is not given and there is a budget, a
    few samples are prepared to find out. It decides which samples are always fresh, so it belongs
    to a checkpoint. ``shared`` says that workers are processes of their own; what is cached in
    memory is had in common with others where there are ``commons``. ``stacks`` says that samples
    are copied into batches, and that nobody else sees them.
    """

    def __init__(
        self,
        road: Road,
        options: Options,
        kept: int | None = None,
        *,
        shared: bool,
        commons: SharedStores | None = None,
        stacks: bool = False,
    ) -> None:
        stops: list[Stop] = []
        caches: dict[int, SampleStore] = {}
        self._claims: list[Path] = []
        self._refurbish: Refurbish | None = None
        self._echo: Echo | None = None
        self.renewal: Generations | None = None
        for at, stop in enumerate(road.stops):
            if isinstance(stop, (Cache, Refurbish, Echo)):
                careful = stacks and all(below.careful for below in road.stops[at + 1 :])
                in_memory = isinstance(stop, Echo) or stop.where == "memory"
                stop = replace(stop, lends=careful and in_memory and not shared)
            if isinstance(stop, Cache):
                stop = replace(stop, store=_cache_store(stop, road.source, stops, shared, commons))
                caches[stop.number] = stop.store  # type: ignore[assignment]
            elif isinstance(stop, Refurbish):
                above = replace(road, stops=road.stops[:at])
                if kept is None:
                    kept = _room(stop, above)
                self.renewal = stop.renewal or _renewal(stop, len(road.source), kept, options)
                store = _refurbish_store(stop, above, shared)
                stop = self._refurbish = replace(
                    stop, store=store, renewal=self.renewal, claims=self._new_claims(shared)
                )
                _check_ranks(stop, options)
            elif isinstance(stop, Echo):
                store = memory_store(memory() // 4, shared=shared)
                stop = self._echo = replace(stop, store=store, claims=self._new_claims(shared))
            stops.append(stop)
        self.road = replace(road, stops=tuple(stops))
        self.caches = Caches(caches, len(road.source), commons)
        self._commons = commons
        held = [stop.store for stop in (self._refurbish, self._echo) if stop is not None]
        self._stores = [*caches.values(), *(store for store in held if store is not None)]
        self._started = False

    def _new_claims(self, shared: bool) -> Path | ThreadClaims:
        if not shared:
            return ThreadClaims()
        path = RunDir.current().path / f"{uuid.uuid4().hex}.claims"
        self._claims.append(path)
        return path

    def open(self) -> None:
        """Make the stores ready before any worker asks for them."""
        self.caches.open()
        for store in self._stores:
            store.open()

    def settled(self) -> bool:
        """Whether the next epoch may be begun early, as of now, when the loader starts.

        Not while samples that it would find are just being put in: then it would depend on who
        was faster what is found. For refurbish that is the first epoch.
        """
        started, self._started = self._started, True
        return self.caches.settled() and (self._refurbish is None or started)

    def handed_out(self, plan: BatchKeys) -> None:
        """A batch has been handed out: what nobody needs from now on is let go."""
        for stop in (self._refurbish, self._echo):
            if stop is not None and stop.store is not None:
                outdated = stop.outdated(plan)
                if outdated:
                    stop.store.delete_many(outdated)

    def stats(self, answered: Sequence[tuple[int, int]], factor: float) -> Held:
        """What each of them has to say, given its hits and misses."""
        refurbish = echo = None
        if self._refurbish is not None and self.renewal is not None:
            store = self._refurbish.store
            reused, fresh = answered[self._refurbish.number]
            used = store.used if store is not None else 0
            refurbish = RefurbishStats(fresh, reused, self.renewal.kept, used)
        if self._echo is not None:
            copies, fresh = answered[self._echo.number]
            echo = EchoStats(fresh, fresh + copies, factor)
        return Held(self.caches.stats(answered), refurbish, echo)

    def close(self) -> None:
        self.caches.close()
        for store in self._stores:
            if store.persistent:
                store.close()
            elif self._commons is not None and self._commons.release(store):
                continue
            else:
                store.destroy()
        for file in self._claims:
            file.unlink(missing_ok=True)


def _cache_store(
    stop: Cache, source: Source, above: Sequence[Stop], shared: bool, commons: SharedStores | None
) -> SampleStore:
    overshoot = (1 << 30) + stop.budget // 8  # what workers put in before it is decided on
    if stop.where == "memory":

        def make() -> SampleStore:
            return memory_store(stop.budget, overshoot, shared=shared)

        if commons is None:
            return make()
        same = fingerprint(_made_of(stop, source, above))
        return commons.store(f"{same} {shared} {stop.lends}", make)
    made_of = _made_of(stop, source, above)
    return _disk_store(stop.where, stop.budget, fingerprint(made_of), overshoot)


def _refurbish_store(stop: Refurbish, above: Road, shared: bool) -> SampleStore:
    # A budget bounds how many samples are kept; without one the store takes what there is.
    if stop.where == "memory":
        return memory_store(stop.budget or memory(), shared=shared)
    made_of = _made_of(stop, above.source, above.stops)
    identity = fingerprint(("refurbish", made_of, above.seed, stop.encode))
    return _disk_store(stop.where, stop.budget or UNBOUNDED, identity)


def _disk_store(where: str, budget: int, identity: str, overshoot: int | None = None) -> LmdbStore:
    root = disk_dir() / "stores" if where == "disk" else Path(where)
    return LmdbStore(
        root / identity, budget, identity=identity, persistent=True, overshoot=overshoot
    )


def _renewal(stop: Refurbish, samples: int, kept: int, options: Options) -> Generations:
    return Generations(samples, int(stop.reuse), kept, options.seed)


def _made_of(stop: Cache | Refurbish, source: Source, above: Sequence[Stop]) -> object:
    try:
        return source.identity(), [one.fingerprint() for one in above]
    except FingerprintError as error:
        raise FingerprintError(
            f"{stop.name}(where={stop.where!r}) outlives this run and must know what it holds: "
            f"{error}"
        ) from error


def _room(stop: Refurbish, above: Road) -> int:
    """How many samples the budget of a refurbish has room for, judged by a few of them."""
    samples = len(above.source)
    if stop.budget is None:
        return samples
    indices = (
        Keyed(above.seed, "refurbish/room")
        .fresh(Key(0))
        .choice(samples, min(samples, WEIGHED), replace=False)
    )
    encoding = Encoding(stop.encode)
    bare = replace(above, stops=tuple(one for one in above.stops if not isinstance(one, Hold)))
    costs = []
    with scope_of(bare, own_process=False):
        road = bare.open()
        for index in indices.tolist():
            try:
                (sample,) = road.get(Keys(0, [index]))
            except StageFailure:
                continue  # a bad sample is reported when its turn comes
            costs.append(LmdbStore.cost(encoding.packed(sample).nbytes, tagged=True))
    if not costs:
        return samples
    return min(samples, int(ROOMY * stop.budget * len(costs) / sum(costs)))


def _check_ranks(stop: Refurbish, options: Options) -> None:
    alone = options.share is None
    if alone and options.world > 1 and stop.where == "memory" and stop.reuse != 1:
        warnings.warn(
            f'refurbish(where="memory") keeps samples for this process alone, and with '
            f"{options.world} ranks a sample comes back to the same one only now and then. Give "
            'the loaders share="run-1", or one place to share: where="/dev/shm/run-1".',
            RuntimeWarning,
            stacklevel=4,
        )
