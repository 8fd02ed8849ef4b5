"""The way of batches through storage, workers and the accelerator, played through in numbers. Pure.

``min(F, P, G)`` is what a loader would reach whose reading, preparing and training never wait for
each other. Real workers read a sample and then prepare it, take turns at the storage and at the
cores, and have only so many batches ahead: near the point where two rates meet, that costs up to a
third. So the few things that happen are played through, sample by sample.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

from penstock.analysis.report import Curve

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flow:
    """One loader and its loop. All times are seconds; ``step`` is that of a batch, and so is
    ``shuttle``, what it takes the loop to receive one.

    ``held`` is the share of samples that a cache answers at once. The others take ``service`` of
    the storage, one after the other, and arrive after ``latency`` where nobody else reads.
    ``spread`` is by how much samples differ in size, as a part of the mean: one of twice the size
    takes twice as long to fetch, and to prepare (to decode a photograph takes 0.1 + 0.97 times its
    size, both as parts of the mean). ``reading`` is what a fetched sample costs a core besides, and
    ``after_wait`` what a worker loses after it has waited for so long.
    """

    workers: int
    cores: int
    batch: int
    piece: int
    ahead: int
    prep: float
    held: float
    service: float
    latency: float
    step: float
    shuttle: float = 0.0
    spread: float = 0.0
    reading: float = 0.0
    after_wait: Curve = ()


WARM, COUNTED = 24, 96
"""Batches that are played before the clock starts, and those that are timed: twice as many change
the outcome by less than 0.2 %."""


def seconds_a_batch(flow: Flow) -> float:
    """How long a step takes, with all the waiting."""
    if flow.workers == 0:
        wait = max(flow.service, flow.latency)
        fetch = (1 - flow.held) * (wait + flow.reading + between(flow.after_wait, wait))
        return flow.step + flow.shuttle + flow.batch * (flow.prep + fetch)
    ends = _Play(flow).run(WARM + COUNTED)
    # Between two moments at which equally much is underway.
    return (ends[-1] - ends[WARM - 1]) / COUNTED


class _Play:
    """One run: workers are heap entries that carry the moment at which they go on."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.pieces = -(-flow.batch // flow.piece)
        self.storage = 0.0
        self.cores = [0.0] * max(1, flow.cores)
        self.left: dict[int, int] = {}
        self.ready: dict[int, float] = {}
        self.opened: list[float] = [0.0] * flow.ahead
        self.ends: list[float] = []
        self.next_piece = 0
        self.blocked: list[tuple[float, int]] = []
        self.events: list[tuple[float, int, int, int, float, float]] = []
        """(when, worker, batch, samples left in the piece, size of the sample if it is there, and
        what fetching it costs a core)"""
        self.sizes = _sizes(flow.spread)
        self.hits = _hits(flow.held)

    def run(self, batches: int) -> list[float]:
        for worker in range(self.flow.workers):
            self.take(0.0, worker)
        while len(self.ends) < batches:
            when, worker, batch, left, size, more = heapq.heappop(self.events)
            if not size:
                size, there = next(self.sizes), when
                if not next(self.hits):
                    there = self.fetch(when, size)
                    more = self.flow.reading + between(self.flow.after_wait, there - when)
                heapq.heappush(self.events, (there, worker, batch, left, size, more))
                continue
            done = self.prepare(when, size, more)
            if left > 1:
                heapq.heappush(self.events, (done, worker, batch, left - 1, 0.0, 0.0))
            else:
                self.finish(done, batch)
                self.take(done, worker)
        return self.ends

    def take(self, now: float, worker: int) -> None:
        """The next piece, as soon as its batch is open."""
        batch, place = divmod(self.next_piece, self.pieces)
        if batch >= len(self.opened):
            self.blocked.append((now, worker))
            return
        self.next_piece += 1
        flow = self.flow
        size = min(flow.piece, flow.batch - place * flow.piece)
        start = max(now, self.opened[batch])
        heapq.heappush(self.events, (start, worker, batch, size, 0.0, 0.0))

    def fetch(self, now: float, size: float) -> float:
        flow = self.flow
        service = flow.service * size
        self.storage = max(now, self.storage) + service
        # What a reader waits beyond its turn is the same for all.
        return self.storage + flow.latency - flow.service

    def prepare(self, now: float, size: float, more: float) -> float:
        took = size * self.flow.prep + more
        done = max(now, heapq.heappop(self.cores)) + took
        heapq.heappush(self.cores, done)
        return done

    def finish(self, now: float, batch: int) -> None:
        """A piece is done; batches are handed out in order, and each one opens another."""
        self.left[batch] = self.left.get(batch, self.pieces) - 1
        self.ready[batch] = max(self.ready.get(batch, 0.0), now)
        while self.left.get(len(self.ends), 1) == 0:
            number = len(self.ends)
            taken = max(self.ready.pop(number), self.ends[-1] if self.ends else 0.0)
            del self.left[number]
            self.ends.append(taken + self.flow.shuttle + self.flow.step)
            self.opened.append(taken)
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
"""Samples that are dealt in another order again and again: their mean is exact, and with that what
is played through does not depend on chance."""


def _sizes(spread: float) -> Iterator[float]:
    """Sizes as parts of their mean: none is below nothing, and a few are large."""
    narrow = math.sqrt(math.log1p(spread**2))
    quantiles = (NormalDist().inv_cdf((at + 0.5) / DEALT) for at in range(DEALT))
    found = [math.exp(narrow * one) for one in quantiles]
    mean = sum(found) / DEALT
    return _shuffled([one / mean for one in found], 0)


def _hits(held: float) -> Iterator[bool]:
    return _shuffled([at < round(held * DEALT) for at in range(DEALT)], 1)


def _shuffled(values: list[T], seed: int) -> Iterator[T]:
    chance = random.Random(seed)
    while True:
        chance.shuffle(values)
        yield from values
