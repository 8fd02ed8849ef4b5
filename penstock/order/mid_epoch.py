"""Epochs that begin in the middle: batches k to the last, then batches 0 to k - 1."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.order.cursor import Cursor
from penstock.order.deal import Deal
from penstock.order.plan import BatchKeys, Begin, PartProgress, Plan


class MidEpoch(Plan):
    """A plan whose epochs may begin with any batch; the batches themselves stay the same.

    ``begin`` is called when an epoch begins and returns its first batch; without ``begin`` every
    epoch begins with batch 0. ``firsts`` has the first batch of each recent epoch. The cursor of an
    epoch that began in the middle counts batches, so the epoch can be resumed only with the same
    batch size and the same number of ranks.

    >>> from penstock.order import Deal, Sequential
    >>> plan = MidEpoch(Deal(Sequential(), n=6, seed=0, batch_size=2), lambda *_: 1)
    >>> [batch.indices.tolist() for batch in plan.batches(Cursor())]
    [[2, 3], [4, 5], [0, 1]]
    """

    def __init__(self, plan: Plan, begin: Begin | None = None) -> None:
        self.plan = plan
        self.begin = begin
        self.firsts: dict[int, int] = {}

    @property
    def ahead(self) -> bool:
        return self.plan.ahead

    @property
    def as_deal(self) -> Deal | None:
        return self.plan.as_deal

    def ranks(self, epoch: int) -> NDArray[np.int32] | None:
        return self.plan.ranks(epoch)

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        epoch = cursor.epoch
        length = self.plan.length(Cursor(epoch))
        first = self.firsts.get(epoch, 0) if cursor.batch else None
        if self.begin is not None:
            first = self.begin(epoch, length, first, cursor.batch)
        first = first or 0
        self.firsts = {e: f for e, f in self.firsts.items() if e >= epoch - 1}
        self.firsts[epoch] = first
        if not first:
            return self.plan.batches(cursor)
        return islice(self._from(epoch, first), cursor.batch, None)

    def _from(self, epoch: int, first: int) -> Iterator[BatchKeys]:
        return chain(
            islice(self.plan.batches(Cursor(epoch)), first, None),
            islice(self.plan.batches(Cursor(epoch)), first),
        )

    def length(self, cursor: Cursor) -> int | None:
        if not self.firsts.get(cursor.epoch):
            return self.plan.length(cursor)
        length = self.plan.length(Cursor(cursor.epoch))
        return None if length is None else max(0, length - cursor.batch)

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        if not self.firsts.get(cursor.epoch):
            return self.plan.after(cursor, batch)
        return cursor._replace(batch=cursor.batch + 1)

    def first(self, cursor: Cursor) -> int:
        """The first batch of the cursor's epoch, to resume it; 0 if no batch was delivered yet."""
        return self.firsts.get(cursor.epoch, 0) if cursor.batch else 0

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        self.plan.check_state(epoch_state)

    def progress(self, cursor: Cursor) -> list[PartProgress]:
        return self.plan.progress(cursor)

    def begin_at(self, epoch: int, first: int) -> None:
        self.firsts[epoch] = first

    def begin_by(self, begin: Begin) -> None:
        self.begin = begin
