"""Decides when a phase has been measured well enough: times of batches in, decisions out. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.diagnose.analyze.report import Interval, Phase, PhaseName, Rate

BLOCKS = 8
"""Steps are grouped into at least this many blocks, and the means of the blocks are compared.
Single steps are not independent: workers finish at the same time, and a queue smooths them."""

LEAST_ROUNDS = 2
"""Rounds of the workers that a turn has, if that takes at most twice its time."""

TOLERANCE = 0.01
"""A phase ends when half its confidence interval, relative to the rate, is below this."""

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)
"""Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on."""


@dataclass
class PhaseTimer:
    """Collects the times at which batches of one phase are handed out, in one or several turns.

    - ``samples``: samples per batch.
    - ``warm_up``: first batches of the first turn that are not counted: they were queued before the
      phase began. It ends after ``warm_up_seconds`` too, if it had two batches.
    - ``seconds``: time limit of a turn.
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
    warm_up_seconds: float = math.inf
    moments: list[float] = field(default_factory=list)
    seen: int = 0
    turns: list[Turn] = field(default_factory=list)
    _turn: Turn = field(default_factory=lambda: Turn())
    _excluded: float = 0.0
    _began: float = 0.0

    def next_turn(self, warm_up: int) -> None:
        """Begin another turn; its first ``warm_up`` batches are not counted."""
        self._keep_turn()
        self.warm_up, self.seen, self.moments, self._excluded = warm_up, 0, [], 0.0

    def _keep_turn(self) -> None:
        if self._turn.durations:
            self.turns.append(self._turn)
        self._turn = Turn()

    def counts_next(self, now: float) -> bool:
        """Whether the next batch is the first one that counts."""
        return not self.moments and self._warm(self.seen + 1, now)

    def _warm(self, seen: int, now: float) -> bool:
        long_enough = seen >= 2 and now - self._began >= self.warm_up_seconds
        return seen >= self.warm_up or long_enough

    def step(
        self, now: float, excluded: float = 0.0, wait: float = 0.0, computed: float = 0.0
    ) -> None:
        """Count a batch handed out ``now``; ``excluded`` seconds before it are not counted.

        The loop waited ``wait`` seconds for it, after it had ``computed`` with the one before.
        """
        if not self.seen:
            self._began = now
        self.seen += 1
        self._excluded += excluded
        real, now = now, now - self._excluded
        if self.moments:
            self._turn.durations.append(now - self.moments[-1])
            self._turn.waits.append(max(0.0, wait - excluded))
            self._turn.computed.append(computed)
        if self.moments or self._warm(self.seen, real):
            self.moments.append(now)

    def end(self, now: float) -> None:
        """Move the last step to ``now``, when an accelerator that lagged behind has finished."""
        lag = now - self._excluded - self.moments[-1] if self.moments else 0.0
        if lag > 0:
            self.moments[-1] += lag
            if self._turn.durations:
                self._turn.durations[-1] += lag
                self._turn.computed[-1] += lag

    @property
    def steps(self) -> int:
        """Counted steps of all turns."""
        return len(self._turn.durations) + sum(len(turn.durations) for turn in self.turns)

    @property
    def done(self) -> bool:
        """Whether the turn may end: it is exact, or its time is up. It has two steps at least."""
        count = len(self._turn.durations)
        if count < 2:
            return False
        spent = self.moments[-1] - self.moments[0]
        # Workers finish in turns, so whole rounds of them are compared; not at any price.
        whole = count >= min(LEAST_ROUNDS * self.period, BLOCKS) or spent >= 2 * self.seconds
        if (spent >= self.seconds and whole) or count >= self.max_steps:
            return True
        return count >= max(self.min_steps, BLOCKS * self.period) and self.exact

    @property
    def exact(self) -> bool:
        """Whether the confidence interval is as narrow as ``tolerance``."""
        return self.steps >= 2 and self.rate().spread <= self.tolerance

    def _all(self) -> list[Turn]:
        return [*self.turns, *([self._turn] if self._turn.durations else [])]

    def rate(self) -> Rate:
        turns = self._all()
        found = rate_of(
            [step for turn in turns for step in turn.durations], self.samples, self.period
        )
        seconds = interval_of([turn.durations for turn in turns], self.period)
        if found.value <= 0 or len(turns) < 2:
            return found
        low = self.samples / seconds.high
        high = self.samples / seconds.low if seconds.low > 0 else math.inf
        return Rate(found.value, low, high)

    def phase(self) -> Phase:
        turns = self._all()
        computed = any(step for turn in turns for step in turn.computed)
        timed = bool(turns) and (computed or any(wait for turn in turns for wait in turn.waits))
        return Phase(
            self.name,
            self.rate(),
            self.steps,
            sum(sum(turn.durations) for turn in turns),
            self.exact,
            interval_of([turn.computed for turn in turns], self.period) if timed else None,
            interval_of([turn.waits for turn in turns], self.period) if timed else None,
            max(1, len(turns)),
        )


@dataclass
class Turn:
    """Counted steps of one turn: seconds in all, of waiting, and of computing."""

    durations: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


def interval_of(turns: Sequence[Sequence[float]], period: int = 1) -> Interval:
    """The mean of all values, with an interval that also covers how the turns differ.

    Values of one turn are alike, because they meet the machine in the same state. So the interval
    is at least as wide as the range of the means of the turns.

    >>> interval_of([[1.0] * 40, [2.0] * 40])
    Interval(value=1.5, low=1.0, high=2.0)
    """
    values = [value for turn in turns for value in turn]
    if not values:
        return Interval(0.0, 0.0, math.inf)
    mean = sum(values) / len(values)
    half = half_width(values, period)
    means = [sum(turn) / len(turn) for turn in turns if len(turn) >= 2]
    if len(means) > 1:
        half = max(half if math.isfinite(half) else 0.0, (max(means) - min(means)) / 2)
    return Interval(mean, max(0.0, mean - half), mean + half)


def half_width(seconds: Sequence[float], period: int = 1) -> float:
    """Half the 95 % confidence interval of the mean; infinite for fewer than two blocks."""
    size = max(period, len(seconds) // (2 * BLOCKS), 1)
    if len(seconds) < 2 * size and len(seconds) >= 4:
        size = len(seconds) // 2  # two blocks at least, even if a period is longer
    blocks = [sum(seconds[at : at + size]) / size for at in range(0, len(seconds) - size + 1, size)]
    if len(blocks) < 2:
        return math.inf
    centre = sum(blocks) / len(blocks)
    variance = sum((block - centre) ** 2 for block in blocks) / (len(blocks) - 1)
    freedom = len(blocks) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.1
    return student * math.sqrt(variance / len(blocks))


def rate_of(seconds: Sequence[float], samples: float, period: int = 1) -> Rate:
    """The rate, with its interval, of steps that took ``seconds`` for ``samples`` samples each."""
    if not seconds or sum(seconds) <= 0:
        return Rate(0.0, 0.0, 0.0)
    mean = sum(seconds) / len(seconds)
    half = half_width(seconds, period)
    if not math.isfinite(half):
        return Rate(samples / mean, 0.0, math.inf)
    low = samples / (mean + half)
    high = samples / (mean - half) if half < mean else math.inf
    return Rate(samples / mean, low, high)
