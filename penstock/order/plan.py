"""What a plan is: the batches of one rank, epoch by epoch, from wherever a run stands."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.order.cursor import Cursor
from penstock.order.deal import BatchKeys


class Plan(Protocol):
    """Which batches come, from a cursor on: ``Deal``, or ``Sampled`` for a user's sampler."""

    @property
    def ahead(self) -> bool: ...

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]: ...

    def length(self, cursor: Cursor) -> int | None: ...

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor: ...


class Batches:
    """The batches from a cursor on, and into the next epochs where ``ahead`` allows it.

    ``epoch`` is the one that was begun last.
    """

    def __init__(self, plan: Plan, cursor: Cursor, ahead: Callable[[], bool]) -> None:
        self._plan = plan
        self._cursor = cursor
        self._ahead = weakref.WeakMethod(ahead)
        self.epoch = cursor.epoch

    def __iter__(self) -> Iterator[BatchKeys]:
        yield from self._plan.batches(self._cursor)
        while self._may():
            cursor = Cursor(self.epoch + 1)
            if self._plan.length(cursor) == 0:
                return
            self.epoch = cursor.epoch
            yield from self._plan.batches(cursor)

    def _may(self) -> bool:
        # By a method: a name in the generator above would keep the loader as long as it waits.
        ahead = self._ahead()
        return ahead is not None and ahead()
