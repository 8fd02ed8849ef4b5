"""When has a phase been measured well enough: pure, moments in and decisions out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.diagnose.analyze.report import Phase, PhaseName, Rate

BLOCKS = 8
"""Steps are put together into at least so many blocks, whose means are compared: neighbours are not
independent (workers finish at the same time, and a queue smooths them)."""

TIGHT = 0.01
"""Half of the interval, as a part of the rate, at which measuring on is not worth the time."""

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)
"""Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on."""


@dataclass
class Course:
    """One phase in the making: it is told the moment of every batch.

    The first ``warm_up`` are not counted: what was prepared before the phase began comes out of a
    queue then. ``samples`` is how many are in a batch, ``period`` after how many batches things
    repeat (the number of workers).
    """

    name: PhaseName
    samples: int
    warm_up: int
    seconds: float
    least: int = 2 * BLOCKS
    most: int = 100_000
    period: int = 1
    tight: float = TIGHT
    moments: list[float] = field(default_factory=list)
    seen: int = 0
    _apart: float = 0.0

    def step(self, now: float, apart: float = 0.0) -> None:
        """A batch was handed out; ``apart`` is what of its time is not counted."""
        self.seen += 1
        self._apart += apart
        now -= self._apart
        if self.seen >= self.warm_up:
            self.moments.append(now)

    def end(self, now: float) -> None:
        """All that was handed out is done: an accelerator may be behind."""
        if self.moments:
            self.moments[-1] = max(self.moments[-1], now - self._apart)

    @property
    def steps(self) -> int:
        return max(0, len(self.moments) - 1)

    @property
    def over(self) -> bool:
        """Whether it may end: it is exact, or the time is up (but for two steps at least)."""
        if self.steps < 2:
            return False
        spent = self.moments[-1] - self.moments[0]
        if spent >= self.seconds or self.steps >= self.most:
            return True
        return self.steps >= max(self.least, BLOCKS * self.period) and self.enough

    @property
    def enough(self) -> bool:
        return self.steps >= 2 and self.rate().spread <= self.tight

    def rate(self) -> Rate:
        steps = [after - before for before, after in pairwise(self.moments)]
        return rate_of(steps, self.samples, self.period)

    def phase(self) -> Phase:
        spent = self.moments[-1] - self.moments[0] if self.moments else 0.0
        return Phase(self.name, self.rate(), self.steps, spent, self.enough)


def rate_of(seconds: Sequence[float], samples: float, period: int = 1) -> Rate:
    """The rate that steps of so many samples make, with its interval."""
    if not seconds or sum(seconds) <= 0:
        return Rate(0.0, 0.0, 0.0)
    mean = sum(seconds) / len(seconds)
    size = max(period, len(seconds) // (2 * BLOCKS), 1)
    blocks = [sum(seconds[at : at + size]) / size for at in range(0, len(seconds) - size + 1, size)]
    if len(blocks) < 2:
        return Rate(samples / mean, 0.0, math.inf)
    centre = sum(blocks) / len(blocks)
    variance = sum((one - centre) ** 2 for one in blocks) / (len(blocks) - 1)
    freedom = len(blocks) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.1
    half = student * math.sqrt(variance / len(blocks))
    low = samples / (mean + half)
    high = samples / (mean - half) if half < mean else math.inf
    return Rate(samples / mean, low, high)
