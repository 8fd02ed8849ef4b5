"""How the time of a sample is spent: computing, or waiting for prep or for fetch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.diagnose.analyze.model import SMALL_STALL, Bound, Prediction, bound_of, predict
from penstock.diagnose.analyze.report import AnalysisReport, Phase, PhaseName


@dataclass(frozen=True, slots=True)
class Stalls:
    """Seconds per sample: the accelerator computes, waits for prep, and waits for fetch.

    ``measured``: all three come from phases that were run, none from the model.
    """

    compute: float
    prep: float
    fetch: float
    measured: bool = True

    @property
    def whole(self) -> float:
        return self.compute + self.prep + self.fetch

    @property
    def speed(self) -> float:
        """Samples per second."""
        return 1 / self.whole

    @property
    def prep_share(self) -> float:
        return self.prep / self.whole

    @property
    def fetch_share(self) -> float:
        return self.fetch / self.whole

    @property
    def idle(self) -> float:
        """Share of the time that the accelerator is idle."""
        return self.prep_share + self.fetch_share

    @property
    def bound(self) -> Bound:
        """The bottleneck: what training waits for most, or ``compute`` if it hardly waits."""
        return bound_of(self.compute, self.prep, self.fetch)


def stalls_of(report: AnalysisReport) -> Stalls:
    """The stalls, as differences between phases.

    Replayed batches need computing only, cached samples also need prep, and cold samples also need
    fetching. The model replaces a phase that was not run.
    """
    replay, cached, cold = (_seconds(report, name) for name in ("replay", "cached", "cold"))
    measured = replay is not None and cached is not None and cold is not None
    model = Stalls(0.0, 0.0, 0.0) if measured else predicted_stalls(report, predict(report))
    compute = model.compute if replay is None else replay
    # Each phase is at least as slow as the one before: a negative difference is noise.
    with_prep = max(compute, compute + model.prep if cached is None else cached)
    with_fetch = max(with_prep, with_prep + model.fetch if cold is None else cold)
    return Stalls(compute, with_prep - compute, with_fetch - with_prep, measured)


def _seconds(report: AnalysisReport, name: PhaseName) -> float | None:
    rate = report.rate(name)
    return 1 / rate if rate else None


def predicted_stalls(report: AnalysisReport, prediction: Prediction) -> Stalls:
    """The stalls of a prediction, per sample instead of per epoch."""
    samples = report.setup.samples
    return Stalls(
        prediction.compute / samples,
        prediction.prep / samples,
        prediction.fetch / samples,
        measured=False,
    )


def measured_speed(report: AnalysisReport) -> Phase | None:
    """The phase that shows the speed of the unchanged run, with its present cache."""
    return report.phase("cold") or report.phase("as it is")


def model_error(report: AnalysisReport, present: Prediction) -> float | None:
    """Relative error of the model for the unchanged run: 0.02 if it predicts 2 % too much."""
    measured = measured_speed(report)
    return None if measured is None else present.speed / measured.rate.value - 1


def all_ranks(report: AnalysisReport) -> tuple[AnalysisReport, ...]:
    """The reports of all ranks, ordered by rank."""
    return tuple(sorted((report, *report.ranks), key=lambda rank: rank.setup.rank))


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """One rank: its stalls, and the speed of its loader alone in samples per second."""

    report: AnalysisReport
    stalls: Stalls
    loader: float


def rank_speeds(report: AnalysisReport) -> tuple[RankSpeed, ...]:
    speeds = []
    for rank in all_ranks(report):
        model = predict(rank)
        speeds.append(RankSpeed(rank, stalls_of(rank), min(model.fetch_rate, model.prep_rate)))
    return tuple(speeds)


def slowest(ranks: Sequence[RankSpeed]) -> RankSpeed | None:
    """The rank that the others wait for; ``None`` if they differ less than measurements err.

    Ranks that exchange gradients all run at the speed of the slowest. Then the rank with the
    slowest loader is the one that the others wait for.
    """
    keys: tuple[Callable[[RankSpeed], float], ...] = (
        lambda rank: rank.stalls.speed,
        lambda rank: rank.loader,
    )
    for key in keys:
        last = min(ranks, key=key)
        if key(last) < (1 - SMALL_STALL) * max(map(key, ranks)):
            return last
    return None
