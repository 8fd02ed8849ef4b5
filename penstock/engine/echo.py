"""The echo of a loader: the factor of each epoch, and batches that are handed out again."""

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
from penstock.stops.echo import LARGEST_FACTOR
from penstock.stops.stop import Stop


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a sample takes above and below the echo, in seconds.

    ``above``: one worker, for a fresh sample. ``below``: one worker, for a delivered sample.
    ``step``: the training step, for a delivered sample, without the time it waits for batches.

    >>> Pace(above=0.006, below=0.0001, step=0.001, workers=2).ratio
    3.0
    """

    above: float
    below: float
    step: float
    workers: int

    @classmethod
    def between(cls, before: Totals, after: Totals, stage: int | None, workers: int) -> Pace | None:
        """The pace between two readings of a meter; ``None`` if no sample passed.

        ``stage``: the number of the echo among the stages; ``None`` for an echo of batches.
        """
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
        """How many times as long a sample takes above the echo as below it."""
        down = max(self.step, self.below / self.workers)
        return self.above / self.workers / down if down > 0 else math.inf


class Factors:
    """The factors that ``echo("auto")`` chooses: call it with an epoch for its factor.

    The factor of an epoch is the last measured ratio at the first call, and is fixed from then on.
    It never exceeds the ratio or ``limit``. Before the first measurement it is 1.

    >>> factors = Factors(limit=8)
    >>> factors(0)
    1.0
    >>> factors.record(Pace(above=0.005, below=0.0, step=0.002, workers=1))
    >>> factors(1), factors(0)
    (2.5, 1.0)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ratio = 1.0
        self._chosen: dict[int, float] = {}

    def __call__(self, epoch: int) -> float:
        if epoch not in self._chosen:
            # Rounded down to a hundredth: a measurement is not more exact than that.
            factor = math.floor(min(self._ratio, self._limit) * 100) / 100
            self._chosen[epoch] = max(1.0, factor)
        return self._chosen[epoch]

    def record(self, pace: Pace | None) -> None:
        """Use this measurement for the epochs that have no factor yet."""
        if pace is not None:
            self._ratio = pace.ratio

    def state(self, epoch: int) -> dict[str, float]:
        """The entry of a checkpoint taken in this epoch, as plain data."""
        return {"ratio": min(self._ratio, float(self._limit)), "factor": self(epoch)}

    def check_state(self, state: Any) -> None:
        """Raise StateError if ``restore`` would refuse this."""
        if not isinstance(state, Mapping) or not {"ratio", "factor"} <= set(state):
            raise StateError(
                'the checkpoint has no echo factor, which this loader needs for echo("auto"): it '
                "was taken with another pipeline. Resume with that pipeline, or start anew."
            )

    def restore(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self.check_state(state)
        self._chosen = {epoch: float(state["factor"])}
        self._ratio = float(state["ratio"])


Pull = Callable[[], Ready | None]


class Repeats:
    """Hands out prepared batches, some of them several times, in the order of the plan.

    A batch that is needed again is handed out as a copy, because the training loop may change a
    batch in place.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.fresh = 0
        """Samples that the engine has prepared."""
        self.delivered = 0
        """Samples that were handed out, including copies."""
        self._order: Iterator[int] = iter(())
        self._left: Counter[int] = Counter()
        self._held: dict[int, Ready] = {}
        self._delivered_before: set[int] = set()

    def begin(self, epoch: int, deliveries: Sequence[int]) -> None:
        """Start an epoch. ``deliveries``: the number of each batch in the order of delivery."""
        self.epoch = epoch
        self._order = iter(deliveries)
        self._left = Counter(deliveries)
        self._held.clear()
        self._delivered_before.clear()

    def next(self, pull: Pull) -> tuple[Ready, bool] | None:
        """The next batch, and whether it was delivered before; ``None`` after the last.

        ``pull`` returns the next prepared batch.
        """
        number = next(self._order, None)
        if number is None:
            return None
        while number not in self._held:
            ready = pull()
            if ready is None:
                return None
            self._held[ready.batch_keys.number] = ready
            self.fresh += ready.rows
        self._left[number] -= 1
        ready = self._held[number]
        if self._left[number]:
            ready = ready._replace(value=copy.deepcopy(ready.value))
        else:
            del self._held[number]
        self.delivered += ready.rows
        repeated = number in self._delivered_before
        self._delivered_before.add(number)
        return ready, repeated


class Echoing:
    """The part of a loader that handles ``echo``; it does nothing for a pipeline without echo."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.echo = echo_of(pipeline)
        auto = self.echo is not None and self.echo.measured
        self.factors = Factors(LARGEST_FACTOR) if auto else None
        self._repeats = None if pipeline.echoed is None else Repeats()
        self._before: Totals | None = None

    # Handing out.

    @property
    def repeats_batches(self) -> bool:
        """Whether whole batches are handed out again."""
        return self._repeats is not None

    def restart(self) -> None:
        """Forget the batches of the feed: it starts again."""
        if self._repeats is not None:
            self._repeats.epoch = -1

    def next(self, pull: Pull, plan: Plan, cursor: Cursor, meter: Meter) -> Ready | None:
        """The next batch: a newly prepared one, or a copy of an earlier one."""
        repeats = self._repeats
        if repeats is None:
            return pull()
        if repeats.epoch != cursor.epoch:
            deliveries = plan.deliveries(cursor)
            if deliveries is None:
                return pull()
            repeats.begin(cursor.epoch, deliveries.tolist())
        delivery = repeats.next(pull)
        if delivery is None:
            return None
        ready, repeated = delivery
        if repeated and ready.rows:
            meter.delivered(ready.rows, ready.nbytes)
        return ready

    # Choosing the factor.

    def begin(self, meter: Meter) -> None:
        """Start measuring an epoch."""
        if self.factors is not None:
            self._before = meter.totals()

    def end(self, meter: Meter, stops: Sequence[Stop], workers: int) -> None:
        """Measure the epoch that is over. ``stops``: the stops of the pipeline as they run."""
        if self.factors is None or self._before is None:
            return
        # Stage 0 is the source.
        stage = next((place for place, stop in enumerate(stops, start=1) if stop.repeats), None)
        self.factors.record(Pace.between(self._before, meter.totals(), stage, workers))

    def factor(self, epoch: int) -> float:
        """The factor of an epoch."""
        if self.factors is not None:
            return self.factors(epoch)
        return 1.0 if self.echo is None else float(self.echo.factor)

    def counted(self, held: Held, epoch: int) -> Held:
        """The statistics with the factor, and with the counts of an echo of batches."""
        echo = held.echo
        if self._repeats is not None:
            echo = EchoStats(self._repeats.fresh, self._repeats.delivered, 1.0)
        if echo is None:
            return held
        return held._replace(echo=replace(echo, factor=self.factor(epoch)))

    # State.

    def state(self, epoch: int) -> dict[str, float] | None:
        """The entry of a checkpoint; ``None`` without ``echo("auto")``."""
        return None if self.factors is None else self.factors.state(epoch)

    def check_state(self, state: Any) -> None:
        """Raise StateError if ``restore`` would refuse this."""
        if self.factors is not None:
            self.factors.check_state(state)

    def restore(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        if self.factors is not None:
            self.factors.restore(epoch, state)
