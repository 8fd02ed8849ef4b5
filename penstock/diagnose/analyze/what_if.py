"""Predictions for many changes, with prices, and the point where more stops helping. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from penstock.diagnose.analyze.free_cores import free_cores
from penstock.diagnose.analyze.model import Change, Prediction, gain_of, predict, says_nothing
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.result import Trust
from penstock.errors import PipelineError

ENOUGH = 0.01
"""More cache or cores have stopped helping if they add less speed than this share: a measured rate
is rarely more exact."""

MOST_CORES = 256
"""Most cores that the search for enough cores tries."""

CACHE_STEPS = 16
"""Cache sizes that the search for enough cache tries before it refines the size."""


class Forecast:
    """Predictions for one report. Each is computed once, because it takes a part of a second.

    With ``trust`` they are scaled to the measured run, and never beyond what the accelerator takes.
    """

    def __init__(self, report: AnalysisReport, trust: Trust | None = None) -> None:
        self.report = report
        self._factor = 1.0 if trust is None else trust.factor
        self._error = 0.0 if trust is None else trust.error
        self._uncertain: dict[Change, bool] = {}
        self._predictions: dict[Change, Prediction] = {}

    def __call__(self, change: Change | None = None) -> Prediction:
        change = change or Change()
        if change not in self._predictions:
            self._predictions[change] = _scaled(predict(self.report, change), self._factor)
        return self._predictions[change]

    @property
    def others(self) -> float:
        """Cores that other programs keep, as predictions assume; 0 if they hardly need any."""
        cores = self.report.setup.cores
        return cores - free_cores(self.report, cores)

    def uncertain(self, change: Change) -> bool:
        """Whether the speed depends too much on the cores that other programs leave."""
        if change not in self._uncertain:
            self._uncertain[change] = self.others > 0 and says_nothing(
                gain_of(self.report, change), self._error
            )
        return self._uncertain[change]

    @property
    def data(self) -> int:
        """Bytes of all samples in a cache; 0 if unknown."""
        return round(self.report.setup.full_cache_bytes)


def _scaled(prediction: Prediction, factor: float) -> Prediction:
    """The prediction with ``factor`` times its speed, at most what the accelerator takes."""
    if factor == 1:
        return prediction
    speed = prediction.speed * factor
    if factor > 1:
        speed = max(prediction.speed, min(speed, prediction.ingestion))
    slower = prediction.speed / speed
    compute = prediction.compute if factor > 1 else prediction.compute * slower
    waits = prediction.prep + prediction.fetch + prediction.network
    left = max(0.0, prediction.epoch * slower - compute)
    share = left / waits if waits else 0.0
    if not waits:
        compute = prediction.epoch * slower
    return replace(
        prediction,
        speed=speed,
        compute=compute,
        prep=prediction.prep * share,
        fetch=prediction.fetch * share,
        network=prediction.network * share,
    )


@dataclass(frozen=True, slots=True)
class Saturation:
    """The amounts from which on more adds less speed than ``ENOUGH``, and the speeds there.

    ``cache`` is in bytes: 0 if a cache does not help at all, ``None`` if the size of samples is
    unknown. ``cores`` have one worker each; ``None`` if even ``MOST_CORES`` are too few.
    """

    cache: int | None
    cache_speed: float
    cores: int | None
    cores_speed: float


def with_cores(report: AnalysisReport, change: Change, cores: int) -> Change:
    """The change with this number of cores, and a worker on each unless it names the workers."""
    # Without workers in the script, the model adds none with the cores. So add them here.
    add_workers = change.workers is None and not report.setup.workers
    return replace(change, cores=cores, workers=cores if add_workers else change.workers)


def cache_sizes(data: int) -> tuple[int, ...]:
    """Cache sizes from 0 to all of the data."""
    return tuple(round(data * n / CACHE_STEPS) for n in range(CACHE_STEPS + 1))


def saturation(forecast: Forecast, change: Change | None = None) -> Saturation:
    """The points beyond which more cache and more cores stop helping, given a change."""
    change = change or Change()
    cache = _enough_cache(forecast, change)
    cores = _enough_cores(forecast, change)
    return Saturation(
        cache,
        forecast(replace(change, cache=cache or 0)).speed,
        cores,
        forecast(with_cores(forecast.report, change, cores or MOST_CORES)).speed,
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
        return forecast(with_cores(forecast.report, change, cores)).speed

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
    """Prices per hour: of a machine, an accelerator, a core, and a gigabyte of cache."""

    machine: float = 0.0
    accelerator: float = 0.0
    core: float = 0.0
    cache_gb: float = 0.0

    def epoch(self, report: AnalysisReport, change: Change, prediction: Prediction) -> float:
        """The cost of an epoch of one job. Jobs that run at once split machine, cores and cache."""
        setup = report.setup
        cores = setup.cores if change.cores is None else change.cores
        cores += change.remote_cores
        cache = setup.cache if change.cache is None else change.cache
        split = self.machine + cores * self.core + cache / 1e9 * self.cache_gb
        hourly = change.machines * (split / change.jobs + setup.world * self.accelerator)
        return hourly * prediction.epoch / 3600


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One change: its prediction, the speed relative to the present, and the cost of an epoch.

    The gain is that of all machines together. ``certain``: it is not if it depends too much on the
    cores that other programs leave; then it is not printed.
    """

    change: Change
    prediction: Prediction
    gain: float
    cost: float | None = None
    certain: bool = True

    def to_dict(self) -> dict[str, Any]:
        prediction = self.prediction
        return {
            "change": asdict(self.change),
            "speed": prediction.speed,
            "all_machines": prediction.all_machines,
            "machines_that_share": prediction.sharing,
            "remote_share": prediction.remote_share,
            "device_share": prediction.device_share,
            "gain": self.gain,
            "fetch_stall": prediction.fetch_stall,
            "prep_stall": prediction.prep_stall,
            "network_stall": prediction.network_stall,
            "bound": prediction.bound,
            "epoch_seconds": prediction.epoch,
            "fetch_rate": _finite(prediction.fetch_rate),
            "prep_rate": _finite(prediction.prep_rate),
            "ingestion": _finite(prediction.ingestion),
            "cost": self.cost,
            "certain": self.certain,
        }


def _finite(rate: float) -> float | None:
    """The rate, or ``None`` if it is infinite, which JSON cannot express."""
    return rate if math.isfinite(rate) else None


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one option of ``penstock what-if``; ``name`` is a field of ``Change``."""

    name: str
    values: tuple[float, ...]


def prediction_rows(
    forecast: Forecast, options: Sequence[Values], prices: Prices | None = None
) -> list[PredictionRow]:
    """A row for every combination of values; those of the last option change fastest."""
    check_options(options)
    present = forecast().speed
    rows = []
    for combination in product(*(option.values for option in options)):
        given = dict(zip((option.name for option in options), combination, strict=True))
        change = Change(**given)  # type: ignore[arg-type]
        prediction = forecast(change)
        cost = None if prices is None else prices.epoch(forecast.report, change, prediction)
        gain = prediction.all_machines / present
        rows.append(PredictionRow(change, prediction, gain, cost, not forecast.uncertain(change)))
    return rows


def fixed_change(options: Sequence[Values]) -> Change:
    """The change that all combinations have in common: the options with one value."""
    given = {option.name: option.values[0] for option in options if len(option.values) == 1}
    return Change(**given)  # type: ignore[arg-type]


def varied(options: Sequence[Values]) -> list[Values]:
    """The options with more than one value."""
    return [option for option in options if len(option.values) > 1]


def check_options(options: Sequence[Values]) -> None:
    """Raise ``PipelineError`` for more than two ranges, and for ``--share`` with one job."""
    ranges = varied(options)
    if len(ranges) > 2:
        listed = ", ".join(f"--{option.name.replace('_', '-')}" for option in ranges)
        raise PipelineError(
            f"{listed} are {len(ranges)} ranges, and a table has two sides. Give one value for all "
            "but two of them."
        )
    names = {option.name: option.values for option in options}
    _check_machines(names)
    if names.get("requests") and not names.get("latency"):
        raise PipelineError(
            "--requests is the number of objects that are fetched at once, which matters only "
            "where storage has a latency. Give --latency, such as --latency 30ms."
        )
    if names.get("share", (False,))[0] and max(names.get("jobs", (1,))) < 2:
        raise PipelineError(
            "--share lets several jobs share one preparation, and there is only one job. Give "
            "--jobs with the number of jobs that run at once, such as --jobs 2."
        )


def _check_machines(names: Mapping[str, Sequence[float]]) -> None:
    """Raise ``PipelineError`` for options that need several machines, where there is one."""
    several = max(names.get("machines", (1,))) > 1
    remote = max(names.get("remote_cores", (0,))) > 0
    if names.get("shared_storage") and not several:
        raise PipelineError(
            "--shared-storage lets several machines read from one storage, and there is only one "
            "machine. Give --machines with their number, such as --machines 4."
        )
    if names.get("network") and not several and not remote:
        raise PipelineError(
            "--network is the speed of the links between machines, and there is only one machine. "
            "Give --machines or --remote-cores, such as --machines 4."
        )
