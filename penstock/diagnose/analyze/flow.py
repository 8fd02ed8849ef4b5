"""A simulation of batches on their way through storage, workers and the accelerator. Pure.

``min(F, P, G)`` is the speed of a loader whose reading, preparing and training never wait for each
other. Real workers read a sample and then prepare it, take turns at the storage and at the cores,
and prepare only a few batches ahead. Near the point where two rates meet, that costs up to a third
of the speed. So these events are simulated, sample by sample.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from penstock.diagnose.analyze.report import Curve
from penstock.engine.schedule import (
    HANDING_TO_THREADS,
    Piece,
    Schedule,
    group_size,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flow:
    """One loader and its training loop. All times are seconds.

    - ``piece``: samples a worker takes at a time; ``None``: as Penstock's engine cuts batches, by
      the recent cost of samples and the number of workers.
    - ``handing``: seconds of the training process for each piece, from which the engine chooses
      their length.
    - ``pause``: time of preparing a sample in which the worker needs no core, beside ``prep``.
    - ``together``: samples of a piece that are fetched before they are prepared.
    - ``ahead``: batches prepared ahead of the training loop.
    - ``batch_bytes``: bytes of a batch, if the engine prepares more batches ahead where workers are
      many; otherwise 0.
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
    handing: float = HANDING_TO_THREADS
    batch_bytes: int = 0
    pause: float = 0.0


WARM, COUNTED = 24, 96
"""Batches simulated before the timed ones, and timed batches: twice as many change the outcome by
less than 0.2 %."""


CARRIED = 0.3
"""Share of the loss after a wait that carries over to the next sample, which did not wait. If only
every second or fourth sample waits, each wait costs 1.2 times as much as if all of them wait."""


@lru_cache(maxsize=1024)
def seconds_a_batch(flow: Flow) -> float:
    """Seconds per batch, including all waits.

    Equal flows are simulated once: the prediction for every size of a cache needs the speed of the
    same fully cached flow.
    """
    if flow.workers == 0:
        wait = max(flow.service, flow.latency)
        fetch = (1 - flow.hit_rate) * (wait + flow.reading + between(flow.after_wait, wait))
        return flow.step + flow.shuttle + flow.batch * (flow.prep + flow.pause + fetch)
    ends = _Simulation(flow).run(WARM + COUNTED)
    # Both moments are in the steady state, with the same amount of work in progress.
    return (ends[-1] - ends[WARM - 1]) / COUNTED


@dataclass(slots=True)
class _SimulatedWorker:
    """A worker and its current piece of a batch.

    - ``piece``: the piece; ``left``: samples of it that are not prepared yet; ``since``: its start.
    - ``cost``, ``reading``: seconds per sample of the last piece, and those spent on reading.
    - ``waited``: seconds spent on reading so far in this piece.
    - ``looked_up``: samples of the current group that were looked up in the cache or storage;
      ``asked``: when that began; ``size``: their sizes added up; ``fetched``: those from storage.
    - ``lost``: loss after the last wait; it decays with the following samples.
    """

    number: int
    piece: Piece | None = None
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


LOOP = -1
"""The number of the training loop among the workers: at equal times it comes first."""


class _Simulation:
    """One run. Each worker is an entry of the event heap, with the time of its next event.

    The training loop is entry ``LOOP``: it becomes free to take the next batch. The pieces are cut
    and dealt by the engine's own ``Schedule``.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.storage = 0.0
        self.cores = [0.0] * max(1, flow.cores)
        self.pieces = Schedule(flow.workers, handing=flow.handing, tiny_batch=flow.piece)
        self.opened = 0
        self.complete: set[int] = set()
        self.ends: list[float] = []
        self.idle: list[_SimulatedWorker] = []
        self.events: list[tuple[float, int]] = []
        self.workers = [_SimulatedWorker(number) for number in range(flow.workers)]
        self.sizes = _shuffled(list(flow.sizes or (1.0,)), 0)
        self.hits = _hits(flow.hit_rate)

    def run(self, batches: int) -> list[float]:
        self.open()
        for worker in self.workers:
            self.take(0.0, worker)
        while len(self.ends) < batches:
            now, number = heapq.heappop(self.events)
            if number == LOOP:
                self.hand_out(now)
                continue
            worker = self.workers[number]
            if not worker.left:
                self.finish(now, worker)
                continue
            arrival = self.look_up(now, worker)
            self.schedule(self.prepare(now, worker) if arrival is None else arrival, worker.number)
        return self.ends

    def schedule(self, when: float, number: int) -> None:
        heapq.heappush(self.events, (when, number))

    def open(self) -> None:
        """Open as many batches as the engine prepares ahead."""
        depth, nbytes, rows = self.flow.ahead, self.flow.batch_bytes, self.flow.batch
        if nbytes:
            depth = max(depth, self.pieces.batches_ahead(nbytes, rows))
        while self.opened < len(self.ends) + depth:
            self.pieces.open(self.opened, rows)
            self.opened += 1

    def take(self, now: float, worker: _SimulatedWorker) -> None:
        """Give the worker the next piece, or let it wait for one."""
        worker.piece = self.pieces.take(worker.number)
        if worker.piece is None:
            self.idle.append(worker)
            return
        worker.left, worker.since, worker.waited = worker.piece.count, now, 0.0
        self.schedule(now, worker.number)

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
        return done + count * self.flow.pause

    def finish(self, now: float, worker: _SimulatedWorker) -> None:
        """Finish the worker's piece, and give it another."""
        piece = worker.piece
        assert piece is not None
        worker.cost = (now - worker.since) / piece.count
        worker.reading = worker.waited / piece.count
        if self.pieces.done(piece.id, now - worker.since):
            self.complete.add(piece.batch)
            self.hand_out(now)
        self.take(now, worker)

    def hand_out(self, now: float) -> None:
        """Give the training loop the next batch, if it is free and the batch is complete."""
        before = len(self.ends)
        while (number := len(self.ends)) in self.complete:
            if self.ends and self.ends[-1] > now:
                break
            self.complete.remove(number)
            self.pieces.drop(number)
            self.ends.append(now + self.flow.shuttle + self.flow.step)
        if len(self.ends) == before:
            return
        self.schedule(self.ends[-1], LOOP)
        self.open()
        idle, self.idle = self.idle, []
        for worker in idle:
            self.take(now, worker)


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
