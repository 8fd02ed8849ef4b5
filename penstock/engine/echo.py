"""A loader's echo: the factor of each epoch, and batches that are handed out again."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.feed import Ready
from penstock.engine.plan import echo_of
from penstock.errors import StateError
from penstock.order import Cursor, Plan
from penstock.pipeline import Pipeline
from penstock.stats import EchoStats, Held, Meter, Totals
from penstock.stops.echo import MOST
from penstock.stops.stop import Stop


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

    def check_state(self, state: Any) -> None:
        """Raise StateError if ``restore`` would refuse this."""
        if not isinstance(state, Mapping) or not {"ratio", "factor"} <= set(state):
            raise StateError(
                'the checkpoint has no echo factor, and this loader has echo("auto"): it was '
                "taken from another pipeline."
            )

    def restore(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Take up what ``state`` returned."""
        self.check_state(state)
        self._chosen = {epoch: float(state["factor"])}
        self._ratio = float(state["ratio"])


Pull = Callable[[], Ready | None]


class Repeats:
    """Hands out what the engine prepared in the sequence that an echo of batches deals.

    A batch that will come again is handed out as a copy: whoever takes it may work in place.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.fresh = 0
        """Samples that the engine has prepared."""
        self.delivered = 0
        """Samples that were handed out, copies included."""
        self._order: Iterator[int] = iter(())
        self._left: Counter[int] = Counter()
        self._held: dict[int, Ready] = {}
        self._given: set[int] = set()

    def begin(self, epoch: int, deliveries: Sequence[int]) -> None:
        """From here on these, by the numbers of the batches they repeat."""
        self.epoch = epoch
        self._order = iter(deliveries)
        self._left = Counter(deliveries)
        self._held.clear()
        self._given.clear()

    def next(self, pull: Pull) -> tuple[Ready, bool] | None:
        """The next batch, and whether it came before; ``None`` after the last.

        ``pull`` gives the next that was prepared.
        """
        number = next(self._order, None)
        if number is None:
            return None
        while number not in self._held:
            ready = pull()
            if ready is None:
                return None
            self._held[ready.plan.number] = ready
            self.fresh += ready.rows
        self._left[number] -= 1
        ready = self._held[number]
        if self._left[number]:
            ready = ready._replace(value=copy.deepcopy(ready.value))
        else:
            del self._held[number]
        self.delivered += ready.rows
        again = number in self._given
        self._given.add(number)
        return ready, again


class Echoing:
    """What a loader does about the echo of its pipeline; nothing where it has none."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.echo = echo_of(pipeline)
        auto = self.echo is not None and self.echo.measured
        self.factors = Factors(MOST) if auto else None
        self._repeats = None if pipeline.echoed is None else Repeats()
        self._before: Totals | None = None

    # Handing out.

    def restart(self) -> None:
        """The feed starts again: forget the batches it gave before."""
        if self._repeats is not None:
            self._repeats.epoch = -1

    def next(self, pull: Pull, plan: Plan, cursor: Cursor, meter: Meter) -> Ready | None:
        """The next batch: one that was just prepared, or a copy of an earlier one."""
        repeats = self._repeats
        if repeats is None:
            return pull()
        if repeats.epoch != cursor.epoch:
            deliveries = plan.deliveries(cursor)
            if deliveries is None:
                return pull()
            repeats.begin(cursor.epoch, deliveries.tolist())
        found = repeats.next(pull)
        if found is None:
            return None
        ready, again = found
        if again and ready.rows:
            meter.delivered(ready.rows, ready.nbytes)
        return ready

    # Choosing the factor.

    def begin(self, meter: Meter) -> None:
        """An epoch begins."""
        if self.factors is not None:
            self._before = meter.totals()

    def end(self, meter: Meter, stops: Sequence[Stop], workers: int) -> None:
        """An epoch is over: measure the factor for the next. ``stops``: as they run."""
        if self.factors is None or self._before is None:
            return
        # Stage 0 is the source.
        stage = next((place for place, stop in enumerate(stops, start=1) if stop.repeats), None)
        self.factors.measured(Pace.between(self._before, meter.totals(), stage, workers))

    def factor(self, epoch: int) -> float:
        """The factor of an epoch."""
        if self.factors is not None:
            return self.factors(epoch)
        return 1.0 if self.echo is None else float(self.echo.factor)

    def counted(self, held: Held, epoch: int) -> Held:
        """Complete the statistics: the factor, and the counts of an echo of batches."""
        echo = held.echo
        if self._repeats is not None:
            echo = EchoStats(self._repeats.fresh, self._repeats.delivered, 1.0)
        if echo is None:
            return held
        return held._replace(echo=replace(echo, factor=self.factor(epoch)))

    # State.

    def state(self, epoch: int) -> dict[str, float] | None:
        return None if self.factors is None else self.factors.state(epoch)

    def check_state(self, state: Any) -> None:
        """Raise StateError if ``restore`` would refuse this."""
        if self.factors is not None:
            self.factors.check_state(state)

    def restore(self, epoch: int, state: Mapping[str, Any]) -> None:
        if self.factors is not None:
            self.factors.restore(epoch, state)
