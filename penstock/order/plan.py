"""The contract of plans: the batches of one rank, epoch by epoch, from a cursor on."""

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

    - ``replicas``: the replica number of each sample; ``None`` if all are 0.
    - ``spent``: with echo, the samples whose last copy is in this batch.
    - ``stream``: for a stream, the worker whose own stream gives this batch.
    - ``entering``: samples that an order takes into its window with this batch, in the sequence
      in which storage should read them. A hint: batches do not depend on it.
    - ``resumed``: for a stream that is opened anew, where it is to begin: the number of a batch,
      and the packed state of the stream before that batch.
    - ``reached``: of a delivered batch, the packed state of its stream after it; empty if the
      stream has ended with it, ``None`` if it has no state.
    """

    epoch: int
    number: int
    indices: NDArray[np.int64]
    replicas: NDArray[np.int64] | None
    spent: NDArray[np.int64] | None = None
    stream: int | None = None
    entering: NDArray[np.int64] | None = None
    resumed: tuple[int, bytes] | None = None
    reached: bytes | None = None


class PartProgress(NamedTuple):
    """What was dealt of one source of a mix, to all ranks together.

    - ``share``: its share by weight in this epoch, 0 to 1.
    - ``samples``: its samples in this epoch so far.
    - ``passes``: how often all its samples were dealt, since the first epoch.
    """

    name: str
    share: float
    samples: int
    passes: float


class Begin(Protocol):
    """Chooses the first batch of an epoch of ``length`` batches (``None``: length unknown).

    ``first``: the first batch, if it is known already. ``done``: number of batches delivered.
    """

    def __call__(
        self, epoch: int, length: int | None, first: int | None = None, done: int = 0
    ) -> int: ...


class Plan:
    """The batches from a cursor on.

    ``source_name``: for errors, the name of what decides the number of batches. ``fewest_rows``: a
    batch with fewer rows, after bad samples were skipped, is not delivered.
    """

    source_name: str = "the order"
    fewest_rows: int = 1
    key_epoch: int | None = None
    """What random choices are keyed by in place of the number of the epoch, for plans that follow
    a framework's own seeds."""
    most_ahead: int | None = None
    """Most batches that may be dealt and not be delivered yet; with 0, the next one is dealt when
    the loop asks for it. ``None``: any number."""

    @property
    def ahead(self) -> bool:
        """Whether the batches of the next epoch are known before this one is over."""
        return False

    @property
    def any_thread(self) -> bool:
        """Whether any thread may iterate ``batches``, not only that of the training loop."""
        return self.ahead

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """The rest of the cursor's epoch."""
        raise NotImplementedError

    def length(self, cursor: Cursor) -> int | None:
        """The number of batches left of the cursor's epoch; ``None`` if unknown."""
        raise NotImplementedError

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        """The cursor after this batch is delivered."""
        raise NotImplementedError

    def left(self, cursor: Cursor) -> int | None:
        """Like ``length``, but ``None`` if only the end of the data ends the epoch."""
        return self.length(cursor)

    def ended(self, batch: BatchKeys) -> None:
        """Record that the stream that should have given this batch is exhausted."""

    def deliveries(self, cursor: Cursor) -> NDArray[np.integer[Any]] | None:
        """With an echo of batches, the number of each batch in the order of delivery.

        ``None``: each batch is delivered once, as it is prepared.
        """
        return None

    def epoch_state(self, epoch: int) -> Any:
        """The data that a checkpoint within an epoch needs beside the cursor, as plain data."""
        return None

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        """Raise StateError if ``restore(epoch_state)`` or ``begin_at(epoch, first)`` would fail."""
        if first:
            raise StateError(
                f"the checkpoint was taken within an epoch that began with batch {first}, because "
                "the job joined a group in the middle of its epoch, and this loader's order cannot "
                "begin there. Resume with the order it was taken with, or from a checkpoint taken "
                "between epochs."
            )

    def restore(self, epoch_state: Any) -> None:
        """Go on from what ``epoch_state`` returned."""

    def first(self, cursor: Cursor) -> int:
        """The batch that the cursor's epoch began with; 0 unless it began in the middle."""
        return 0

    def begin_at(self, epoch: int, first: int) -> None:
        """Go on with an epoch that began with batch ``first``."""

    @property
    def as_deal(self) -> Deal | None:
        """The deal that has exactly these batches; ``None`` if no deal has."""
        return None

    def ranks(self, epoch: int) -> NDArray[np.int32] | None:
        """The rank that is dealt each sample in an epoch first; -1 for samples that none is dealt.

        ``None``: the plan of one rank does not say what others are dealt.
        """
        return None

    def progress(self, cursor: Cursor) -> list[PartProgress]:
        """What was dealt of each source of a mix up to the cursor; empty for other orders."""
        return []

    def begin_by(self, begin: Begin) -> None:
        """Let ``begin`` choose the first batch of each epoch, if the plan can begin anywhere."""


class Batches:
    """The batches from a cursor on; also those of later epochs, as long as ``ahead`` returns true.

    ``epoch``: the epoch that was begun last.
    """

    def __init__(self, plan: Plan, cursor: Cursor, ahead: Callable[[], bool]) -> None:
        self._plan = plan
        self._cursor = cursor
        self._ahead = weakref.WeakMethod(ahead)
        self.epoch = cursor.epoch

    def __iter__(self) -> Iterator[BatchKeys]:
        yield from self._plan.batches(self._cursor)
        while self._may_go_on():
            cursor = Cursor(self.epoch + 1)
            if self._plan.length(cursor) == 0:
                return
            self.epoch = cursor.epoch
            yield from self._plan.batches(cursor)

    def goes_on_after(self, epoch: int) -> bool:
        """Whether batches of a later epoch follow those of ``epoch``, or have begun to."""
        return self.epoch > epoch or self._may_go_on()

    def _may_go_on(self) -> bool:
        # Not inlined above: a local variable of the generator would keep the loader alive.
        ahead = self._ahead()
        return ahead is not None and ahead()
