"""What a plan is: the batches of one rank, epoch by epoch, from a cursor on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StateError
from penstock.order.cursor import Cursor

if TYPE_CHECKING:
    from penstock.order.deal import Deal


class BatchKeys(NamedTuple):
    """The keys of one batch.

    ``replicas`` is ``None`` when every sample occurs for the first time. ``spent``: the samples
    whose last copy is in this batch, where samples are echoed. ``stream``: the worker whose own
    stream gives this batch, where the source is a stream.
    """

    epoch: int
    number: int
    indices: NDArray[np.int64]
    replicas: NDArray[np.int64] | None
    spent: NDArray[np.int64] | None = None
    stream: int | None = None


class Begin(Protocol):
    """Chooses the first batch of an epoch of ``length`` batches (``None``: length unknown).

    ``first``: the first batch, if it is known already. ``done``: batches delivered so far.
    """

    def __call__(
        self, epoch: int, length: int | None, first: int | None = None, done: int = 0
    ) -> int: ...


class Plan:
    """Which batches come from a cursor on.

    ``source_name`` names what decides how many batches there are, for errors.
    """

    source_name: str = "the order"

    @property
    def ahead(self) -> bool:
        """Whether the next epoch may be asked for before this one is over."""
        return False

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """The rest of the cursor's epoch."""
        raise NotImplementedError

    def length(self, cursor: Cursor) -> int | None:
        """How many batches are left of the cursor's epoch; ``None`` if that is not known."""
        raise NotImplementedError

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        """The cursor after this batch is delivered."""
        raise NotImplementedError

    def left(self, cursor: Cursor) -> int | None:
        """As ``length``, but ``None`` where only the end of the data ends the epoch."""
        return self.length(cursor)

    def delivers(self, rows: int) -> bool:
        """Whether a batch of so few rows, after bad samples were skipped, is delivered at all."""
        return rows > 0

    def ended(self, batch: BatchKeys) -> None:
        """The stream that was to give this batch is exhausted."""

    def deliveries(self, cursor: Cursor) -> NDArray[np.integer[Any]] | None:
        """The numbers of batches in the sequence in which they are delivered, where batches repeat.

        ``None``: each batch is delivered once, as it is prepared.
        """
        return None

    def epoch_state(self, epoch: int) -> Any:
        """What a checkpoint within an epoch needs beside the cursor, as plain data."""
        return None

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        """Raise StateError if this plan cannot go on from there; see ``restore``, ``begin_at``."""
        if first:
            raise StateError(
                "the checkpoint was taken within an epoch that began in the middle, beside other "
                "jobs that shared it, and this loader's order cannot begin there. Resume with the "
                "order it was taken with, or from a checkpoint taken between epochs."
            )

    def restore(self, epoch_state: Any) -> None:
        """Take up what ``epoch_state`` returned."""

    def first(self, cursor: Cursor) -> int:
        """The batch that the cursor's epoch began with, where that was not its first one."""
        return 0

    def begin_at(self, epoch: int, first: int) -> None:
        """Go on with an epoch that began with batch ``first``."""

    @property
    def as_deal(self) -> Deal | None:
        """The deal whose batches these are, unchanged; ``None`` where there is none."""
        return None

    def begin_by(self, begin: Begin) -> None:
        """Ask ``begin`` with which batch to begin each epoch, where the plan allows any."""


class Batches:
    """The batches from a cursor on, and into the next epochs where ``ahead`` allows it.

    ``epoch``: the epoch that was begun last.
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
        # A method of its own: a local name in the generator above would keep the loader alive.
        ahead = self._ahead()
        return ahead is not None and ahead()
