"""Echoing: how often each sample or batch comes in an epoch, and the plans that deal copies."""

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

Numbers = NDArray[np.integer[Any]]
"""Whole numbers, in no more bytes than they need: there are ``factor`` times n of them."""

_KEPT = 2
"""Epochs whose sequence is remembered: the current one, and the next one if it is begun early."""

_COUNTS, _WINDOWS = 0, 1
"""What the random choices of an epoch are for; each has a stream of its own."""


@dataclass(frozen=True)
class EchoSequence:
    """Every group ``factor`` times, its copies spread over windows of ``window`` places.

    A group is what is repeated as one: a sample of each rank, or a batch. Of a factor between two
    whole numbers the fraction is dealt by chance, group by group: at 1.25 one in four comes twice.
    The copies of a group follow each other, and then every run of ``window`` places is shuffled by
    itself. So a copy is delivered less than a window away from the others, or right after them with
    ``window=1``.

    ``factor`` may also be a function of the epoch, for a factor that is chosen as epochs begin. It
    must give the same answer whenever it is asked for the same epoch. What it answers above
    ``limit`` counts as ``limit``: measured ratios have no bound, and replica numbers need one.

    Two echoes on one road choose apart when they have different names for ``stage``.

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
    _kept: dict[tuple[int, int, float], tuple[Numbers, Numbers]] = field(
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
        """How many copies a group can have in any epoch; copy numbers stay below it."""
        return self.limit if callable(self.factor) else math.ceil(self.factor)

    def factor_of(self, epoch: int) -> float:
        """The factor of one epoch."""
        if not callable(self.factor):
            return self.factor
        chosen = _factor(f"The factor that echo() was given for epoch {epoch}", self.factor(epoch))
        return min(chosen, float(self.limit))

    def counts(self, groups: int, epoch: int) -> NDArray[np.int64]:
        """How often each group comes in an epoch."""
        fraction, least = math.modf(self.factor_of(epoch))
        found = np.full(groups, int(least), dtype=np.int64)
        if fraction:
            found += self._generator(epoch, _COUNTS).random(groups) < fraction
        return found

    def total(self, groups: int, epoch: int) -> int:
        """How many copies of all groups an epoch has."""
        factor = self.factor_of(epoch)
        kept = self._kept.get((groups, epoch, factor))
        if kept is not None:
            return len(kept[0])
        if factor.is_integer():
            return groups * int(factor)
        return int(self.counts(groups, epoch).sum())

    def sequence(self, groups: int, epoch: int) -> tuple[Numbers, Numbers]:
        """The groups of an epoch as they are delivered, and which copy of its group each one is."""
        key = (groups, epoch, self.factor_of(epoch))
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        counts = self.counts(groups, epoch)
        ends = np.cumsum(counts)
        places = self._shuffled(int(ends[-1]) if groups else 0, epoch)
        numbers = np.repeat(np.arange(groups, dtype=_narrowest(groups)), counts)[places]
        copies = (places - (ends - counts)[numbers]).astype(_narrowest(self.most))
        for found in (numbers, copies):
            found.flags.writeable = False
        for old in list(self._kept)[: len(self._kept) - _KEPT + 1]:
            self._kept.pop(old, None)
        self._kept[key] = numbers, copies
        return numbers, copies

    def _shuffled(self, total: int, epoch: int) -> NDArray[np.int64]:
        """All places of an epoch, shuffled within their windows."""
        places = np.arange(total, dtype=np.int64)
        window = min(self.window, total)
        if window <= 1:
            return places
        # A random word for every place, with the place within its window in the lowest bits:
        # sorting the words shuffles the places, in a third of the time of an argsort. Words are
        # drawn place by place, so a window does not depend on how many others there are.
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
        return {**self.__dict__, "_kept": {}}


@dataclass(frozen=True)
class Echoed(Plan):
    """The batches of one rank when samples are echoed.

    What ``deal`` gives to the ranks in one round is a group. All ranks deliver the groups in the
    same sequence, so they have the same number of batches, and the copies of a sample stay on
    the rank that has prepared it. Batches are cut here: the size of those of ``deal`` matters only
    to orders with ``blocks``, whose dealing depends on it.

    The replica number of a copy is ``replica * echo.most + copy``, with the replica number that
    the sample was dealt with. ``spent`` are the samples that no later batch has a copy of, once for
    each time they were dealt; a copy that ``drop_last`` leaves out is no copy.

    A cursor's position counts what all ranks together were delivered, copies included. The rest of
    an epoch can be delivered in batches of another size, but to as many ranks as began it (and
    from a deal of the same batch size, where that matters): which samples a rank has begun to
    repeat depends on it.

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
        """The next epoch may be asked for early, unless its factor is still to be chosen."""
        return self.deal.ahead and self.echo.fixed

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """The rest of the cursor's epoch for this rank."""
        numbers, copies = self.echo.sequence(self.deal.share(cursor.epoch), cursor.epoch)
        first = self._place(cursor, len(numbers))
        indices, bases = self.deal.mine(cursor.epoch)
        return self._cut(cursor, first, _Copies(numbers, copies, indices, bases))

    def length(self, cursor: Cursor) -> int:
        """How many batches the rest of the cursor's epoch is."""
        total = self.echo.total(self.deal.share(cursor.epoch), cursor.epoch)
        return self._steps(total - self._place(cursor, total))

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        """The cursor once this batch is delivered."""
        position = cursor.position + len(batch.indices) * self.deal.world
        return Cursor(cursor.epoch, position, cursor.batch + 1)

    def _cut(self, cursor: Cursor, first: int, epoch: _Copies) -> Iterator[BatchKeys]:
        numbers, copies, indices, bases = epoch
        steps = self._steps(len(numbers) - first)
        end = min(len(numbers), first + steps * self.batch_size)
        last = _last_places(numbers, first, end, len(indices))
        for step in range(steps):
            start = first + step * self.batch_size
            part = slice(start, min(end, start + self.batch_size))
            groups = numbers[part]
            replicas = copies[part].astype(np.int64)
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
        """How many copies this rank was delivered before the cursor, of ``total`` in the epoch."""
        world = self.deal.world
        place, odd = divmod(cursor.position, world)
        if odd:
            raise StateError(
                f"The cursor stands at sample {cursor.position} of epoch {cursor.epoch}, where "
                f"{world} ranks never stand: each is delivered as many as the others. With echo() "
                "an epoch ends with as many ranks as it began with. Resume with that many, or from "
                "a checkpoint taken between epochs."
            )
        if place > total:
            raise StateError(
                f"The cursor stands at sample {cursor.position} of epoch {cursor.epoch}, and with "
                f"this echo and {world} ranks that epoch delivers {total * world}. The checkpoint "
                "was written with other data, another order, another echo, or another number of "
                "ranks: resume with what it was written with."
            )
        return place

    def _steps(self, left: int) -> int:
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)


@dataclass(frozen=True)
class EchoedBatches(Plan):
    """The batches of another plan, each delivered several times as it is.

    A copy of a batch has nothing of its own, so ``batches`` gives each fresh batch once, for
    preparing, and ``deliveries`` says in which sequence their numbers are handed out. A cursor
    counts what was handed out, in ``batch`` alone. The plan must know its length, because how
    often each batch comes is decided over the whole epoch.

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
        """As the plan says, unless the factor of the next epoch is still to be chosen."""
        return self.plan.ahead and self.echo.fixed

    def deliveries(self, cursor: Cursor) -> Numbers:
        """The numbers of the fresh batches, as they are handed out in the rest of the epoch."""
        numbers, _ = self.echo.sequence(self._fresh(cursor.epoch), cursor.epoch)
        return numbers[self._delivered(cursor, len(numbers)) :]

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """Each fresh batch that is still to be handed out, once, in the sequence of the plan."""
        needed = np.zeros(self._fresh(cursor.epoch), dtype=bool)
        needed[self.deliveries(cursor)] = True
        # From the start: where a plan stands after a number of batches, only dealing them tells.
        return self._needed(self.plan.batches(Cursor(cursor.epoch)), needed)

    def length(self, cursor: Cursor) -> int:
        """How many batches are handed out in the rest of the cursor's epoch."""
        total = self.echo.total(self._fresh(cursor.epoch), cursor.epoch)
        return total - self._delivered(cursor, total)

    def after(self, cursor: Cursor, batch: BatchKeys | None = None) -> Cursor:
        """The cursor once one more batch is handed out, whichever it is."""
        return Cursor(cursor.epoch, 0, cursor.batch + 1)

    def epoch_state(self, epoch: int) -> Any:
        """As the plan whose batches are echoed says."""
        return self.plan.epoch_state(epoch)

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        self.plan.check_state(epoch_state, first)

    def restore(self, epoch_state: Any) -> None:
        self.plan.restore(epoch_state)

    def _needed(self, dealt: Iterator[BatchKeys], needed: NDArray[np.bool_]) -> Iterator[BatchKeys]:
        # To the end even when nothing more is needed: what a sampler does there is part of it.
        count = 0
        for batch in dealt:
            count += 1
            if count > len(needed):
                break
            if needed[batch.number]:
                yield batch
        if count != len(needed):
            raise PipelineError(
                f"The epoch was to have {len(needed)} fresh batches, by the length of the order or "
                f"sampler, and {'more' if count > len(needed) else f'only {count}'} came. echo() "
                "needs to know how many there are: make the length right."
            )

    def _fresh(self, epoch: int) -> int:
        """How many fresh batches an epoch has."""
        found = self.plan.length(Cursor(epoch))
        if found is None:
            raise PipelineError(
                "echo() after batch() needs to know how many batches an epoch has, and the sampler "
                "cannot tell: its copies are dealt over the whole epoch. Give the sampler a "
                "__len__."
            )
        return found

    def _delivered(self, cursor: Cursor, total: int) -> int:
        if cursor.batch > total:
            raise StateError(
                f"The cursor stands at batch {cursor.batch} of epoch {cursor.epoch}, and with this "
                f"echo that epoch has {total}. The checkpoint was written with other data, another "
                "order, another batch size or another echo: resume with what it was written with."
            )
        return cursor.batch


class _Copies(NamedTuple):
    """An epoch of one rank: its copies as they are delivered, and the samples they are of."""

    numbers: Numbers
    copies: Numbers
    indices: NDArray[np.int64]
    bases: NDArray[np.int64] | None


def _last_places(numbers: Numbers, first: int, end: int, groups: int) -> NDArray[np.int64]:
    """Where each group comes for the last time from ``first`` on and before ``end``."""
    found = np.full(groups, -1, dtype=np.int64)
    np.maximum.at(found, numbers[first:end], np.arange(first, end))
    return found


def _factor(what: str, value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, Real)
    found = float(value) if number else math.nan
    if not (math.isfinite(found) and found >= 1):
        raise PipelineError(
            f"{what} is {value!r}; give how often each fresh output is used, a number of 1 or more "
            "such as 2 or 1.5. With 1 everything comes once."
        )
    return found


def _narrowest(end: int) -> type[np.integer[Any]]:
    """The smallest type for the numbers below ``end``."""
    return next((kind for kind in (np.uint8, np.int32) if end - 1 <= np.iinfo(kind).max), np.int64)
