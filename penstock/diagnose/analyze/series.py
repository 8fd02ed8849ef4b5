"""What the plots of a report show, as numbers. Pure; ``plots`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.diagnose.analyze.model import Change, Prediction
from penstock.diagnose.analyze.report import PhaseName, Report
from penstock.diagnose.analyze.stalls import Stalls, measured_speed, predicted_stalls, stalls_of
from penstock.diagnose.analyze.what_if import Forecast, Saturation, cache_sizes, on_cores

MOST_BARS = 120
"""Bars of a timeline: a phone has three times as many pixels."""

MOST_CORE_POINTS = 12
MOST_BINS = 24


@dataclass(frozen=True, slots=True)
class Stack:
    """Seconds of an epoch, by what they go to."""

    title: str
    compute: float
    prep: float
    fetch: float

    @property
    def whole(self) -> float:
        return self.compute + self.prep + self.fetch


def stacks(
    report: Report, present: Prediction, best: tuple[str, Prediction] | None = None
) -> list[Stack]:
    """The epoch as measured, as predicted, and with the best remedy, where there is one."""
    samples = report.setup.samples

    def stack(title: str, stalls: Stalls) -> Stack:
        return Stack(title, stalls.compute * samples, stalls.prep * samples, stalls.fetch * samples)

    measured = stalls_of(report)
    found = [stack("measured", measured)] if measured.measured else []
    found.append(stack("predicted", predicted_stalls(report, present)))
    if best is not None:
        found.append(stack(best[0], predicted_stalls(report, best[1])))
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """One rate over what is varied; ``name`` is F, P, G or ``speed``."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """Rates over one quantity.

    ``enough`` is where more of it stops helping and the speed there, ``present`` how it is now: the
    place and the measured speed.
    """

    lines: tuple[Line, ...]
    enough: tuple[float, float] | None
    present: tuple[float, float] | None

    @property
    def right(self) -> float:
        return max(x for line in self.lines for x, _ in line.points)

    @property
    def top(self) -> float:
        """High enough for all that is reached; a rate that nobody waits for may leave the plot."""
        speeds = [y for line in self.lines if line.name in ("speed", "G") for _, y in line.points]
        if self.present is not None:
            speeds.append(self.present[1])
        return 1.2 * max(speeds)


def over_cache(forecast: Forecast, enough: Saturation) -> Curves | None:
    """Rates over the size of the cache, in bytes; ``None`` where sizes are not known."""
    report = forecast.report
    if not forecast.data or enough.cache is None:
        return None
    sizes = sorted({*cache_sizes(forecast.data), enough.cache})
    made = [(float(cache), forecast(Change(cache=cache))) for cache in sizes]
    now = min(report.setup.cache, forecast.data)
    return Curves(_lines(made), _crossing(enough.cache, enough.cache_speed), _present(report, now))


def over_cores(forecast: Forecast, enough: Saturation) -> Curves:
    """Rates over cores, each with a worker."""
    report = forecast.report
    setup = report.setup
    now = max(1, min(setup.cores, setup.workers))
    last = max(4, round(1.5 * (enough.cores or 0)), now + 2)
    step = math.ceil(last / MOST_CORE_POINTS)
    places = sorted({1, *range(step, last + 1, step), now, enough.cores or last})
    made = [(float(cores), forecast(on_cores(report, Change(), cores))) for cores in places]
    crossing = None if enough.cores is None else (float(enough.cores), enough.cores_speed)
    return Curves(_lines(made), crossing, _present(report, now))


def _lines(made: Sequence[tuple[float, Prediction]]) -> tuple[Line, ...]:
    found = (
        Line("F", tuple((x, one.fetch_rate) for x, one in made)),
        Line("P", tuple((x, one.prep_rate) for x, one in made)),
        Line("G", tuple((x, one.ingestion) for x, one in made)),
        Line("speed", tuple((x, one.speed) for x, one in made)),
    )
    return tuple(
        replace(line, points=points)
        for line in found
        if (points := tuple(point for point in line.points if math.isfinite(point[1])))
    )


def _crossing(cache: int, speed: float) -> tuple[float, float] | None:
    return (float(cache), speed) if cache else None


def _present(report: Report, place: float) -> tuple[float, float] | None:
    phase = measured_speed(report)
    return None if phase is None else (float(place), phase.rate.value)


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    detail: str = ""


def operations(report: Report, most: int = 14) -> list[Bar]:
    """Milliseconds a sample of each operation, in their order; the smallest of many are joined."""
    found = [
        Bar(one.name, one.ms, f"{one.kind}{', random' if one.random else ''}")
        for one in report.operations
    ]
    if len(found) <= most:
        return found
    kept = sorted(found, key=lambda bar: -bar.value)[: most - 1]
    names = {id(bar) for bar in kept}
    others = [bar for bar in found if id(bar) not in names]
    joined = Bar(f"{len(others)} others", sum(bar.value for bar in others))
    return [*(bar for bar in found if id(bar) in names), joined]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a batch took how long, in seconds.

    ``edges`` has one more than ``counts``. ``allowed`` is how long a worker may take over a batch
    before the accelerator waits; ``None`` where workers do not take whole batches.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    median: float
    late: float
    """What 95 % of them stay below."""
    allowed: float | None


def batch_times(report: Report) -> Histogram | None:
    """The times that preparing a batch took."""
    times = sorted(one for one in report.batch_times if math.isfinite(one))
    if len(times) < 2:
        return None
    width = _round_up((times[-1] - times[0]) / max(1, min(MOST_BINS, math.isqrt(len(times)) + 1)))
    if width <= 0:
        width = max(times[0], 1e-6) / 10
    first = math.floor(times[0] / width + 1e-9)
    counts = [0] * (math.floor(times[-1] / width + 1e-9) - first + 1)
    for one in times:
        counts[math.floor(one / width + 1e-9) - first] += 1
    setup = report.setup
    allowed = None
    if setup.workers and setup.piece >= setup.batch:
        allowed = setup.workers * setup.batch * stalls_of(report).compute
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
    """The next of 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * size for size in (1, 2, 5, 10) if unit * size >= value * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class WaitBar:
    """Some steps that follow each other: from when to when, and how long each waited, in seconds.

    Times count what was spent in the loop: what lies between two phases is cut out.
    """

    phase: PhaseName
    begin: float
    end: float
    mean: float
    longest: float
    steps: int


def timeline(report: Report, most: int = MOST_BARS) -> list[WaitBar]:
    """The waits in their order; where there are many, several steps of a phase are one bar."""
    waits = sorted(report.waits, key=lambda one: one.at)
    together = max(1, math.ceil(len(waits) / most))
    found: list[WaitBar] = []
    now = 0.0
    for one in waits:
        begin, now = now, now + one.wait + one.step
        last = found[-1] if found else None
        if last is not None and last.phase == one.phase and last.steps < together:
            steps = last.steps + 1
            found[-1] = WaitBar(
                one.phase,
                last.begin,
                now,
                last.mean + (one.wait - last.mean) / steps,
                max(last.longest, one.wait),
                steps,
            )
        else:
            found.append(WaitBar(one.phase, begin, now, one.wait, one.wait, 1))
    return found


def phases_of(bars: Sequence[WaitBar]) -> list[tuple[PhaseName, float, float]]:
    """The runs of one phase in a timeline: which, from when, to when."""
    found: list[tuple[PhaseName, float, float]] = []
    for bar in bars:
        if found and found[-1][0] == bar.phase:
            found[-1] = (bar.phase, found[-1][1], bar.end)
        else:
            found.append((bar.phase, bar.begin, bar.end))
    return found
