"""What would be if: the speed, the stalls and what bounds them, worked out of a report. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.diagnose.analyze.delayed_reads import LONGEST
from penstock.diagnose.analyze.flow import Flow, seconds_a_batch
from penstock.diagnose.analyze.report import Report
from penstock.errors import ReportError

Bound = Literal["compute", "prep", "fetch"]

LITTLE = 0.05
"""A stall below this share of the time is none: measuring is not more exact."""

FITS = 10
"""How often an interval is halved: to a thousandth of it."""

MOST_LOST = 0.15
"""What waiting costs a worker is at most so much of the wait more than was seen with one alone: on
two cores a twentieth was found."""

MEMBER = 0.5e-3
"""CPU seconds that each further job costs for a batch that it shares: a message, a mapping, and
what the node hears from it. Measured with 8 jobs."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the run that was analysed; nothing unless said.

    ``cache`` is the budget in bytes, ``storage`` bytes a second, ``accelerator`` a factor of speed.
    More ``cores`` are taken to be used: there are as many workers then, unless told otherwise.
    ``reuse`` is refurbish's r, ``echo`` a factor (after all preparation). ``jobs`` run at once, on
    one preparation if they ``share``. ``offload`` so many of the last operations are done by the
    device, in no time. ``penstock`` puts our loader in place of torch's.
    """

    cache: int | None = None
    workers: int | None = None
    cores: int | None = None
    storage: float | None = None
    accelerator: float = 1.0
    reuse: int = 1
    echo: float = 1.0
    jobs: int = 1
    share: bool = False
    offload: int = 0
    penstock: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "reuse", "jobs", "offload", "cores"):
            value = getattr(self, name)
            least = 0 if name in ("workers", "offload") else 1
            if value is not None and value < least:
                raise ReportError(f"{name} is {value}; give a number from {least} on.")
        for name in ("accelerator", "echo", "storage"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ReportError(f"{name} is {value}; give a number above 0.")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Samples a second of each job, the seconds of an epoch by what they go to, and the rates.

    ``fetch_rate``, ``prep_rate`` and ``ingestion`` are F, P and G under the change.
    """

    speed: float
    compute: float
    prep: float
    fetch: float
    fetch_rate: float
    prep_rate: float
    ingestion: float

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        return self.compute + self.prep + self.fetch

    @property
    def prep_stall(self) -> float:
        """The share of time that training stands still because of preparation."""
        return self.prep / self.epoch

    @property
    def fetch_stall(self) -> float:
        return self.fetch / self.epoch

    @property
    def bound(self) -> Bound:
        """What training waits for most; the accelerator itself, where it hardly waits."""
        return bound_of(self.compute, self.prep, self.fetch)


def bound_of(compute: float, prep: float, fetch: float) -> Bound:
    """What most of the waiting is for, by the time that goes to each."""
    if prep + fetch < LITTLE * (compute + prep + fetch):
        return "compute"
    return "prep" if prep >= fetch else "fetch"


def predict(report: Report, change: Change | None = None) -> Prediction:
    """The speed of a job under a change."""
    change = change or Change()
    flow, fetch_rate, prep_rate = _flow(report, change)
    samples, echo = report.setup.samples, change.echo
    # An epoch has as many steps as before, and an echoed one needs fewer fresh samples for them.
    a_batch = flow.batch * echo
    full = seconds_a_batch(flow) / a_batch
    cached = min(full, seconds_a_batch(replace(flow, held=1.0)) / a_batch)
    compute = min(cached, (flow.step + flow.shuttle) / a_batch)
    return Prediction(
        speed=1 / full,
        compute=samples * compute,
        prep=samples * (cached - compute),
        fetch=samples * (full - cached),
        fetch_rate=fetch_rate * echo,
        prep_rate=prep_rate * echo,
        ingestion=a_batch / flow.step if flow.step else math.inf,
    )


def _flow(report: Report, change: Change) -> tuple[Flow, float, float]:
    """What is played through, and the rates F and P."""
    setup, costs = report.setup, report.costs
    alone = change.jobs if not change.share else 1  # each has its part of the machine then
    cores = max(1, (change.cores or setup.cores) // alone)
    workers = setup.workers if change.workers is None else change.workers
    if change.cores is not None and change.workers is None:
        workers = change.cores // alone if setup.workers else 0
    busy = min(workers, cores)
    prep = costs.prep
    if change.penstock and costs.penstock is not None:
        prep = costs.penstock
    prep *= _reused(report, change) * _left(report, change.offload)
    if workers:
        # What workers take from each other: the GIL, memory, the cores' own caches.
        prep *= busy / (scaling(_uncrowded(report), busy) * _crowded(report, workers / cores))
    if change.share:
        prep += busy * (change.jobs - 1) * MEMBER / setup.batch
    size = setup.sample_bytes
    storage = (costs.storage if change.storage is None else change.storage) / alone
    service = size / storage if storage > 0 and math.isfinite(storage) else 0.0
    held = setup.held((setup.cache if change.cache is None else change.cache) / alone)
    fetched = _fetched(report, change)
    # What is left out of the way from storage is so much less to fetch for each sample.
    measured = size / costs.storage if costs.storage > 0 else 0.0
    # What a reader waits beyond its turn: that does not go away on a faster device.
    latency = (service + max(0.0, costs.latency - measured)) * fetched
    service *= fetched
    flow = Flow(
        workers=workers,
        cores=cores,
        batch=setup.batch,
        piece=setup.batch if setup.of_torch else None,
        ahead=setup.ahead_with(workers),
        prep=prep,
        held=held,
        service=service,
        latency=latency,
        step=setup.batch * (costs.compute / change.accelerator + costs.copy) * change.echo,
        shuttle=setup.batch * costs.shuttle,
        sizes=costs.sizes,
        reading=costs.reading * fetched,
        after_wait=costs.after_wait,
        together=setup.together,
    )
    # In the flow a hit takes no time: ``prep`` was measured on samples that came from memory.
    hit = size / costs.cache * fetched if costs.cache > 0 else 0.0
    a_fetch = held * hit + (1 - held) * service
    fetch_rate = 1 / a_fetch if a_fetch > 0 else math.inf
    prep_rate = max(1, busy) / prep if prep > 0 else math.inf
    return flow, fetch_rate, prep_rate


def scaling(measured: Mapping[int, float], workers: int) -> float:
    """How much faster so many workers, each with a core, are than one.

    Between two numbers that were measured the gain grows evenly; beyond the most, each further
    worker adds what these have added on average.

    >>> scaling({1: 1.0, 3: 2.5}, 2), scaling({1: 1.0, 3: 2.5}, 6)
    (1.75, 5.0)
    """
    known = {1: 1.0, **measured}
    if workers in known:
        return known[workers]
    below = max((one for one in known if one < workers), default=1)
    above = min((one for one in known if one > workers), default=None)
    if above is None:
        return known[below] * workers / below
    part = (workers - below) / (above - below)
    return known[below] + part * (known[above] - known[below])


def _uncrowded(report: Report) -> dict[int, float]:
    """What was measured with a core for each worker."""
    cores = report.setup.cores
    return {number: rate for number, rate in report.costs.scaling.items() if number <= cores}


def _crowded(report: Report, workers: float) -> float:
    """What is left of their rate where so many workers share a core: they keep interrupting each
    other. Measured with two; more are not much worse."""
    cores, measured = report.setup.cores, report.costs.scaling
    if workers <= 1 or 2 * cores not in measured:
        return 1.0
    lost = max(0.0, 1 - measured[2 * cores] / scaling(_uncrowded(report), cores))
    return 1 - lost * min(1.0, workers - 1)


def _reused(report: Report, change: Change) -> float:
    """What is left of preparing a sample where refurbish keeps what stands above it."""
    costs = report.costs
    if change.reuse == 1 or costs.reuse_miss is None or costs.reuse_hit is None or not costs.prep:
        return 1.0
    fresh = 1 / change.reuse
    return (fresh * costs.reuse_miss + (1 - fresh) * costs.reuse_hit) / costs.prep


def _fetched(report: Report, change: Change) -> float:
    """The share of samples that are asked for at all: those that are kept are not."""
    return 1 / change.reuse if report.costs.reuse_hit is not None else 1.0


def _left(report: Report, offload: int) -> float:
    """The share of preparation that is left to workers if the device does the last operations."""
    operations = report.operations
    total = sum(one.ms for one in operations)
    if not offload or total <= 0:
        return 1.0
    kept = operations[: max(0, len(operations) - offload)]
    return sum(one.ms for one in kept) / total


def fitted(report: Report) -> Report:
    """The report with what waiting costs a worker set so that the run with cold data comes out.

    What one loses beside others, who use the caches and the cores meanwhile, can be measured only
    together. It is more after a longer wait, so that predictions for fast storage stay as they are.
    Where the speed does not depend on it, or is explained already, nothing is changed: one phase
    may have been disturbed, so that the run as it is has a word in this too.
    """
    cold = report.rate("cold")
    if not cold:
        return report
    cold = max(cold, report.rate("as it is") or 0.0)

    def speed(share: float) -> float:
        return predict(_losing(report, share)).speed

    low, high = 0.0, MOST_LOST
    if speed(low) <= cold or speed(high) > cold:
        return report
    for _ in range(FITS):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) > cold else (low, middle)
    return _losing(report, (low + high) / 2)


def _losing(report: Report, share: float) -> Report:
    """The same, where workers lose so much more of each second that they wait."""
    curve = report.costs.after_wait or ((LONGEST, 0.0),)
    more = tuple((wait, lost + share * wait) for wait, lost in curve)
    return replace(report, costs=replace(report.costs, after_wait=more))
