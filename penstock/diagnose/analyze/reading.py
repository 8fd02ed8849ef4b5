"""How fast samples are read: by several threads at once, and what that says about storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeVar

from penstock.diagnose.analyze.phase_timer import PhaseTimer
from penstock.diagnose.analyze.report import Phase

T = TypeVar("T")

WAITING = 2
"""Reads queued per thread, so that no thread ever waits for one."""

BUSY = 0.8
"""Readers that together use more than this share of a core wait for the core rather than for
storage: most of their work holds the GIL, so only one of them does it at a time."""

MOST_FASTER = 10.0
"""Upper limit of the estimate: storage is at most this much faster than busy readers."""


class ReadSpeed(NamedTuple):
    """The result of timed reads: the phase in samples, bytes per second, CPU seconds per byte."""

    phase: Phase
    bytes_per_second: float
    cpu_per_byte: float


def time_reads(
    reading: Iterator[int],
    timer: PhaseTimer,
    size: float,
    clock: Callable[[], float],
    cpu: Callable[[], float],
) -> ReadSpeed:
    """Read until the timer is done. ``size`` is the mean size of a sample."""
    total = warm_up = 0
    before = cpu()
    while not timer.done:
        # One step is one read of one thread, and reads differ in size.
        nbytes = next(reading)
        timer.step(clock())
        if len(timer.moments) == 1:
            warm_up = total + nbytes
        total += nbytes
    cpu_seconds = cpu() - before
    phase = timer.phase()
    counted = total - warm_up
    return ReadSpeed(
        replace(phase, rate=phase.rate.times(counted / phase.steps / size)),
        counted / (timer.moments[-1] - timer.moments[0]),
        cpu_seconds / max(1, total),
    )


def storage_speed(many: ReadSpeed, to_one: float) -> float:
    """Bytes per second that storage can deliver.

    ``many`` was measured with many readers. ``to_one`` is what a single reader gets in the time it
    only waits. Readers that are busy themselves do not show the limit of storage: ``to_one`` is
    the better estimate then.
    """
    if many.bytes_per_second * many.cpu_per_byte < BUSY:
        return many.bytes_per_second
    return max(many.bytes_per_second, min(to_one, MOST_FASTER * many.bytes_per_second))


def by_threads(read: Callable[[T], int], items: Iterator[T], threads: int) -> Iterator[int]:
    """The results of ``read`` for each item, in their order, computed by ``threads`` threads."""
    threads = max(1, threads)
    if threads == 1:  # no pool: as fast as a worker that only reads
        yield from map(read, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-read") as pool:
        pending: deque[Future[int]] = deque()
        try:
            pending.extend(pool.submit(read, item) for item in islice(items, WAITING * threads))
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(read, item) for item in islice(items, 1))
        finally:
            for future in pending:
                future.cancel()
