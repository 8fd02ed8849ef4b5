"""How the time of a sample is spent: computing, or waiting for prep or for fetch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
    """One rank: its stalls, and the speed of its loader alone in samples per second.

    ``stalls`` are those that its own loader causes. ``others``: seconds per sample that it waits
    for other ranks, inside its training step.
    """

    report: AnalysisReport
    stalls: Stalls
    loader: float
    others: float = 0.0

    @property
    def speed(self) -> float:
        """Samples per second, with all waits."""
        return 1 / (self.stalls.whole + self.others)

    @property
    def others_share(self) -> float:
        """Share of the time that this rank waits for other ranks."""
        return self.others * self.speed

    @property
    def waits_for_loader(self) -> float:
        """Seconds per sample that this rank waits for its own loader."""
        return self.stalls.prep + self.stalls.fetch


def rank_speeds(report: AnalysisReport) -> tuple[RankSpeed, ...]:
    speeds = []
    for rank in all_ranks(report):
        model = predict(rank)
        loader = min(model.fetch_rate, model.prep_rate)
        own, others = own_stalls(rank) if report.ranks else (stalls_of(rank), 0.0)
        speeds.append(RankSpeed(rank, own, loader, others))
    return tuple(speeds)


def own_stalls(report: AnalysisReport) -> tuple[Stalls, float]:
    """The stalls that a rank's own loader causes, and the seconds that it waits for other ranks.

    Ranks exchange gradients in every step. So if one of them waits for its loader, the others wait
    in their step: all phases become slower on all ranks. Only the time between asking for a batch
    and getting it is a rank's own stall; the rest of the difference between phases is not.
    """
    stalls = stalls_of(report)
    cached, cold = (_wait_per_sample(report, name) for name in ("cached", "cold"))
    prep = stalls.prep if cached is None else min(stalls.prep, cached)
    fetch = stalls.fetch
    if cold is not None:
        fetch = min(stalls.fetch, max(0.0, cold - prep))
    others = stalls.prep + stalls.fetch - prep - fetch
    return Stalls(stalls.compute, prep, fetch, stalls.measured), others


def _wait_per_sample(report: AnalysisReport, name: PhaseName) -> float | None:
    """Seconds that the loop waited for a sample in this phase; ``None`` if not recorded.

    Only the second half of the phase counts: its first batches come from queues.
    """
    waits = [wait.wait for wait in report.waits if wait.phase == name]
    late = waits[len(waits) // 2 :]
    return sum(late) / (len(late) * report.setup.batch) if late else None


def slowest(ranks: Sequence[RankSpeed]) -> RankSpeed | None:
    """The rank that the others wait for; ``None`` if they differ less than measurements err.

    Ranks that exchange gradients all run at the speed of the slowest. Then it is the rank that
    waits longest for its own loader, and if that is unknown, the one with the slowest loader.
    """
    last = min(ranks, key=lambda rank: rank.speed)
    fastest = max(ranks, key=lambda rank: rank.speed)
    if last.speed < (1 - SMALL_STALL) * fastest.speed:
        return last
    longest = max(ranks, key=lambda rank: rank.waits_for_loader)
    shortest = min(ranks, key=lambda rank: rank.waits_for_loader)
    more = longest.waits_for_loader - shortest.waits_for_loader
    if more > SMALL_STALL / longest.speed:
        return longest
    last = min(ranks, key=lambda rank: rank.loader)
    if last.loader < (1 - SMALL_STALL) * max(rank.loader for rank in ranks):
        return last
    return None


def slowest_host(ranks: Sequence[RankSpeed]) -> str | None:
    """The machine whose ranks all wait longer for their loaders than all ranks elsewhere.

    ``None`` with a single machine, or if no machine is slower as a whole.
    """
    last = slowest(ranks)
    if last is None or not last.report.host:
        return None
    here = [rank for rank in ranks if rank.report.host == last.report.host]
    elsewhere = [rank for rank in ranks if rank.report.host != last.report.host]
    if not elsewhere or len(here) < 2:
        return None

    def cost(rank: RankSpeed) -> float:
        return max(rank.waits_for_loader, 1 / rank.loader if rank.loader else 0.0)

    return last.report.host if min(map(cost, here)) > max(map(cost, elsewhere)) else None
