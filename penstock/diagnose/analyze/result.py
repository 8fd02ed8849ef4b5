"""The result of an analysis: one frozen object from which everything that is shown is taken. Pure.

``judge.result_of(report)`` makes it from the measurements. Verdict, rates, remedies, what-if and
page must agree, so none of them computes a figure of its own that is here. ``broken_rules`` checks
that the parts do not contradict each other; ``judge`` turns a contradiction into a refusal or into
wider intervals before anybody sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.diagnose.analyze.model import Bound as Bound
from penstock.diagnose.analyze.report import Interval, MachineUse, Phase, Rate, WorkerUse
from penstock.host.text import percent

SMALL = 0.05
"""Shares of the time below this are not a bottleneck: they are hardly worth a change."""

LEAST_STEPS = 4
"""Counted steps of the run as it is, and of the replayed batch, below which nothing is stated."""

MODEL_OFF, MODEL_USELESS = 0.10, 0.25
"""Above the first relative error of the model every prediction gets wider; above the second there
are no predictions."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bottleneck, or the reason why none is named.

    - ``bound``: ``None`` if the analysis refuses to name one. Then ``refusal`` says what was found
      and what to do, such as ``not enough steps to tell: 8 steps in 45 s; give --seconds 300``.
    - ``also``: further bottlenecks that are as large within the intervals, or nearly.
    - ``reason``: the figures that decide, in one sentence.
    - ``cause``: for ``latency`` what workers wait for (``sleep``, ``open``, ``lock``, ``network``,
      ``read`` or ``other``); else empty. ``place``: where in the user's code, if known.
    """

    bound: Bound | None
    reason: str = ""
    refusal: str = ""
    also: tuple[Bound, ...] = ()
    cause: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        if (self.bound is None) != bool(self.refusal):
            raise ValueError("a verdict has either a bottleneck or a refusal")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of the measured run, each with its interval. ``compute`` is the rest.

    ``prep`` and ``fetch`` are waits of the training loop, ``contention`` is the time by which the
    step is longer while the loader is at work.
    """

    prep: Interval
    fetch: Interval
    contention: Interval

    @property
    def waiting(self) -> float:
        """Share of the time that training waits for batches."""
        return self.prep.value + self.fetch.value

    @property
    def compute(self) -> float:
        return max(0.0, 1 - self.waiting - self.contention.value)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a training step, per batch.

    - ``alone``: with a replayed batch and no loader at work.
    - ``beside``: with the script's own loader at work, without the wait for the batch.
    - ``wait``: the wait for a batch, measured at the loop.
    """

    alone: Interval
    beside: Interval
    wait: Interval


@dataclass(frozen=True, slots=True)
class LoaderRates:
    """Samples per second; ``None`` where unknown.

    ``G`` ingestion of the accelerator, ``P`` preparation by all workers, ``F`` fetching with the
    present cache and the data as warm as it is, ``C`` reading from memory, ``S`` cold storage.
    """

    G: Rate | None = None
    P: Rate | None = None
    F: Rate | None = None
    C: Rate | None = None
    S: Rate | None = None

    def known(self) -> dict[str, Rate]:
        rates = {name: getattr(self, name) for name in "GPFCS"}
        return {name: rate for name, rate in rates.items() if rate is not None}


@dataclass(frozen=True, slots=True)
class Trust:
    """How far predictions can be trusted.

    - ``measured``: samples per second of the measured run, to which predictions are scaled;
      ``modelled``: what the model says about that run.
    - ``error``: half the relative width of every prediction: 0.1 means within 10 %.
    - ``numbers``: whether there are predictions at all.
    - ``phase``: the phase in which model and measurement differ most, if they differ.
    - ``reasons``: why predictions are wide or missing, in sentences.
    """

    measured: Rate | None
    modelled: float
    error: float
    numbers: bool = True
    phase: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def factor(self) -> float:
        """Factor from the model's speeds to those of the measured run."""
        if self.measured is None or self.modelled <= 0 or self.measured.value <= 0:
            return 1.0
        return self.measured.value / self.modelled


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Predicted speeds that must not contradict each other, scaled to the measured run.

    - ``cores``: samples per second by number of cores, ascending.
    - ``jobs``: samples per second of each of k jobs that do not share, by k, ascending.
    - ``most``: the highest speed that a change of the loader alone may bring.
    """

    cores: tuple[tuple[int, float], ...] = ()
    jobs: tuple[tuple[int, float], ...] = ()
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that an analysis states.

    - ``shares``, ``step``: ``None`` if no phase with the training loop was measured.
    - ``workers``: how workers spend their time; ``None`` if unknown or without workers.
    - ``machine``: use of the machine by phase.
    - ``warm``: share of the present fetches that memory serves (the page cache); cold storage is a
      scenario of its own, ``Change(cold=True)``.
    - ``rank``: the rank that the figures are of; ``world``: number of ranks.
    - ``warnings``: sentences on what limits the statements: load of others, few cores, throttling.
    - ``interrupted``: why the analysis ended early; empty if it did not.
    """

    verdict: Verdict
    rates: LoaderRates
    trust: Trust
    shares: Shares | None = None
    step: StepTimes | None = None
    forecasts: Forecasts = Forecasts()
    workers: WorkerUse | None = None
    machine: tuple[MachineUse, ...] = ()
    phases: tuple[Phase, ...] = ()
    warm: float = 0.0
    rank: int = 0
    world: int = 1
    warnings: tuple[str, ...] = ()
    interrupted: str = ""

    @property
    def bound(self) -> Bound | None:
        return self.verdict.bound

    @property
    def speed(self) -> Rate | None:
        """Samples per second of the measured run."""
        return self.trust.measured


TOLERATED = 1e-3
"""Relative difference of two predictions that counts as none: rounding of the simulation."""


def broken_rules(result: Result) -> tuple[str, ...]:
    """The contradictions within a result, in sentences; empty if it is consistent."""
    return (*_verdict_rules(result), *_rate_rules(result), *_forecast_rules(result))


def _verdict_rules(result: Result) -> list[str]:
    rates, shares, verdict = result.rates, result.shares, result.verdict
    found = []
    others = {name: rate for name, rate in rates.known().items() if name in "PF"}
    if verdict.bound == "compute":
        if rates.G is None:
            found.append("the verdict is compute-bound, but the step alone (G) was not measured.")
        else:
            found += [
                f"the verdict is compute-bound, but {name} ({rate.value:,.0f} samples/s) is not "
                f"above G ({rates.G.value:,.0f}) by more than their intervals."
                for name, rate in others.items()
                if rate.low <= rates.G.high
            ]
        if shares is not None and shares.waiting > SMALL:
            found.append(
                f"the verdict is compute-bound, but the loop waited {percent(shares.waiting)} of "
                "the time for batches."
            )
        if shares is not None and shares.contention.value > 2 * SMALL:
            found.append(
                "the verdict is compute-bound, but the loader makes the step longer by "
                f"{percent(shares.contention.value)} of the time."
            )
    if verdict.bound in ("prep", "latency", "fetch") and shares is not None:
        if shares.waiting <= SMALL:
            found.append(
                f"the verdict is {verdict.bound}-bound, but the loop waited only "
                f"{percent(shares.waiting)} of the time for batches."
            )
        elif verdict.bound == "fetch" and shares.fetch.high < shares.prep.low:
            found.append("the verdict is fetch-bound, but the loop waited longer for preparation.")
        elif verdict.bound != "fetch" and shares.prep.high < shares.fetch.low:
            found.append(
                f"the verdict is {verdict.bound}-bound, but the loop waited longer for storage."
            )
    if verdict.bound == "contention" and shares is not None and shares.contention.low <= 0:
        found.append("the verdict is contention, but the step may be as fast beside the loader.")
    return found


def _rate_rules(result: Result) -> list[str]:
    found = []
    for name, rate in result.rates.known().items():
        unknown = rate.low == 0 and math.isinf(rate.high)  # too few steps for an interval
        if not unknown and not 0 < rate.low <= rate.value <= rate.high:
            found.append(f"the interval of {name} does not contain {name}, or is not above 0.")
    cache, storage = result.rates.C, result.rates.S
    if cache is not None and storage is not None and cache.high < storage.low:
        found.append(
            f"memory (C, {cache.value:,.0f} samples/s) is slower than storage (S, "
            f"{storage.value:,.0f})."
        )
    return found


def _forecast_rules(result: Result) -> list[str]:
    found = []
    for (fewer, slow), (more, fast) in zip(
        result.forecasts.cores, result.forecasts.cores[1:], strict=False
    ):
        if fast < slow * (1 - TOLERATED):
            found.append(
                f"{more} cores are predicted to be slower ({fast:,.0f} samples/s) than {fewer} "
                f"({slow:,.0f})."
            )
    for (few, alone), (many, each) in zip(
        result.forecasts.jobs, result.forecasts.jobs[1:], strict=False
    ):
        if each > alone * (1 + TOLERATED):
            found.append(
                f"each of {many} jobs that do not share is predicted to be faster ({each:,.0f} "
                f"samples/s) than each of {few} ({alone:,.0f})."
            )
    highest = max((speed for _, speed in result.forecasts.cores), default=0.0)
    if highest > result.forecasts.most * (1 + TOLERATED):
        found.append(
            f"more cores are predicted to bring {highest:,.0f} samples/s, more than the "
            f"accelerator takes ({result.forecasts.most:,.0f})."
        )
    return found
