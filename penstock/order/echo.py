"""Echoing: how often each sample or batch is used in an epoch, and the plans that do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed
from penstock.order.cursor import Cursor
from penstock.order.deal import Deal
from penstock.order.order import whole
from penstock.order.plan import BatchKeys, Plan

CompactInts = NDArray[np.integer[Any]]
"""Integers of the narrowest type that holds them: an epoch has ``factor`` times n of them."""

_EPOCHS_KEPT = 2
"""Epochs whose sequence is kept: the current one, and the next one if it begins early."""

_COUNTS, _WINDOWS = 0, 1
"""The two uses of randomness in an epoch; each has a random stream of its own."""


@dataclass(frozen=True)
class EchoSequence:
    """Every group ``factor`` times, its copies spread over windows of ``window`` places.

    A group is the unit that is repeated: a sample of each rank, or a batch. The fraction of a
    factor is drawn at random for each group: with factor 1.25 one group in four is used twice. The
    copies of a group are first placed one after the other; then each window, a run of ``window``
    places, is shuffled. So a copy moves by less than ``window`` places, and with ``window=1`` the
    copies follow each other.

    ``factor`` may be a function of the epoch, for a factor that is chosen when an epoch begins. It
    must always return the same factor for the same epoch. Factors above ``limit`` are cut to
    ``limit``: a measured ratio has no upper bound, but replica numbers need one.

    Two echoes on one road make independent random choices if their ``stage`` differs.

    >>> echo = EchoSequence(2, window=4, seed=0)
    >>> groups, copies = echo.sequence(4, epoch=0)
    >>> sorted(groups[:4].tolist()), sorted(groups[4:].tolist())
    ([0, 0, 1, 1], [2, 2, 3, 3])
    >>> EchoSequence(1.5, window=1, seed=0).sequence(4, epoch=1)[0].tolist()
    [0, 0, 1, 1, 2, 3, 3]
    """

    factor: float | Callable[[int], float]
    window: int
    seed: int
    limit: int = 8
    stage: str = "order/echo"
    _sequences: dict[tuple[int, int, float], tuple[CompactInts, CompactInts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not callable(self.factor):
            object.__setattr__(self, "factor", _factor("The factor of echo()", self.factor))
        for name, least in (("window", 1), ("seed", None), ("limit", 1)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))

    @property
    def fixed(self) -> bool:
        """Whether the factor is known before an epoch begins."""
        return not callable(self.factor)

    @property
    def most(self) -> int:
        """The largest number of copies that a group can have; copy numbers are below it."""
        return self.limit if callable(self.factor) else math.ceil(self.factor)

    def factor_of(self, epoch: int) -> float:
        """The factor of one epoch."""
        if not callable(self.factor):
            return self.factor
        chosen = _factor(f"The factor of echo() for epoch {epoch}", self.factor(epoch))
        return min(chosen, float(self.limit))

    def counts(self, groups: int, epoch: int) -> NDArray[np.int64]:
        """The number of copies of each group in an epoch."""
        fraction, least = math.modf(self.factor_of(epoch))
        counts = np.full(groups, int(least), dtype=np.int64)
        if fraction:
            counts += self._generator(epoch, _COUNTS).random(groups) < fraction
        return counts

    def total(self, groups: int, epoch: int) -> int:
        """The number of copies of all groups in an epoch."""
        factor = self.factor_of(epoch)
        kept = self._sequences.get((groups, epoch, factor))
        if kept is not None:
            return len(kept[0])
        if factor.is_integer():
            return groups * int(factor)
        return int(self.counts(groups, epoch).sum())

    def sequence(self, groups: int, epoch: int) -> tuple[CompactInts, CompactInts]:
        """The group numbers of an epoch in the order of delivery, and the copy number of each."""
        key = (groups, epoch, self.factor_of(epoch))
        kept = self._sequences.get(key)
        if kept is not None:
            return kept
        counts = self.counts(groups, epoch)
        ends = np.cumsum(counts)
        places = self._shuffled(int(ends[-1]) if groups else 0, epoch)
        numbers = np.repeat(np.arange(groups, dtype=_narrowest(groups)), counts)[places]
        copies = (places - (ends - counts)[numbers]).astype(_narrowest(self.most))
        for array in (numbers, copies):
            array.flags.writeable = False
        for old in list(self._sequences)[: len(self._sequences) - _EPOCHS_KEPT + 1]:
            self._sequences.pop(old, None)
        self._sequences[key] = numbers, copies
        return numbers, copies

    def _shuffled(self, total: int, epoch: int) -> NDArray[np.int64]:
        """All places of an epoch, shuffled within their windows."""
        places = np.arange(total, dtype=np.int64)
        window = min(self.window, total)
        if window <= 1:
            return places
        # Every place gets a random word whose lowest bits are the place within its window.
        # Sorting the words shuffles the places, in a third of the time of an argsort. Words are
        # drawn place by place, so a window does not depend on the number of windows after it.
        within = places % window
        bits = (window - 1).bit_length()
        words = self._generator(epoch, _WINDOWS).integers(0, 2**64, size=total, dtype=np.uint64)
        words >>= np.uint64(bits)
        words <<= np.uint64(bits)
        words |= within.astype(np.uint64)
        full = total - total % window
        words[:full].reshape(-1, window).sort(axis=1)
        words[full:].sort()
        words &= np.uint64((1 << bits) - 1)
        places -= within
        places += words.astype(np.int64)
        return places

    def _generator(self, epoch: int, use: int) -> np.random.Generator:
        return Keyed(self.seed, self.stage).fresh(Key(index=0, epoch=epoch, replica=use))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sequences": {}}


@dataclass(frozen=True)
class StreamCopies:
    """The copies of the samples of a stream: every sample ``factor`` times, block by block.

    A stream is cut into blocks of as many samples as have room for all their copies in ``window``
    places; the places of each block are shuffled. So the copy at a place depends on the place, the
    epoch and the number of the stream only, and a worker holds one block at a time. The fraction of
    a factor is drawn at random for each sample.

    >>> copies = StreamCopies(2, window=4, seed=0)
    >>> copies.per_block
    2
    >>> sorted(copies.block(0, epoch=0, number=0, samples=2))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """

    factor: float
    window: int
    seed: int

    @property
    def per_block(self) -> int:
        """The number of samples in a block; the last block of a stream may have fewer."""
        return max(1, self.window // math.ceil(self.factor))

    def block(self, stream: int, epoch: int, number: int, samples: int) -> list[tuple[int, int]]:
        """The deliveries of a block of this many samples: (number of the sample in it, copy)."""
        counts = self._counts(stream, epoch, number)[:samples]
        total = int(counts.sum())
        owners = np.repeat(np.arange(samples), counts)
        copies = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        places = self._generator(stream, epoch, number, _WINDOWS).permutation(total)
        return list(zip(owners[places].tolist(), copies[places].tolist(), strict=True))

    def start(self, stream: int, epoch: int, place: int) -> tuple[int, int]:
        """The number of the block in which a place is, and the place within it."""
        if float(self.factor).is_integer():
            return divmod(place, self.per_block * int(self.factor))
        number = 0
        while place >= (total := int(self._counts(stream, epoch, number).sum())):
            place, number = place - total, number + 1
        return number, place

    def total(self, samples: int) -> int | None:
        """The number of copies that are made; ``None`` if the factor is no whole number."""
        return samples * int(self.factor) if float(self.factor).is_integer() else None

    def _counts(self, stream: int, epoch: int, number: int) -> NDArray[np.int64]:
        fraction, least = math.modf(self.factor)
        counts = np.full(self.per_block, int(least), dtype=np.int64)
        if fraction:
            counts += self._generator(stream, epoch, number, _COUNTS).random(len(counts)) < fraction
        return counts

    def _generator(self, stream: int, epoch: int, number: int, use: int) -> np.random.Generator:
        keyed = Keyed(self.seed, f"order/echo/stream/{use}")
        return keyed.fresh(Key(index=number, epoch=epoch, replica=stream))


@dataclass(frozen=True)
class Echoed(Plan):
    """The batches of one rank when samples are echoed.

    A group is one round of ``deal``: one sample for each rank. All ranks deliver the groups in the
    same sequence, so they have the same number of batches, and the copies of a sample stay on the
    rank that has prepared it. Batches have the ``batch_size`` given here; that of ``deal`` matters
    only for orders with ``blocks``, where it decides which rank is dealt what.

    The replica number of a copy is ``replica * echo.most + copy``, where ``replica`` is the number
    that ``deal`` gave the sample. ``spent`` lists the samples that no later batch has a copy of,
    once for each time they were dealt. Copies that ``drop_last`` leaves out do not count.

    A cursor's position counts the samples delivered to all ranks together, copies included. The
    rest of an epoch can be delivered in batches of another size, but only to the number of ranks
    that began it (and, for orders with ``blocks``, from a deal of the same batch size): otherwise
    the copies still to come of a sample would be on another rank.

    >>> from penstock.order import Sequential
    >>> deal = Deal(Sequential(), n=3, seed=0, batch_size=1)
    >>> twice = EchoSequence(2, window=1, seed=0)
    >>> for batch in Echoed(deal, twice, batch_size=4).batches(Cursor()):
    ...     print(batch.indices.tolist(), batch.replicas.tolist(), batch.spent.tolist())
    [0, 0, 1, 1] [0, 1, 0, 1] [0, 1]
    [2, 2] [0, 1] [2]
    """

    deal: Deal
    echo: EchoSequence
    batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", whole("batch_size", self.batch_size, least=1))

    @property
    def ahead(self) -> bool:
        """The next epoch may be requested early, unless its factor is chosen when it begins."""
        return self.deal.ahead and self.echo.fixed

    def ranks(self, epoch: int) -> NDArray[np.int32]:
        """See ``Plan.ranks``: the copies of a sample stay on one rank."""
        return self.deal.ranks(epoch)

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """This rank's batches from the cursor to the end of its epoch."""
        numbers, copies = self.echo.sequence(self.deal.share(cursor.epoch), cursor.epoch)
        first = self._place(cursor, len(numbers))
        indices, bases = self.deal.rank_samples(cursor.epoch)
        return self._cut(cursor, first, _Copies(numbers, copies, indices, bases))

    def length(self, cursor: Cursor) -> int:
        """The number of batches from the cursor to the end of its epoch."""
        total = self.echo.total(self.deal.share(cursor.epoch), cursor.epoch)
        return self._steps(total - self._place(cursor, total))

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        """The cursor after this batch."""
        position = cursor.position + len(batch.indices) * self.deal.world
        return Cursor(cursor.epoch, position, cursor.batch + 1)

    def _cut(self, cursor: Cursor, first: int, epoch: _Copies) -> Iterator[BatchKeys]:
        numbers, copies, indices, bases = epoch
        steps = self._steps(len(numbers) - first)
        end = min(len(numbers), first + steps * self.batch_size)
        last = _last_places(numbers, first, end, len(indices))
        for step in range(steps):
            start = first + step * self.batch_size
            places = slice(start, min(end, start + self.batch_size))
            groups = numbers[places]
            replicas = copies[places].astype(np.int64)
            if bases is not None:
                replicas += bases[groups] * self.echo.most
            spent = groups[last[groups] == np.arange(start, start + len(groups))]
            yield BatchKeys(
                cursor.epoch,
                cursor.batch + step,
                indices[groups],
                replicas if replicas.any() else None,
                indices[spent],
            )

    def _place(self, cursor: Cursor, total: int) -> int:
        """The number of samples delivered to this rank before the cursor, of the ``total``."""
        world = self.deal.world
        place, odd = divmod(cursor.position, world)
        if odd:
            raise StateError(
                f"The cursor is at sample {cursor.position} of epoch {cursor.epoch}, which is not "
                f"a multiple of {world}, the number of ranks. With echo() an epoch must end with "
                "the number of ranks that it began with. Resume with that number, or from a "
                "checkpoint taken between two epochs."
            )
        if place > total:
            raise StateError(
                f"The cursor is at sample {cursor.position} of epoch {cursor.epoch}, but with "
                f"this echo and {world} ranks that epoch delivers only {total * world}. The "
                "checkpoint was written with other data, another order, another echo, or another "
                "number of ranks: resume with those."
            )
        return place

    def _steps(self, left: int) -> int:
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)


@dataclass(frozen=True)
class EchoedBatches(Plan):
    """The batches of another plan, each delivered several times without a change.

    The copies of a batch are identical, so ``batches`` yields each fresh batch once, to be
    prepared, and ``deliveries`` has the numbers of the batches in the order of delivery. The
    cursor's ``batch`` counts deliveries; its ``position`` is always 0. The plan must know its
    length, because the copies are spread over the whole epoch.

    >>> from penstock.order import Sequential
    >>> twice = EchoSequence(2, window=1, seed=0)
    >>> plan = EchoedBatches(Deal(Sequential(), 6, 0, batch_size=2), twice)
    >>> plan.deliveries(Cursor(batch=3)).tolist()
    [1, 2, 2]
    >>> [batch.number for batch in plan.batches(Cursor(batch=3))]
    [1, 2]
    """

    plan: Plan
    echo: EchoSequence

    def __post_init__(self) -> None:
        self._fresh(0)

    @property
    def ahead(self) -> bool:
        """Whether the plan allows it, and the factor of the next epoch is known already."""
        return self.plan.ahead and self.echo.fixed

    def ranks(self, epoch: int) -> NDArray[np.int32] | None:
        """See ``Plan.ranks``."""
        return self.plan.ranks(epoch)

    def deliveries(self, cursor: Cursor) -> CompactInts:
        """The batch numbers in the order of delivery, from the cursor to the end of its epoch."""
        numbers, _ = self.echo.sequence(self._fresh(cursor.epoch), cursor.epoch)
        return numbers[self._delivered(cursor, len(numbers)) :]

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """Each batch that is still to be delivered, once, in the order of the plan."""
        needed = np.zeros(self._fresh(cursor.epoch), dtype=bool)
        needed[self.deliveries(cursor)] = True
        # From the start of the epoch: the plan's own cursor is known only by dealing its batches.
        return self._needed(self.plan.batches(Cursor(cursor.epoch)), needed)

    def length(self, cursor: Cursor) -> int:
        """The number of deliveries from the cursor to the end of its epoch."""
        total = self.echo.total(self._fresh(cursor.epoch), cursor.epoch)
        return total - self._delivered(cursor, total)

    def after(self, cursor: Cursor, batch: BatchKeys | None = None) -> Cursor:
        """The cursor after one more delivery; it does not depend on the batch."""
        return Cursor(cursor.epoch, 0, cursor.batch + 1)

    def epoch_state(self, epoch: int) -> Any:
        """The state of the plan whose batches are echoed."""
        return self.plan.epoch_state(epoch)

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        self.plan.check_state(epoch_state, first)

    def restore(self, epoch_state: Any) -> None:
        self.plan.restore(epoch_state)

    def _needed(self, dealt: Iterator[BatchKeys], needed: NDArray[np.bool_]) -> Iterator[BatchKeys]:
        # To the end even if no more batches are needed: a sampler may change its state there.
        count = 0
        for batch in dealt:
            count += 1
            if count > len(needed):
                break
            if needed[batch.number]:
                yield batch
        if count != len(needed):
            raise PipelineError(
                f"By its length the order or sampler has {len(needed)} batches in an epoch, but it "
                f"dealt {'more' if count > len(needed) else f'only {count}'}. echo() needs the "
                "right number: correct the length."
            )

    def _fresh(self, epoch: int) -> int:
        """The number of different batches in an epoch."""
        length = self.plan.length(Cursor(epoch))
        if length is None:
            raise PipelineError(
                "echo() after batch() needs the number of batches in an epoch, because it spreads "
                "the copies over the whole epoch, but the sampler has no length. Give the sampler "
                "a __len__."
            )
        return length

    def _delivered(self, cursor: Cursor, total: int) -> int:
        if cursor.batch > total:
            raise StateError(
                f"The cursor is at batch {cursor.batch} of epoch {cursor.epoch}, but with this "
                f"echo that epoch has only {total}. The checkpoint was written with other data, "
                "another order, another batch size or another echo: resume with those."
            )
        return cursor.batch


class _Copies(NamedTuple):
    """An epoch of one rank, as ``Echoed`` delivers it.

    ``numbers`` and ``copies``: group and copy number of every delivered sample. ``indices`` and
    ``bases``: index and replica number of every group's sample.
    """

    numbers: CompactInts
    copies: CompactInts
    indices: NDArray[np.int64]
    bases: NDArray[np.int64] | None


def _last_places(numbers: CompactInts, first: int, end: int, groups: int) -> NDArray[np.int64]:
    """The last place of each group from ``first`` to before ``end``; -1 for a group without one."""
    places = np.full(groups, -1, dtype=np.int64)
    np.maximum.at(places, numbers[first:end], np.arange(first, end))
    return places


def _factor(what: str, value: Any) -> float:
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    factor = float(value) if is_number else math.nan
    if not (math.isfinite(factor) and factor >= 1):
        raise PipelineError(
            f"{what} is {value!r}; give the number of times that each prepared sample or batch is "
            "used: a number of 1 or more, such as 2 or 1.5. With 1 nothing is repeated."
        )
    return factor


def _narrowest(end: int) -> type[np.integer[Any]]:
    """The narrowest integer type for the numbers below ``end``."""
    return next((kind for kind in (np.uint8, np.int32) if end - 1 <= np.iinfo(kind).max), np.int64)
