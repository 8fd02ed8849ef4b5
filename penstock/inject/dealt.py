"""The batches that a script's own sampler deals, drawn just when and as torch would draw them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order import BatchKeys, Cursor
from penstock.order.deal import Occurrences


class Drawn:
    """One epoch of a sampler: what was drawn and is not delivered yet, and the rest of it.

    Nothing is put in the way of the sampler: it draws from the script's generators, as it does in
    torch. What is drawn is kept until it is delivered, because whoever goes on with an epoch has
    to go on with the same batches.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._kept: deque[Any] = deque()
        self._ended = False
        self.done = 0
        """Batches that were delivered."""

    def draw(self, batches: int) -> None:
        """Draw as many batches more, if there are."""
        while batches > 0 and not self._ended:
            batches -= 1
            try:
                self._kept.append(next(self._iterator))
            except StopIteration:
                self._ended = True

    def rest(self) -> Iterator[Any]:
        """All that is not delivered."""
        return self.since(self.done)

    def since(self, number: int) -> Iterator[Any]:
        while True:
            place = number - self.done
            if place >= len(self._kept):
                self.draw(place - len(self._kept) + 1)
            if place >= len(self._kept):
                return
            yield self._kept[place]
            number += 1

    def deliver(self, number: int) -> None:
        """A batch was handed out, and all before it."""
        while self.done <= number and self._kept:
            self._kept.popleft()
            self.done += 1


class Dealt:
    """A plan (see ``penstock.order.plan``) whose epochs are begun by hand, one after the other."""

    ahead: ClassVar[bool] = False

    def __init__(self, n: int, single: bool, total: Callable[[], int] | None = None) -> None:
        self._n = n
        self._single = single
        self._total = total
        self._drawn = Drawn(iter(()))

    def begin(self, drawn: Drawn) -> None:
        """Deal these from now on."""
        self._drawn = drawn

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        seen = Occurrences()
        for number, drawn in enumerate(self._drawn.since(cursor.batch), cursor.batch):
            indices = self._indices([drawn] if self._single else drawn)
            yield BatchKeys(cursor.epoch, number, indices, seen.count(indices))

    def length(self, cursor: Cursor) -> int | None:
        """Not known: torch goes on until a sampler ends, whatever length it says it has."""
        return None if self._total is None else max(0, self._total() - cursor.batch)

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        self._drawn.deliver(batch.number)
        return Cursor(cursor.epoch, cursor.position + len(batch.indices), cursor.batch + 1)

    def _indices(self, drawn: Any) -> NDArray[np.int64]:
        if hasattr(drawn, "tolist"):
            drawn = drawn.tolist()
        if not isinstance(drawn, Iterable):
            raise PipelineError(f"its batch sampler yielded {drawn!r}, and no list of indices.")
        found = []
        for value in drawn:
            try:
                index = operator.index(value)
            except TypeError:
                index = -1
            if not 0 <= index < self._n:
                raise PipelineError(
                    f"its sampler yielded {value!r}, which is no index of its {self._n} samples."
                )
            found.append(index)
        if not found:
            raise PipelineError("its batch sampler yielded an empty batch.")
        return np.array(found, dtype=np.int64)
