"""The refurbish stop: partly augmented samples are kept and used several times (Revamper).

The maps above it are the partial augmentation, keyed by the generation of a sample; the maps below
it are the final augmentation, keyed by the epoch as usual. The generation that an epoch uses is a
pure function of index and epoch, so losing the store costs time and changes no sample.
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
from penstock.stops.hold import Hold, Keeper, Opening, store_key, to_stored
from penstock.stops.stop import StageFailure, Step, StepContext, Stop, Upstream
from penstock.store import LmdbStore, SampleStore, ThreadClaims, claims_of, memory_store
from penstock.store.encoding import Encoding
from penstock.store.value import Lent

_MISSING = object()

UNBOUNDED = 1 << 40
"""The budget of a store on disk without ``size``: the disk is the limit."""

WEIGHED, FILLED = 16, 0.85
"""With a budget: samples that are prepared to learn their size, and the share of the budget that
kept samples are expected to fill. 16 samples give the size within a tenth, a sample is there in two
generations while one replaces the other, and the file is a tenth larger than its content."""

Wanted = list[tuple[int, int]]
"""Samples by (index, generation)."""


@dataclass(frozen=True)
class Refurbish(Hold):
    """Keeps samples from above and uses each ``reuse`` times.

    ``budget``: bytes of the kept samples. ``generations`` and ``claims``, with which workers agree
    on who prepares a sample, are set when a loader opens the pipeline.
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
    def as_call(self) -> str:
        return f".refurbish(reuse={self.reuse!r}, where={self.where!r})"

    def fingerprint(self) -> str | None:
        # Without the budget: a checkpoint has the number of kept samples instead.
        how = self.encode if Encoding(self.encode).lossy else "exact"
        return fingerprint(("refurbish", self.reuse, how))

    @property
    def measured(self) -> bool:
        return self.reuse == "auto"

    @property
    def in_memory(self) -> bool:
        return self.where == "memory"

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        """Raise PipelineError below another refurbish, below echo, or with nothing random above."""
        if any(stop.renews for stop in above):
            raise PipelineError(
                "a second refurbish() in the pipeline: the work of renewing samples would no "
                "longer be spread evenly over the epochs. Leave one of them out."
            )
        if any(stop.repeats for stop in above):
            raise PipelineError(
                "refurbish() stands below echo(): all copies of a sample would get the same kept "
                "sample. Put echo() below refurbish(), or leave echo() out and raise reuse."
            )
        if not random_source and not any(stop.random for stop in above):
            raise PipelineError(
                "refurbish() has nothing random above it: the samples it keeps would never need to "
                "be renewed. Use cache() here, or move a random map above refurbish()."
            )

    def check_below(self, below: Sequence[Stop]) -> None:
        """Raise PipelineError if no map below varies the kept samples."""
        if self.reuse in (1, "auto") or any(stop.random for stop in below):
            return
        raise PipelineError(
            f"refurbish(reuse={self.reuse}) has no random map below it: training would see exactly "
            f"the same sample {self.reuse} times. Move a random map from above it to below it, or, "
            f"if exact repeats are what you want, use echo({self.reuse}) instead.",
            code="nothing-random-below-refurbish",
        )

    def order(self, order: Order) -> Order:
        """Balance a shuffled order: every batch gets its share of fresh samples."""
        if self.generations is not None and isinstance(order, Shuffled):
            return Balanced(self.generations)
        return order

    def make_keeper(self, opening: Opening) -> RefurbishKeeper:
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
        # With a budget, the number of kept samples is bounded too; see ``_room``.
        if self.in_memory:
            return memory_store(self.budget or memory(), shared=opening.shared)
        tags = ("refurbish", opening.seed, self.encode)
        return opening.disk_store(self.name, self.where, self.budget or UNBOUNDED, *tags)

    def _room(self, opening: Opening) -> int:
        """The number of samples that the budget has room for, by the size of a few of them."""
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
                f'refurbish(where="memory") keeps samples for this process only, and with {ranks} '
                "ranks a sample seldom comes back to the rank that kept it. Let the ranks share: "
                'give the loaders share="run-1", or refurbish() a directory such as '
                'where="/dev/shm/run-1".',
                RuntimeWarning,
                stacklevel=6,
            )

    def for_trial(self, store: SampleStore, number: int, samples: int, seed: int) -> Refurbish:
        generations = Generations(samples, 2, samples, seed)
        return replace(self, number=number, store=store, generations=generations)

    def hit_share(self, room: float) -> float | None:
        return None if self.reuse == "auto" else room * (1 - 1 / self.reuse)

    def step(self, context: StepContext) -> Step:
        store, generations, number, tally = self.store, self.generations, self.number, context.tally
        if store is None or generations is None:
            raise PipelineError(
                "refurbish() has no store, because the pipeline was not opened by a loader: a "
                "pipeline runs only through a loader. Iterate pipeline.loader()."
            )
        encoding = Encoding(self.encode)
        generation_of, keeps = generations.generation, generations.keeps
        reused = generations.reuse > 1
        lends = self.lends and encoding.name == "raw"
        claims = claims_of(self.claims)

        def look_up(wanted: Wanted) -> list[Any]:
            """These samples from the store; ``_MISSING`` for those it does not have."""
            before = store.corrupt
            keys = [store_key(index, generation) for index, generation in wanted]
            values = store.get_tagged(keys, [generation for _, generation in wanted])
            samples: list[Any] = []
            unreadable: list[int] = []
            for key, value in zip(keys, values, strict=True):
                try:
                    if type(value) is Lent:
                        samples.append(value.sample)
                    elif value is None:
                        samples.append(_MISSING)
                    else:
                        samples.append(encoding.decode(value, store.holds_pickles))
                except ValueError:
                    samples.append(_MISSING)
                    unreadable.append(key)
            if unreadable:
                store.drop_unreadable(unreadable)
            tally.corrupt += store.corrupt - before
            return samples

        def keep(wanted: Wanted, fresh: list[Any]) -> list[Any]:
            """Put fresh samples into the store. Returns them as the store would return them."""
            packed: list[Any] = []
            for (index, _), sample in zip(wanted, fresh, strict=True):
                try:
                    packed.append(to_stored(sample, True) if lends else encoding.packed(sample))
                except Exception as error:
                    raise StageFailure(self.name, index) from error
            store.put_tagged(
                [
                    (store_key(index, generation), generation, value)
                    for (index, generation), value in zip(wanted, packed, strict=True)
                ]
            )
            # A lossy encoding changes a sample. It must do so whether the sample was kept or not.
            return [encoding.decode(v.tobytes()) for v in packed] if encoding.lossy else fresh

        def prepare(wanted: Wanted, upstream: Upstream) -> list[Any]:
            """These samples from upstream, with one call for each generation."""
            fresh: dict[int, Any] = {}
            for generation in dict.fromkeys(generation for _, generation in wanted):
                indices = [index for index, other in wanted if other == generation]
                samples = upstream(Keys(generation, indices))
                fresh.update(zip(indices, samples, strict=True))
            tally.misses[number] += len(wanted)
            return [fresh[index] for index, _ in wanted]

        def renew(wanted: Wanted, upstream: Upstream) -> list[Any]:
            """These samples from the store, or prepared and kept by one worker at a time."""
            # A task of the next epoch may want a sample that this epoch is preparing: it waits.
            with ExitStack() as claimed:
                # Sorted: two workers that claim in different orders could wait for each other.
                # Without duplicates: a worker that claims a key twice would wait for itself.
                for key in sorted({store_key(index, generation) for index, generation in wanted}):
                    claimed.enter_context(claims.claim(key))
                samples = look_up(wanted)
                missing = [i for i, sample in enumerate(samples) if sample is _MISSING]
                if missing:
                    due = [wanted[i] for i in missing]
                    for i, sample in zip(missing, keep(due, prepare(due, upstream)), strict=True):
                        samples[i] = sample
                # Counted last: after a failure the samples are tried one by one, and counted then.
                tally.hits[number] += len(samples) - len(missing)
                return samples

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            epoch = keys.epoch
            wanted = [(index, generation_of(index, epoch)) for index in keys.indices]
            samples: list[Any] = [_MISSING] * len(wanted)
            kept = [i for i, (index, _) in enumerate(wanted) if reused and keeps(index)]
            for i, sample in zip(kept, look_up([wanted[i] for i in kept]), strict=True):
                samples[i] = sample
            missing = [i for i, sample in enumerate(samples) if sample is _MISSING]
            to_keep = set() if context.trial else set(kept)
            for get, part in (
                (renew, [i for i in missing if i in to_keep]),
                (prepare, [i for i in missing if i not in to_keep]),
            ):
                fresh = get([wanted[i] for i in part], upstream) if part else []
                for i, sample in zip(part, fresh, strict=True):
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
            store_key(index, generation)
            for index, generation in zip(
                batch.indices[renewed].tolist(), before[renewed].tolist(), strict=True
            )
            if generations.keeps(index)
        ]

    def settled(self, *, restarted: bool) -> bool:
        """False in the first epoch, which puts in the samples that the second one would find."""
        return restarted

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        mine = RefurbishStats(misses, hits, self._generations.kept, self.store.used)
        return held._replace(refurbish=mine)


def refurbish_in(stops: Sequence[Stop]) -> Refurbish | None:
    """The refurbish among these stops; ``None`` if there is none."""
    return next((stop for stop in stops if isinstance(stop, Refurbish)), None)


def make_refurbish(reuse: Any, budget: int | str | None, where: str, encode: str) -> Refurbish:
    """A refurbish stop from the arguments of ``Pipeline.refurbish``. Raises PipelineError."""
    if reuse != "auto" and (isinstance(reuse, bool) or not isinstance(reuse, int) or reuse < 1):
        raise PipelineError(
            f"refurbish() got reuse={reuse!r}. Give the number of times that a kept sample is "
            'used, a whole number from 1 on, or "auto".'
        )
    Encoding(encode)
    budget = None if budget is None else size(budget, "refurbish()")
    return Refurbish(reuse, budget, where, encode)
