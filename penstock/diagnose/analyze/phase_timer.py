"""Decides when a phase has been measured well enough: times of batches in, decisions out. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.diagnose.analyze.report import Phase, PhaseName, Rate

BLOCKS = 8
"""Steps are grouped into at least this many blocks, and the means of the blocks are compared.
Single steps are not independent: workers finish at the same time, and a queue smooths them."""

TOLERANCE = 0.01
"""A phase ends when half its confidence interval, relative to the rate, is below this."""

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)
"""Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on."""


@dataclass
class PhaseTimer:
    """Collects the times at which batches of one phase are handed out.

    - ``samples``: samples per batch.
    - ``warm_up``: first batches that are not counted: they were queued before the phase began.
    - ``seconds``: time limit of the phase.
    - ``period``: batches after which the pattern repeats (the number of workers).
    """

    name: PhaseName
    samples: int
    warm_up: int
    seconds: float
    min_steps: int = 2 * BLOCKS
    max_steps: int = 100_000
    period: int = 1
    tolerance: float = TOLERANCE
    moments: list[float] = field(default_factory=list)
    seen: int = 0
    _excluded: float = 0.0

    def step(self, now: float, excluded: float = 0.0) -> None:
        """Count a batch handed out ``now``; ``excluded`` seconds before it are not counted."""
        self.seen += 1
        self._excluded += excluded
        now -= self._excluded
        if self.seen >= self.warm_up:
            self.moments.append(now)

    def end(self, now: float) -> None:
        """Move the last step to ``now``, when an accelerator that lagged behind has finished."""
        if self.moments:
            self.moments[-1] = max(self.moments[-1], now - self._excluded)

    @property
    def steps(self) -> int:
        return max(0, len(self.moments) - 1)

    @property
    def done(self) -> bool:
        """Whether the phase may end: it is exact, or its time is up. It has two steps at least."""
        if self.steps < 2:
            return False
        spent = self.moments[-1] - self.moments[0]
        if spent >= self.seconds or self.steps >= self.max_steps:
            return True
        return self.steps >= max(self.min_steps, BLOCKS * self.period) and self.exact

    @property
    def exact(self) -> bool:
        """Whether the confidence interval is as narrow as ``tolerance``."""
        return self.steps >= 2 and self.rate().spread <= self.tolerance

    def rate(self) -> Rate:
        steps = [after - before for before, after in pairwise(self.moments)]
        return rate_of(steps, self.samples, self.period)

    def phase(self) -> Phase:
        spent = self.moments[-1] - self.moments[0] if self.moments else 0.0
        return Phase(self.name, self.rate(), self.steps, spent, self.exact)


def rate_of(seconds: Sequence[float], samples: float, period: int = 1) -> Rate:
    """The rate, with its interval, of steps that took ``seconds`` for ``samples`` samples each."""
    if not seconds or sum(seconds) <= 0:
        return Rate(0.0, 0.0, 0.0)
    mean = sum(seconds) / len(seconds)
    size = max(period, len(seconds) // (2 * BLOCKS), 1)
    blocks = [sum(seconds[at : at + size]) / size for at in range(0, len(seconds) - size + 1, size)]
    if len(blocks) < 2:
        return Rate(samples / mean, 0.0, math.inf)
    centre = sum(blocks) / len(blocks)
    variance = sum((block - centre) ** 2 for block in blocks) / (len(blocks) - 1)
    freedom = len(blocks) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.1
    half = student * math.sqrt(variance / len(blocks))
    low = samples / (mean + half)
    high = samples / (mean - half) if half < mean else math.inf
    return Rate(samples / mean, low, high)
