"""Reading by several threads at once, without end, to see how fast it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeVar

from penstock.diagnose.analyze.course import Course
from penstock.diagnose.analyze.report import Phase

T = TypeVar("T")

WAITING = 2
"""Readings for each thread that wait to be done, so that no thread ever waits for one."""

BUSY = 0.8
"""The part of a core from which on readers are taken to wait for it more than for storage: most of
what they do, only one of them can do at a time."""

MOST_FASTER = 10.0
"""Storage is at most so much faster than busy readers, whatever they seem to wait."""


class Reads(NamedTuple):
    """What readers have brought: samples, bytes a second, and the CPU seconds for a byte."""

    phase: Phase
    rate: float
    worked: float


def timed(
    reading: Iterator[int],
    course: Course,
    size: float,
    clock: Callable[[], float],
    cpu: Callable[[], float],
) -> Reads:
    """Read for as long as the course lasts; samples have this size on average."""
    total = first = 0
    before = cpu()
    while not course.over:
        # One step is what the readers bring at a time; how much that is differs.
        got = next(reading)
        course.step(clock())
        if len(course.moments) == 1:
            first = total + got
        total += got
    worked = cpu() - before
    found = course.phase()
    counted = total - first
    return Reads(
        replace(found, rate=found.rate.times(counted / found.steps / size)),
        counted / (course.moments[-1] - course.moments[0]),
        worked / max(1, total),
    )


def of_storage(many: Reads, to_one: float) -> float:
    """The bytes a second that storage gives to many readers, where one gets ``to_one`` while it
    waits.

    Readers who are busy themselves do not show what storage can do: that is what it gives to one.
    """
    if many.rate * many.worked < BUSY:
        return many.rate
    return max(many.rate, min(to_one, MOST_FASTER * many.rate))


def by_threads(read: Callable[[T], int], what: Iterator[T], threads: int) -> Iterator[int]:
    """What ``read`` says of each of these, in their order, done by so many threads."""
    threads = max(1, threads)
    if threads == 1:  # without one, it is as fast as a worker that does nothing else
        yield from map(read, what)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-read") as pool:
        underway: deque[Future[int]] = deque()
        try:
            underway.extend(pool.submit(read, one) for one in islice(what, WAITING * threads))
            while underway:
                yield underway.popleft().result()
                underway.extend(pool.submit(read, one) for one in islice(what, 1))
        finally:
            for one in underway:
                one.cancel()
