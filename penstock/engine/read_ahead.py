"""Announces to a store of objects which ones the next batches need, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from penstock.order.plan import BatchKeys
from penstock.source.source import FetchedAhead

SAMPLES = 4096
"""Samples that are announced ahead of the batches that workers prepare. The fetcher limits itself
by bytes; with small objects this keeps the messages small."""

Lacking = Callable[[BatchKeys], list[int]]
"""The samples of a batch that no stop keeps, so that they come from the source."""


class ReadAhead:
    """The same batches. The objects of the batches after them are fetched meanwhile.

    ``far``: batches may be asked for before they are needed. Otherwise each is announced when the
    engine takes it.
    """

    def __init__(
        self, batches: Iterator[BatchKeys], objects: FetchedAhead, lacking: Lacking, *, far: bool
    ) -> None:
        self._batches = batches
        self._objects = objects
        self._lacking = lacking
        self._far = far
        self._waiting: deque[BatchKeys] = deque()
        self._samples = 0
        self._ended = False
        self._epoch = -1
        """Of the batch that was given last."""
        self._announced = 0
        """Batches among those that wait that were announced."""
        self._first_known = False
        """The next batch was announced."""
        objects.forget()

    def __iter__(self) -> Iterator[BatchKeys]:
        return self

    def __next__(self) -> BatchKeys:
        while not self._ended and (not self._waiting or (self._far and self._samples < SAMPLES)):
            batch = next(self._batches, None)
            if batch is None:
                self._ended = True
            else:
                self._waiting.append(batch)
                self._samples += len(batch.indices)
        if not self._waiting:
            raise StopIteration
        given = self._waiting.popleft()
        self._samples -= len(given.indices)
        self._announced = max(0, self._announced - 1)
        self._announce(given)
        return given

    def _announce(self, given: BatchKeys) -> None:
        """Announce the batches that are known, up to the end of the epoch of ``given``.

        Objects of the next epoch are not fetched before it begins: there may be none.
        """
        if given.epoch != self._epoch:
            self._epoch = given.epoch
            if given.entering is not None and not self._first_known:
                # The loop waits for this batch, and not for the window in which its samples lie.
                self._objects.expect(self._lacking(given))
        indices = [] if self._first_known else self._needed(given)
        for batch in list(self._waiting)[self._announced :]:
            if batch.epoch != given.epoch:
                break
            indices += self._needed(batch)
            self._announced += 1
        self._first_known = self._announced > 0
        if indices:
            self._objects.expect(indices)

    def _needed(self, batch: BatchKeys) -> list[int]:
        """The samples to fetch for a batch: those that enter a window first, in sequence."""
        if batch.entering is None:
            return self._lacking(batch)
        entering = batch._replace(indices=batch.entering, entering=None)
        return self._lacking(entering) + self._lacking(batch)
