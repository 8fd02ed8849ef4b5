"""The refurbish stop: what was partly augmented is kept and used several times (Revamper).

Everything above it is the partial augmentation, keyed by a sample's generation; everything below
it is the final one, keyed by the epoch as ever. Which generation an epoch uses is a pure function,
so losing what is kept costs time and changes nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.config import show_size, size
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Keys
from penstock.order import BatchKeys, Generations
from penstock.stops.stop import Hold, Site, StageFailure, Step, Upstream, place, stored
from penstock.store import SampleStore, ThreadClaims, claims_of
from penstock.store.encoding import Encoding
from penstock.store.value import Lent

Reuse = int | Literal["auto"]

_NOTHING = object()

Wanted = list[tuple[int, int]]
"""Samples by (index, generation)."""


@dataclass(frozen=True)
class Refurbish(Hold):
    """Uses what comes from above ``reuse`` times.

    ``budget`` bounds what is kept. ``store``, ``renewal`` and ``claims``, by which workers
    agree on who prepares what, are set when a loader opens it.
    """

    reuse: Reuse
    budget: int | None = None
    where: str = "memory"
    encode: str = "raw"
    number: int = 0
    lends: bool = False
    store: SampleStore | None = None
    renewal: Generations | None = None
    claims: Path | ThreadClaims | None = None

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
        lends = self.lends and encoding.name == "raw"
        claims = claims_of(self.claims)

        def look(wanted: Wanted) -> list[Any]:
            """What the store has of these; ``_NOTHING`` for what it has not."""
            before = store.corrupt
            places = [place(*one) for one in wanted]
            frames = store.get_tagged(places, [generation for _, generation in wanted])
            tally.corrupt += store.corrupt - before
            found = []
            for (index, _), frame in zip(wanted, frames, strict=True):
                try:
                    if type(frame) is Lent:
                        found.append(frame.sample)
                    else:
                        found.append(_NOTHING if frame is None else encoding.decode(frame))
                except Exception as error:
                    raise StageFailure(self.name, index) from error
            return found

        def keep(wanted: Wanted, fresh: list[Any]) -> list[Any]:
            packed: list[Any] = []
            for (index, _), sample in zip(wanted, fresh, strict=True):
                try:
                    packed.append(stored(sample, True) if lends else encoding.packed(sample))
                except Exception as error:
                    raise StageFailure(self.name, index) from error
            items = zip(wanted, packed, strict=True)
            store.put_tagged([(place(*one), one[1], value) for one, value in items])
            # A sample must not tell whether it was kept: where keeping changes it, it always does.
            return [encoding.decode(v.tobytes()) for v in packed] if encoding.lossy else fresh

        def make(wanted: Wanted, upstream: Upstream) -> list[Any]:
            """These from above, as many at a time as are of one generation."""
            fresh: dict[int, Any] = {}
            for generation in dict.fromkeys(generation for _, generation in wanted):
                indices = [index for index, of in wanted if of == generation]
                made = upstream(Keys(generation, indices))
                fresh.update(zip(indices, made, strict=True))
            tally.misses[number] += len(wanted)
            return [fresh[index] for index, _ in wanted]

        def renew(wanted: Wanted, upstream: Upstream) -> list[Any]:
            # The next epoch may ask for what this one is just making: then it is worth waiting for.
            with ExitStack() as claimed:
                # All claim in the same order, or two could wait for each other; and no place twice,
                # or whoever wants it twice would wait for itself.
                for claim in sorted({place(*one) for one in wanted}):
                    claimed.enter_context(claims.claim(claim))
                found = look(wanted)
                missing = [i for i, one in enumerate(found) if one is _NOTHING]
                if missing:
                    due = [wanted[i] for i in missing]
                    for i, sample in zip(missing, keep(due, make(due, upstream)), strict=True):
                        found[i] = sample
                # Last, because what fails is tried again, one by one, and counted then.
                tally.hits[number] += len(found) - len(missing)
                return found

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            epoch = keys.epoch
            wanted = [(index, generation_of(index, epoch)) for index in keys.indices]
            samples: list[Any] = [_NOTHING] * len(wanted)
            kept = [i for i, (index, _) in enumerate(wanted) if reused and keeps(index)]
            for i, sample in zip(kept, look([wanted[i] for i in kept]), strict=True):
                samples[i] = sample
            missing = [i for i, sample in enumerate(samples) if sample is _NOTHING]
            due = set() if site.trial else set(kept)
            for get, some in (
                (renew, [i for i in missing if i in due]),
                (make, [i for i in missing if i not in due]),
            ):
                made = get([wanted[i] for i in some], upstream) if some else []
                for i, sample in zip(some, made, strict=True):
                    samples[i] = sample
            tally.hits[number] += len(samples) - len(missing)
            return samples

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
