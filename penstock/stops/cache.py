"""The cache stop: admits until its budget is full and never evicts (CoorDL's MinIO).

Every epoch after the first hits exactly what the cache holds, where an LRU of the same size would
throw out each sample just before it comes round again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config import show_size
from penstock.errors import PipelineError
from penstock.keyed import Keys
from penstock.serialize import pack
from penstock.stops.stop import Hold, Site, Step, Upstream, lent, taken
from penstock.store import SampleStore


@dataclass(frozen=True)
class Cache(Hold):
    """Keeps what comes from above, by index.

    ``store`` is ``None`` in a pipeline and set when a loader opens it.
    """

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

    def fingerprint(self) -> str | None:
        return None

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


def _exact(sample: Any, lends: bool) -> Any:
    """As it is put into the store, at the same price in any: what is admitted depends on that."""
    packed = pack(sample)
    found = lent(sample) if lends else None
    if found is None:
        return packed
    found.nbytes = packed.nbytes
    return found
