"""Dealing: an order's sequence cut into batches, equally many for every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed
from penstock.order.cursor import Cursor
from penstock.order.order import Order, check, length_of, whole
from penstock.order.plan import BatchKeys, PartProgress, Plan

_EPOCHS_KEPT = 2
"""Epochs whose sequence is kept: the current one, and the next one if it begins early."""

_AHEAD = 1 << 14
"""Samples of the sequence that are computed at a time: 0.1 us each, so 1.6 ms."""


@dataclass(frozen=True)
class Deal(Plan):
    """The batches of one rank.

    In each global step the next ``batch_size * world`` samples of the epoch's sequence are dealt
    like cards, one to each rank in turn. If the number of remaining samples is not a multiple of
    ``world``, ``tail="pad"`` adds samples from the start of the sequence and ``tail="drop"`` leaves
    the last ones out. ``drop_last`` then leaves out a last step with smaller batches. So all ranks
    have the same number of batches, of the same sizes.

    An order with ``blocks = True`` keeps neighbours together: of every step's samples each rank is
    dealt a contiguous run, and that run is shuffled.

    A cursor's position counts samples, not batches, so the rest of an epoch can be dealt to another
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
    _sequences: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.order, Order) or isinstance(self.order, type):
            raise PipelineError(
                f"The order is {self.order!r}, which has no method indices(n, seed, epoch). Give "
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
                f'tail is {self.tail!r}; give "pad" to repeat samples until all ranks have equally '
                'many, or "drop" to leave out the samples that do not divide evenly.'
            )

    @property
    def ahead(self) -> bool:
        """Orders are pure functions, so the next epoch can be dealt early, unless one objects."""
        return bool(getattr(self.order, "ahead", True))

    @property
    def as_deal(self) -> Deal:
        return self

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """This rank's batches from the cursor to the end of its epoch."""
        if hasattr(self.order, "at") or hasattr(self.order, "keys_at"):
            total = self._total(cursor.epoch)
            dealt = self._even(self._left(cursor, total))
            return self._computed_as_needed(cursor, self.order, total, dealt)
        if not self.ahead and not cursor.position:
            self._sequences.pop(cursor.epoch, None)  # it may have been counted too early
        sequence = self._sequence(cursor.epoch)
        left = self._left(cursor, len(sequence))
        dealt = self._even(left)
        padding = sequence[np.arange(max(0, dealt - left)) % max(1, len(sequence))]
        padded = np.concatenate((sequence, padding)) if len(padding) else sequence
        # Numbered over the whole epoch, so that the numbers do not depend on where a run resumed.
        replicas = replica_numbers(padded)
        mine: slice | NDArray[np.int64]
        if getattr(self.order, "blocks", False):
            mine = self._runs(cursor.epoch, cursor.position, cursor.position + dealt)
        else:
            mine = slice(cursor.position + self.rank, cursor.position + dealt, self.world)
        return self._cut(
            cursor,
            _frozen(padded[mine]),
            None if replicas is None else _frozen(replicas[mine]),
            self._steps(dealt),
        )

    def share(self, epoch: int) -> int:
        """The number of samples that each rank is dealt in an epoch, before ``drop_last``."""
        return self._even(self._total(epoch)) // self.world

    def rank_samples(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """All samples that this rank is dealt in an epoch before ``drop_last``, in sequence.

        The second array has their replica numbers; it is ``None`` if all of them are 0.
        """
        # As one batch, except for blocks: there the batch size decides which rank is dealt what.
        blocks = getattr(self.order, "blocks", False)
        size = self.batch_size if blocks else max(1, self.share(epoch))
        uncut = replace(self, batch_size=size, drop_last=False)
        uncut._sequences.update(self._sequences)
        batches = list(uncut.batches(Cursor(epoch)))
        if not batches:
            return np.zeros(0, dtype=np.int64), None
        indices = np.concatenate([batch.indices for batch in batches])
        if all(batch.replicas is None for batch in batches):
            return indices, None
        zeros = np.zeros(size, dtype=np.int64)
        replicas = [zeros[: len(b.indices)] if b.replicas is None else b.replicas for b in batches]
        return indices, np.concatenate(replicas)

    def ranks(self, epoch: int) -> NDArray[np.int32]:
        """The rank that is dealt each sample in an epoch; -1 for samples that no rank is dealt.

        >>> from penstock.order import Sequential
        >>> Deal(Sequential(), n=5, seed=0, batch_size=1, world=2).ranks(0).tolist()
        [0, 1, 0, 1, 0]
        """
        ranks = np.full(self.n, -1, np.int32)
        # Backwards: samples that pad the end of the epoch belong to the rank dealt them first.
        for rank in reversed(range(self.world)):
            indices, replicas = replace(self, rank=rank).rank_samples(epoch)
            ranks[indices if replicas is None else indices[replicas == 0]] = rank
        return ranks

    def length(self, cursor: Cursor) -> int:
        """The number of batches from the cursor to the end of its epoch."""
        return self._steps(self._even(self._left(cursor, self._total(cursor.epoch))))

    def after(self, cursor: Cursor, batch: BatchKeys | None = None) -> Cursor:
        """The cursor after one more batch; it does not depend on the batch's content."""
        epoch, position, delivered = cursor
        position += self.batch_size * self.world
        total = self._stated_length
        if total is None:
            total = self._total(epoch)
        # The training loop pays for this with every batch: no other Python function is called.
        return tuple.__new__(Cursor, (epoch, min(position, total), delivered + 1))

    def progress(self, cursor: Cursor) -> list[PartProgress]:
        of_mix = getattr(self.order, "progress", None)
        return [] if of_mix is None else of_mix(cursor.epoch, cursor.position)

    def _computed_as_needed(
        self, cursor: Cursor, order: Any, total: int, dealt: int
    ) -> Iterator[BatchKeys]:
        """Batches of an order that has ``at`` or ``keys_at``, computed a few at a time."""
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
            if hasattr(order, "keys_at"):
                indices, replicas = order.keys_at(self.n, self.seed, cursor.epoch, places)
            else:
                # Places past the end are padding: the sequence starts again, and every sample's
                # replica number is the number of passes before.
                passes = places // max(1, total)
                indices = order.at(self.n, self.seed, cursor.epoch, places % max(1, total))
                replicas = passes if passes.any() else None
            yield from self._cut(
                Cursor(cursor.epoch, 0, cursor.batch + step),
                _frozen(indices),
                None if replicas is None else _frozen(replicas),
                count,
            )
            step += count
            ahead = min(ahead * 2, max(1, _AHEAD // self.batch_size))

    def _runs(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """This rank's run of places in every step of ``start`` to ``stop``, each run shuffled."""
        keyed = Keyed(self.seed, "order/within")
        places = np.empty((stop - start) // self.world, dtype=np.int64)
        for done in range(0, len(places), self.batch_size):
            run = places[done : done + self.batch_size]
            # Keyed by the first place of the run, so that a resumed run shuffles it the same way.
            first = start + done * self.world + self.rank * len(run)
            run[:] = first + keyed.at(Key(first, epoch)).permutation(len(run))
        return places

    def _cut(
        self,
        cursor: Cursor,
        indices: NDArray[np.int64],
        replicas: NDArray[np.int64] | None,
        steps: int,
    ) -> Iterator[BatchKeys]:
        for step in range(steps):
            rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
            numbers = None if replicas is None else replicas[rows]
            if numbers is not None and not numbers.any():
                numbers = None
            yield BatchKeys(cursor.epoch, cursor.batch + step, indices[rows], numbers)

    def _left(self, cursor: Cursor, total: int) -> int:
        if cursor.position > total:
            raise StateError(
                f"The cursor is at sample {cursor.position} of epoch {cursor.epoch}, but in this "
                f"order that epoch has only {total} samples. The checkpoint was written with other "
                "data or another order: resume with those."
            )
        return total - cursor.position

    def _even(self, left: int) -> int:
        """The number of samples to deal, of ``left`` remaining ones: a multiple of ``world``."""
        odd = left % self.world
        if self.tail == "drop":
            return left - odd
        return left + (self.world - odd if odd else 0)

    def _steps(self, dealt: int) -> int:
        each = dealt // self.world
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def _total(self, epoch: int) -> int:
        length = self._stated_length
        return len(self._sequence(epoch)) if length is None else length

    @cached_property
    def _stated_length(self) -> int | None:
        """Asked once, because the training loop needs it after every batch."""
        return length_of(self.order, self.n)

    def _sequence(self, epoch: int) -> NDArray[np.int64]:
        kept = self._sequences.get(epoch)
        if kept is not None:
            return kept
        sequence = check(self.order.indices(self.n, self.seed, epoch), self.n, self.order)
        length = length_of(self.order, self.n)
        if length is None:
            # Kept only for orders without length(): length() and after() need the sequence again.
            for old in list(self._sequences)[: len(self._sequences) - _EPOCHS_KEPT + 1]:
                self._sequences.pop(old, None)
            self._sequences[epoch] = sequence
        elif length != len(sequence):
            raise PipelineError(
                f"{type(self.order).__name__} returned {len(sequence)} indices for epoch {epoch}, "
                f"but its length({self.n}) says {length}. Make them agree, or leave length() out."
            )
        return sequence

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sequences": {}}


def _frozen(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    # Batches are views of this array, so writing to one of them would change the sequence.
    array = np.ascontiguousarray(indices)
    array.flags.writeable = False
    return array


def replica_numbers(indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """For each entry, the number of equal entries before it; ``None`` if nothing repeats.

    >>> replica_numbers(np.array([4, 7, 4, 4, 7])).tolist()
    [0, 0, 1, 2, 1]
    >>> replica_numbers(np.array([4, 7, 5])) is None
    True
    """
    places = _places_of_repeated(indices)
    if places is None:
        return None
    repeated = indices[places]
    by_index = np.argsort(repeated, kind="stable")
    ordered = repeated[by_index]
    ranks = np.arange(len(ordered), dtype=np.int64)
    starts = np.empty(len(ordered), dtype=bool)
    starts[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=starts[1:])
    numbers = np.zeros(len(indices), dtype=np.int64)
    numbers[places[by_index]] = ranks - np.maximum.accumulate(np.where(starts, ranks, 0))
    return numbers


def _places_of_repeated(indices: NDArray[np.int64]) -> NDArray[np.intp] | None:
    """The places of entries that occur more than once; only these need sorting."""
    if len(indices) < 2:
        return None
    # A table by index is several times faster than sorting, as long as it stays small.
    if indices.min() >= 0 and indices.max() < 4 * len(indices):
        counts = np.bincount(indices)
        if counts.max() < 2:
            return None
        return np.flatnonzero(counts[indices] > 1)
    ordered = np.sort(indices)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    return np.arange(len(indices), dtype=np.intp)


class Occurrences:
    """Replica numbers for a sequence that arrives in chunks and may be endless.

    Indices are places in a source, so a table as long as the largest index is affordable.

    >>> occurrences = Occurrences()
    >>> occurrences.count(np.array([4, 7])) is None
    True
    >>> occurrences.count(np.array([7, 5, 7])).tolist()
    [1, 0, 2]
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int32)

    def count(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The replica numbers of the next chunk; ``None`` if all of them are 0."""
        if len(indices) == 0:
            return None
        largest = int(indices.max())
        if largest >= len(self._counts):
            grown = np.zeros(max(largest + 1, 2 * len(self._counts)), dtype=np.int32)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        numbers = self._counts[indices].astype(np.int64)
        within_chunk = replica_numbers(indices)
        if within_chunk is not None:
            numbers += within_chunk
        # NumPy keeps the last of several assignments to one index: the one with the highest number.
        self._counts[indices] = numbers + 1
        return numbers if numbers.any() else None
