"""What waiting costs a worker beside the wait: seen on samples that come late on purpose.

Whoever has waited is slower afterwards: others have used the caches, the core's clock went down, a
thread must be woken. How much that is depends on how long the wait was.
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
"""How late samples are that are fetched instead of coming out of memory."""

WAITS = (1 / 3, 1.0, 3.0)
SHORTEST, LONGEST = 1e-4, 1e-2
"""Parts and multiples of the wait for storage that are tried, but no shorter and no longer ones."""

MOST = 0.3
"""A loss above this part of its wait is noise: what was seen is a tenth to a quarter."""

LEAST = 3
"""How often each is seen at least."""

SLEEPS = 50
"""How often it is seen how long a sleep really takes."""


class Late:
    """Keeps whoever reads waiting: for one batch after the other as long as ``late`` says in turn.

    It counts what one worker reads; each process has a count of its own.
    """

    def __init__(self, late: Sequence[float], batch: int) -> None:
        self._late = late
        self._batch = batch
        self._count = 0

    def wait(self, samples: int = 1) -> bool:
        """Wait for so many; whether they are to be read from storage instead."""
        seconds = self._late[self._count // self._batch % len(self._late)]
        self._count += samples
        if seconds == FROM_STORAGE:
            return True
        if seconds:
            time.sleep(samples * seconds)
        return False


def losses(
    batches_of: Callable[[Sequence[float]], Iterator[Any]],
    wait: float,
    *,
    batch: int,
    fetches: bool,
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[Curve, float | None]:
    """What a worker loses on a sample after it has waited, by how long; and how much longer one
    takes that it fetches, where ``fetches`` says that it can be told to.

    ``batches_of`` gives batches that are as late in turn as it is told. All kinds come in turn and
    again and again, so that what disturbs one of them disturbs all.
    """
    around = [factor * wait for factor in WAITS]
    waits = [one for one in around if SHORTEST <= one <= LONGEST]
    waits = waits or [min(LONGEST, max(SHORTEST, wait))]
    # Those that there is time for.
    sums = accumulate(waits)
    waits = [one for one, sum_of in zip(waits, sums, strict=True) if batch * sum_of < seconds]
    turns = (0.0, *waits, *([FROM_STORAGE] if fetches else []))
    if len(turns) == 1:
        return (), None
    took: list[list[float]] = [[] for _ in turns]
    with closing(batches_of(turns)) as batches:  # type: ignore[type-var]
        next(batches)  # of the first batch of all, its start is a part
        began = clock()
        while len(took[0]) < LEAST or clock() - began < seconds:
            for one in (*took[1:], took[0]):
                before = clock()
                next(batches)
                one.append((clock() - before) / batch)
    at_once, *others = map(median, took)
    fetched = others.pop() - at_once if fetches else None
    # Being woken is a part of every wait for storage, but not what it takes longer after long ones.
    woken = _overslept(min(LONGEST, max(SHORTEST, wait)), clock, sleep)
    lost = (
        min(MOST * late, max(0.0, other - late - woken - at_once))
        for late, other in zip(waits, others, strict=True)
    )
    return tuple(zip(waits, accumulate(lost, max), strict=True)), fetched


def _overslept(seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> float:
    """How much longer somebody sleeps than he wants to."""
    before = clock()
    for _ in range(SLEEPS):
        sleep(seconds)
    return (clock() - before) / SLEEPS - seconds
