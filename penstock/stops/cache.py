"""The cache stop: admits samples until its budget is full, and never evicts (CoorDL's MinIO).

Every epoch after the first hits exactly the samples that the cache holds. An LRU cache of the same
size would evict each sample just before it is needed again.
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
from penstock.stats import CacheStats, Held
from penstock.stops.hold import Found, Hold, Keeper, Opening, from_stored, lend
from penstock.stops.stop import Step, StepContext, Stop, Upstream
from penstock.store import SampleStore, memory_store
from penstock.store.admission import Admission
from penstock.store.partitioned import Division
from penstock.store.plain import pack_sample
from penstock.store.shared import SharedStores

SMALLEST = 1000
"""A smaller budget, in bytes, is taken for a mistake: ``cache(8)`` is 8 bytes, not 8 GB."""


@dataclass(frozen=True)
class Cache(Hold):
    """Keeps the samples from above, by index, within ``budget`` bytes."""

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
    def as_call(self) -> str:
        return f".cache({show_size(self.budget)}, where={self.where!r})"

    @property
    def in_memory(self) -> bool:
        return self.where == "memory"

    def fingerprint(self) -> str | None:
        return None

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        """Raise PipelineError if the source or a stop above is random: a cached sample is fixed."""
        if random_source:
            raise PipelineError(
                "cache() stands below a dataset that may be random: a cached sample would never "
                "change again. If the dataset is not random, give from_dataset(..., random=False). "
                "If it augments samples, move the augmentation out of the dataset into a map below "
                "cache().",
                code="random-above-cache",
            )
        stop = next((stop for stop in above if stop.random), None)
        if stop is not None:
            raise PipelineError(
                f"cache() stands below {stop.name} (a random map): a cached sample would never "
                f"change again. Use refurbish(reuse=...) here, or move cache() above {stop.name}. "
                f"If {stop.name} is not random, give map(..., random=False)."
            )

    def make_keeper(self, opening: Opening) -> Keeper:
        stop = replace(self, number=opening.number, lends=opening.lends)
        store = stop._open_store(opening)
        return CacheKeeper(replace(stop, store=store), store, opening)

    def _open_store(self, opening: Opening) -> SampleStore:
        # Room for samples that workers put in before the keeper has decided on them.
        overshoot = (1 << 30) + self.budget // 8

        def in_memory() -> SampleStore:
            return memory_store(self.budget, overshoot, shared=opening.shared)

        def make() -> SampleStore:
            if self.in_memory:
                return in_memory()
            return opening.disk_store(self.name, self.where, self.budget, overshoot=overshoot)

        shared_stores = opening.shared_stores
        if shared_stores is None or not (self.in_memory or shared_stores.divides):
            return make()
        return shared_stores.store(
            fingerprint(opening.made_of()),
            f"{'processes' if opening.shared else 'threads'} {self.where}",
            make,
            lends=self.lends,
            samples=opening.samples,
            make_arrivals=in_memory,
        )

    def for_trial(self, store: SampleStore, number: int, samples: int, seed: int) -> Cache:
        return replace(self, number=number, store=store)

    def hit_share(self, room: float) -> float | None:
        return room

    def step(self, context: StepContext) -> Step:
        access = self.access(context)

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            found = access.find(keys)
            samples, missing = found.samples, found.missing
            access.count(len(samples) - len(missing), len(missing))
            if missing:
                wanted = keys.pick(missing)
                fresh = upstream(wanted)
                for i, sample in zip(missing, fresh, strict=True):
                    samples[i] = sample
                access.keep(wanted.indices, (), fresh)
            return samples

        return step

    def lent(self, context: StepContext) -> CacheAccess | None:
        return self.access(context) if self.lends and self.in_memory else None

    def access(self, context: StepContext) -> CacheAccess:
        """The samples of the cache, for one worker."""
        if self.store is None:
            raise PipelineError(
                "cache() has no store, because the pipeline was not opened by a loader: a pipeline "
                "runs only through a loader. Iterate pipeline.loader()."
            )
        return CacheAccess(self.store, self.number, self.lends, context)


class CacheAccess:
    """Finds samples in the store of a cache, and puts in the ones that were missing."""

    def __init__(self, store: SampleStore, number: int, lends: bool, context: StepContext) -> None:
        self._store = store
        self._number = number
        self._lends = lends
        self._context = context

    def find(self, keys: Keys) -> Found:
        """See ``Access.find``."""
        store = self._store
        before = store.corrupt
        samples: list[Any] = []
        missing: list[int] = []
        unreadable: list[int] = []
        for i, frame in enumerate(store.get_many(keys.indices)):
            samples.append(None)
            try:
                if frame is None:
                    missing.append(i)
                else:
                    samples[i] = from_stored(frame, store)
            except ValueError:
                missing.append(i)
                unreadable.append(keys.indices[i])
        if unreadable:
            store.drop_unreadable(unreadable)
        self._context.tally.corrupt += store.corrupt - before
        return Found(samples, missing, [] if store.sealed else missing)

    def count(self, hits: int, misses: int) -> None:
        """See ``Access.count``."""
        self._context.tally.hits[self._number] += hits
        self._context.tally.misses[self._number] += misses

    def keep(self, indices: Sequence[int], versions: Sequence[int], fresh: Sequence[Any]) -> None:
        """See ``Access.keep``; nothing is kept if the store is full."""
        store = self._store
        if store.sealed or self._context.trial:
            return
        values: list[Any] = [_stored_at_packed_size(sample, self._lends) for sample in fresh]
        stored = store.put_many(list(zip(indices, values, strict=True)))
        for index, value, put in zip(indices, values, stored, strict=True):
            if put:
                offer = (self._number, index, store.cost(value.nbytes))
                self._context.offers.append(offer)


class CacheKeeper(Keeper):
    """Decides which samples stay in the cache.

    Workers put every missed sample into the store at once. The keeper admits or removes it in the
    order in which batches are handed out, so the result does not depend on the speed of workers.
    """

    # The next epoch does not begin before the last sample is admitted, and the store has room for
    # the samples that are not yet.
    may_lag: ClassVar[bool] = True

    def __init__(self, stop: Cache, store: SampleStore, opening: Opening) -> None:
        super().__init__(stop, store)
        self._samples = opening.samples
        self._shared: SharedStores | None = opening.shared_stores
        # In a node, several engines may admit samples to one store.
        self._admitting = nullcontext() if self._shared is None else self._shared.admitting
        self._admission: Admission | None = None
        self._division = None if self._shared is None else self._shared.division(store)
        self._used_before = 0

    @property
    def division(self) -> Division | None:
        return self._division

    def open(self) -> None:
        super().open()
        store = self.store
        # Samples that an earlier run left in a store on disk count against its budget.
        self._used_before = store.used if store.persistent and len(store) else 0
        full = self._used_before >= store.budget > 0
        if full and not store.sealed and self._division is None:
            # Workers then do not put in samples that would be removed again, and perhaps with them
            # the same samples that a run with a larger budget has put in.
            store.seal()
        admission = Admission(0 if store.sealed else max(0, store.budget - self._used_before))
        if self._division is not None and self._used_before:
            admission.restore(store.keys())
        if self._shared is not None:
            admission = self._shared.admission(store, admission)
        if self._division is not None:
            self._division.open(admission)
        self._admission = admission

    def admit(self, offers: Sequence[tuple[int, int]], epoch: int) -> None:
        admission = self._admission
        if admission is None:
            return
        division = self._division
        with self._admitting:
            if division is None:
                refused = admission.offer_many(offers)
                full = bool(refused)
            else:
                refused = division.admit(offers)
                full = division.full
        if full and not self.store.sealed:
            self.store.seal()
        if refused:
            self.store.delete_many(refused)

    def discard(self, indices: Sequence[int]) -> None:
        admission = self._admission
        dropped = [index for index in indices if admission is None or index not in admission]
        if dropped:
            self.store.delete_many(dropped)

    def lost(self, indices: Sequence[int]) -> None:
        # A store that outlives the run holds samples of earlier runs and of other ranks, which
        # look the same. What a dead worker put there counts from the next run on.
        if not self.store.persistent:
            self.discard(indices)

    def settled(self, *, restarted: bool) -> bool:
        """Whether nothing more will be admitted: the cache is full, or holds every sample."""
        return self.store.sealed or len(self.store) >= self._samples

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        store, admission = self.store, self._admission  # another thread may close the loader
        if admission is None:
            mine = CacheStats(hits, misses, 0, 0, store.budget, False)
        else:
            used = self._used_before + admission.used
            mine = CacheStats(hits, misses, len(store), used, store.budget, store.sealed)
        return held._replace(caches=(*held.caches, mine))

    def close(self) -> None:
        self._admission = None
        if self._shared is None or not self._shared.release(self.store):
            super().close()


def make_cache(budget: int | str, where: str) -> Cache:
    """A cache stop from the arguments of ``Pipeline.cache``. Raises PipelineError."""
    nbytes = size(budget, "cache()")
    if 0 < nbytes < SMALLEST:
        raise PipelineError(
            f"cache() got {budget!r}, a budget of {nbytes} bytes, which is too small for a sample. "
            'Give a size with its unit, such as "8GB", or a number of bytes.'
        )
    return Cache(nbytes, where)


def _stored_at_packed_size(sample: Any, lends: bool) -> Any:
    """The value for the store; a lent sample has the size that it would have if packed.

    So the same samples are admitted whether they are lent or not.
    """
    packed = pack_sample(sample)
    lent = lend(sample) if lends else None
    if lent is None:
        return packed
    lent.nbytes = packed.nbytes
    return lent
