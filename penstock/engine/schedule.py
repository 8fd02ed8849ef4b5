"""Decides which worker does what next: pure, events in and decisions out.

Batches are cut into pieces: tiny-batches of a few samples. Workers take the oldest piece first, so
all of them work on the batch that is needed next. Pieces are cut when they are taken, as large as
what is left then allows. If a worker dies, its pieces are dealt again. The
piece it was working on is dealt sample by sample, so that the sample that kills workers is found.
A batch that is collated as a whole is tried sample by sample and then prepared again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PIECE_SECONDS = 4e-3
"""The least time that a piece should take. Longer ones leave workers idle at the end of a batch."""

HANDING, HANDING_TO_THREADS, HANDING_SHARE = 80e-6, 10e-6, 0.01
"""Seconds of the training process for handing out one piece and taking it back: to a worker process
(with what a thread costs that wakes and finds its caches cold) and to a thread. Pieces are so long
that all workers together cost it at most ``HANDING_SHARE`` of a core: whatever it spends on them
holds up the training loop."""

HANDING_EACH, LONGEST_PIECE = 5e-6, 0.4
"""Seconds of the training process that a sample of a piece may cost, and the longest time that a
piece may take to keep to that. Longer ones would often be unfinished where a batch is needed."""

SMALL, GROUP = 200e-6, 64
TINY, TINY_GROUP = 5e-6, 256
"""A sample that takes longer than ``SMALL`` seconds runs alone, or in the group size that a stop
prefers, so that it stays in the CPU's cache on its way from decoding to its row. Faster samples run
in groups of ``GROUP``, which saves calls; those that take up to ``TINY`` seconds, a number or two,
in groups of ``TINY_GROUP``."""

TRIED, TRIED_GROUP = 2e-3, 8
"""A worker tries this many samples at a time now and then if one takes up to this many seconds. The
cost of a call may be most of that time: on a busy machine, seeding for one number took 0.6 ms. Not
more, because decoded photographs would wait in memory for each other."""

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

MOST_AHEAD, MEMORY_AHEAD = 64, 4 * LARGE
"""Batches that are prepared ahead where workers are many and batches small, and the memory for each
worker that they may take. A worker process takes several times that memory itself. Two batches of
32 images in float32 take 38 MB: torch's loader has as many for each worker."""

HELD = 3
"""Pieces for each worker that are not done: one it works on, one it has in advance, and one that
waits. With fewer, workers become idle. Where memory allows it, the open batches have two more: they
are done, in a batch that is not finished yet or that waits for the loop. With one more, what waits
often was less than whole batches of 32, and pieces were half as long."""

SMALLEST = 4
"""The smallest piece that is cut because little is left is a fourth of a long one."""

REST, LONGEST_REST, REST_FROM = 0.6, 0.1, 4
"""See ``rest``. Fewer than ``REST_FROM`` workers report too seldom for resting to save anything."""

TaskKind = Literal["rows", "whole", "probe", "pull", "host", "device"]
"""``host`` is what CPU workers do of a tiny-batch for the device, ``device`` is the rest of it."""


def piece_seconds(workers: int, handing: float = HANDING_TO_THREADS, cost: float = 0.0) -> float:
    """The time that a piece should take where nothing is about to run out.

    ``handing``: seconds of the training process for each piece. ``cost``: seconds per sample.

    >>> piece_seconds(1), round(piece_seconds(12, HANDING), 3)
    (0.004, 0.096)
    >>> round(piece_seconds(12, HANDING, cost=0.02), 3), piece_seconds(12, HANDING, cost=1.0)
    (0.32, 0.4)
    """
    few = min(LONGEST_PIECE, cost * handing / HANDING_EACH)
    return max(PIECE_SECONDS, workers * handing / HANDING_SHARE, few)


class Demand(NamedTuple):
    """What a piece is cut from, and for whom.

    - ``workers``: how many there are; ``handing``: see ``piece_seconds``.
    - ``mean``: seconds that recent samples took on average. Where a cache has some of them, most of
      the time goes into the others, which a long piece may meet.
    - ``open``: samples of the open batches that are not done; ``waiting``: those of them that no
      worker has.
    - ``urgent``: the training loop has no finished batch to take next.
    """

    workers: int
    handing: float
    mean: float
    open: int
    waiting: int
    urgent: bool


def piece_size(left: int, cost: float, demand: Demand | None = None) -> int:
    """Samples of the next piece of a batch that has ``left`` samples.

    Enough to be worth handing out. If the training loop is about to wait, also few enough that all
    workers have pieces, and fewer the less there is left to hand out: then workers finish what is
    needed next at about the same time. But never so few that handing out takes several times its
    share.

    ``cost``: seconds per sample, 0 if unknown. ``demand``: ``None`` if no other batch is open.

    >>> steady = Demand(12, HANDING, mean=4e-3, open=1024, waiting=512, urgent=True)
    >>> piece_size(256, 4e-3, steady)
    23
    >>> few = steady._replace(waiting=60)
    >>> piece_size(256, 4e-3, steady._replace(open=432)), piece_size(60, 4e-3, few)
    (12, 6)
    >>> piece_size(60, 4e-3, few._replace(urgent=False))
    30
    """
    if cost <= 0:
        return left
    least = PIECE_SECONDS / cost
    if demand is None:
        wanted = least
    else:
        mean = max(cost, demand.mean)
        wanted = piece_seconds(demand.workers, demand.handing, mean) / mean
        if demand.urgent:
            shared = max(demand.waiting / demand.workers, wanted / SMALLEST)
            wanted = min(wanted, demand.open / (HELD * demand.workers), shared)
    return round(left / max(1, round(left / max(wanted, least, 1.0))))


def group_size(
    cost: float, reading: float, preferred: int, left: int, *, trial: bool = False
) -> int:
    """Samples that a worker runs at a time, of the ``left`` samples of its piece.

    ``cost``: seconds per sample, 0 if unknown, of which ``reading`` are spent reading.
    ``preferred``: the group size that the stops work best with. ``trial``: learn what a sample
    costs in a group, which may be much less than alone.

    >>> group_size(1e-4, 0.0, 4, 90), group_size(1e-3, 1e-4, 4, 90), group_size(1e-3, 1e-4, 4, 3)
    (64, 4, 3)
    >>> group_size(1e-3, 6e-4, 4, 90), group_size(1e-6, 0.0, 4, 900)
    (1, 256)
    >>> group_size(6e-4, 5e-4, 1, 90, trial=True), group_size(6e-3, 0.0, 1, 90, trial=True)
    (8, 1)
    """
    if 0.0 < cost <= SMALL:
        return min(left, GROUP if cost > TINY else TINY_GROUP)
    if trial and 0.0 < cost <= TRIED:
        return min(left, max(preferred, TRIED_GROUP))
    return 1 if reading > READING_SHARE * cost else min(left, preferred)


SAMPLES_AHEAD = 8
"""Samples for each worker that are prepared ahead, where workers share each batch. 64 workers end
a batch of 64 in the time of one sample; with two batches they would wait for the loop to take one
and open the next."""


@lru_cache(maxsize=64)
def batches_ahead_of_sharers(nbytes: int, rows: int, workers: int) -> int:
    """``batches_ahead`` for workers that share each batch, sample by sample.

    >>> batches_ahead_of_sharers(9 << 20, 64, 2), batches_ahead_of_sharers(9 << 20, 64, 64)
    (2, 8)
    """
    return max(batches_ahead(nbytes), math.ceil(SAMPLES_AHEAD * workers / rows))


def batches_for_lenders(rows: int, workers: int) -> int:
    """Batches that are prepared ahead for the workers that other machines lend.

    >>> batches_for_lenders(64, 0), batches_for_lenders(64, 4), batches_for_lenders(64, 32)
    (0, 2, 4)
    """
    # Two at least: one that is on its way, and the next.
    return max(2, math.ceil(SAMPLES_AHEAD * workers / rows)) if workers > 0 else 0


@lru_cache(maxsize=64)
def batches_ahead(nbytes: int, rows: int = 1, samples: int = 0, workers: int = 0) -> int:
    """The default for ``prefetch``: how many batches of this size are prepared ahead.

    ``rows``: samples of a batch. ``samples``: how many keep all ``workers`` busy. Where the usual
    number of batches has fewer, more are prepared ahead, up to ``MEMORY_AHEAD`` for each worker.

    >>> batches_ahead(1 << 20), batches_ahead(9 << 20)
    (4, 2)
    >>> batches_ahead(1 << 20, 32, 400, workers=12), batches_ahead(40 << 20, 32, 400, workers=12)
    (13, 9)
    """
    usual = AHEAD if nbytes <= LARGE else AHEAD_OF_LARGE
    in_memory = workers * MEMORY_AHEAD // max(1, nbytes)
    return max(usual, min(MOST_AHEAD, in_memory, math.ceil(samples / max(1, rows))))


def rest(ahead: int, cost: float, *, relaxed: bool = False) -> float:
    """Seconds for which worker processes may be left alone.

    Each message that wakes the training process alone costs it several times as much as one of many
    that it finds together. But no worker may run out of tasks meanwhile, unless the training loop
    has batches for a while (``relaxed``).

    ``ahead``: samples that the worker with the fewest has in advance. ``cost``: seconds per sample,
    of the cheapest recent ones.

    >>> round(rest(8, 4e-3), 4), rest(1000, 4e-3), rest(0, 4e-3), rest(0, 4e-3, relaxed=True)
    (0.0192, 0.1, 0.0, 0.1)
    """
    return LONGEST_REST if relaxed else min(LONGEST_REST, REST * ahead * cost)


def refill_from(depth: int) -> int:
    """The number of open batches at which idle workers are woken to open more, up to ``depth``.

    >>> refill_from(1), refill_from(4), refill_from(36)
    (0, 3, 27)
    """
    return depth - max(1, depth // 4)


@dataclass(slots=True)
class Piece:
    """``count`` samples of a batch from row ``first`` on, prepared by one worker in one task.

    Never changed, but not frozen either: making a frozen one takes three times as long.

    ``pin``: the only worker that may take it. ``strikes``: how many workers died while working on
    it. ``part``: of a piece for the device, what CPU workers have prepared for it.
    """

    id: int
    kind: TaskKind
    batch: int
    first: int
    count: int
    pin: int | None = None
    strikes: int = 0
    part: Any = None


class RowsOnDevice(Protocol):
    """The rows of a batch that a device has prepared in its own memory."""

    column: int
    """The field of the batch that it has prepared."""

    def leaf(self, host: NDArray[Any], pieces: Sequence[tuple[int, int]]) -> Any:
        """This field of the finished batch, for the delivery.

        ``host``: the same field in the memory of the host, with the rows that the CPU has prepared.
        ``pieces``: the first row and the rows of each piece; rows of skipped samples lie between
        them, and all rows move up over these.
        """


class Schedule:
    """The pieces of the open batches.

    ``workers``: on this machine. The attribute changes when other machines lend theirs.
    ``handing``: seconds of the training process for each piece. ``tiny_batch``: samples of every
    piece, in place of a number that follows their cost. ``cuts``: batches are cut; without it
    each is one piece.
    """

    def __init__(
        self,
        workers: int,
        *,
        handing: float = HANDING_TO_THREADS,
        tiny_batch: int | None = None,
        cuts: bool = True,
    ) -> None:
        self.workers = self.local_workers = max(1, workers)
        self._handing = handing
        self._tiny_batch = tiny_batch
        self._cuts = cuts
        self.hurried = False
        """The training loop takes batches as soon as they are finished; set by the engine."""
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._guess = 1
        """Samples of a piece while nothing is known of their cost: two pieces for each worker."""
        self._next = 0
        self._waiting: deque[Piece] = deque()
        self._running: dict[int, Piece] = {}
        self._left: dict[int, int] = {}

    def open(
        self,
        batch: int,
        rows: int,
        kind: TaskKind = "rows",
        pin: int | None = None,
        *,
        first: int = 0,
        indices: Sequence[int] | NDArray[np.int64] = (),
    ) -> None:
        """Add a batch. Only ``"rows"`` are cut, when they are taken; other kinds are one piece.

        ``first``: the rows before this one are done already. ``indices``: its samples.
        """
        self._left[batch] = 0
        self._waiting.append(self._piece(kind, batch, first, rows - first, pin))
        if not self._recent:
            self._guess = math.ceil(rows / (2 * self.workers))

    def piece_size(self, left: int) -> int:
        """Samples of the next piece of a batch that has ``left`` samples."""
        if not self._cuts:
            return left
        if self._tiny_batch is not None:
            return min(left, self._tiny_batch)
        if not self._recent:
            return min(left, max(1, self._guess))
        unfinished = next(iter(self._left.values())) > 0  # the oldest batch
        urgent = unfinished or self.hurried
        waiting = running = 0
        if urgent:  # otherwise they do not matter
            waiting = sum([piece.count for piece in self._waiting])
            running = sum([piece.count for piece in self._running.values()])
        mean = sum(self._recent) / len(self._recent)
        demand = Demand(self.workers, self._handing, mean, waiting + running, waiting, urgent)
        return piece_size(left, min(self._recent), demand)

    def batches_ahead(self, nbytes: int, rows: int) -> int:
        """Batches to prepare ahead for worker processes, so that none of them is ever idle."""
        return batches_ahead(nbytes, rows, self._samples_in_demand(), self.local_workers)

    def _samples_in_demand(self) -> int:
        """Samples that open batches should have; 0: any number."""
        if self.workers <= AHEAD or not self._recent or self._tiny_batch is not None:
            return 0  # each worker has a batch to work on
        cost = max(1e-9, min(self._recent))
        seconds = (HELD + 2) * self.workers * piece_seconds(self.workers, self._handing, cost)
        return math.ceil(seconds / cost)

    def take(self, worker: int) -> Piece | None:
        """The next piece for this worker; ``None`` if there is none."""
        for i, piece in enumerate(self._waiting):
            if piece.pin is None or piece.pin == worker:
                size = piece.count
                if piece.kind == "rows" and piece.count > 1:
                    size = self.piece_size(piece.count)
                del self._waiting[i]
                self._running[piece.id] = piece
                return piece if size >= piece.count else self.cut(piece.id, size)
        return None

    def take_away(self, most: int) -> Piece | None:
        """A piece of at most ``most`` samples for another machine; ``None`` if there is none.

        It is as long as the other machine wants, because sending it takes time. A piece for each
        worker of this machine stays: these come first. A sample that may have killed a worker
        stays here too.
        """
        most = min(most, self.left_over())
        if not most:
            return None
        taken = next(self._movable())
        self._waiting.remove(taken)
        self._running[taken.id] = taken
        return self.cut(taken.id, most)

    def left_over(self) -> int:
        """Samples that ``take_away`` may give to other machines."""
        counts = [piece.count for piece in self._movable()]
        if not counts:
            return 0
        # Workers that share a task take a batch at a time.
        kept = self.local_workers * self.piece_size(counts[0]) if self._cuts else counts[0]
        return max(0, sum(counts) - kept)

    def _movable(self) -> Iterator[Piece]:
        return (piece for piece in self._waiting if piece.kind == "rows" and not piece.strikes)

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
            taken = self._running[piece] = Piece(
                taken.id, taken.kind, taken.batch, taken.first, count, taken.pin, taken.strikes
            )
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

    def end(self, batch: int) -> None:
        """Remove a batch whose pieces are all done."""
        self._left.pop(batch, None)

    # Overridden where a device takes part: see ``device/shared_schedule.py``.

    shared: ClassVar[bool] = False
    """A batch that is handed out may give workers more to do."""

    def take_device(self) -> Piece | None:
        """The next piece for the device; ``None`` if there is none."""
        return None

    def host_done(self, piece: int, part: Any, seconds: float) -> None:
        """Record that the CPU has done its part of a piece for the device."""
        raise TypeError("no device takes part")

    def on_device(self, batch: int) -> RowsOnDevice | None:
        """The rows of a complete batch that a device has prepared."""
        return None

    def device_lost(self) -> None:
        """The device takes part no longer: the CPU prepares what it had."""

    def loop_waits(self, waits: bool) -> None:
        """The training loop began or ended to wait for a batch."""

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
