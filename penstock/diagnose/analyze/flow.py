"""The way of batches through storage, workers and the accelerator, played through in numbers. Pure.

``min(F, P, G)`` is what a loader would reach whose reading, preparing and training never wait for
each other. Real workers read a sample and then prepare it, take turns at the storage and at the
cores, and have only so many batches ahead: near the point where two rates meet, that costs up to a
third. So the few things that happen are played through, sample by sample.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from penstock.diagnose.analyze.report import Curve
from penstock.engine.schedule import PIECE_SECONDS, RECENT, group_of, piece_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flow:
    """One loader and its loop. All times are seconds; ``step`` is that of a batch, and so is
    ``shuttle``, what it takes the loop to receive one.

    ``held`` is the share of samples that a cache answers at once. The others take ``service`` of
    the storage, one after the other, and arrive after ``latency`` where nobody else reads.
    ``sizes`` are those of samples, as parts of the mean (all alike, where none are given): one of
    twice the size takes twice as long to fetch, and to prepare (to decode a photograph takes 0.1 +
    0.97 times its size, both as parts of the mean). ``reading`` is what a fetched sample costs a
    core besides, and ``after_wait`` what a worker loses on each after it has waited for so long for
    each.

    ``piece`` is how many samples a worker takes at a time; ``None`` is as our engine cuts batches,
    by how long samples took of late. ``together`` of a piece are fetched before they are prepared.
    """

    workers: int
    cores: int
    batch: int
    piece: int | None
    ahead: int
    prep: float
    held: float
    service: float
    latency: float
    step: float
    shuttle: float = 0.0
    sizes: tuple[float, ...] = ()
    reading: float = 0.0
    after_wait: Curve = ()
    together: int = 1


WARM, COUNTED = 24, 96
"""Batches that are played before the clock starts, and those that are timed: twice as many change
the outcome by less than 0.2 %."""


CARRIED = 0.3
"""What is left of what a wait has cost a worker when it prepares the next sample: of every second
or fourth sample that comes late, each costs 1.2 times as much as where all of them do."""


def seconds_a_batch(flow: Flow) -> float:
    """How long a step takes, with all the waiting."""
    if flow.workers == 0:
        wait = max(flow.service, flow.latency)
        fetch = (1 - flow.held) * (wait + flow.reading + between(flow.after_wait, wait))
        return flow.step + flow.shuttle + flow.batch * (flow.prep + fetch)
    ends = _Play(flow).run(WARM + COUNTED)
    # Between two moments at which equally much is underway.
    return (ends[-1] - ends[WARM - 1]) / COUNTED


@dataclass(slots=True)
class _Worker:
    """What a worker is at: so many samples of a batch, since when, and how many are left of them;
    ``cost`` is what each of the last piece took, and ``reading`` what of that went to reading it.

    Of the group that it has in hand, ``there`` is how many were looked for, and ``asked`` when that
    began; ``size`` is how large they are together, and ``fetched`` how many came from storage.
    ``lost`` is what waiting has cost it the last time, and less and less after that.
    """

    number: int
    batch: int = 0
    count: int = 0
    since: float = 0.0
    left: int = 0
    cost: float = 0.0
    reading: float = 0.0
    waited: float = 0.0
    asked: float = 0.0
    there: int = 0
    size: float = 0.0
    fetched: int = 0
    lost: float = 0.0


class _Play:
    """One run: workers are heap entries that carry the moment at which they go on."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.storage = 0.0
        self.cores = [0.0] * max(1, flow.cores)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.pieces: deque[tuple[int, int]] = deque()
        """(batch, samples) of those that nobody has taken."""
        self.left: dict[int, int] = {}
        self.ready: dict[int, float] = {}
        self.opened: list[float] = []
        self.ends: list[float] = []
        self.blocked: list[tuple[float, _Worker]] = []
        self.events: list[tuple[float, int, _Worker]] = []
        self.sizes = _shuffled(list(flow.sizes or (1.0,)), 0)
        self.hits = _hits(flow.held)

    def run(self, batches: int) -> list[float]:
        for _ in range(self.flow.ahead):
            self.open(0.0)
        for number in range(self.flow.workers):
            self.take(0.0, _Worker(number))
        while len(self.ends) < batches:
            now, _, worker = heapq.heappop(self.events)
            there = self.look_for(now, worker)
            if there is not None:
                self.later(there, worker)
                continue
            done = self.prepare(now, worker)
            if worker.left:
                self.later(done, worker)
            else:
                worker.cost = (done - worker.since) / worker.count
                worker.reading, worker.waited = worker.waited / worker.count, 0.0
                self.recent.append(worker.cost)
                self.finish(done, worker.batch)
                self.take(done, worker)
        return self.ends

    def later(self, when: float, worker: _Worker) -> None:
        heapq.heappush(self.events, (when, worker.number, worker))

    def open(self, now: float) -> None:
        """Cut the next batch into pieces."""
        batch, rows = len(self.opened), self.flow.batch
        size = self.flow.piece
        if size is None:
            size = piece_of(rows, min(self.recent, default=PIECE_SECONDS))
        counts = [min(size, rows - first) for first in range(0, rows, size)]
        self.opened.append(now)
        self.pieces.extend((batch, count) for count in counts)
        self.left[batch] = len(counts)

    def take(self, now: float, worker: _Worker) -> None:
        """The next piece, as soon as there is one."""
        if not self.pieces:
            self.blocked.append((now, worker))
            return
        worker.batch, worker.count = self.pieces.popleft()
        worker.left = worker.count
        worker.since = max(now, self.opened[worker.batch])
        self.later(worker.since, worker)

    def look_for(self, now: float, worker: _Worker) -> float | None:
        """When the next sample that must be fetched is there; none once all of a group are."""
        if not worker.there:
            worker.asked, worker.size, worker.fetched = now, 0.0, 0
        while worker.there < self.group(worker):
            size = next(self.sizes)
            worker.there += 1
            worker.size += size
            if not next(self.hits):
                worker.fetched += 1
                return self.fetch(now, size)
        return None

    def group(self, worker: _Worker) -> int:
        if self.flow.piece is not None:
            return min(self.flow.together, worker.left)
        return group_of(worker.cost, worker.reading, self.flow.together, worker.left)

    def fetch(self, now: float, size: float) -> float:
        flow = self.flow
        service = flow.service * size
        self.storage = max(now, self.storage) + service
        # What a reader waits beyond its turn is the same for all.
        return self.storage + flow.latency - flow.service

    def prepare(self, now: float, worker: _Worker) -> float:
        """What was looked for."""
        count, worker.there = worker.there, 0
        worker.left -= count
        worker.waited += now - worker.asked + worker.fetched * self.flow.reading
        if worker.fetched:
            worker.lost = count * between(self.flow.after_wait, (now - worker.asked) / count)
        else:
            worker.lost *= CARRIED
        took = worker.size * self.flow.prep + worker.fetched * self.flow.reading + worker.lost
        done = max(now, heapq.heappop(self.cores)) + took
        heapq.heappush(self.cores, done)
        return done

    def finish(self, now: float, batch: int) -> None:
        """A piece is done; batches are handed out in order, and each one opens another."""
        self.left[batch] -= 1
        self.ready[batch] = max(self.ready.get(batch, 0.0), now)
        while self.left.get(len(self.ends), 1) == 0:
            number = len(self.ends)
            taken = max(self.ready.pop(number), self.ends[-1] if self.ends else 0.0)
            del self.left[number]
            self.ends.append(taken + self.flow.shuttle + self.flow.step)
            self.open(taken)
        blocked, self.blocked = self.blocked, []
        for since, worker in blocked:
            self.take(since, worker)


def between(points: Curve, at: float) -> float:
    """The value at a place between two points, and at the last one's beyond it; from (0, 0) on.

    >>> between(((1.0, 2.0), (3.0, 4.0)), 0.5), between(((1.0, 2.0), (3.0, 4.0)), 2.0)
    (1.0, 3.0)
    >>> between(((1.0, 2.0),), 9.0), between(((1.0, 2.0),), -1.0), between((), 1.0)
    (2.0, 0.0, 0.0)
    """
    left, below = 0.0, 0.0
    for right, above in points:
        if at < right:
            return below + (above - below) * max(0.0, at - left) / (right - left)
        left, below = right, above
    return below


DEALT = 1024
"""Hits and misses that are dealt in another order again and again: their share is exact, and with
that what is played through does not depend on chance."""


def _hits(held: float) -> Iterator[bool]:
    return _shuffled([at < round(held * DEALT) for at in range(DEALT)], 1)


def _shuffled(values: list[T], seed: int) -> Iterator[T]:
    chance = random.Random(seed)
    while True:
        chance.shuffle(values)
        yield from values
