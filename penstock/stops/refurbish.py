"""The refurbish stop: what was partly augmented is kept and used several times (Revamper).

Everything above it is the partial augmentation, keyed by a sample's generation; everything below
it is the final one, keyed by the epoch as ever. Which generation an epoch uses is a pure function,
so losing what is kept costs time and changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.config import memory, show_size, size
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Key, Keyed, Keys
from penstock.order import Balanced, BatchKeys, Generations, Order, Shuffled
from penstock.stats import Held, RefurbishStats
from penstock.stops.hold import Hold, Keeper, Opening, place, stored
from penstock.stops.stop import Site, StageFailure, Step, Stop, Upstream
from penstock.store import LmdbStore, SampleStore, ThreadClaims, claims_of, memory_store
from penstock.store.encoding import Encoding
from penstock.store.value import Lent

_NOTHING = object()

UNBOUNDED = 1 << 40
"""The budget of a store on disk where none is given: the disk is the limit."""

WEIGHED, FILLED = 16, 0.85
"""Where refurbish has a budget: samples prepared to learn how large one is, and the part of the
budget they may be expected to fill. So few samples tell the size within a tenth, a sample lies
there in two generations while one replaces the other, and the file is a tenth larger than its
content."""

Wanted = list[tuple[int, int]]
"""Samples by (index, generation)."""


@dataclass(frozen=True)
class Refurbish(Hold):
    """Uses what comes from above ``reuse`` times.

    ``budget`` bounds what is kept. ``generations`` and ``claims``, by which workers agree on who
    prepares what, are set by its keeper.
    """

    renews: ClassVar[bool] = True

    reuse: int | Literal["auto"]
    budget: int | None = None
    where: str = "memory"
    encode: str = "raw"
    number: int = 0
    lends: bool = False
    store: SampleStore | None = None
    generations: Generations | None = None
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

    @property
    def measured(self) -> bool:
        return self.reuse == "auto"

    @property
    def in_memory(self) -> bool:
        return self.where == "memory"

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        """It keeps random samples, stands once in a pipeline, and not below the copies of echo."""
        if any(stop.renews for stop in above):
            raise PipelineError(
                "a second refurbish() in the pipeline: the work of renewing samples would no "
                "longer be spread evenly over the epochs. Leave one of them out."
            )
        if any(stop.repeats for stop in above):
            raise PipelineError(
                "refurbish() stands below echo(): it would give every copy the same kept sample. "
                "Put echo() below refurbish(), or leave it out and raise reuse."
            )
        if not random_source and not any(stop.random for stop in above):
            raise PipelineError(
                "refurbish() has nothing random above it: what it keeps would never have to be "
                "made again. Use cache() here."
            )

    def check_below(self, below: Sequence[Stop]) -> None:
        """What it keeps must still be varied below it, or the same sample would come again."""
        if self.reuse in (1, "auto") or any(stop.random for stop in below):
            return
        raise PipelineError(
            f"refurbish(reuse={self.reuse}) has no random map below it: the very same sample "
            f"would come {self.reuse} times. Move one of the random maps from above it to below "
            "it; or say that this is what you want with echo().",
            code="nothing-random-below-refurbish",
        )

    def order(self, order: Order) -> Order:
        """A shuffled order is balanced: every batch gets its share of fresh samples."""
        if self.generations is not None and isinstance(order, Shuffled):
            return Balanced(self.generations)
        return order

    def opened(self, opening: Opening) -> RefurbishKeeper:
        kept = self._room(opening) if opening.kept is None else opening.kept
        generations = self.generations or Generations(
            opening.samples, int(self.reuse), kept, opening.seed
        )
        self._check_ranks(opening.ranks)
        store = self._open_store(opening)
        stop = replace(
            self,
            number=opening.number,
            lends=opening.lends,
            store=store,
            generations=generations,
            claims=opening.claims(),
        )
        return RefurbishKeeper(stop, store, generations)

    def _open_store(self, opening: Opening) -> SampleStore:
        # A budget bounds how many samples are kept; without one the store takes what there is.
        if self.in_memory:
            return memory_store(self.budget or memory(), shared=opening.shared)
        tags = ("refurbish", opening.seed, self.encode)
        return opening.disk_store(self.name, self.where, self.budget or UNBOUNDED, *tags)

    def _room(self, opening: Opening) -> int:
        """How many samples the budget has room for, judged by a few of them."""
        samples = opening.samples
        if self.budget is None:
            return samples
        chosen = (
            Keyed(opening.seed, "refurbish/room")
            .fresh(Key(0))
            .choice(samples, min(samples, WEIGHED), replace=False)
        )
        encoding = Encoding(self.encode)
        costs = [
            LmdbStore.cost(encoding.packed(sample).nbytes, tagged=True)
            for sample in opening.prepare(chosen.tolist())
        ]
        if not costs:
            return samples
        return min(samples, int(FILLED * self.budget * len(costs) / sum(costs)))

    def _check_ranks(self, ranks: int) -> None:
        if ranks > 1 and self.in_memory and self.reuse != 1:
            warnings.warn(
                f'refurbish(where="memory") keeps samples for this process alone, and with '
                f"{ranks} ranks a sample seldom comes back to the rank that kept it. Give the "
                'loaders share="run-1", or one place to share: where="/dev/shm/run-1".',
                RuntimeWarning,
                stacklevel=6,
            )

    def tried(self, store: SampleStore, number: int, samples: int, seed: int) -> Refurbish:
        generations = Generations(samples, 2, samples, seed)
        return replace(self, number=number, store=store, generations=generations)

    def hit_share(self, room: float) -> float | None:
        return None if self.reuse == "auto" else room * (1 - 1 / self.reuse)

    def step(self, site: Site) -> Step:
        store, generations, number, tally = self.store, self.generations, self.number, site.tally
        if store is None or generations is None:
            raise PipelineError("refurbish() has no store: a pipeline runs only through a loader.")
        encoding = Encoding(self.encode)
        generation_of, keeps = generations.generation, generations.keeps
        reused = generations.reuse > 1
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


class RefurbishKeeper(Keeper):
    """Removes the generations that no later batch uses."""

    def __init__(self, stop: Refurbish, store: SampleStore, generations: Generations) -> None:
        super().__init__(stop, store)
        self._generations = generations

    @property
    def generations(self) -> Generations:
        return self._generations

    def outdated(self, batch: BatchKeys) -> list[int]:
        generations = self._generations
        if generations.reuse == 1 or batch.epoch == 0:
            return []
        now = generations.generations(batch.indices, batch.epoch)
        before = generations.generations(batch.indices, batch.epoch - 1)
        renewed = np.flatnonzero(now != before)
        return [
            place(index, generation)
            for index, generation in zip(
                batch.indices[renewed].tolist(), before[renewed].tolist(), strict=True
            )
            if generations.keeps(index)
        ]

    def settled(self, *, restarted: bool) -> bool:
        """In the first epoch, what the next one would find is still being put in."""
        return restarted

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        mine = RefurbishStats(misses, hits, self._generations.kept, self.store.used)
        return held._replace(refurbish=mine)


def refurbish_in(stops: Sequence[Stop]) -> Refurbish | None:
    """The refurbish among these stops."""
    return next((stop for stop in stops if isinstance(stop, Refurbish)), None)


def make_refurbish(reuse: Any, budget: int | str | None, where: str, encode: str) -> Refurbish:
    """A refurbish stop, checked."""
    if reuse != "auto" and (isinstance(reuse, bool) or not isinstance(reuse, int) or reuse < 1):
        raise PipelineError(
            f"refurbish() got reuse={reuse!r}; give how often a sample is used, a whole number "
            'from 1 on, or "auto".'
        )
    Encoding(encode)
    budget = None if budget is None else size(budget, "refurbish()")
    return Refurbish(reuse, budget, where, encode)
