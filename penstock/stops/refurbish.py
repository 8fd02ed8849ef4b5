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
from penstock.stops.hold import Found, Hold, Keeper, Opening, store_key, to_stored
from penstock.stops.stop import StageFailure, Step, StepContext, Stop, Upstream
from penstock.store import SampleStore, ThreadClaims, claims_of, cost, memory_store
from penstock.store.admission import Versions, split_keys, version_keys, version_slot
from penstock.store.encoding import Encoding
from penstock.store.partitioned import Division
from penstock.store.shared import SharedStores
from penstock.store.value import Lent

UNBOUNDED = 1 << 40
"""The budget of a store on disk without ``size``: the disk is the limit."""

WEIGHED, FILLED = 16, 0.85
"""With a budget: samples that are prepared to learn their size, and the share of the budget that
kept samples are expected to fill. 16 samples give the size within a tenth, a sample is there in two
generations while one replaces the other, and the file is a tenth larger than its content."""

_MANY = 16
"""From this many samples on, generations are computed for all of them at once."""

_LENT = frozenset((Lent, type(None)))
"""The types of the values that a store returns where all samples are lent, or missing."""

Wanted = list[tuple[int, int]]
"""Samples by (index, generation)."""


@dataclass(frozen=True)
class Refurbish(Hold):
    """Keeps samples from above and uses each ``reuse`` times.

    ``budget``: bytes of the kept samples. ``generations`` and ``claims``, with which workers agree
    on who prepares a sample, are set when a loader opens the pipeline, and so is ``divided``:
    several machines divide what is kept, so the keeper decides where fresh samples are kept.
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
    divided: bool = False

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

    @property
    def can_lend(self) -> bool:
        return self.in_memory and Encoding(self.encode).name == "raw"

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
        store = self._open_store(opening, generations)
        shared = opening.shared_stores
        division = None if shared is None else shared.division(store)
        stop = replace(
            self,
            number=opening.number,
            lends=opening.lends,
            store=store,
            generations=generations,
            claims=opening.claims(),
            divided=division is not None,
        )
        return RefurbishKeeper(stop, store, generations, shared, division)

    def _open_store(self, opening: Opening, generations: Generations) -> SampleStore:
        # With a budget, the number of kept samples is bounded too; see ``_room``.
        tags = ("refurbish", opening.seed, self.encode)

        def in_memory() -> SampleStore:
            return memory_store(self.budget or memory(), shared=opening.shared)

        def make() -> SampleStore:
            if self.in_memory:
                return in_memory()
            return opening.disk_store(self.name, self.where, self.budget or UNBOUNDED, *tags)

        if opening.shared_stores is None or not opening.shared_stores.divides:
            return make()
        # Which versions are kept for how long depends on how often they are used.
        use = (generations.reuse, generations.kept)
        return opening.shared_stores.store(
            fingerprint((*tags, opening.made_of(), *use)),
            f"{'processes' if opening.shared else 'threads'} {self.where}",
            make,
            lends=opening.lends and self.can_lend,
            samples=opening.samples,
            make_arrivals=in_memory,
            generations=generations,
        )

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
            cost(encoding.packed(sample).nbytes, tagged=True)
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
        access = self.access(context)
        claims = claims_of(self.claims)

        def prepare(wanted: Wanted, upstream: Upstream) -> list[Any]:
            """These samples from upstream, with one call for each generation."""
            fresh: dict[int, Any] = {}
            for generation in dict.fromkeys(generation for _, generation in wanted):
                indices = [index for index, other in wanted if other == generation]
                samples = upstream(Keys(generation, indices))
                fresh.update(zip(indices, samples, strict=True))
            access.count(0, len(wanted))
            return [fresh[index] for index, _ in wanted]

        def renew(wanted: Wanted, upstream: Upstream) -> list[Any]:
            """These samples from the store, or prepared and kept by one worker at a time."""
            # A task of the next epoch may want a sample that this epoch is preparing: it waits.
            with ExitStack() as claimed:
                # Sorted: two workers that claim in different orders could wait for each other.
                # Without duplicates: a worker that claims a key twice would wait for itself.
                for key in sorted({store_key(index, generation) for index, generation in wanted}):
                    claimed.enter_context(claims.claim(key))
                samples = access.look_up(wanted)
                missing = [i for i, sample in enumerate(samples) if sample is None]
                if missing:
                    due = [wanted[i] for i in missing]
                    fresh = access.store(due, prepare(due, upstream))
                    for i, sample in zip(missing, fresh, strict=True):
                        samples[i] = sample
                # Counted last: after a failure the samples are tried one by one, and counted then.
                access.count(len(samples) - len(missing), 0)
                return samples

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            found = access.find(keys)
            samples, missing, to_keep = found.samples, found.missing, set(found.keep)
            wanted = list(zip(keys.indices, found.versions or (), strict=True))
            for get, part in (
                (renew, [i for i in missing if i in to_keep]),
                (prepare, [i for i in missing if i not in to_keep]),
            ):
                fresh = get([wanted[i] for i in part], upstream) if part else []
                for i, sample in zip(part, fresh, strict=True):
                    samples[i] = sample
            access.count(len(samples) - len(missing), 0)
            return samples

        return step

    def lent(self, context: StepContext) -> RefurbishAccess | None:
        access = self.access(context)
        return access if access.lends and self.in_memory else None

    def access(self, context: StepContext) -> RefurbishAccess:
        """The kept samples, for one worker."""
        if self.store is None or self.generations is None:
            raise PipelineError(
                "refurbish() has no store, because the pipeline was not opened by a loader: a "
                "pipeline runs only through a loader. Iterate pipeline.loader()."
            )
        return RefurbishAccess(self, self.store, self.generations, context)


class RefurbishAccess:
    """Finds kept samples by index and generation, and keeps fresh ones."""

    def __init__(
        self, stop: Refurbish, store: SampleStore, generations: Generations, context: StepContext
    ) -> None:
        self._name = stop.name
        self._number = stop.number
        self._store = store
        self._generations = generations
        self._encoding = Encoding(stop.encode)
        self._context = context
        self.lends = stop.lends and self._encoding.name == "raw"
        self._divided = stop.divided

    def find(self, keys: Keys) -> Found:
        """See ``Access.find``; a version is a generation."""
        generations, indices, epoch = self._generations, keys.indices, keys.epoch
        if len(indices) < _MANY:
            versions = [generations.generation(index, epoch) for index in indices]
            store_keys = [
                store_key(index, version) for index, version in zip(indices, versions, strict=True)
            ]
        else:
            numbers = np.array(indices, np.int64)
            made = generations.generations(numbers, epoch)
            versions, store_keys = made.tolist(), (2 * numbers + made % 2).tolist()
        if generations.reuse == 1:
            everything = list(range(len(indices)))
            return Found([None] * len(indices), everything, [], versions)
        if generations.kept == generations.n:
            samples = self._look_up(store_keys, versions)
            missing = keep = [i for i, sample in enumerate(samples) if sample is None]
        else:
            samples = [None] * len(indices)
            kept = [i for i, index in enumerate(indices) if generations.keeps(index)]
            found = self._look_up([store_keys[i] for i in kept], [versions[i] for i in kept])
            for i, sample in zip(kept, found, strict=True):
                samples[i] = sample
            missing = [i for i, sample in enumerate(samples) if sample is None]
            keep = [i for i in kept if samples[i] is None]
        return Found(samples, missing, [] if self._context.trial else keep, versions)

    def count(self, hits: int, misses: int) -> None:
        """See ``Access.count``."""
        self._context.tally.hits[self._number] += hits
        self._context.tally.misses[self._number] += misses

    def keep(self, indices: Sequence[int], versions: Sequence[int], fresh: Sequence[Any]) -> None:
        """See ``Access.keep``."""
        self.store(list(zip(indices, versions, strict=True)), list(fresh))

    def look_up(self, wanted: Wanted) -> list[Any]:
        """These samples from the store; ``None`` for those it does not have."""
        keys = [store_key(index, generation) for index, generation in wanted]
        return self._look_up(keys, [generation for _, generation in wanted])

    def _look_up(self, keys: list[int], versions: list[int]) -> list[Any]:
        """The samples with these store keys and generations."""
        store, encoding = self._store, self._encoding
        before = store.corrupt
        values = store.get_tagged(keys, versions)
        if self.lends and _LENT.issuperset(map(type, values)):
            return [value if value is None else value.sample for value in values]
        samples: list[Any] = []
        unreadable: list[int] = []
        for key, value in zip(keys, values, strict=True):
            try:
                if type(value) is Lent:
                    samples.append(value.sample)
                elif value is None:
                    samples.append(None)
                else:
                    samples.append(encoding.decode(value, store.holds_pickles))
            except ValueError:
                samples.append(None)
                unreadable.append(key)
        if unreadable:
            store.drop_unreadable(unreadable)
        self._context.tally.corrupt += store.corrupt - before
        return samples

    def store(self, wanted: Wanted, fresh: list[Any]) -> list[Any]:
        """Put fresh samples into the store. Returns them as the store would return them."""
        encoding, packed = self._encoding, list[Any]()
        for (index, _), sample in zip(wanted, fresh, strict=True):
            try:
                packed.append(to_stored(sample, True) if self.lends else encoding.packed(sample))
            except Exception as error:
                raise StageFailure(self._name, index) from error
        held = self._store.put_tagged(
            [
                (store_key(index, generation), generation, value)
                for (index, generation), value in zip(wanted, packed, strict=True)
            ]
        )
        if self._divided:
            for (index, _), value, kept in zip(wanted, packed, held, strict=True):
                if kept:
                    offer = (self._number, index, self._store.cost(value.nbytes, tagged=True))
                    self._context.offers.append(offer)
        # A lossy encoding changes a sample. It must do so whether the sample was kept or not.
        return [encoding.decode(v.tobytes()) for v in packed] if encoding.lossy else fresh


class RefurbishKeeper(Keeper):
    """Removes the generations that no later batch uses."""

    def __init__(
        self,
        stop: Refurbish,
        store: SampleStore,
        generations: Generations,
        shared: SharedStores | None = None,
        division: Division | None = None,
    ) -> None:
        super().__init__(stop, store)
        self._generations = generations
        self._shared = shared
        self._division = division
        self._epoch = 0

    @property
    def generations(self) -> Generations:
        return self._generations

    @property
    def division(self) -> Division | None:
        return self._division

    def open(self) -> None:
        super().open()
        if self._division is not None:
            self._division.open(Versions())

    def lacks(self, indices: list[int], epoch: int) -> list[int]:
        generations = self._generations
        if epoch == 0 or generations.reuse == 1:
            return indices
        renewed = set(generations.renewed(np.array(indices, np.int64), epoch).tolist())
        return [i for i in indices if i in renewed or not generations.keeps(i)]

    def keys_of(self, indices: Sequence[int], epoch: int) -> list[int]:
        generations = self._generations
        if generations.reuse == 1:
            return []
        kept = np.array([index for index in indices if generations.keeps(index)], np.int64)
        keys: list[int] = version_keys(kept, generations.generations(kept, epoch)).tolist()
        return keys

    def admit(self, offers: Sequence[tuple[int, int]], epoch: int) -> None:
        if self._division is None:
            return
        keys = self.keys_of([index for index, _ in offers], epoch)
        costs = [cost for _, cost in offers]
        refused = self._division.admit(list(zip(keys, costs, strict=True)))
        self.store.delete_many(list(map(version_slot, refused)))

    def outdated(self, batch: BatchKeys) -> list[int]:
        generations = self._generations
        if generations.reuse == 1 or batch.epoch == 0:
            return []
        renewed = generations.renewed(batch.indices, batch.epoch)
        parity = generations.before_renewal(batch.epoch) % 2
        keys: list[int] = (2 * renewed + parity).tolist()  # ``store_key``
        return keys

    def handed_out(self, batch: BatchKeys) -> None:
        division = self._division
        if division is None:
            super().handed_out(batch)
            return
        generations, epoch = self._generations, batch.epoch
        if division.alone and epoch > 0:
            renewed = generations.renewed(batch.indices, epoch)
            before = generations.generations(renewed, epoch - 1)
            division.forget(version_keys(renewed, before).tolist())
        if self._epoch - 1 <= epoch <= self._epoch:
            return
        # Other machines may be an epoch behind this one, or ahead of it. What neither uses is
        # removed: versions of earlier epochs, and of later ones if a job begins again.
        self._epoch = epoch
        keys = np.array(division.known(), np.int64)
        indices, kept = split_keys(keys)
        outdated = kept < generations.generations(indices, max(0, epoch - 1))
        division.forget(
            keys[outdated | (kept > generations.generations(indices, epoch + 1))].tolist()
        )

    def settled(self, *, restarted: bool) -> bool:
        """False in the first epoch, which puts in the samples that the second one would find."""
        return restarted

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        mine = RefurbishStats(misses, hits, self._generations.kept, self.store.used)
        return held._replace(refurbish=mine)

    def close(self) -> None:
        # Not kept for the next job, which begins with other versions.
        if self._shared is None or not self._shared.release(self.store, keep=False):
            super().close()


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
