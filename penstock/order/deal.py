"""Who gets what: an order's sequence cut into batches, the same number for every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed
from penstock.order.cursor import Cursor
from penstock.order.order import Order, check, length_of, whole
from penstock.order.plan import BatchKeys, Plan
from penstock.order.replicas import replicas

_KEPT = 2
"""Epochs whose sequence is remembered: the current one, and the next one if it is begun early."""


_AHEAD = 1 << 14
"""Samples whose place in the sequence is worked out at a time: 0.1 us each, so 1.6 ms."""


@dataclass(frozen=True)
class Deal(Plan):
    """The batches of one rank.

    In each global step the next ``batch_size * world`` samples of the epoch's sequence are dealt
    like cards, one to each rank in turn. When what is left cannot be dealt evenly,
    ``tail="pad"`` deals samples from the start of the sequence again and ``tail="drop"`` leaves
    the last ones out. ``drop_last`` then leaves out a last step of smaller batches. So all ranks
    have the same number of batches, of the same sizes.

    An order with ``blocks = True`` says that neighbours belong together: there each rank is dealt
    a run of every step's samples instead, and its batch is shuffled by itself.

    A cursor's position counts samples, not batches: the rest of an epoch can be dealt to another
    number of ranks, or in batches of another size.

    >>> from penstock.order import Cursor, Sequential
    >>> for rank in range(2):
    ...     deal = Deal(Sequential(), n=7, seed=0, batch_size=2, rank=rank, world=2)
    ...     print([batch.indices.tolist() for batch in deal.batches(Cursor())])
    [[0, 2], [4, 6]]
    [[1, 3], [5, 0]]
    """

    order: Order
    n: int
    seed: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world: int = 1
    tail: Literal["pad", "drop"] = "pad"
    _kept: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.order, Order) or isinstance(self.order, type):
            raise PipelineError(
                f"The order is {self.order!r}, which has no indices(n, seed, epoch) to call. Give "
                "an order such as Shuffled()."
            )
        for name, least in (("n", 0), ("seed", None), ("batch_size", 1), ("world", 1), ("rank", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        if self.rank >= self.world:
            raise PipelineError(
                f"rank is {self.rank} in a world of {self.world}; ranks go from 0 to "
                f"{self.world - 1}."
            )
        if self.tail not in ("pad", "drop"):
            raise PipelineError(
                f'tail is {self.tail!r}; give "pad" to repeat samples until the ranks are even, '
                'or "drop" to leave the odd ones out.'
            )

    @property
    def ahead(self) -> bool:
        """Orders are pure functions, so the next epoch can be dealt at any time."""
        return True

    @property
    def as_deal(self) -> Deal:
        return self

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """The rest of the cursor's epoch for this rank."""
        if hasattr(self.order, "at"):
            total = self._total(cursor.epoch)
            dealt = self._even(self._left(cursor, total))
            return self._as_needed(cursor, self.order, total, dealt)
        sequence = self._sequence(cursor.epoch)
        left = self._left(cursor, len(sequence))
        dealt = self._even(left)
        # Counted over the whole epoch, so that the numbers do not depend on where a run resumed.
        padding = sequence[np.arange(max(0, dealt - left)) % max(1, len(sequence))]
        everything = np.concatenate((sequence, padding)) if len(padding) else sequence
        numbers = replicas(everything)
        mine: slice | NDArray[np.int64]
        if getattr(self.order, "blocks", False):
            mine = self._runs(cursor.epoch, cursor.position, cursor.position + dealt)
        else:
            mine = slice(cursor.position + self.rank, cursor.position + dealt, self.world)
        return self._cut(
            cursor,
            _frozen(everything[mine]),
            None if numbers is None else _frozen(numbers[mine]),
            self._steps(dealt),
        )

    def share(self, epoch: int) -> int:
        """How many samples each rank is dealt in an epoch, before ``drop_last``."""
        return self._even(self._total(epoch)) // self.world

    def mine(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """These samples one after the other, and their replica numbers if any repeats."""
        # In one piece, unless the cutting decides who is dealt what.
        blocks = getattr(self.order, "blocks", False)
        size = self.batch_size if blocks else max(1, self.share(epoch))
        uncut = replace(self, batch_size=size, drop_last=False)
        uncut._kept.update(self._kept)
        dealt = list(uncut.batches(Cursor(epoch)))
        if not dealt:
            return np.zeros(0, dtype=np.int64), None
        indices = np.concatenate([batch.indices for batch in dealt])
        if all(batch.replicas is None for batch in dealt):
            return indices, None
        none = np.zeros(size, dtype=np.int64)
        numbers = [none[: len(b.indices)] if b.replicas is None else b.replicas for b in dealt]
        return indices, np.concatenate(numbers)

    def length(self, cursor: Cursor) -> int:
        """How many batches the rest of the cursor's epoch is."""
        return self._steps(self._even(self._left(cursor, self._total(cursor.epoch))))

    def after(self, cursor: Cursor, batch: BatchKeys | None = None) -> Cursor:
        """The cursor once one more batch is delivered, which is the same whatever is in it."""
        position = cursor.position + self.batch_size * self.world
        return Cursor(cursor.epoch, min(position, self._total(cursor.epoch)), cursor.batch + 1)

    def _as_needed(self, cursor: Cursor, order: Any, total: int, dealt: int) -> Iterator[BatchKeys]:
        """Batches of an order that can be asked for any part, worked out a few at a time."""
        blocks = getattr(order, "blocks", False)
        stride = self.batch_size * self.world
        step, steps, ahead = 0, self._steps(dealt), 1
        while step < steps:
            count = min(ahead, steps - step)
            start = cursor.position + step * stride
            stop = min(cursor.position + dealt, start + count * stride)
            if blocks:
                places = self._runs(cursor.epoch, start, stop)
            else:
                places = np.arange(start + self.rank, stop, self.world, dtype=np.int64)
            # Places past the end are padding: the sequence from its start, for another time.
            again = places // max(1, total)
            indices = _frozen(order.at(self.n, self.seed, cursor.epoch, places % max(1, total)))
            numbers = _frozen(again) if again.any() else None
            yield from self._cut(
                Cursor(cursor.epoch, 0, cursor.batch + step), indices, numbers, count
            )
            step += count
            ahead = min(ahead * 2, max(1, _AHEAD // self.batch_size))

    def _runs(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """This rank's run of places in each step from ``start`` on, shuffled within itself."""
        keyed = Keyed(self.seed, "order/within")
        found = np.empty((stop - start) // self.world, dtype=np.int64)
        for done in range(0, len(found), self.batch_size):
            run = found[done : done + self.batch_size]
            # By where it begins, so that a resumed run shuffles its batches the same.
            first = start + done * self.world + self.rank * len(run)
            run[:] = first + keyed.at(Key(first, epoch)).permutation(len(run))
        return found

    def _cut(
        self,
        cursor: Cursor,
        indices: NDArray[np.int64],
        numbers: NDArray[np.int64] | None,
        steps: int,
    ) -> Iterator[BatchKeys]:
        for step in range(steps):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            copies = None if numbers is None else numbers[part]
            if copies is not None and not copies.any():
                copies = None
            yield BatchKeys(cursor.epoch, cursor.batch + step, indices[part], copies)

    def _left(self, cursor: Cursor, total: int) -> int:
        if cursor.position > total:
            raise StateError(
                f"The cursor stands at sample {cursor.position} of epoch {cursor.epoch}, and that "
                f"epoch has {total} samples in this order. The checkpoint was written with other "
                "data or another order."
            )
        return total - cursor.position

    def _even(self, left: int) -> int:
        """How many samples are dealt, of so many left, for the ranks to be even."""
        odd = left % self.world
        if self.tail == "drop":
            return left - odd
        return left + (self.world - odd if odd else 0)

    def _steps(self, dealt: int) -> int:
        each = dealt // self.world
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def _total(self, epoch: int) -> int:
        told = length_of(self.order, self.n)
        return len(self._sequence(epoch)) if told is None else told

    def _sequence(self, epoch: int) -> NDArray[np.int64]:
        kept = self._kept.get(epoch)
        if kept is not None:
            return kept
        found = check(self.order.indices(self.n, self.seed, epoch), self.n, self.order)
        told = length_of(self.order, self.n)
        if told is None:
            # Only an order that cannot tell its length is asked again, by length() and after().
            for old in list(self._kept)[: len(self._kept) - _KEPT + 1]:
                self._kept.pop(old, None)
            self._kept[epoch] = found
        elif told != len(found):
            raise PipelineError(
                f"{type(self.order).__name__} returned {len(found)} indices for epoch {epoch}, and "
                f"its length({self.n}) says {told}. Make them agree, or leave length() out."
            )
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}


def _frozen(part: NDArray[np.int64]) -> NDArray[np.int64]:
    # Batches are views of it, so nobody may write to one.
    found = np.ascontiguousarray(part)
    found.flags.writeable = False
    return found
