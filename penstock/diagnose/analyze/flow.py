"""A simulation of batches on their way through storage, workers and the accelerator. Pure.

``min(F, P, G)`` is the speed of a loader whose reading, preparing and training never wait for each
other. Real workers read a sample and then prepare it, take turns at the storage and at the cores,
and prepare only a few batches ahead. Near the point where two rates meet, that costs up to a third
of the speed. So these events are simulated, sample by sample.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from penstock.diagnose.analyze.report import Curve
from penstock.engine.schedule import PIECE_SECONDS, RECENT, group_size, piece_size

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flow:
    """One loader and its training loop. All times are seconds.

    - ``piece``: samples a worker takes at a time; ``None``: as Penstock's engine cuts batches, by
      the recent cost of samples.
    - ``together``: samples of a piece that are fetched before they are prepared.
    - ``ahead``: batches prepared ahead of the training loop.
    - ``prep``: preparing a sample on one core.
    - ``hit_rate``: share of the samples that a cache delivers at once.
    - ``service``: time of the storage for each other sample; it serves one after the other.
    - ``latency``: time until such a sample arrives if nothing else reads.
    - ``step``: training step of a batch.
    - ``shuttle``: time of the training loop to receive a batch.
    - ``sizes``: sizes of samples relative to their mean; empty if all are equal. A sample of twice
      the size takes twice as long to fetch and to prepare (decoding a photograph takes 0.1 + 0.97
      times its size, both relative to the mean).
    - ``reading``: CPU time of fetching a sample, in addition to ``prep``.
    - ``after_wait``: time a worker loses on a sample, by the length of its wait for it.
    """

    workers: int
    cores: int
    batch: int
    piece: int | None
    ahead: int
    prep: float
    hit_rate: float
    service: float
    latency: float
    step: float
    shuttle: float = 0.0
    sizes: tuple[float, ...] = ()
    reading: float = 0.0
    after_wait: Curve = ()
    together: int = 1


WARM, COUNTED = 24, 96
"""Batches simulated before the timed ones, and timed batches: twice as many change the outcome by
less than 0.2 %."""


CARRIED = 0.3
"""Share of the loss after a wait that carries over to the next sample, which did not wait. If only
every second or fourth sample waits, each wait costs 1.2 times as much as if all of them wait."""


def seconds_a_batch(flow: Flow) -> float:
    """Seconds per batch, including all waits."""
    if flow.workers == 0:
        wait = max(flow.service, flow.latency)
        fetch = (1 - flow.hit_rate) * (wait + flow.reading + between(flow.after_wait, wait))
        return flow.step + flow.shuttle + flow.batch * (flow.prep + fetch)
    ends = _Simulation(flow).run(WARM + COUNTED)
    # Both moments are in the steady state, with the same amount of work in progress.
    return (ends[-1] - ends[WARM - 1]) / COUNTED


@dataclass(slots=True)
class _SimulatedWorker:
    """A worker and its current piece of a batch.

    - ``count``, ``left``: samples of the piece, and those not prepared yet; ``since``: its start.
    - ``cost``, ``reading``: seconds per sample of the last piece, and those spent on reading.
    - ``waited``: seconds spent on reading so far in this piece.
    - ``looked_up``: samples of the current group that were looked up in the cache or storage;
      ``asked``: when that began; ``size``: their sizes added up; ``fetched``: those from storage.
    - ``lost``: loss after the last wait; it decays with the following samples.
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
    looked_up: int = 0
    size: float = 0.0
    fetched: int = 0
    lost: float = 0.0


class _Simulation:
    """One run. Each worker is an entry of the event heap, with the time of its next event."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.storage = 0.0
        self.cores = [0.0] * max(1, flow.cores)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.pieces: deque[tuple[int, int]] = deque()
        """(batch, samples) of the pieces that no worker has taken yet."""
        self.left: dict[int, int] = {}
        self.ready: dict[int, float] = {}
        self.opened: list[float] = []
        self.ends: list[float] = []
        self.blocked: list[tuple[float, _SimulatedWorker]] = []
        self.events: list[tuple[float, int, _SimulatedWorker]] = []
        self.sizes = _shuffled(list(flow.sizes or (1.0,)), 0)
        self.hits = _hits(flow.hit_rate)

    def run(self, batches: int) -> list[float]:
        for _ in range(self.flow.ahead):
            self.open(0.0)
        for number in range(self.flow.workers):
            self.take(0.0, _SimulatedWorker(number))
        while len(self.ends) < batches:
            now, _, worker = heapq.heappop(self.events)
            arrival = self.look_up(now, worker)
            if arrival is not None:
                self.schedule(arrival, worker)
                continue
            done = self.prepare(now, worker)
            if worker.left:
                self.schedule(done, worker)
            else:
                worker.cost = (done - worker.since) / worker.count
                worker.reading, worker.waited = worker.waited / worker.count, 0.0
                self.recent.append(worker.cost)
                self.finish(done, worker.batch)
                self.take(done, worker)
        return self.ends

    def schedule(self, when: float, worker: _SimulatedWorker) -> None:
        heapq.heappush(self.events, (when, worker.number, worker))

    def open(self, now: float) -> None:
        """Open the next batch: cut it into pieces."""
        batch, rows = len(self.opened), self.flow.batch
        size = self.flow.piece
        if size is None:
            size = piece_size(rows, min(self.recent, default=PIECE_SECONDS))
        counts = [min(size, rows - first) for first in range(0, rows, size)]
        self.opened.append(now)
        self.pieces.extend((batch, count) for count in counts)
        self.left[batch] = len(counts)

    def take(self, now: float, worker: _SimulatedWorker) -> None:
        """Give the worker the next piece, or let it wait for one."""
        if not self.pieces:
            self.blocked.append((now, worker))
            return
        worker.batch, worker.count = self.pieces.popleft()
        worker.left = worker.count
        worker.since = max(now, self.opened[worker.batch])
        self.schedule(worker.since, worker)

    def look_up(self, now: float, worker: _SimulatedWorker) -> float | None:
        """Arrival of the next sample that must be fetched; ``None`` once the group is complete."""
        if not worker.looked_up:
            worker.asked, worker.size, worker.fetched = now, 0.0, 0
        while worker.looked_up < self.group(worker):
            size = next(self.sizes)
            worker.looked_up += 1
            worker.size += size
            if not next(self.hits):
                worker.fetched += 1
                return self.fetch(now, size)
        return None

    def group(self, worker: _SimulatedWorker) -> int:
        if self.flow.piece is not None:
            return min(self.flow.together, worker.left)
        return group_size(worker.cost, worker.reading, self.flow.together, worker.left)

    def fetch(self, now: float, size: float) -> float:
        flow = self.flow
        service = flow.service * size
        self.storage = max(now, self.storage) + service
        # The wait beyond the service time does not depend on the size.
        return self.storage + flow.latency - flow.service

    def prepare(self, now: float, worker: _SimulatedWorker) -> float:
        """Prepare the current group; return when it is done."""
        count, worker.looked_up = worker.looked_up, 0
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
        """Finish a piece. Hand out complete batches in order; each one opens another batch."""
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
    """The value at ``at`` by linear interpolation from (0, 0) on; constant after the last point.

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


DECK = 1024
"""Hits and misses are drawn from a deck of this size that is shuffled again each round: the hit
rate is exact, so the outcome of the simulation does not depend on chance."""


def _hits(hit_rate: float) -> Iterator[bool]:
    return _shuffled([at < round(hit_rate * DECK) for at in range(DECK)], 1)


def _shuffled(values: list[T], seed: int) -> Iterator[T]:
    chance = random.Random(seed)
    while True:
        chance.shuffle(values)
        yield from values
