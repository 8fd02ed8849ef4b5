"""Which batch in the making gets a slot when, and which pieces are prepared before theirs has one.

While the loop waits, a large slot more would only take memory: the loop gives one back as soon as
it has the batch that is just being finished. What workers begin until then is *loose*: a few rows
in memory of their own, copied into the slot once it is there.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.open_batch import OpenBatch
from penstock.engine.schedule import LARGE, Piece
from penstock.engine.slots import Ring

FIRST_WHOLE = 1 << 20
"""The size of the first slot for a batch that is collated as a whole; workers make it longer."""

SPARED = 2
"""Slots that a loop which waits has to do with: the one it looks at, and the next one."""

IN_TIME = 4
"""A loop that finds so many batches ready, one after the other, does not wait any more. One alone
says little: the loop may have been interrupted."""

LOOSE = 4
"""A loose piece is so many times smaller than others: it is copied, and over sooner."""

LOOSE_PART = 2
"""Loose pieces are at most half of their batch. Where as much as a piece for each worker would be
more, there is one slot more instead: until one comes back, all of them may need something to do."""


class SlotPolicy:
    """Gives slots of a ring to batches. ``own_process``: workers are, and need a slot for a batch
    that is collated as a whole."""

    def __init__(self, ring: Ring, workers: int, *, own_process: bool) -> None:
        self.whole_size = FIRST_WHOLE
        self._ring = ring
        self._own_process = own_process
        self._workers = max(1, workers)
        self._waits = False
        self._in_time = 0

    def asked(self, *, ready: bool) -> None:
        """The loop has asked for the next batch, and it was there, or it was not."""
        if not ready:
            self._waits = True
        elif self._waits:
            self._waits, self._in_time = False, 0
        else:
            self._in_time += 1

    def serve(self, jobs: Iterable[OpenBatch], wanted: OpenBatch, piece: Piece) -> int:
        """A slot for a batch of which a piece is taken, and for those before it. Says how many
        samples of the piece can be prepared: all, a few that are loose, or none as of now.

        Not when it is opened: until its turn comes, the loop may give back a slot that will do.
        In order, because the last slot must never be that of a batch that is not handed out next.
        """
        first = True
        for job in jobs:
            spare = self._spares(job, first=first, piece=piece)
            if not self._filled(job, spare=spare):
                return _loose(job, piece) if spare and job is wanted else 0
            if job is wanted:
                break
            first = False
        return piece.count

    def serve_next(self, jobs: Iterable[OpenBatch]) -> None:
        """Having no slot is an error only when there is nothing else to hand out."""
        job = next(iter(jobs), None)
        if job is not None and not self._filled(job):
            raise self._ring.exhausted(self._size(job))

    def _filled(self, job: OpenBatch, *, spare: bool = False) -> bool:
        nbytes = self._size(job)
        if nbytes and job.slot is None:
            slot = self._ring.acquire(nbytes, make=not spare)
            if slot is None:
                return False
            job.write_into(slot)
        return True

    def _size(self, job: OpenBatch) -> int:
        if job.layout is not None:
            return job.layout.nbytes
        return self.whole_size if job.kind != "probe" and self._own_process else 0

    def _spares(self, job: OpenBatch, *, first: bool, piece: Piece) -> bool:
        """Whether no slot is made for a batch as of now: one is on its way back."""
        return (
            self._in_time < IN_TIME
            and not (first and self._waits)
            and len(self._ring) >= SPARED
            and not self._ring.shared
            and job.kind == piece.kind == "rows"
            and job.layout is not None
            and job.layout.nbytes > LARGE
            and self._workers * piece.count * LOOSE_PART <= job.layout.rows
        )


def _loose(job: OpenBatch, piece: Piece) -> int:
    """How many samples of a piece may be loose. Never all of a batch: a complete one has a slot."""
    count = max(1, piece.count // LOOSE)
    found = sum(loose.rows for loose in job.loose.values()) + count
    return count if found * LOOSE_PART <= len(job.keys) else 0
