"""Which worker does what next: pure, events in and decisions out.

Batches are cut into pieces, tiny-batches of a few samples, that workers take oldest first, so that
all of them work on the batch that is needed next. A worker that dies loses nothing: its pieces are
dealt again, the one it was working on sample by sample, so that a deadly sample gives itself away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

PIECE_SECONDS = 4e-3
"""A piece takes about this long. Handing one out costs about 0.1 ms, so this keeps the price at
2-3%; longer pieces leave workers idle at the end of a batch."""

SMALL, GROUP = 200e-6, 64
"""Samples that take longer than ``SMALL`` are run one at a time, or as few as a stop likes best, so
that each stays in the CPU's cache on its way from decoding to its row; shorter ones in groups of
``GROUP``, to spare the calls."""

READING = 0.5
"""Where reading is more than this part of a sample's time, samples are run one at a time: each of a
group would wait for all of it, and two workers were 6 % slower."""

RECENT = 16
"""A sample costs what the cheapest of so many pieces took: on a busy machine the others were
interrupted, and cutting pieces smaller would only add to that."""

AHEAD, AHEAD_OF_LARGE, LARGE = 4, 2, 8 << 20
"""Batches that are prepared ahead, by their bytes. Two of 38 MB are as fast as four, because
workers share a batch and are never idle between two, and they take 75 MB less."""

TaskKind = Literal["rows", "whole", "probe", "pull"]


def piece_of(rows: int, cost: float) -> int:
    """How many samples make a piece, of a batch of so many, where one costs so many seconds: enough
    to be worth handing out, few enough to share."""
    wanted = round(PIECE_SECONDS / cost) if cost > 0 else rows
    if wanted >= rows / 2:
        return rows
    return max(1, wanted)


def group_of(cost: float, reading: float, together: int, left: int) -> int:
    """How many of the samples that are left a worker runs at a time, where one took it so many
    seconds (0 where that is not known), ``reading`` among them, and a stop likes so many best.

    >>> group_of(1e-4, 0.0, 4, 90), group_of(1e-3, 1e-4, 4, 90), group_of(1e-3, 1e-4, 4, 3)
    (64, 4, 3)
    >>> group_of(1e-3, 6e-4, 4, 90)
    1
    """
    if 0.0 < cost <= SMALL:
        return min(left, GROUP)
    return 1 if reading > READING * cost else min(left, together)


def ahead(nbytes: int) -> int:
    """How many batches of this size are prepared ahead where nobody says how many."""
    return AHEAD if nbytes <= LARGE else AHEAD_OF_LARGE


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` samples of a batch from ``first`` on, done in one go by one worker.

    ``pin`` names the only worker that may do it; ``strikes`` counts the workers that died of it.
    """

    id: int
    kind: TaskKind
    batch: int
    first: int
    count: int
    pin: int | None = None
    strikes: int = 0


class Schedule:
    """The pieces of the open batches."""

    def __init__(self, workers: int) -> None:
        self.workers = max(1, workers)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._next = 0
        self._waiting: deque[Piece] = deque()
        self._running: dict[int, Piece] = {}
        self._left: dict[int, int] = {}

    def open(self, batch: int, rows: int, kind: TaskKind = "rows", pin: int | None = None) -> None:
        """A batch whose samples are to be prepared; in pieces only where rows stand alone."""
        size = self.tiny(rows) if kind == "rows" else max(1, rows)
        self._left[batch] = 0
        for first in range(0, max(1, rows), size):
            count = min(size, rows - first)
            self._waiting.append(self._piece(kind, batch, first, count, pin))

    def tiny(self, rows: int) -> int:
        """How many samples make a piece."""
        if not self._recent:
            return max(1, -(-rows // (2 * self.workers)))
        return piece_of(rows, min(self._recent))

    def take(self, worker: int) -> Piece | None:
        """The next piece for this worker."""
        for i, piece in enumerate(self._waiting):
            if piece.pin is None or piece.pin == worker:
                del self._waiting[i]
                self._running[piece.id] = piece
                return piece
        return None

    def put_back(self, piece: int) -> None:
        """Whoever took a piece cannot begin with it yet: it is the next one again."""
        self._waiting.appendleft(self._running.pop(piece))

    def cut(self, piece: int, count: int) -> Piece:
        """Have a piece end after ``count`` samples; the rest of it is the next one."""
        found = self._running[piece]
        if count < found.count:
            first, left = found.first + count, found.count - count
            rest = self._piece(found.kind, found.batch, first, left, found.pin, found.strikes)
            self._waiting.appendleft(rest)
            found = self._running[piece] = replace(found, count=count)
        return found

    def done(self, piece: int, seconds: float) -> bool:
        """A piece is done; true when it was the last of its batch."""
        found = self._running.pop(piece)
        if found.kind == "rows" and found.count:
            self._recent.append(seconds / found.count)
        self._left[found.batch] -= 1
        return self._left[found.batch] == 0

    def lost(self, piece: int, *, guilty: bool) -> Piece | None:
        """The worker of a piece died, of it or of another one.

        Returns the piece when it has now killed twice, alone: then it is not dealt again.
        """
        found = self._running.pop(piece)
        self._left[found.batch] -= 1
        strikes = found.strikes + (1 if guilty else 0)
        if guilty and strikes >= 2 and (found.count <= 1 or found.kind != "rows"):
            return found
        size = 1 if guilty and found.kind == "rows" else max(1, found.count)
        again = [
            self._piece(
                found.kind,
                found.batch,
                found.first + at,
                min(size, found.count - at),
                found.pin,
                strikes,
            )
            for at in range(0, max(1, found.count), size)
        ]
        self._waiting.extendleft(reversed(again))
        return None

    def again(self, piece: Piece) -> None:
        """Deal a piece anew, as if nothing had happened: its samples are others now."""
        self._waiting.appendleft(
            self._piece(piece.kind, piece.batch, piece.first, piece.count, piece.pin)
        )

    def whole(self, batch: int, rows: int) -> None:
        """Do a batch over in one piece, because its rows do not stand alone."""
        self._forget(batch)
        self._left[batch] = 0
        self._waiting.appendleft(self._piece("whole", batch, 0, rows, None))

    def drop(self, batch: int) -> None:
        """Nobody wants this batch any more."""
        self._forget(batch)
        self._left.pop(batch, None)

    def outstanding(self, batch: int) -> int:
        """How many pieces of a batch are still to come."""
        return self._left.get(batch, 0)

    def __contains__(self, piece: int) -> bool:
        """A worker has this piece, and its outcome is wanted."""
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
