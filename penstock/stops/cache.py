"""The cache stop: admits until its budget is full and never evicts (CoorDL's MinIO).

Every epoch after the first hits exactly what the cache holds, where an LRU of the same size would
throw out each sample just before it comes round again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from penstock.config import show_size, size
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Keys
from penstock.serialize import pack
from penstock.stats import CacheStats, Held
from penstock.stops.hold import Hold, Keeper, Opening, lent, taken
from penstock.stops.placement import first_random
from penstock.stops.stop import Site, Step, Stop, Upstream
from penstock.store import SampleStore, memory_store
from penstock.store.admission import Admission
from penstock.store.shared import SharedStores

SMALLEST = 1000
"""The smallest budget in bytes that is not taken for a mistake: ``cache(8)`` means 8 bytes."""


@dataclass(frozen=True)
class Cache(Hold):
    """Keeps what comes from above, by index, within ``budget`` bytes."""

    transparent: ClassVar[bool] = True
    by_index: ClassVar[bool] = True

    budget: int
    where: str = "memory"
    number: int = 0
    lends: bool = False
    store: SampleStore | None = None

    @property
    def name(self) -> str:
        return "cache"

    @property
    def note(self) -> str:
        return f"{show_size(self.budget)}, {self.where}"

    @property
    def written(self) -> str:
        return f".cache({show_size(self.budget)}, where={self.where!r})"

    @property
    def in_memory(self) -> bool:
        return self.where == "memory"

    def fingerprint(self) -> str | None:
        return None

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        """A cached sample never changes again, so nothing random may stand above."""
        if random_source:
            raise PipelineError(
                "cache() stands below a dataset that may be random: a cached sample would never "
                "change again. If the dataset is not random, say so with from_dataset(..., "
                "random=False); if it is, take the augmentation out of it and put it below cache() "
                "as a map.",
                code="random-above-cache",
            )
        stop = first_random(above)
        if stop is not None:
            raise PipelineError(
                f"cache() stands below {stop.name} (a random map): a cached sample would never "
                f"change again. Use refurbish(reuse=...) here, or move cache() above {stop.name}; "
                "or, if the map is not random, say so with map(..., random=False)."
            )

    def opened(self, opening: Opening) -> CacheKeeper:
        stop = replace(self, number=opening.number, lends=opening.lends)
        store = stop._open_store(opening)
        return CacheKeeper(replace(stop, store=store), store, opening)

    def _open_store(self, opening: Opening) -> SampleStore:
        overshoot = (1 << 30) + self.budget // 8  # what workers put in before it is decided on
        if not self.in_memory:
            return opening.disk_store(self.name, self.where, self.budget, overshoot=overshoot)

        def make() -> SampleStore:
            return memory_store(self.budget, overshoot, shared=opening.shared)

        if opening.shared_stores is None:
            return make()
        same = fingerprint(opening.made_of())
        return opening.shared_stores.store(f"{same} {opening.shared} {self.lends}", make)

    def tried(self, store: SampleStore, number: int, samples: int, seed: int) -> Cache:
        return replace(self, number=number, store=store)

    def hit_share(self, room: float) -> float | None:
        return room

    def step(self, site: Site) -> Step:
        store, number, tally, lends = self.store, self.number, site.tally, self.lends
        if store is None:
            raise PipelineError("cache() has no store: a pipeline runs only through a loader.")

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            before = store.corrupt
            frames = store.get_many(keys.indices)
            tally.corrupt += store.corrupt - before
            missing = [i for i, frame in enumerate(frames) if frame is None]
            tally.hits[number] += len(frames) - len(missing)
            tally.misses[number] += len(missing)
            samples = [None if frame is None else taken(frame) for frame in frames]
            if not missing:
                return samples
            wanted = keys.pick(missing)
            fresh = upstream(wanted)
            for i, sample in zip(missing, fresh, strict=True):
                samples[i] = sample
            if not store.sealed and not site.trial:
                packed: list[Any] = [_exact(sample, lends) for sample in fresh]
                kept = store.put_many(list(zip(wanted.indices, packed, strict=True)))
                for index, frame, put in zip(wanted.indices, packed, kept, strict=True):
                    if put:
                        site.offers.append((number, index, store.cost(frame.nbytes)))
            return samples

        return step


class CacheKeeper(Keeper):
    """Workers put what they miss into the store at once. Which of it stays is decided here, in the
    order in which batches are handed out, so it does not depend on which worker was faster."""

    def __init__(self, stop: Cache, store: SampleStore, opening: Opening) -> None:
        super().__init__(stop, store)
        self._samples = opening.samples
        self._shared: SharedStores | None = opening.shared_stores
        # Several engines may admit to a store of the node.
        self._admitting = nullcontext() if self._shared is None else self._shared.admitting
        self._admission: Admission | None = None
        self._found = 0

    def open(self) -> None:
        super().open()
        store = self.store
        # What an earlier run left in a store on disk counts against its budget.
        self._found = store.used if store.persistent and len(store) else 0
        admission = Admission(0 if store.sealed else max(0, store.budget - self._found))
        if self._shared is not None:
            admission = self._shared.admission(store, admission)
        self._admission = admission

    def admit(self, offers: Sequence[tuple[int, int]]) -> None:
        admission = self._admission
        if admission is None:
            return
        with self._admitting:
            refused = [index for index, cost in offers if not admission.offer(index, cost)]
        if refused:
            if not self.store.sealed:
                self.store.seal()
            self.store.delete_many(refused)

    def discard(self, indices: Sequence[int]) -> None:
        admission = self._admission
        dropped = [index for index in indices if admission is None or index not in admission]
        if dropped:
            self.store.delete_many(dropped)

    def settled(self, *, restarted: bool) -> bool:
        """Whether nothing more will be admitted: the cache is full, or holds every sample."""
        return self.store.sealed or len(self.store) >= self._samples

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        store = self.store
        if self._admission is None:
            mine = CacheStats(hits, misses, 0, 0, store.budget, False)
        else:
            used = self._found + self._admission.used
            mine = CacheStats(hits, misses, len(store), used, store.budget, store.sealed)
        return held._replace(caches=(*held.caches, mine))

    def close(self) -> None:
        self._admission = None
        if self._shared is not None and not self.store.persistent:
            self._shared.release(self.store)
        else:
            super().close()


def make_cache(budget: int | str, where: str) -> Cache:
    """A cache stop, checked."""
    nbytes = size(budget, "cache()")
    if 0 < nbytes < SMALLEST:
        raise PipelineError(
            f"cache() got {budget!r}, a budget of {nbytes} bytes, which holds no sample. Give a "
            'size with its unit, such as "8GB", or a number of bytes.'
        )
    return Cache(nbytes, where)


def _exact(sample: Any, lends: bool) -> Any:
    """As it is put into the store, at the same price in any: what is admitted depends on that."""
    packed = pack(sample)
    found = lent(sample) if lends else None
    if found is None:
        return packed
    found.nbytes = packed.nbytes
    return found
