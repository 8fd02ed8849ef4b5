"""The model: predicts speed, stalls and the bottleneck from a report, with changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.device.forecast import LEAST_SPEED, device_share
from penstock.diagnose.analyze.delayed_reads import LONGEST
from penstock.diagnose.analyze.flow import Flow, seconds_a_batch
from penstock.diagnose.analyze.free_cores import (
    beside_most,
    cpu_share,
    free_cores,
    without_others,
)
from penstock.diagnose.analyze.report import AnalysisReport, Interval
from penstock.engine.schedule import HANDING, HANDING_TO_THREADS
from penstock.errors import ReportError

Bound = Literal["compute", "prep", "latency", "fetch", "contention", "network"]
"""What holds training up.

- ``compute``: the step; loading keeps up and does not slow it.
- ``prep``: workers compute (decode, augment) more slowly than the step takes samples.
- ``latency``: workers wait (sleep, open files, wait for a lock or a server) instead of computing.
- ``fetch``: storage delivers bytes more slowly.
- ``contention``: training hardly waits, but its step is slower while the loader is at work.
- ``network``: the link between machines; only in predictions.
"""

SMALL_STALL = 0.05
"""A stall below this share of the time is ignored: measurements are not more exact."""

FIT_STEPS = 10
"""Times the interval of a bisection is halved: to a thousandth of it."""

MOST_LOST = 0.15
"""Most that the loss of a worker after a wait may exceed the measurement with one worker alone, as
a share of the wait. On two cores a twentieth was measured."""

MEMBER = 0.5e-3
"""CPU seconds per batch of each further job that shares a preparation: a message, a mapping, and
the job's messages to the node. Measured with 8 jobs."""


@dataclass(frozen=True, slots=True)
class Change:
    """The difference to the run that was analysed. The defaults change nothing.

    - ``cache``: budget of the cache of raw samples, in bytes.
    - ``workers``: number of workers.
    - ``cores``: number of cores, with as many workers unless ``workers`` is given.
    - ``storage``: bytes per second.
    - ``accelerator``: speed of the accelerator, as a factor.
    - ``reuse``: uses of each partly augmented sample (refurbish).
    - ``echo``: uses of each batch, after all preparation.
    - ``jobs``: jobs that run at once; with ``share`` they share one preparation.
    - ``offload``: number of last operations that the device runs, in no time.
    - ``penstock``: Penstock's loader in place of torch's.
    - ``machines``: machines like this one that train the job together, and share their caches.
    - ``network``: bytes per second that each of them can receive, and send at the same time;
      ``None`` if the network is no limit.
    - ``shared_storage``: all machines read from one storage; otherwise each has its own.
    - ``remote_cores``: cores of machines without accelerators that prepare samples for one machine.
    - ``cold``: storage is cold: nothing that a cache does not hold is in memory. By default the
      data is as warm as it was when it was measured.
    - ``device_prep``: speed with which the device prepares a share of each batch while training
      waits, relative to one worker; 0 if it does not.
    - ``batch``: samples of a batch. A step takes ``Costs.fixed`` and a time for each sample.
    - ``epochs``: predict the mean of this many epochs, the first of which finds all caches empty;
      ``None``: predict a later epoch.
    - ``page_cache``: memory in which the operating system keeps the files that were read last.
    - ``latency``: seconds until the first byte of a sample arrives from storage.
    - ``requests``: samples that are fetched at the same time, ahead of the workers, as Penstock
      does for objects of a bucket; 0 if each worker waits for its own sample.
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
    machines: int = 1
    network: float | None = None
    shared_storage: bool = False
    remote_cores: int = 0
    device_prep: float = 0.0
    batch: int | None = None
    epochs: int | None = None
    page_cache: int = 0
    latency: float | None = None
    requests: int = 0
    cold: bool = False

    def __post_init__(self) -> None:
        from_1 = ("reuse", "jobs", "cores", "machines", "batch", "epochs")
        from_0 = ("workers", "offload", "remote_cores", "page_cache", "latency", "requests")
        for name in (*from_1, *from_0):
            value = getattr(self, name)
            least = 0 if name in from_0 else 1
            if value is not None and value < least:
                raise ReportError(f"{name} is {value}; give a number of at least {least}.")
        if self.device_prep and self.device_prep < LEAST_SPEED:
            raise ReportError(
                f"device_prep is {self.device_prep:g}; give a speed of at least {LEAST_SPEED} "
                "workers. What a slower device brings is not predicted."
            )
        for name in ("accelerator", "echo", "storage", "network"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ReportError(f"{name} is {value}; give a number above 0.")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speed in samples per second of each job, and how the seconds of an epoch are spent.

    With several machines ``speed`` is that of one of them, and an epoch of it has its part of the
    samples. ``compute``, ``prep``, ``fetch`` and ``network`` are seconds of an epoch: computing,
    and waiting for preparation, for storage and for the network. ``fetch_rate``, ``prep_rate`` and
    ``ingestion`` are the rates F, P and G under the change. ``sharing``: number of machines that
    share their caches. ``remote_share``: share of the samples that remote cores prepare.
    ``device_share``: share of the preparation that the device does.
    """

    speed: float
    compute: float
    prep: float
    fetch: float
    fetch_rate: float
    prep_rate: float
    ingestion: float
    network: float = 0.0
    machines: int = 1
    sharing: int = 1
    remote_share: float = 0.0
    device_share: float = 0.0

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        return self.compute + self.prep + self.fetch + self.network

    @property
    def all_machines(self) -> float:
        """Samples per second of all machines together."""
        return self.speed * self.machines

    @property
    def prep_stall(self) -> float:
        """Share of the time that training waits for preparation."""
        return self.prep / self.epoch

    @property
    def fetch_stall(self) -> float:
        """Share of the time that training waits for storage."""
        return self.fetch / self.epoch

    @property
    def bound(self) -> Bound:
        """The bottleneck: what training waits for most, or ``compute`` if it hardly waits."""
        if self.network > max(self.prep, self.fetch, SMALL_STALL * self.epoch):
            return "network"
        return bound_of(self.compute + self.network, self.prep, self.fetch)

    @property
    def network_stall(self) -> float:
        """Share of the time that training waits for the network."""
        return self.network / self.epoch


def bound_of(compute: float, prep: float, fetch: float) -> Bound:
    """The bottleneck, from the time that training computes, waits for prep and waits for fetch."""
    if prep + fetch < SMALL_STALL * (compute + prep + fetch):
        return "compute"
    return "prep" if prep >= fetch else "fetch"


def predict(report: AnalysisReport, change: Change | None = None) -> Prediction:
    """The speed and stalls of a job under a change."""
    change = change or Change()
    if change.epochs is not None:
        return _mean_of_epochs(report, change, change.epochs)
    found = _predict_run(report, change)
    if change.jobs > 1 and not change.share:
        # Its workers wait less for each other on fewer cores, but no job gets faster by another.
        alone = predict(report, replace(change, jobs=1))
        return min(found, alone, key=lambda prediction: prediction.speed)
    setup = report.setup
    if setup.workers and change.workers is None and (change.cores or 0) > setup.cores:
        # A worker for each core is not always best: use fewer if that is faster.
        counts = {setup.workers}
        while (count := (change.cores or 0) >> len(counts)) > setup.workers:
            counts.add(count)
        fewer = (_predict_run(report, replace(change, workers=count)) for count in counts)
        return max((found, *fewer), key=lambda prediction: prediction.speed)
    return found


def _predict_run(report: AnalysisReport, change: Change) -> Prediction:
    if change.batch is not None and change.batch != report.setup.batch:
        report = _with_batch(report, change.batch)
    run = _best_run(report, change)
    flow = run.flow
    samples, echo = report.setup.samples / change.machines, change.echo
    # With echo an epoch has as many steps as before, and needs fewer fresh samples for them.
    per_batch = flow.batch * echo
    simulated = run.simulated / per_batch
    full = max(simulated, run.network / per_batch, run.remote / per_batch)
    floor = _core_seconds(report, change, flow)
    cached = min(simulated, max(floor, seconds_a_batch(replace(flow, hit_rate=1.0))) / per_batch)
    compute = min(cached, (flow.step + flow.shuttle) / per_batch)
    # Remote cores that are too slow count as preparation.
    prepared = min(full, max(cached, run.remote / per_batch))
    fetched = max(prepared, simulated)
    return Prediction(
        speed=1 / full,
        compute=samples * compute,
        prep=samples * (prepared - compute),
        fetch=samples * (fetched - prepared),
        fetch_rate=run.fetch_rate * echo,
        prep_rate=run.prep_rate * echo,
        ingestion=per_batch / (flow.step - run.contended) if flow.step else math.inf,
        network=samples * (full - fetched),
        machines=change.machines,
        sharing=run.sharing,
        remote_share=run.remote_share,
        device_share=run.device_share,
    )


def _mean_of_epochs(report: AnalysisReport, change: Change, epochs: int) -> Prediction:
    """The mean of the first epoch, which finds nothing in any cache, and of the later ones."""
    later = predict(report, replace(change, epochs=None))
    first = predict(report, replace(change, epochs=None, cache=0, page_cache=0, reuse=1))
    if first.epoch <= later.epoch:
        return later

    def mean(name: str) -> float:
        once, again = float(getattr(first, name)), float(getattr(later, name))
        return (once + (epochs - 1) * again) / epochs

    compute, prep, fetch, network = map(mean, ("compute", "prep", "fetch", "network"))
    return replace(
        later,
        speed=later.speed * later.epoch / (compute + prep + fetch + network),
        compute=compute,
        prep=prep,
        fetch=fetch,
        network=network,
    )


def _with_batch(report: AnalysisReport, batch: int) -> AnalysisReport:
    """The report of the same script with another batch size."""
    setup, costs = report.setup, report.costs
    more = batch / setup.batch
    return replace(
        report,
        setup=replace(
            setup,
            batch=batch,
            piece=batch if setup.piece == setup.batch else min(setup.piece, batch),
            batch_bytes=round(setup.batch_bytes * more),
        ),
        # A step takes ``fixed`` however many samples it has, and a time for each sample.
        costs=replace(costs, compute=costs.compute - costs.fixed * (1 - 1 / more) / setup.batch),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One way to run a job: seconds a batch of the simulation, of the link, and of remote cores.

    These three work at the same time, so a batch takes the longest of them.
    """

    flow: Flow
    simulated: float
    network: float
    remote: float
    fetch_rate: float
    prep_rate: float
    sharing: int
    remote_share: float
    device_share: float
    contended: float = 0.0

    @property
    def whole(self) -> float:
        return max(self.simulated, self.network, self.remote)


BISECTIONS = 6
"""Times the share of remote cores is halved: to 1/64."""


def _best_run(report: AnalysisReport, change: Change) -> _Run:
    """The fastest run: how many machines share their caches, and what remote cores prepare.

    The more machines share, the less is read from storage, and the more crosses the network. Where
    the network is too slow for all of them, fewer share: the machines form groups.
    """
    sharing = change.machines
    best = _run_with(report, change, sharing, 0.0)
    if best.network > best.simulated:
        few, many = 1, sharing
        while many - few > 1:
            count = (few + many) // 2
            found = _run_with(report, change, count, 0.0)
            few, many = (few, count) if found.network > found.simulated else (count, many)
        for count in (few, many):
            found = _run_with(report, change, count, 0.0)
            if found.whole < best.whole:
                best, sharing = found, count
    if not change.remote_cores or not row_bytes(report) or best.network >= best.simulated:
        return best
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _run_with(report, change, sharing, middle)
        best = min(best, found, key=lambda run: run.whole)
        waits = max(found.network, found.remote) > found.simulated
        low, high = (low, middle) if waits else (middle, high)
    return best


def _run_with(report: AnalysisReport, change: Change, sharing: int, remote_share: float) -> _Run:
    """A run in which ``sharing`` machines share their caches."""
    flow, fetch_rate, prep_rate = _flow_and_rates(report, change, sharing)
    alone = flow.prep + flow.pause
    here = 1 - remote_share
    if remote_share:
        # Remote cores read what the caches do not hold.
        flow = replace(
            flow,
            prep=flow.prep * here,
            pause=flow.pause * here,
            service=flow.service * here,
            latency=flow.latency * here,
            reading=flow.reading * here,
        )
    setup = report.setup
    kept = setup.kept_bytes or setup.sample_bytes
    kept *= _fetched_share(report, change)
    split = change.jobs if not change.share else 1
    cache = setup.cache if change.cache is None else change.cache
    # A machine with room left keeps copies of the samples that it gets from others, so that its
    # cache is full, or holds all samples.
    crossing = (flow.hit_rate - setup.cached_share(cache / split)) * kept
    received = crossing + remote_share * row_bytes(report)
    # Remote cores get what the caches hold from this machine.
    sent = crossing + remote_share * flow.hit_rate * kept
    nbytes = flow.batch * max(received, sent)
    link = 0.0 if change.network is None else nbytes / (change.network / split)
    remote = 0.0
    if change.remote_cores:
        remote = flow.batch * remote_share * alone / change.remote_cores
    on_device = _share_on_device(report, change, flow)
    if on_device:
        flow = replace(flow, prep=flow.prep * (1 - on_device))
        prep_rate /= 1 - on_device
    contended = flow.batch * report.costs.contended * change.echo
    return _Run(
        flow,
        max(seconds_a_batch(flow), _core_seconds(report, change, flow)),
        link,
        remote,
        fetch_rate,
        prep_rate,
        sharing,
        remote_share,
        on_device,
        min(contended, flow.step),
    )


def _core_seconds(report: AnalysisReport, change: Change, flow: Flow) -> float:
    """Seconds that the cores need for a batch: for its preparation, and for a step on the CPU.

    Without this, workers and a step on the CPU would have all the cores each, and workers would
    have those that other programs keep busy.
    """
    if not flow.workers:
        return 0.0
    split = change.jobs if not change.share else 1
    whole = change.cores or report.setup.cores
    step = flow.batch * report.costs.step_cpu * change.echo / change.accelerator
    # Of the loop's own time one core is in use; it counts if the step uses more, or they are few.
    prep = flow.batch * flow.prep
    free = free_cores(report, whole) / split
    return max(
        (step + prep) / max(1, whole // split),
        (step + prep * cpu_share(report)) / free,
    )


def gain_of(report: AnalysisReport, change: Change) -> Interval:
    """The speed under a change, relative to now (for jobs that share: to jobs that do not).

    The interval is that of the cores: others leave the job as few as in the busiest phase, or all.
    """

    def gain(given: AnalysisReport) -> float:
        before = predict(given, replace(change, share=False) if change.share else None)
        return predict(given, change).speed / before.speed

    gains = [gain(given) for given in (report, beside_most(report), without_others(report))]
    return Interval(gains[0], min(gains), max(gains))


TOO_WIDE = 0.5
"""Predictions that may be off by more than this are not given: they say nothing."""


def says_nothing(gain: Interval, error: float = 0.0) -> bool:
    """Whether a gain is too uncertain to be given; ``error`` is that of all predictions.

    >>> says_nothing(Interval(1.2, 1.0, 3.5)), says_nothing(Interval(1.2, 1.0, 1.3))
    (True, False)
    """
    off = max(gain.high - gain.value, gain.value - gain.low) / gain.value
    return off > 0 and off > TOO_WIDE - error


def _share_on_device(report: AnalysisReport, change: Change, flow: Flow) -> float:
    """Share of the preparation that the device does, in the time in which training waits."""
    if not change.device_prep:
        return 0.0
    return device_share(
        lambda share: seconds_a_batch(replace(flow, prep=flow.prep * (1 - share))),
        flow.step + flow.shuttle,
        flow.batch * report.costs.prep,
        change.device_prep,
        min(MOST_ON_DEVICE, possible_on_device(report)),
    )


MOST_ON_DEVICE = 0.99
"""Reading stays on the CPU, whatever was measured."""


def possible_on_device(report: AnalysisReport, *, decodes: bool = False) -> float:
    """Share of the preparation of a sample that a device can do: the maps below the decoding.

    ``decodes``: and the decoding, which ``decode="device"`` leaves to it. 0 if operations were not
    timed one by one, or none of them decodes.
    """
    operations = report.operations
    total = sum(operation.ms for operation in operations)
    at = max((n for n, one in enumerate(operations) if "decode" in one.name.lower()), default=None)
    if at is None or total <= 0:
        return 0.0
    first = at if decodes else at + 1
    return sum(one.ms for one in operations[first:] if one.kind != "batch") / total


def row_bytes(report: AnalysisReport) -> float:
    """Bytes of a prepared sample, which remote cores send back; 0 if unknown."""
    setup, operations = report.setup, report.operations
    if setup.batch_bytes:
        return setup.batch_bytes / setup.batch
    return float(operations[-1].nbytes) if operations else 0.0


def _flow_and_rates(
    report: AnalysisReport, change: Change, sharing: int = 1
) -> tuple[Flow, float, float]:
    """The input of the simulation, and the rates F and P, if ``sharing`` machines share caches."""
    setup, costs = report.setup, report.costs
    split = change.jobs if not change.share else 1  # jobs that do not share split the machine
    cores = max(1, (change.cores or setup.cores) // split)
    workers = setup.workers if change.workers is None else change.workers
    if change.cores is not None and change.workers is None:
        workers = change.cores // split if setup.workers else 0
    busy = min(workers, cores)
    prep = costs.prep
    if change.penstock and costs.penstock is not None:
        prep = costs.penstock
    prep *= _prep_share_with_reuse(report, change) * _prep_share_on_cpu(report, change.offload)
    # Penstock's loader saves work, not the waits of the user's own code.
    pause = min(prep, costs.prep * costs.pause) if not change.share else prep * costs.pause
    prep -= pause
    if workers:
        # Workers compete for the GIL, the memory and the caches of the cores.
        speed = scaling(_scaling_on_own_cores(report), busy)
        slower = busy / (speed * _oversubscribed_speed(report, workers / cores))
        prep *= slower if not pause else max(1.0, min(slower, 1.5))
        if pause:
            pause *= _lost_to_others(report, workers)
    if change.share:
        prep += busy * (change.jobs - 1) * MEMBER / setup.batch
    size = setup.sample_bytes
    storage = (costs.storage if change.storage is None else change.storage) / split
    if change.shared_storage:
        storage /= change.machines
    service = size / storage if storage > 0 and math.isfinite(storage) else 0.0
    cache = setup.cache if change.cache is None else change.cache
    hit_rate = setup.cached_share(sharing * cache / split)
    # The page cache has the reads that miss the cache.
    hit_rate += (1 - hit_rate) * lru_hits(_page_cached_share(report, change, hit_rate, split))
    if not (change.cold or change.page_cache or change.storage or change.latency):
        # Warm data stays warm: the page cache holds this share of what the cache does not.
        hit_rate += (1 - hit_rate) * (report.warm or 0.0)
    # Samples that refurbish keeps are not fetched: spread the fetches over all samples.
    fetched = _fetched_share(report, change)
    measured = size / costs.storage if costs.storage > 0 else 0.0
    # The wait beyond the service time stays the same with faster storage.
    waiting = max(0.0, costs.latency - measured) if change.latency is None else change.latency
    if change.requests:
        # So many requests are under way that samples arrive this often; no worker waits for one.
        service, waiting = max(service, (service + waiting) / change.requests), 0.0
    latency = (service + waiting) * fetched
    service *= fetched
    if setup.of_torch:
        piece: int | None = setup.batch
    else:  # threads of the kernel share each batch sample by sample
        piece = 1 if setup.piece == 1 and not setup.own_process else None
    flow = Flow(
        workers=workers,
        cores=cores,
        batch=setup.batch,
        piece=piece,
        ahead=setup.ahead_with(workers),
        prep=prep,
        hit_rate=hit_rate,
        service=service,
        latency=latency,
        step=setup.batch
        * (costs.compute / change.accelerator + costs.copy + costs.contended)
        * change.echo,
        shuttle=setup.batch * costs.shuttle,
        sizes=costs.sizes,
        reading=costs.reading * fetched,
        after_wait=costs.after_wait,
        together=setup.together,
        handing=HANDING if setup.own_process else HANDING_TO_THREADS,
        batch_bytes=setup.batch_bytes if setup.own_process else 0,
        pause=pause,
    )
    # The simulation counts no time for a hit: ``prep`` was measured on samples from memory.
    hit = size / costs.cache * fetched if costs.cache > 0 else 0.0
    fetch = hit_rate * hit + (1 - hit_rate) * service
    fetch_rate = 1 / fetch if fetch > 0 else math.inf
    prep_rate = max(1, busy) / prep if prep > 0 else math.inf
    if pause:
        prep_rate = min(prep_rate, max(1, workers) / (prep + pause))
    return flow, fetch_rate, prep_rate


def lru_hits(share: float) -> float:
    """Share of the reads that hit a cache for ``share`` of the data which evicts what was read
    longest ago, if every epoch reads all samples in a new random order.

    A sample that was read ``a`` of an epoch before its end, and is read again after ``q`` of the
    next, has had ``a + q (1 - a)`` of all samples read in between. It is still there if that is at
    most ``share``. Averaged over all ``a`` and ``q``, this is the formula below.

    >>> [round(lru_hits(share), 3) for share in (0.0, 0.5, 0.9, 1.0)]
    [0.0, 0.153, 0.67, 1.0]
    """
    if share >= 1:
        return 1.0
    return share + (1 - share) * math.log1p(-share)


def _page_cached_share(
    report: AnalysisReport, change: Change, hit_rate: float, split: int
) -> float:
    """Share of the data outside the cache that fits into the page cache."""
    rest = (1 - hit_rate) * report.setup.sample_bytes * report.setup.samples
    return min(1.0, change.page_cache / split / rest) if rest > 0 else 0.0


def scaling(measured: Mapping[int, float], workers: int) -> float:
    """The speed of ``workers`` workers, each with its own core, relative to one.

    Interpolates linearly between measured numbers of workers. Beyond the largest, each further
    worker adds the average of the measured ones.

    >>> scaling({1: 1.0, 3: 2.5}, 2), scaling({1: 1.0, 3: 2.5}, 6)
    (1.75, 5.0)
    """
    known = {1: 1.0, **measured}
    if workers in known:
        return known[workers]
    below = max((count for count in known if count < workers), default=1)
    above = min((count for count in known if count > workers), default=None)
    if above is None:
        return known[below] * workers / below
    part = (workers - below) / (above - below)
    return known[below] + part * (known[above] - known[below])


def _scaling_on_own_cores(report: AnalysisReport) -> dict[int, float]:
    """The measured scaling, for numbers of workers with a core each.

    More workers on cores of their own are never slower: where they seem to be, a disturbance was
    measured.
    """
    cores, best = report.setup.cores, 0.0
    found = {}
    for count, rate in sorted(report.costs.scaling.items()):
        if count <= cores:
            found[count] = best = max(best, rate)
    return found


def _lost_to_others(report: AnalysisReport, workers: int) -> float:
    """Factor by which workers that mostly wait become slower as they get more.

    1 if their speed grows with their number, as that of sleeping workers does. If they wait for
    each other, such as for a lock, more of them are hardly faster.
    """
    measured = {count: rate for count, rate in report.costs.scaling.items() if count > 1}
    if not measured or workers <= 1:
        return 1.0
    nearest = min(measured, key=lambda count: abs(count - workers))
    share = min(1.0, max(1 / nearest, measured[nearest] / nearest))
    if workers <= nearest:
        return 1 / share
    # Where more workers brought little, even more bring nothing.
    return 1 / share if share > 0.8 else (workers / nearest) / share


def _oversubscribed_speed(report: AnalysisReport, per_core: float) -> float:
    """The speed of workers that share cores, relative to the same cores with one worker each.

    ``per_core`` workers interrupt each other on a core. Measured with two per core; more are not
    much worse.
    """
    cores, measured = report.setup.cores, report.costs.scaling
    if per_core <= 1 or 2 * cores not in measured:
        return 1.0
    lost = max(0.0, 1 - measured[2 * cores] / scaling(_scaling_on_own_cores(report), cores))
    return 1 - lost * min(1.0, per_core - 1)


def _prep_share_with_reuse(report: AnalysisReport, change: Change) -> float:
    """Share of the preparation of a sample that is left with refurbish."""
    costs = report.costs
    if change.reuse == 1 or costs.reuse_miss is None or costs.reuse_hit is None or not costs.prep:
        return 1.0
    fresh = 1 / change.reuse
    return (fresh * costs.reuse_miss + (1 - fresh) * costs.reuse_hit) / costs.prep


def _fetched_share(report: AnalysisReport, change: Change) -> float:
    """Share of the samples that are fetched at all: those that refurbish keeps are not."""
    return 1 / change.reuse if report.costs.reuse_hit is not None else 1.0


def _prep_share_on_cpu(report: AnalysisReport, offload: int) -> float:
    """Share of the preparation that workers do if the device runs the last operations."""
    operations = report.operations
    total = sum(operation.ms for operation in operations)
    if not offload or total <= 0:
        return 1.0
    kept = operations[: max(0, len(operations) - offload)]
    return sum(operation.ms for operation in kept) / total


CLEAR = 0.05
"""Cold data makes a difference if it makes training slower by more than this share of the time."""

ALL_OR_NOTHING = 0.15
"""A share of warm data this close to 0 or 1 is taken for that: times of phases err as much."""


def warm_share(report: AnalysisReport, from_device: float | None) -> float:
    """Share of what the script fetches that memory served during the run as it is.

    The times of the phases tell, if cold data makes a difference to them. Otherwise it is what did
    not come from the device: ``from_device``, a share of the bytes, ``None`` if unknown.
    """
    own, cached, cold = (report.rate(name) for name in ("as it is", "cached", "cold"))
    if own and cached and cold and 1 / cold - 1 / cached > CLEAR / cold:
        share = (1 / cold - 1 / own) / (1 / cold - 1 / cached)
    elif from_device is not None:
        share = 1 - from_device
    else:
        share = 0.0
    if share < ALL_OR_NOTHING:
        return 0.0
    return 1.0 if share > 1 - ALL_OR_NOTHING else share


def fit_cold_run(report: AnalysisReport) -> AnalysisReport:
    """The report with the losses after waits adjusted until the model predicts the cold phase.

    Losses that come from other workers, which use the CPU caches and the cores during a wait, show
    only when all workers run. The adjustment grows with the wait, so predictions for fast storage
    hardly change. The report stays as it is if the model already predicts the speed, or if the
    speed does not depend on these losses. The phase ``as it is`` counts as well, because a
    disturbance may have slowed down the cold phase.
    """
    cold = report.rate("cold")
    if not cold:
        return report
    if not report.warm:  # else the script's own data was in memory, and that of this phase was not
        cold = max(cold, report.rate("as it is") or 0.0)

    def speed(share: float) -> float:
        return predict(_with_more_loss(report, share), Change(cold=True)).speed

    low, high = 0.0, MOST_LOST
    if speed(low) <= cold or speed(high) > cold:
        return report
    for _ in range(FIT_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) > cold else (low, middle)
    return _with_more_loss(report, (low + high) / 2)


def _with_more_loss(report: AnalysisReport, share: float) -> AnalysisReport:
    """The report with losses after waits increased by ``share`` of each wait."""
    curve = report.costs.after_wait or ((LONGEST, 0.0),)
    more = tuple((wait, lost + share * wait) for wait, lost in curve)
    return replace(report, costs=replace(report.costs, after_wait=more))
