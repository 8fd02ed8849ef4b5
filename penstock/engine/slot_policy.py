"""Decides when an open batch gets a slot, and how much of it is prepared before it has one.

While the training loop waits for batches, one more large slot would only take memory: the loop
returns a slot as soon as it gets the batch that is just being finished. Until then workers prepare
*early rows* of the next batch: a few rows in memory of their own, copied into the slot later.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.open_batch import OpenBatch
from penstock.engine.schedule import LARGE, Piece
from penstock.engine.slots import Ring

FIRST_WHOLE = 1 << 20
"""Bytes of the first slot for a batch that is collated as a whole; workers make it longer."""

SLOTS_WHILE_WAITING = 2
"""Large slots that a loop which waits for batches gets: for the batch it uses, and the next one."""

IN_TIME = 4
"""A loop that finds this many batches ready, one after the other, does not wait any more. One alone
says little: the loop may have been interrupted."""

EARLY_DIVISOR = 4
"""An early piece has a fourth of the samples of other pieces: it is copied, and done sooner."""

EARLY_SHARE = 2
"""Early rows are at most half of their batch. Where one piece for each worker would be more than
that, one more slot is made instead: until one comes back, all workers may need something to do."""


class SlotPolicy:
    """Gives the slots of a ring to open batches.

    ``own_process``: workers are processes, and need a slot for a batch collated as a whole too.
    ``early``: rows may be prepared before their batch has a slot.
    """

    def __init__(self, ring: Ring, workers: int, *, own_process: bool, early: bool = True) -> None:
        self.whole_size = FIRST_WHOLE
        self._ring = ring
        self._own_process = own_process
        self._early = early
        self._workers = max(1, workers)
        self._loop_waits = False
        self._in_time = 0
        self.learning = True
        """``record_request`` is to be called for a batch that was ready too."""

    def record_request(self, *, ready: bool) -> None:
        """Record that the loop asked for the next batch, and whether it was ready."""
        if not ready:
            self._loop_waits = True
        elif self._loop_waits:
            self._loop_waits, self._in_time = False, 0
        else:
            self._in_time += 1
        self.learning = self._loop_waits or self._in_time < IN_TIME

    def assign_slots(self, batches: Iterable[OpenBatch], wanted: OpenBatch, piece: Piece) -> int:
        """Give a slot to each batch up to ``wanted``, whose ``piece`` a worker is about to take.

        Returns how many samples of the piece can be prepared now: all, a few as early rows, or 0.

        Batches get their slots here and not when they are opened: until its turn comes, the loop
        may have returned a slot that fits. Slots are assigned in the order of batches, because the
        last slot must never belong to a batch that is not handed out next.
        """
        first = True
        for batch in batches:
            if batch.slot is not None:
                if batch is wanted:
                    break
                first = False
                continue
            wait = self._waits_for_returned_slot(batch, first=first, piece=piece)
            if not self._ensure_slot(batch, make=not wait):
                return _early_count(batch, piece) if wait and batch is wanted else 0
            if batch is wanted:
                break
            first = False
        return piece.count

    def require_slot(self, batches: Iterable[OpenBatch]) -> None:
        """Give the first batch a slot. Raises SlotError: the loop has no other batch to get."""
        batch = next(iter(batches), None)
        if batch is not None and not self._ensure_slot(batch, make=True):
            raise self._ring.exhausted(self._nbytes(batch))

    def _ensure_slot(self, batch: OpenBatch, *, make: bool) -> bool:
        """Give the batch a slot if it needs one; ``make``: a new one may be made for it."""
        nbytes = self._nbytes(batch)
        if nbytes and batch.slot is None:
            slot = self._ring.acquire(nbytes, make=make)
            if slot is None:
                return False
            batch.use_slot(slot)
        return True

    def _nbytes(self, batch: OpenBatch) -> int:
        """The size of the slot that the batch needs; 0 if it needs none."""
        if batch.layout is not None:
            return batch.layout.nbytes
        return self.whole_size if batch.kind != "probe" and self._own_process else 0

    def _waits_for_returned_slot(self, batch: OpenBatch, *, first: bool, piece: Piece) -> bool:
        """Whether the batch waits for the loop to return a slot, instead of getting a new one."""
        return (
            self._early
            and self._in_time < IN_TIME
            and not (first and self._loop_waits)
            and len(self._ring) >= SLOTS_WHILE_WAITING
            and not self._ring.shared
            and batch.kind == piece.kind == "rows"
            and batch.layout is not None
            and batch.layout.nbytes > LARGE
            and self._workers * piece.count * EARLY_SHARE <= batch.layout.rows
        )


def _early_count(batch: OpenBatch, piece: Piece) -> int:
    """How many samples of a piece may be early rows.

    Never all samples of a batch: a complete batch must have a slot.
    """
    count = max(1, piece.count // EARLY_DIVISOR)
    early = sum(rows.rows for rows in batch.early_rows.values()) + count
    return count if early * EARLY_SHARE <= len(batch.keys) else 0
