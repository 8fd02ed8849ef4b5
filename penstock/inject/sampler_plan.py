"""Batches of a script's own sampler, drawn when and in the order in which torch would draw them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order import BatchKeys, Cursor, Plan
from penstock.order.deal import Occurrences


class SamplerEpoch:
    """One epoch of a sampler.

    The sampler is not changed: it draws from the script's generators, as it does in torch. Drawn
    batches are kept until they are delivered, because torch's own iterator may have to continue the
    epoch with the same batches.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._kept: deque[Any] = deque()
        self._ended = False
        self.delivered = 0
        """Number of batches delivered."""

    def draw(self, batches: int) -> None:
        """Draw that many more batches, or fewer if the sampler ends."""
        while batches > 0 and not self._ended:
            batches -= 1
            try:
                self._kept.append(next(self._iterator))
            except StopIteration:
                self._ended = True

    def rest(self) -> Iterator[Any]:
        """All batches that are not delivered yet."""
        return self.since(self.delivered)

    def since(self, number: int) -> Iterator[Any]:
        """The batches from that number on, drawn as they are needed."""
        while True:
            position = number - self.delivered
            if position >= len(self._kept):
                self.draw(position - len(self._kept) + 1)
            if position >= len(self._kept):
                return
            yield self._kept[position]
            number += 1

    def deliver(self, number: int) -> None:
        """Forget the batches up to that number: they are delivered."""
        while self.delivered <= number and self._kept:
            self._kept.popleft()
            self.delivered += 1


class SamplerPlan(Plan):
    """A plan (see ``penstock.order.plan``) that follows a sampler. ``begin`` starts each epoch.

    ``single``: the sampler yields single indices, not lists. ``total``: the number of batches in an
    epoch, if known.
    """

    def __init__(self, n: int, single: bool, total: Callable[[], int] | None = None) -> None:
        self._n = n
        self._single = single
        self._total = total
        self._epoch = SamplerEpoch(iter(()))

    def begin(self, epoch: SamplerEpoch) -> None:
        """Take the batches of this epoch from now on."""
        self._epoch = epoch

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        seen = Occurrences()
        for number, drawn in enumerate(self._epoch.since(cursor.batch), cursor.batch):
            indices = self._indices([drawn] if self._single else drawn)
            yield BatchKeys(cursor.epoch, number, indices, seen.count(indices))

    def length(self, cursor: Cursor) -> int | None:
        """Batches left, if ``total`` is known. torch ignores ``len(sampler)``."""
        return None if self._total is None else max(0, self._total() - cursor.batch)

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        self._epoch.deliver(batch.number)
        return Cursor(cursor.epoch, cursor.position + len(batch.indices), cursor.batch + 1)

    def _indices(self, drawn: Any) -> NDArray[np.int64]:
        if hasattr(drawn, "tolist"):
            drawn = drawn.tolist()
        if not isinstance(drawn, Iterable):
            raise PipelineError(
                f"its batch sampler yielded {drawn!r}, which is not a list of indices."
            )
        indices = []
        for value in drawn:
            try:
                index = operator.index(value)
            except TypeError:
                index = -1
            if not 0 <= index < self._n:
                raise PipelineError(
                    f"its sampler yielded {value!r}, which is not an index of its {self._n} "
                    "samples."
                )
            indices.append(index)
        if not indices:
            raise PipelineError("its batch sampler yielded an empty batch.")
        return np.array(indices, dtype=np.int64)
