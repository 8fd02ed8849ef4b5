"""Budgets: batches bounded by a sum of lengths, and made of samples of similar length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed
from penstock.order.cursor import Cursor
from penstock.order.deal import replica_numbers
from penstock.order.order import Order, check, whole
from penstock.order.plan import BatchKeys, PartProgress, Plan

_Indices = NDArray[np.int64]

TooLong = Literal["raise", "drop", "alone"]
"""What happens to a sample that is longer than the budget: it is an error, it is left out, or it
becomes a batch of its own."""

BATCHES_IN_WINDOW = 64
"""The default window, in batches. A window of samples is sorted, so that neighbours have similar
lengths. For log-normal lengths (sigma 1) and batches of 8,192 padded tokens, 3 % of a batch is
padding, with 16 batches 9 %, without sorting 40 % (docs/mixtures.md); and samples still meet new
neighbours in every epoch."""

_EPOCHS_KEPT = 2
"""Epochs whose batches are kept: the current one, and the next one if it begins early."""


@dataclass(frozen=True, eq=False)
class Budget:
    """How samples are grouped into batches by their lengths.

    - ``lengths``: of each sample of the source. A length of 0 counts as 1.
    - ``limit``: the most that the lengths of a batch may add up to; ``None``: no limit.
    - ``size``: the most samples in a batch; ``None``: no limit.
    - ``padded``: each sample counts as long as the longest of its batch.
    - ``window``: the number of samples, in the order of the epoch, that are grouped together.
    """

    lengths: NDArray[Any]
    limit: float | None = None
    size: int | None = None
    padded: bool = False
    window: int | None = None
    too_long: TooLong = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _checked(self.lengths))
        if self.limit is None and self.size is None:
            raise PipelineError(
                "batch() got by= without a size: give the number of samples in a batch, or tokens= "
                "for the sum of their lengths, or both."
            )
        limit: Any = self.limit
        is_number = not isinstance(limit, bool) and isinstance(limit, (int, float, np.number))
        if limit is not None and not (is_number and 0 < limit < math.inf):
            raise PipelineError(f"tokens is {limit!r}; give a finite number above 0.")
        for name in ("size", "window"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(name, value, 1))
        if self.too_long not in ("raise", "drop", "alone"):
            raise PipelineError(
                f'too_long is {self.too_long!r}; give "raise", "drop" to leave samples out that '
                'are longer than the budget, or "alone" to make batches of one sample of them.'
            )

    def check(self, name: Any) -> None:
        """Raise PipelineError if a sample is too long. ``name``: returns the name of a sample."""
        if self.limit is None or self.too_long == "alone":
            return
        above = np.flatnonzero(self.lengths > self.limit)
        if len(above) == len(self.lengths) and len(above):
            raise PipelineError(
                f"All {len(above)} samples are longer than tokens={self.limit}. Give a larger "
                "budget."
            )
        if len(above) and self.too_long == "raise":
            worst = int(above[self.lengths[above].argmax()])
            raise PipelineError(
                f"{len(above)} of {len(self.lengths)} samples are longer than "
                f"tokens={self.limit}; the longest is {name(worst)} (index {worst}) with "
                f'{self.lengths[worst]}. Give a larger budget, or too_long="drop" to leave them '
                'out, or too_long="alone" to make batches of one sample of them.'
            )

    @property
    def expected_rows(self) -> int:
        """About the number of samples in a batch."""
        most = len(self.lengths) if self.size is None else self.size
        if self.limit is None or not len(self.lengths):
            return max(1, most)
        return max(1, min(most, int(self.limit / float(self.lengths.mean()))))

    def form(self, sequence: _Indices, seed: int, epoch: int, *, shuffle: bool) -> list[_Indices]:
        """The places of a sequence that make up each batch, batch by batch.

        ``shuffle``: the batches of a window come in random order, and not by length.
        """
        lengths = self.lengths[sequence]
        places = np.arange(len(sequence), dtype=np.int64)
        if self.limit is not None and self.too_long == "drop":
            places = places[lengths <= self.limit]
        window = self.window or BATCHES_IN_WINDOW * self.expected_rows
        keyed = Keyed(seed, "order/budget")
        batches: list[_Indices] = []
        for number, start in enumerate(range(0, len(places), window)):
            chunk = places[start : start + window]
            by_length = chunk[np.argsort(lengths[chunk], kind="stable")]
            ends = self._cut(lengths[by_length])
            starts = [0, *ends[:-1]]
            order = np.arange(len(ends))
            if shuffle:
                order = keyed.at(Key(number, epoch)).permutation(len(ends))
            batches += [by_length[starts[i] : ends[i]] for i in order.tolist()]
        return batches

    def _cut(self, lengths: NDArray[Any]) -> list[int]:
        """Where batches end in a run of samples that is sorted by length: as late as possible."""
        sums = np.cumsum(lengths)
        ends: list[int] = []
        at, end = 0, len(lengths)
        while at < end:
            most = end - at if self.size is None else min(self.size, end - at)
            if self.limit is not None and self.padded:
                most = max(1, min(most, int(self.limit // lengths[at])))
                costs = lengths[at : at + most] * np.arange(1, most + 1)
                most = int(costs.searchsorted(self.limit, side="right"))
            elif self.limit is not None:
                before = sums[at - 1] if at else 0
                most = min(most, int(sums.searchsorted(before + self.limit, side="right")) - at)
            at += max(1, most)
            ends.append(at)
        return ends


class _FormedEpoch(NamedTuple):
    """The batches of all ranks: places in ``sequence``, and the replica number of each place."""

    sequence: _Indices
    replicas: _Indices | None
    batches: list[_Indices]

    @property
    def most(self) -> int:
        return 1 if self.replicas is None else int(self.replicas.max()) + 1


@dataclass(frozen=True)
class Budgeted(Plan):
    """The batches of one rank, made by a ``Budget``.

    The batches of an epoch are one sequence, a function of (seed, epoch, lengths, budget). In each
    step the next ``world`` of them are dealt, one to each rank. If the last step has too few, the
    batches with the most samples are halved until there are enough, so that nothing is repeated or
    left out; if even single samples are too few, ``tail`` decides as in ``Deal``.

    The ``position`` of a cursor counts the batches that all ranks together have been dealt, so the
    rest of an epoch can be dealt to another number of ranks.

    >>> from penstock.order import Sequential
    >>> budget = Budget(np.array([5, 1, 1, 5, 2, 2]), limit=6)
    >>> plan = Budgeted(Sequential(), 6, 0, budget, shuffle=False)
    >>> [batch.indices.tolist() for batch in plan.batches(Cursor())]
    [[1, 2, 4, 5], [0], [3]]
    """

    order: Order
    n: int
    seed: int
    budget: Budget
    rank: int = 0
    world: int = 1
    tail: Literal["pad", "drop"] = "pad"
    shuffle: bool = True
    _epochs: dict[int, _FormedEpoch] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.budget.lengths) != self.n:
            raise PipelineError(
                f"batch() got {len(self.budget.lengths)} lengths, but the source has {self.n} "
                "samples. Give one length for each sample."
            )

    @property
    def ahead(self) -> bool:
        return bool(getattr(self.order, "ahead", True))

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        if not self.ahead and not cursor.position:
            self._epochs.pop(cursor.epoch, None)  # it may have been counted too early
        epoch = self._epoch(cursor.epoch)
        self._check(cursor, len(epoch.batches))
        return self._dealt(cursor, epoch)

    def ranks(self, epoch: int) -> NDArray[np.int32]:
        """See ``Plan.ranks``."""
        formed, ranks = self._epoch(epoch), np.full(self.n, -1, np.int32)
        steps, odd = divmod(len(formed.batches), self.world)
        dealt = [
            (number % self.world, batch)
            for number, batch in enumerate(formed.batches[: steps * self.world])
        ]
        last = self._last_step(formed, odd) if odd else None
        dealt += [(rank, batch) for rank, (batch, again) in enumerate(last or ()) if not again]
        # Backwards: a sample that several batches have belongs to the rank that meets it first.
        for rank, batch in reversed(dealt):
            ranks[formed.sequence[batch]] = rank
        return ranks

    def length(self, cursor: Cursor) -> int:
        epoch = self._epoch(cursor.epoch)
        self._check(cursor, len(epoch.batches))
        steps, odd = divmod(len(epoch.batches) - cursor.position, self.world)
        return steps + (bool(odd) and self._last_step(epoch, odd) is not None)

    def after(self, cursor: Cursor, batch: BatchKeys | None = None) -> Cursor:
        end = len(self._epoch(cursor.epoch).batches)
        return Cursor(cursor.epoch, min(cursor.position + self.world, end), cursor.batch + 1)

    def progress(self, cursor: Cursor) -> list[PartProgress]:
        of_mix = getattr(self.order, "progress", None)
        if of_mix is None:
            return []
        dealt = self._epoch(cursor.epoch).batches[: cursor.position]
        progress: list[PartProgress] = of_mix(cursor.epoch, sum(map(len, dealt)))
        return progress

    def _dealt(self, cursor: Cursor, epoch: _FormedEpoch) -> Iterator[BatchKeys]:
        left = len(epoch.batches) - cursor.position
        steps, odd = divmod(left, self.world)
        for step in range(steps):
            places = epoch.batches[cursor.position + step * self.world + self.rank]
            yield self._keys(cursor, step, epoch, places)
        last = self._last_step(epoch, odd) if odd else None
        if last is not None:
            places, again = last[self.rank]
            yield self._keys(cursor, steps, epoch, places, again)

    def _last_step(self, epoch: _FormedEpoch, count: int) -> list[tuple[_Indices, int]] | None:
        """The last ``count`` batches, divided over all ranks; ``None`` if they are left out.

        With each batch, how often its samples came in the epoch before because of padding.
        """
        batches = epoch.batches[len(epoch.batches) - count :]
        while len(batches) < self.world:
            place = max(range(len(batches)), key=lambda i: len(batches[i]))
            largest = batches[place]
            if len(largest) < 2:
                break
            half = len(largest) // 2
            batches = [*batches[:place], largest[:half], largest[half:], *batches[place + 1 :]]
        dealt = [(batch, 0) for batch in batches]
        if len(dealt) < self.world and self.tail == "drop":
            return None
        while len(dealt) < self.world:
            again, place = divmod(len(dealt) - len(batches), len(epoch.batches))
            dealt.append((epoch.batches[place][:1], again + 1))
        return dealt

    def _keys(
        self, cursor: Cursor, step: int, epoch: _FormedEpoch, places: _Indices, again: int = 0
    ) -> BatchKeys:
        replicas = None if epoch.replicas is None else epoch.replicas[places]
        if again:
            before = np.zeros(len(places), np.int64) if replicas is None else replicas
            replicas = before + again * epoch.most
        if replicas is not None and not replicas.any():
            replicas = None
        return BatchKeys(cursor.epoch, cursor.batch + step, epoch.sequence[places], replicas)

    def _epoch(self, epoch: int) -> _FormedEpoch:
        kept = self._epochs.get(epoch)
        if kept is not None:
            return kept
        sequence, replicas = self._sequence(epoch)
        batches = self.budget.form(sequence, self.seed, epoch, shuffle=self.shuffle)
        made = _FormedEpoch(sequence, replicas, batches)
        for old in list(self._epochs)[: len(self._epochs) - _EPOCHS_KEPT + 1]:
            self._epochs.pop(old, None)
        self._epochs[epoch] = made
        return made

    def _sequence(self, epoch: int) -> tuple[_Indices, _Indices | None]:
        if hasattr(self.order, "keys_at"):
            length = self.order.length(self.n)  # type: ignore[attr-defined]
            keys: tuple[_Indices, _Indices | None] = self.order.keys_at(
                self.n, self.seed, epoch, np.arange(length, dtype=np.int64)
            )
            return keys
        sequence = check(self.order.indices(self.n, self.seed, epoch), self.n, self.order)
        return sequence, replica_numbers(sequence)

    def _check(self, cursor: Cursor, batches: int) -> None:
        if cursor.position > batches:
            raise StateError(
                f"The cursor is after {cursor.position} batches of epoch {cursor.epoch}, but with "
                f"this budget that epoch has only {batches}. The checkpoint was written with other "
                "data, lengths or another budget: resume with those."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}}


def _checked(given: Any) -> NDArray[Any]:
    try:
        lengths = np.array(given)
    except ValueError as error:
        raise PipelineError(f"The lengths of batch() are not numbers ({error}).") from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iuf":
        raise PipelineError(
            f"The lengths of batch() are {lengths.dtype} of shape {lengths.shape}. Give a flat "
            "array with one number for each sample."
        )
    bad = ~np.isfinite(lengths) | (lengths < 0)
    if bad.any():
        place = int(bad.argmax())
        raise PipelineError(
            f"Length {place} of batch() is {lengths[place]}. Lengths must be finite numbers of 0 "
            "or more."
        )
    lengths = lengths.astype(np.float64 if lengths.dtype.kind == "f" else np.int64)
    lengths[lengths == 0] = 1
    lengths.flags.writeable = False
    return lengths
