"""How fast a road's parts are beside each other, and which echo factor follows from that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import StateError
from penstock.stats import Totals


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one worker for a fresh sample ``above`` the echo and for a delivered one
    ``below`` it, and seconds of the training ``step`` for a delivered sample, waiting apart.

    >>> Pace(above=0.006, below=0.0001, step=0.001, workers=2).ratio
    3.0
    """

    above: float
    below: float
    step: float
    workers: int

    @classmethod
    def between(cls, before: Totals, after: Totals, stage: int | None, workers: int) -> Pace | None:
        """From two readings; ``stage`` is the echo's among the stages, ``None`` after batching."""
        delivered = after.delivered - before.delivered
        seconds = [b - a for a, b in zip(before.seconds, after.seconds, strict=True)]
        top = len(seconds) - 1 if stage is None else stage - 1
        fresh = after.samples[top] - before.samples[top]
        if delivered <= 0 or fresh <= 0:
            return None
        below = 0.0 if stage is None else seconds[-1] - seconds[stage]
        step = after.now - before.now - (after.wait - before.wait)
        return cls(
            seconds[top] / fresh, max(0.0, below) / delivered, step / delivered, max(1, workers)
        )

    @property
    def ratio(self) -> float:
        """How many times longer a sample takes above the echo than below it."""
        down = max(self.step, self.below / self.workers)
        return self.above / self.workers / down if down > 0 else math.inf


class Factors:
    """The factor of every epoch: what was last measured when it was first asked for, then fixed.

    It never exceeds the measured ratio, nor ``most``; before anything was measured it is 1.

    >>> factors = Factors(most=8)
    >>> factors(0)
    1.0
    >>> factors.measured(Pace(above=0.005, below=0.0, step=0.002, workers=1))
    >>> factors(1), factors(0)
    (2.5, 1.0)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ratio = 1.0
        self._chosen: dict[int, float] = {}

    def __call__(self, epoch: int) -> float:
        if epoch not in self._chosen:
            # Down to a hundredth: finer ones differ by nothing that could be measured.
            followed = math.floor(min(self._ratio, self._most) * 100) / 100
            self._chosen[epoch] = max(1.0, followed)
        return self._chosen[epoch]

    def measured(self, pace: Pace | None) -> None:
        """What the epochs that are not chosen yet will follow."""
        if pace is not None:
            self._ratio = pace.ratio

    def state(self, epoch: int) -> dict[str, float]:
        """What a resume in this epoch needs, as plain data."""
        return {"ratio": min(self._ratio, float(self._most)), "factor": self(epoch)}

    def restore(self, epoch: int, state: Mapping[str, Any] | None) -> None:
        """Take up what ``state`` gave."""
        if not isinstance(state, Mapping) or not {"ratio", "factor"} <= set(state):
            raise StateError(
                'the checkpoint has no echo factor, and this loader has echo("auto"): it was '
                "taken from another pipeline."
            )
        self._chosen = {epoch: float(state["factor"])}
        self._ratio = float(state["ratio"])
