"""What waiting for a sample costs a worker beyond the wait, measured with reads that are delayed.

A worker is slower after a wait: other work has replaced the contents of the CPU caches, the clock
of the core went down, and a thread must be woken. The loss depends on the length of the wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from statistics import median
from typing import Any

from penstock.diagnose.analyze.report import Curve

FROM_STORAGE = math.inf
"""The delay that stands for reading a sample from storage instead of memory."""

WAITS = (1 / 3, 1.0, 3.0)
"""Delays that are tried, as multiples of the wait for storage."""

SHORTEST, LONGEST = 1e-4, 1e-2
"""Limits of the delays that are tried, in seconds."""

MOST = 0.3
"""A loss above this share of its wait is noise: measured losses are a tenth to a quarter."""

LEAST = 3
"""Least number of measurements of each delay."""

SLEEPS = 50
"""Number of sleeps that are timed to see how long a sleep really takes."""


class DelayedReads:
    """Delays reads: all samples of a batch by the same value of ``delays``, batches in turn.

    It counts the reads of one worker; each process has its own count.
    """

    def __init__(self, delays: Sequence[float], batch: int) -> None:
        self._delays = delays
        self._batch = batch
        self._count = 0

    def wait(self, samples: int = 1) -> bool:
        """Wait for the next samples; return whether to read them from storage instead."""
        seconds = self._delays[self._count // self._batch % len(self._delays)]
        self._count += samples
        if seconds == FROM_STORAGE:
            return True
        if seconds:
            time.sleep(samples * seconds)
        return False


def wait_losses(
    delayed_batches: Callable[[Sequence[float]], Iterator[Any]],
    wait: float,
    *,
    batch: int,
    fetches: bool,
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[Curve, float | None]:
    """The loss per sample by length of the wait, and the extra time of a sample from storage.

    ``delayed_batches`` makes batches with the given delays. ``fetches``: it can also read from
    storage; if it cannot, the second result is ``None``. All delays take turns, so that a
    disturbance of the machine affects all of them.
    """
    around = [factor * wait for factor in WAITS]
    waits = [delay for delay in around if SHORTEST <= delay <= LONGEST]
    waits = waits or [min(LONGEST, max(SHORTEST, wait))]
    # Leave out the delays that do not fit into the time.
    sums = accumulate(waits)
    waits = [delay for delay, total in zip(waits, sums, strict=True) if batch * total < seconds]
    delays = (0.0, *waits, *([FROM_STORAGE] if fetches else []))
    if len(delays) == 1:
        return (), None
    took: list[list[float]] = [[] for _ in delays]
    with closing(delayed_batches(delays)) as batches:  # type: ignore[type-var]
        next(batches)  # the first batch of all includes the start of the worker
        began = clock()
        while len(took[0]) < LEAST or clock() - began < seconds:
            for times in (*took[1:], took[0]):
                before = clock()
                next(batches)
                times.append((clock() - before) / batch)
    undelayed, *others = map(median, took)
    fetched = others.pop() - undelayed if fetches else None
    # Every wait for storage includes being woken. A longer wake-up after a longer wait is a loss.
    woken = _overslept(min(LONGEST, max(SHORTEST, wait)), clock, sleep)
    lost = (
        min(MOST * delay, max(0.0, other - delay - woken - undelayed))
        for delay, other in zip(waits, others, strict=True)
    )
    return tuple(zip(waits, accumulate(lost, max), strict=True)), fetched


def _overslept(seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> float:
    """How much longer than ``seconds`` a sleep takes."""
    before = clock()
    for _ in range(SLEEPS):
        sleep(seconds)
    return (clock() - before) / SLEEPS - seconds
