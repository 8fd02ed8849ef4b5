"""A loader's echo: what was chosen for each epoch, and batches that are handed out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.job import Ready
from penstock.order import Cursor, EchoedBatches
from penstock.order.plan import Plan
from penstock.pace import Factors, Pace
from penstock.pipeline import Pipeline
from penstock.plans import echo_of, follows_pace
from penstock.repeats import Pull, Repeats
from penstock.stats import EchoStats, Held, Meter, Totals
from penstock.stops.echo import MOST


class Echoing:
    """What a loader has to do about the echo of its pipeline; nothing where it has none."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.echo = echo_of(pipeline)
        self.factors = Factors(MOST) if follows_pace(pipeline) else None
        self._repeats = None if pipeline.echoed is None else Repeats()
        self._before: Totals | None = None

    # Handing out.

    def restart(self) -> None:
        """The engine begins anew, and nothing it gave before will be handed out again."""
        if self._repeats is not None:
            self._repeats.epoch = -1

    def next(self, pull: Pull, plan: Plan | None, cursor: Cursor, meter: Meter) -> Ready | None:
        """The next batch: one that was just prepared, or once more one that came before."""
        repeats = self._repeats
        if repeats is None or not isinstance(plan, EchoedBatches):
            return pull()
        if repeats.epoch != cursor.epoch:
            repeats.begin(cursor.epoch, plan.deliveries(cursor).tolist())
        found = repeats.next(pull)
        if found is None:
            return None
        ready, again = found
        if again and ready.rows:
            meter.delivered(ready.rows, ready.nbytes)
        return ready

    # Choosing.

    def begin(self, meter: Meter) -> None:
        """An epoch begins."""
        if self.factors is not None:
            self._before = meter.totals()

    def end(self, meter: Meter, stages: Sequence[str], workers: int) -> None:
        """It is over: the factor of the next follows from how it went."""
        if self.factors is None or self._before is None:
            return
        above = self._repeats is None
        stage = list(stages).index("echo") if above else None
        self.factors.measured(Pace.between(self._before, meter.totals(), stage, workers))

    def factor(self, epoch: int) -> float:
        """The factor of an epoch."""
        if self.factors is not None:
            return self.factors(epoch)
        return 1.0 if self.echo is None else float(self.echo.factor)

    def counted(self, held: Held, epoch: int) -> Held:
        """With what an echo of batches has to say."""
        if self._repeats is None:
            return held
        counts = EchoStats(self._repeats.fresh, self._repeats.delivered, self.factor(epoch))
        return held._replace(echo=counts)

    # State.

    def state(self, epoch: int) -> dict[str, float] | None:
        return None if self.factors is None else self.factors.state(epoch)

    def restore(self, epoch: int, state: Mapping[str, Any] | None) -> None:
        if self.factors is not None:
            self.factors.restore(epoch, state)
