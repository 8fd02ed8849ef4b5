"""Decides which worker does what next: pure, events in and decisions out.

Batches are cut into pieces: tiny-batches of a few samples. Workers take the oldest piece first, so
all of them work on the batch that is needed next. If a worker dies, its pieces are dealt again. The
piece it was working on is dealt sample by sample, so that the sample that kills workers is found.
A batch that is collated as a whole is tried sample by sample and then prepared again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

PIECE_SECONDS = 4e-3
"""The time that a piece should take. Handing one out costs about 0.1 ms, which is 2-3% of this;
longer pieces leave workers idle at the end of a batch."""

SMALL, GROUP = 200e-6, 64
"""A sample that takes longer than ``SMALL`` seconds runs alone, or in the group size that a stop
prefers, so that it stays in the CPU's cache on its way from decoding to its row. Faster samples run
in groups of ``GROUP``, which saves calls."""

READING_SHARE = 0.5
"""Where reading takes more than this share of a sample's time, samples run one at a time: in a
group, each sample waits until all are read. Two workers were 6 % slower with groups."""

RECENT = 16
"""The cost of a sample is that of the cheapest of this many recent pieces. On a busy machine the
other pieces were interrupted, and smaller pieces would only add to the load."""

AHEAD, AHEAD_OF_LARGE, LARGE = 4, 2, 8 << 20
"""Batches that are prepared ahead: ``AHEAD``, or ``AHEAD_OF_LARGE`` of more than ``LARGE`` bytes.
Two batches of 38 MB are as fast as four, because workers share a batch and are never idle between
two, and they take 75 MB less."""

TaskKind = Literal["rows", "whole", "probe", "pull"]


def piece_size(rows: int, cost: float) -> int:
    """Samples of a piece: enough to be worth handing out, few enough to share a batch.

    ``rows``: samples of the batch. ``cost``: seconds per sample, 0 if unknown.
    """
    wanted = round(PIECE_SECONDS / cost) if cost > 0 else rows
    if wanted >= rows / 2:
        return rows
    return max(1, wanted)


def group_size(cost: float, reading: float, preferred: int, left: int) -> int:
    """Samples that a worker runs at a time, of the ``left`` samples of its piece.

    ``cost``: seconds per sample, 0 if unknown, of which ``reading`` are spent reading.
    ``preferred``: the group size that the stops work best with.

    >>> group_size(1e-4, 0.0, 4, 90), group_size(1e-3, 1e-4, 4, 90), group_size(1e-3, 1e-4, 4, 3)
    (64, 4, 3)
    >>> group_size(1e-3, 6e-4, 4, 90)
    1
    """
    if 0.0 < cost <= SMALL:
        return min(left, GROUP)
    return 1 if reading > READING_SHARE * cost else min(left, preferred)


SAMPLES_AHEAD = 8
"""Samples for each worker that are prepared ahead. 64 workers finish a batch of 64 in the time of
one sample; with two batches they would wait for the loop to take one and open the next."""


def batches_ahead(nbytes: int, rows: int = 0, workers: int = 0) -> int:
    """The default for ``prefetch``: how many batches of this size are prepared ahead.

    >>> batches_ahead(10**7, rows=64, workers=2), batches_ahead(10**7, rows=64, workers=64)
    (2, 8)
    """
    ahead = AHEAD if nbytes <= LARGE else AHEAD_OF_LARGE
    return max(ahead, -(-SAMPLES_AHEAD * workers // rows)) if rows else ahead


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` samples of a batch from row ``first`` on, prepared by one worker in one task.

    ``pin``: the only worker that may take it. ``strikes``: how many workers died while working on
    it.
    """

    id: int
    kind: TaskKind
    batch: int
    first: int
    count: int
    pin: int | None = None
    strikes: int = 0


class Schedule:
    """The pieces of the open batches. ``cuts``: batches are cut; without it they are one piece."""

    def __init__(self, workers: int, *, cuts: bool = True) -> None:
        self.workers = max(1, workers)
        self._cuts = cuts
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._next = 0
        self._waiting: deque[Piece] = deque()
        self._running: dict[int, Piece] = {}
        self._left: dict[int, int] = {}

    def open(self, batch: int, rows: int, kind: TaskKind = "rows", pin: int | None = None) -> None:
        """Add a batch. Only ``"rows"`` are cut into pieces; the other kinds are one piece."""
        size = self.piece_size(rows) if kind == "rows" and self._cuts else max(1, rows)
        self._left[batch] = 0
        for first in range(0, max(1, rows), size):
            count = min(size, rows - first)
            self._waiting.append(self._piece(kind, batch, first, count, pin))

    def piece_size(self, rows: int) -> int:
        """Samples of a piece, by the cost of recent samples."""
        if not self._recent:
            return max(1, -(-rows // (2 * self.workers)))
        return piece_size(rows, min(self._recent))

    def take(self, worker: int) -> Piece | None:
        """The next piece for this worker; ``None`` if there is none."""
        for i, piece in enumerate(self._waiting):
            if piece.pin is None or piece.pin == worker:
                del self._waiting[i]
                self._running[piece.id] = piece
                return piece
        return None

    def put_back(self, piece: int) -> None:
        """Make a taken piece the next one again: its worker cannot begin yet."""
        self._waiting.appendleft(self._running.pop(piece))

    def cut(self, piece: int, count: int) -> Piece:
        """Shorten a taken piece to ``count`` samples; the rest of it becomes the next piece."""
        taken = self._running[piece]
        if count < taken.count:
            first, left = taken.first + count, taken.count - count
            rest = self._piece(taken.kind, taken.batch, first, left, taken.pin, taken.strikes)
            self._waiting.appendleft(rest)
            taken = self._running[piece] = replace(taken, count=count)
        return taken

    def done(self, piece: int, seconds: float) -> bool:
        """Record that a piece is done. Returns whether it was the last of its batch."""
        finished = self._running.pop(piece)
        if finished.kind == "rows" and finished.count:
            self._recent.append(seconds / finished.count)
        self._left[finished.batch] -= 1
        return self._left[finished.batch] == 0

    def lost(self, piece: int, *, guilty: bool) -> Piece | None:
        """Deal a piece again whose worker died. ``guilty``: the worker died while working on it.

        A guilty piece is cut into single samples. For a batch that is collated as a whole, these
        are probes, after which ``redo_whole`` follows. Of a probe of several samples, only the
        first one is dealt again. A piece that cannot be cut further and has killed two workers is
        not dealt again, but returned.
        """
        lost = self._running.pop(piece)
        self._left[lost.batch] -= 1
        strikes = lost.strikes + (1 if guilty else 0)
        kind, count = lost.kind, lost.count
        if guilty and strikes >= 2 and (count <= 1 or kind in ("whole", "pull")):
            return lost
        size = max(1, count)
        if guilty and kind != "pull":
            size = 1
            count = 1 if kind == "probe" else count
            kind = "probe" if kind == "whole" else kind
        retried = [
            self._piece(
                kind,
                lost.batch,
                lost.first + offset,
                min(size, count - offset),
                lost.pin,
                strikes,
            )
            for offset in range(0, max(1, count), size)
        ]
        self._waiting.extendleft(reversed(retried))
        return None

    def probe(self, batch: int, first: int, count: int) -> None:
        """Deal a probe of these samples; those before them did not work."""
        self._waiting.appendleft(self._piece("probe", batch, first, count, None))

    def deal_again(self, piece: Piece) -> None:
        """Deal a piece with its strikes forgotten: other samples took the place of its own."""
        self._waiting.appendleft(
            self._piece(piece.kind, piece.batch, piece.first, piece.count, piece.pin)
        )

    def redo_whole(self, batch: int, rows: int, strikes: int = 0) -> None:
        """Prepare a batch again in one piece, because its samples do not share one layout.

        Or (``strikes``: 1) because its worker died, and each sample alone kills no worker.
        """
        self._forget(batch)
        self._left[batch] = 0
        self._waiting.appendleft(self._piece("whole", batch, 0, rows, None, strikes))

    def drop(self, batch: int) -> None:
        """Remove a batch and its pieces: their outcomes are no longer wanted."""
        self._forget(batch)
        self._left.pop(batch, None)

    def outstanding(self, batch: int) -> int:
        """How many pieces of a batch are not done yet."""
        return self._left.get(batch, 0)

    def __contains__(self, piece: int) -> bool:
        """Whether a worker has this piece, and its outcome is still wanted."""
        return piece in self._running

    def _forget(self, batch: int) -> None:
        self._waiting = deque(piece for piece in self._waiting if piece.batch != batch)
        for number in [n for n, piece in self._running.items() if piece.batch == batch]:
            del self._running[number]

    def _piece(
        self,
        kind: TaskKind,
        batch: int,
        first: int,
        count: int,
        pin: int | None,
        strikes: int = 0,
    ) -> Piece:
        self._next += 1
        self._left[batch] += 1
        return Piece(self._next, kind, batch, first, count, pin, strikes)
