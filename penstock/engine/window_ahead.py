"""Reads ahead in shards for an order that reads them in sequence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.order import Deal
from penstock.order.plan import BatchKeys
from penstock.order.reservoir import Streamed
from penstock.source.source import Source

_CATCH_UP = 4
"""Batches of samples that are asked for with one batch, until the whole window was: all of it at
once would keep storage from the first batches."""


class WindowAhead:
    """Batches of a loader, which tells the source which samples enter the window next.

    These are the next samples of each shard, so storage is read in sequence and in large blocks.
    What was asked for is a hint: batches do not depend on it.
    """

    def __init__(self, batches: Iterator[BatchKeys], deal: Deal, source: Source) -> None:
        self._batches, self._deal, self._source = batches, deal, source
        self._objects = source.objects
        if self._objects is not None:
            self._objects.hold(deal.order.streamed.window)  # type: ignore[attr-defined]
        self._streamed: Streamed = deal.order.streamed  # type: ignore[attr-defined]
        self._epoch = -1
        self._asked = 0
        """Samples of each lane that were asked for in this epoch."""

    def __iter__(self) -> WindowAhead:
        return self

    def __next__(self) -> BatchKeys:
        batch = next(self._batches)
        entering = self._entering(batch)
        if self._objects is None:
            if len(entering):
                self._source.will_need(entering)
            return batch
        # The engine announces them: it knows which of them a cache has.
        return batch._replace(entering=entering)

    def _entering(self, batch: BatchKeys) -> NDArray[np.int64]:
        """The samples to ask for with this batch."""
        streamed, lanes = self._streamed, self._streamed.lanes
        step = self._deal.batch_size * self._deal.world
        delivered = batch.number * step // lanes
        if batch.epoch != self._epoch:
            self._epoch, self._asked = batch.epoch, delivered
        end = delivered + streamed.slots(0) + -(-step // lanes)
        end = min(end, self._asked + -(-_CATCH_UP * step // lanes), streamed.span(0)[1])
        if end <= self._asked:
            return np.zeros(0, dtype=np.int64)
        first, self._asked = self._asked, end
        return streamed.entering(self._deal.seed, batch.epoch, first, end)


def window_ahead(
    batches: Iterator[BatchKeys], deal: Deal | None, source: Source
) -> Iterator[BatchKeys]:
    """The batches, with reading ahead if their order reads the shards of the source in sequence."""
    if deal is None or not hasattr(deal.order, "streamed") or source.shards is None:
        return batches
    return WindowAhead(batches, deal, source)
