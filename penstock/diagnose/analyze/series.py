"""The numbers behind the plots of a report. Pure; ``plots`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.diagnose.analyze.judge import measured_run
from penstock.diagnose.analyze.model import Change, Prediction
from penstock.diagnose.analyze.report import AnalysisReport, PhaseName
from penstock.diagnose.analyze.result import Result
from penstock.diagnose.analyze.what_if import Forecast, Saturation, cache_sizes, with_cores

MOST_BARS = 120
"""Most bars of a timeline: a phone has three times as many pixels."""

MOST_CORE_POINTS = 12
MOST_BINS = 24


@dataclass(frozen=True, slots=True)
class Stack:
    """Seconds of an epoch: computing, waiting for prep, and waiting for fetch."""

    title: str
    compute: float
    prep: float
    fetch: float

    @property
    def whole(self) -> float:
        return self.compute + self.prep + self.fetch


def stacks(
    report: AnalysisReport,
    result: Result,
    present: Prediction | None,
    best: tuple[str, Prediction] | None = None,
) -> list[Stack]:
    """The epoch as measured, as predicted, and with the best remedy if there is one.

    The measured one comes from the shares of the result, and is left out without them. In it the
    time by which workers slow the steps counts as computing.
    """
    shares, speed, found = result.shares, result.speed, []
    if shares is not None and speed is not None and speed.value:
        whole = report.setup.samples / speed.value
        prep, fetch = whole * shares.prep.value, whole * shares.fetch.value
        found.append(Stack("measured", whole - prep - fetch, prep, fetch))
    if present is not None:
        found.append(Stack("predicted", present.compute, present.prep, present.fetch))
    if best is not None:
        title, after = best
        found.append(Stack(title, after.compute, after.prep, after.fetch))
    return found


@dataclass(frozen=True, slots=True)
class RateLine:
    """One rate over the quantity that is varied; ``name`` is F, P, G or ``speed``."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """Rates over one quantity.

    ``enough``: the amount from which on more does not help, and the speed there. ``present``: the
    present amount, and the measured speed.
    """

    lines: tuple[RateLine, ...]
    enough: tuple[float, float] | None
    present: tuple[float, float] | None

    @property
    def right(self) -> float:
        return max(x for line in self.lines for x, _ in line.points)

    @property
    def top(self) -> float:
        """Upper end of the axis: above all speeds and G. F and P may leave the plot."""
        speeds = [y for line in self.lines if line.name in ("speed", "G") for _, y in line.points]
        if self.present is not None:
            speeds.append(self.present[1])
        return 1.2 * max(speeds)


def over_cache(forecast: Forecast, enough: Saturation) -> Curves | None:
    """Rates over the size of the cache, in bytes; ``None`` if sizes of samples are unknown."""
    report = forecast.report
    if not forecast.data or enough.cache is None:
        return None
    sizes = sorted({*cache_sizes(forecast.data), enough.cache})
    predictions = [(float(cache), forecast(Change(cache=cache))) for cache in sizes]
    now = min(report.setup.cache, forecast.data)
    point = (float(enough.cache), enough.cache_speed) if enough.cache else None
    return Curves(_lines(predictions), point, _present(report, now))


def over_cores(forecast: Forecast, enough: Saturation) -> Curves:
    """Rates over the number of cores, with one worker per core."""
    report = forecast.report
    setup = report.setup
    now = max(1, min(setup.cores, setup.workers))
    last = max(4, round(1.5 * (enough.cores or 0)), now + 2)
    step = math.ceil(last / MOST_CORE_POINTS)
    places = sorted({1, *range(step, last + 1, step), now, enough.cores or last})
    predictions = [
        (float(cores), forecast(with_cores(report, Change(), cores))) for cores in places
    ]
    point = None if enough.cores is None else (float(enough.cores), enough.cores_speed)
    return Curves(_lines(predictions), point, _present(report, now))


def _lines(predictions: Sequence[tuple[float, Prediction]]) -> tuple[RateLine, ...]:
    lines = (
        RateLine("F", tuple((x, at.fetch_rate) for x, at in predictions)),
        RateLine("P", tuple((x, at.prep_rate) for x, at in predictions)),
        RateLine("G", tuple((x, at.ingestion) for x, at in predictions)),
        RateLine("speed", tuple((x, at.speed) for x, at in predictions)),
    )
    return tuple(
        replace(line, points=points)
        for line in lines
        if (points := tuple(point for point in line.points if math.isfinite(point[1])))
    )


def _present(report: AnalysisReport, place: float) -> tuple[float, float] | None:
    phase = measured_run(report)
    return None if phase is None else (float(place), phase.rate.value)


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    detail: str = ""


def operations(report: AnalysisReport, most: int = 14) -> list[Bar]:
    """Milliseconds per sample of each operation, in order; the smallest are joined if too many."""
    bars = [
        Bar(
            operation.name,
            operation.ms,
            f"{operation.kind}{', random' if operation.random else ''}",
        )
        for operation in report.operations
    ]
    if len(bars) <= most:
        return bars
    largest = {id(bar) for bar in sorted(bars, key=lambda bar: -bar.value)[: most - 1]}
    others = [bar for bar in bars if id(bar) not in largest]
    joined = Bar(f"{len(others)} others", sum(bar.value for bar in others))
    return [*(bar for bar in bars if id(bar) in largest), joined]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of the seconds per batch.

    ``edges`` are those of the bins, one more than ``counts``. ``allowed``: most seconds a worker
    may take per batch before the accelerator waits; ``None`` if workers do not take whole batches.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    median: float
    late: float
    """95th percentile."""
    allowed: float | None


def batch_times(report: AnalysisReport) -> Histogram | None:
    """The distribution of batch times; ``None`` with fewer than two."""
    times = sorted(seconds for seconds in report.batch_times if math.isfinite(seconds))
    if len(times) < 2:
        return None
    width = _round_up((times[-1] - times[0]) / max(1, min(MOST_BINS, math.isqrt(len(times)) + 1)))
    if width <= 0:
        width = max(times[0], 1e-6) / 10
    first = math.floor(times[0] / width + 1e-9)
    counts = [0] * (math.floor(times[-1] / width + 1e-9) - first + 1)
    for seconds in times:
        counts[math.floor(seconds / width + 1e-9) - first] += 1
    setup = report.setup
    allowed = None
    if setup.workers and setup.piece >= setup.batch:
        allowed = setup.workers * setup.batch * report.costs.compute
    return Histogram(
        tuple((first + n) * width for n in range(len(counts) + 1)),
        tuple(counts),
        _quantile(times, 0.5),
        _quantile(times, 0.95),
        allowed,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _round_up(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * size for size in (1, 2, 5, 10) if unit * size >= value * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class WaitBar:
    """Consecutive steps of one phase: begin, end, and their waits, in seconds.

    Times count the training loop only: the time between two phases is cut out.
    """

    phase: PhaseName
    begin: float
    end: float
    mean: float
    longest: float
    steps: int


def timeline(report: AnalysisReport, most: int = MOST_BARS) -> list[WaitBar]:
    """The waits in order; with more than ``most``, one bar stands for several steps of a phase."""
    waits = sorted(report.waits, key=lambda wait: wait.at)
    steps_per_bar = max(1, math.ceil(len(waits) / most))
    bars: list[WaitBar] = []
    now = 0.0
    for wait in waits:
        begin, now = now, now + wait.wait + wait.step
        last = bars[-1] if bars else None
        if last is not None and last.phase == wait.phase and last.steps < steps_per_bar:
            steps = last.steps + 1
            bars[-1] = WaitBar(
                wait.phase,
                last.begin,
                now,
                last.mean + (wait.wait - last.mean) / steps,
                max(last.longest, wait.wait),
                steps,
            )
        else:
            bars.append(WaitBar(wait.phase, begin, now, wait.wait, wait.wait, 1))
    return bars


def phases_of(bars: Sequence[WaitBar]) -> list[tuple[PhaseName, float, float]]:
    """The phases of a timeline, each with its begin and end."""
    phases: list[tuple[PhaseName, float, float]] = []
    for bar in bars:
        if phases and phases[-1][0] == bar.phase:
            phases[-1] = (bar.phase, phases[-1][1], bar.end)
        else:
            phases.append((bar.phase, bar.begin, bar.end))
    return phases
