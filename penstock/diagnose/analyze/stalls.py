"""Where the time of a sample goes: into computing, or into waiting for prep or for fetch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.diagnose.analyze.model import LITTLE, Bound, Prediction, bound_of, predict
from penstock.diagnose.analyze.report import Phase, PhaseName, Report


@dataclass(frozen=True, slots=True)
class Stalls:
    """Seconds a sample that the accelerator works, and that it stands still.

    ``measured`` says that all three come from phases that were run, not from the model.
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
        """Samples a second."""
        return 1 / self.whole

    @property
    def prep_share(self) -> float:
        return self.prep / self.whole

    @property
    def fetch_share(self) -> float:
        return self.fetch / self.whole

    @property
    def idle(self) -> float:
        """The share of the time that the accelerator stands still."""
        return self.prep_share + self.fetch_share

    @property
    def bound(self) -> Bound:
        """What training waits for most; the accelerator itself, where it hardly waits."""
        return bound_of(self.compute, self.prep, self.fetch)


def stalls_of(report: Report) -> Stalls:
    """By substitution: what a sample takes longer when something is no longer spared.

    Replayed batches leave computing alone, cached data add prep to it, and cold data fetching.
    Where a phase was not run, the model stands in for it.
    """
    replay, cached, cold = (_seconds(report, name) for name in ("replay", "cached", "cold"))
    measured = replay is not None and cached is not None and cold is not None
    model = Stalls(0.0, 0.0, 0.0) if measured else predicted_stalls(report, predict(report))
    compute = model.compute if replay is None else replay
    # Each is at least as slow as the one before: a difference below nothing is noise.
    with_prep = max(compute, compute + model.prep if cached is None else cached)
    with_fetch = max(with_prep, with_prep + model.fetch if cold is None else cold)
    return Stalls(compute, with_prep - compute, with_fetch - with_prep, measured)


def _seconds(report: Report, name: PhaseName) -> float | None:
    rate = report.rate(name)
    return 1 / rate if rate else None


def predicted_stalls(report: Report, prediction: Prediction) -> Stalls:
    """The same of a prediction, which is about epochs."""
    samples = report.setup.samples
    return Stalls(
        prediction.compute / samples,
        prediction.prep / samples,
        prediction.fetch / samples,
        measured=False,
    )


def measured_speed(report: Report) -> Phase | None:
    """The run as it is, under the cache it has."""
    return report.phase("cold") or report.phase("as it is")


def model_error(report: Report, present: Prediction) -> float | None:
    """By how much the model is off the run as it is: 0.02 where it is 2 % too fast."""
    measured = measured_speed(report)
    return None if measured is None else present.speed / measured.rate.value - 1


def all_ranks(report: Report) -> tuple[Report, ...]:
    """The reports of all ranks, in their order."""
    return tuple(sorted((report, *report.ranks), key=lambda one: one.setup.rank))


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """One rank: how fast it is, and how fast its loader alone could be, in samples a second."""

    report: Report
    stalls: Stalls
    loader: float


def rank_speeds(report: Report) -> tuple[RankSpeed, ...]:
    found = []
    for one in all_ranks(report):
        model = predict(one)
        found.append(RankSpeed(one, stalls_of(one), min(model.fetch_rate, model.prep_rate)))
    return tuple(found)


def slowest(ranks: Sequence[RankSpeed]) -> RankSpeed | None:
    """The rank that the others wait for; ``None`` where they differ by no more than measuring errs.

    Ranks that exchange gradients go at one pace, whichever of them holds the others up: then it is
    the one with the slowest loader.
    """
    keys: tuple[Callable[[RankSpeed], float], ...] = (
        lambda one: one.stalls.speed,
        lambda one: one.loader,
    )
    for key in keys:
        last = min(ranks, key=key)
        if key(last) < (1 - LITTLE) * max(map(key, ranks)):
            return last
    return None
