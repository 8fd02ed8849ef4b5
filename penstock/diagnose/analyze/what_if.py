"""Predictions over ranges and with prices, and where more of something stops helping. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from penstock.diagnose.analyze.model import Change, Prediction, predict
from penstock.diagnose.analyze.report import Report
from penstock.errors import PipelineError

ENOUGH = 0.01
"""More of something has stopped helping where it would bring less speed than this: a measured rate
is rarely more exact."""

MOST_CORES = 256
"""As far as is looked for a number of cores that is enough."""

CACHE_STEPS = 16
"""Parts of the data that are looked at as cache sizes, before looking closer."""


class Forecast:
    """Predictions for one report, each of them made once: one takes a good part of a second."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._made: dict[Change, Prediction] = {}

    def __call__(self, change: Change | None = None) -> Prediction:
        change = change or Change()
        if change not in self._made:
            self._made[change] = predict(self.report, change)
        return self._made[change]

    @property
    def data(self) -> int:
        """Bytes of all samples in a cache; 0 where that is not known."""
        return round(self.report.setup.to_keep_all)


@dataclass(frozen=True, slots=True)
class Saturation:
    """How much is enough: from there on more brings less than ``ENOUGH``.

    ``cache`` is in bytes, 0 where a cache does not help at all, and ``None`` where nobody knows how
    large the samples are. ``cores`` have a worker each, and are ``None`` where even ``MOST_CORES``
    are too few.
    """

    cache: int | None
    cache_speed: float
    cores: int | None
    cores_speed: float


def on_cores(report: Report, change: Change, cores: int) -> Change:
    """The same with so many cores, and a worker on each unless the change says how many."""
    alone = change.workers is None and not report.setup.workers
    # The model leaves a loop that prepares by itself as it is; cores would be lost on it.
    return replace(change, cores=cores, workers=cores if alone else change.workers)


def cache_sizes(data: int) -> tuple[int, ...]:
    """From none to all of the data."""
    return tuple(round(data * n / CACHE_STEPS) for n in range(CACHE_STEPS + 1))


def saturation(forecast: Forecast, change: Change | None = None) -> Saturation:
    """The points beyond which more cache, and more cores, stop helping."""
    change = change or Change()
    cache = _enough_cache(forecast, change)
    cores = _enough_cores(forecast, change)
    return Saturation(
        cache,
        forecast(replace(change, cache=cache or 0)).speed,
        cores,
        forecast(on_cores(forecast.report, change, cores or MOST_CORES)).speed,
    )


def _enough_cache(forecast: Forecast, change: Change) -> int | None:
    if not forecast.data:
        return None

    def speed(cache: int) -> float:
        return forecast(replace(change, cache=cache)).speed

    sizes = cache_sizes(forecast.data)
    least = (1 - ENOUGH) * speed(sizes[-1])
    at = next(number for number, cache in enumerate(sizes) if speed(cache) >= least)
    if at == 0:
        return 0
    few, many = sizes[at - 1], sizes[at]
    while many - few > forecast.data // 256 + 1:
        middle = (few + many) // 2
        few, many = (few, middle) if speed(middle) >= least else (middle, many)
    return many


def _enough_cores(forecast: Forecast, change: Change) -> int | None:
    def speed(cores: int) -> float:
        return forecast(on_cores(forecast.report, change, cores)).speed

    cores = 1
    while speed(2 * cores) > (1 + ENOUGH) * speed(cores):
        if cores >= MOST_CORES:
            return None
        cores *= 2
    least = (1 - ENOUGH) * speed(2 * cores)
    few, many = cores // 2, cores
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if speed(middle) >= least else (middle, many)
    return many


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour costs: of a machine, an accelerator, a core, and a gigabyte of cache."""

    machine: float = 0.0
    accelerator: float = 0.0
    core: float = 0.0
    cache_gb: float = 0.0

    def epoch(self, report: Report, change: Change, prediction: Prediction) -> float:
        """What an epoch of one job costs: jobs that run at once split machine, cores and cache."""
        setup = report.setup
        cores = setup.cores if change.cores is None else change.cores
        cache = setup.cache if change.cache is None else change.cache
        common = self.machine + cores * self.core + cache / 1e9 * self.cache_gb
        hourly = common / change.jobs + setup.world * self.accelerator
        return hourly * prediction.epoch / 3600


@dataclass(frozen=True, slots=True)
class Row:
    """One change, what it leads to, the speed over the present one, and what an epoch costs."""

    change: Change
    prediction: Prediction
    gain: float
    cost: float | None = None

    def to_dict(self) -> dict[str, Any]:
        found = self.prediction
        return {
            "change": asdict(self.change),
            "speed": found.speed,
            "gain": self.gain,
            "fetch_stall": found.fetch_stall,
            "prep_stall": found.prep_stall,
            "bound": found.bound,
            "epoch_seconds": found.epoch,
            "fetch_rate": _finite(found.fetch_rate),
            "prep_rate": _finite(found.prep_rate),
            "ingestion": _finite(found.ingestion),
            "cost": self.cost,
        }


def _finite(rate: float) -> float | None:
    """JSON has no word for a rate that knows no bounds."""
    return rate if math.isfinite(rate) else None


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one option, by its name in ``Change``; several make a range."""

    name: str
    values: tuple[float, ...]


def rows(forecast: Forecast, options: Sequence[Values], prices: Prices | None = None) -> list[Row]:
    """The predictions for every combination; the last option changes fastest."""
    check(options)
    present = forecast().speed
    found = []
    for combination in product(*(one.values for one in options)):
        given = dict(zip((one.name for one in options), combination, strict=True))
        change = Change(**given)  # type: ignore[arg-type]
        prediction = forecast(change)
        cost = None if prices is None else prices.epoch(forecast.report, change, prediction)
        found.append(Row(change, prediction, prediction.speed / present, cost))
    return found


def fixed(options: Sequence[Values]) -> Change:
    """What all the combinations have in common."""
    given = {one.name: one.values[0] for one in options if len(one.values) == 1}
    return Change(**given)  # type: ignore[arg-type]


def ranges(options: Sequence[Values]) -> list[Values]:
    return [one for one in options if len(one.values) > 1]


def check(options: Sequence[Values]) -> None:
    """Refuse what no table can show, and what contradicts itself."""
    found = ranges(options)
    if len(found) > 2:
        listed = ", ".join(f"--{one.name}" for one in found)
        raise PipelineError(
            f"{listed} are {len(found)} ranges, and a table has two sides. Give one value for all "
            "but two of them."
        )
    names = {one.name: one.values for one in options}
    if names.get("share", (False,))[0] and max(names.get("jobs", (1,))) < 2:
        raise PipelineError(
            "--share is one preparation for several jobs, and there is one job: give --jobs 2, or "
            "as many as run at once."
        )


def unheard(report: Report, options: Sequence[Values]) -> list[str]:
    """The options that the report has nothing to say about, and why."""
    names = {one.name for one in options if max(one.values) > 0}
    found = []
    if "reuse" in names and report.costs.reuse_hit is None:
        found.append(
            "--reuse changes nothing here: refurbish can stand nowhere on this road, or its costs "
            "were not measured."
        )
    if "penstock" in names and report.costs.penstock is None:
        found.append(
            "--penstock changes nothing here: the script has it already, or it was not measured."
        )
    if "offload" in names and not report.operations:
        found.append("--offload changes nothing here: operations were not timed one by one.")
    if names & {"cache", "storage"} and not report.setup.sample_bytes:
        found.append(
            "--cache and --storage change nothing here: it is not known how much is read for a "
            "sample."
        )
    return found
