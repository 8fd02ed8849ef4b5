"""The refurbish stop: what was partly augmented is kept and used several times (Revamper).

Everything above it is the partial augmentation, keyed by a sample's generation; everything below
it is the final one, keyed by the epoch as ever. Which generation an epoch uses is a pure function,
so losing what is kept costs time and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.config import show_size, size
from penstock.encoding import Encoding
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.order import BatchKeys, Renewal
from penstock.random import Keys
from penstock.stops.stop import Hold, Site, StageFailure, Step, Upstream, place
from penstock.store import AnyStore, Claims

Reuse = int | Literal["auto"]

_NOTHING = object()


@dataclass(frozen=True)
class Refurbish(Hold):
    """Uses what comes from above ``reuse`` times.

    ``budget`` bounds what is kept. ``store``, ``renewal`` and ``claims``, the file whose locks say
    who prepares what, are set when a loader opens it.
    """

    reuse: Reuse
    budget: int | None = None
    where: str = "memory"
    encode: str = "raw"
    number: int = 0
    store: AnyStore | None = None
    renewal: Renewal | None = None
    claims: Path | None = None

    @property
    def name(self) -> str:
        return "refurbish"

    @property
    def note(self) -> str:
        times = "used as often as pays" if self.reuse == "auto" else f"used {self.reuse} times"
        room = "as many as there is room for" if self.budget is None else show_size(self.budget)
        return f"{times}, {room}, {self.where}"

    @property
    def written(self) -> str:
        return f".refurbish(reuse={self.reuse!r}, where={self.where!r})"

    def fingerprint(self) -> str | None:
        # Not the budget: how many samples it keeps stands in a checkpoint as a number.
        how = self.encode if Encoding(self.encode).lossy else "exact"
        return fingerprint(("refurbish", self.reuse, how))

    def step(self, site: Site) -> Step:
        store, renewal, number, tally = self.store, self.renewal, self.number, site.tally
        if store is None or renewal is None:
            raise PipelineError("refurbish() has no store: a pipeline runs only through a loader.")
        encoding = Encoding(self.encode)
        generation_of, keeps = renewal.generation, renewal.keeps
        reused = renewal.reuse > 1
        claims = Claims(self.claims)

        def look(index: int, generation: int) -> Any:
            before = store.corrupt
            frame = store.get_tagged([place(index, generation)], [generation])[0]
            tally.corrupt += store.corrupt - before
            return _NOTHING if frame is None else encoding.decode(frame)

        def keep(index: int, generation: int, fresh: Any) -> Any:
            value = encoding.packed(fresh)
            store.put_tagged([(place(index, generation), generation, value)])
            # A sample must not tell whether it was kept: where keeping changes it, it always does.
            return encoding.decode(value.tobytes()) if encoding.lossy else fresh

        def found(index: int, generation: int) -> Any:
            try:
                return look(index, generation)
            except Exception as error:
                raise StageFailure(self.name, index) from error

        def fresh(index: int, generation: int, upstream: Upstream) -> Any:
            tally.misses[number] += 1
            return upstream(Keys(generation, [index]))[0]

        def renewed(index: int, generation: int, upstream: Upstream) -> Any:
            # The next epoch may ask for what this one is just making: then it is worth waiting for.
            with claims.claim(place(index, generation)):
                sample = found(index, generation)
                if sample is not _NOTHING:
                    tally.hits[number] += 1
                    return sample
                sample = fresh(index, generation, upstream)
                try:
                    return keep(index, generation, sample)
                except Exception as error:
                    raise StageFailure(self.name, index) from error

        def one(index: int, epoch: int, upstream: Upstream) -> Any:
            generation = generation_of(index, epoch)
            if not reused or not keeps(index):
                return fresh(index, generation, upstream)
            sample = found(index, generation)
            if sample is not _NOTHING:
                tally.hits[number] += 1
                return sample
            if site.trial:
                return fresh(index, generation, upstream)
            return renewed(index, generation, upstream)

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            # One at a time: what is worth keeping takes longer than a look into the store.
            return [one(index, keys.epoch, upstream) for index in keys.indices]

        return step

    def outdated(self, plan: BatchKeys) -> list[int]:
        """The places of generations that nobody needs once this batch is handed out."""
        renewal = self.renewal
        if renewal is None or renewal.reuse == 1 or plan.epoch == 0:
            return []
        now = renewal.generations(plan.indices, plan.epoch)
        before = renewal.generations(plan.indices, plan.epoch - 1)
        renewed = np.flatnonzero(now != before)
        return [
            place(index, generation)
            for index, generation in zip(
                plan.indices[renewed].tolist(), before[renewed].tolist(), strict=True
            )
            if renewal.keeps(index)
        ]


def make_refurbish(
    reuse: Any, budget: int | str | None, where: str, encode: str, number: int
) -> Refurbish:
    """A refurbish stop, checked."""
    if reuse != "auto" and (isinstance(reuse, bool) or not isinstance(reuse, int) or reuse < 1):
        raise PipelineError(
            f"refurbish() got reuse={reuse!r}; give how often a sample is used, a whole number "
            'from 1 on, or "auto".'
        )
    Encoding(encode)
    budget = None if budget is None else size(budget, "refurbish()")
    return Refurbish(reuse, budget, where, encode, number)
