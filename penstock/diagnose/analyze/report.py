"""The report of an analysis: measured rates and costs, as plain data.

A report holds measurements only. ``model`` and ``remedies`` compute the verdict, predictions and
remedies from it, so an old report can answer new questions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from penstock.diagnose.analyze.trials import RemedyTrial, trial_from_dict
from penstock.engine.schedule import batches_ahead_of_sharers
from penstock.errors import ReportError

VERSION = 2

TORCH_AHEAD = 2
"""Batches that each worker of torch's loader prefetches by default."""

Curve = tuple[tuple[float, float], ...]
"""Points (x, y) of a piecewise linear function that starts at (0, 0), in ascending order of x."""

PhaseName = Literal["as it is", "replay", "cached", "cold", "prep", "storage", "cache"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples per second, with the 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the width of the interval, relative to the rate."""
        return (self.high - self.low) / (2 * self.value) if self.value > 0 else 0.0

    def times(self, factor: float) -> Rate:
        return Rate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Phase:
    """One measurement: the number of steps and their seconds, without the warm-up.

    In ``as it is``, ``replay``, ``cached`` and ``cold`` the training loop of the script ran. In
    ``prep`` only the loader ran, in ``storage`` and ``cache`` only its reads. ``enough``: the
    confidence interval became narrow enough before the time was up. ``step`` and ``wait`` are
    seconds per batch of the loop: computing, and waiting for the batch; ``None`` if no training
    loop ran. ``turns``: how often the phase was resumed; phases take turns, so that a change of
    the machine affects all of them.
    """

    name: PhaseName
    rate: Rate
    steps: int
    seconds: float
    enough: bool = True
    step: Interval | None = None
    wait: Interval | None = None
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """The loader of the script, and the machine it runs on.

    - ``loader``: name of its class.
    - ``workers``: 0 if the training process prepares batches itself.
    - ``ahead``: batches prepared ahead of the training loop.
    - ``batch_bytes``: bytes of a batch, if Penstock chooses how many are prepared ahead, else 0.
    - ``piece``: samples a worker takes at a time; a whole batch for torch's loader.
    - ``together``: samples of a piece that a worker fetches before it prepares them.
    - ``sample_bytes``: mean bytes read from storage per sample, 0 if unknown.
    - ``kept_bytes``: mean bytes a sample occupies in a cache.
    - ``cache``: budget of the cache of raw samples, in bytes.
    - ``persistent``: workers go on from epoch to epoch.
    """

    loader: str
    samples: int
    batch: int
    workers: int
    kind: Literal["processes", "threads", "crew", "none", "node"]
    ahead: int
    piece: int
    cores: int
    sample_bytes: float
    cache: int = 0
    accelerator: str = "cpu"
    rank: int = 0
    world: int = 1
    kept_bytes: float = 0.0
    together: int = 1
    batch_bytes: int = 0
    persistent: bool = False

    @property
    def own_process(self) -> bool:
        """Whether workers are in other processes than the training loop."""
        return self.kind in ("processes", "crew", "node")

    @property
    def of_torch(self) -> bool:
        """Whether this is torch's own loader."""
        return self.loader.startswith("torch.")

    @property
    def full_cache_bytes(self) -> float:
        """Bytes of a cache that holds all samples; 0 if unknown."""
        return (self.kept_bytes or self.sample_bytes) * self.samples

    def ahead_with(self, workers: int) -> int:
        """Batches prepared ahead with another number of workers: torch prefetches per worker."""
        if not self.of_torch:
            if self.batch_bytes and self.piece == 1 and not self.own_process:
                return batches_ahead_of_sharers(self.batch_bytes, self.batch, workers)
            return max(1, self.ahead)
        each = self.ahead // self.workers if self.workers else TORCH_AHEAD
        return max(1, each * workers)

    def cached_share(self, budget: float) -> float:
        """Share of the samples that fit into a cache of ``budget`` bytes."""
        return min(1.0, budget / self.full_cache_bytes) if self.full_cache_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured inputs of the model. All are seconds per sample unless stated otherwise.

    - ``compute``: the training step (1/G), including ``copy``, moving the batch to the device.
    - ``prep``: one worker preparing a sample that is already in memory.
    - ``sizes``: sizes of samples relative to their mean, which scale ``prep``; empty if all are
      equal.
    - ``scaling``: speed of N workers relative to one, by N.
    - ``storage``, ``cache``: bytes per second of all workers together.
    - ``latency``: wait of one worker for one sample from storage while nothing else reads, without
      ``reading``.
    - ``reading``: CPU time of fetching a sample, in addition to ``prep``.
    - ``after_wait``: time a worker loses on a sample after waiting for it: pairs of the wait and
      the loss, in ascending order.
    - ``shuttle``: time the training loop takes to receive a sample.
    - ``reuse_miss``, ``reuse_hit``: ``prep`` with refurbish at its best place, for a fresh and for
      a kept sample; ``None`` if the pipeline has no place for refurbish.
    - ``penstock``: ``prep`` with Penstock's loader in place of torch's; ``None`` if the script
      already uses Penstock or its loader cannot be replaced.
    - ``fixed``: seconds of a step, not of a sample, that do not depend on the size of the batch;
      known only from two reports with different batch sizes.
    - ``step_cpu``: CPU seconds of the training step; 0 if unknown.
    - ``pause``: share of ``prep`` in which a worker waits and needs no core: sleeps, slow ``open``.
    - ``contended``: time by which the step is longer while the loader is at work.
    """

    compute: float
    prep: float
    scaling: Mapping[int, float]
    storage: float
    cache: float
    latency: float
    copy: float = 0.0
    sizes: tuple[float, ...] = ()
    shuttle: float = 0.0
    reading: float = 0.0
    after_wait: Curve = ()
    reuse_miss: float | None = None
    reuse_hit: float | None = None
    penstock: float | None = None
    fixed: float = 0.0
    step_cpu: float = 0.0
    pause: float = 0.0
    contended: float = 0.0


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One operation of the road: milliseconds per sample on one core, and its share of all."""

    name: str
    kind: str
    ms: float
    share: float
    random: bool = False
    nbytes: int = 0
    """Size of a sample after this operation."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of the training loop for a batch.

    ``at``: when it asked for the batch, ``wait``: seconds until it had it, ``step``: seconds it
    computed before asking.
    """

    at: float
    phase: PhaseName
    wait: float
    step: float


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """How workers spend their time while they prepare batches: shares of it that add up to 1.

    ``computing`` on a core, ``queueing`` for a core, then waiting: in a ``sleep``, while a file is
    opened (``open``), for bytes of a file (``read``), for a ``lock``, for a ``network`` peer, for
    something unknown (``other``); and ``idle``: waiting for work. ``places`` are the places in the
    user's code where workers wait, each with its share, the largest first. ``seconds``: seconds
    of all workers together that were observed.
    """

    seconds: float
    computing: float
    queueing: float = 0.0
    sleep: float = 0.0
    open: float = 0.0
    read: float = 0.0
    lock: float = 0.0
    network: float = 0.0
    other: float = 0.0
    idle: float = 0.0
    places: tuple[tuple[str, float], ...] = ()

    @property
    def waits(self) -> dict[str, float]:
        """The shares of waiting that preparation causes, by their cause."""
        names = ("sleep", "open", "read", "lock", "network", "other")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class MachineUse:
    """The machine during one phase.

    - ``cores``: cores that the job may use; ``own``: cores that its processes kept busy;
      ``others``: cores that other processes kept busy; ``stolen``: cores that the hypervisor took.
    - ``queueing``: share of the time in which processes of the job waited for a core.
    - ``throttled``: share of the time in which the limit of the control group stopped the job.
    - ``pressure``: share of the time in which some process waited for memory (PSI).
    - ``memory``: bytes available; ``None`` if unknown.
    - ``pace``: speed of a core, relative to the fastest phase of this analysis.
    """

    phase: str
    seconds: float
    cores: int
    own: float
    others: float
    stolen: float = 0.0
    queueing: float = 0.0
    throttled: float = 0.0
    pressure: float = 0.0
    memory: int | None = None
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class AnalysisReport:
    """All measurements of one rank; ``ranks`` holds the reports of the other ranks.

    ``device_reads`` is the share of the bytes of the cold phase that came from the storage device
    instead of memory; ``None`` if unknown. ``batch_times`` are the seconds workers took to prepare
    a batch. ``notes`` say what could not be measured, and why. ``machine`` describes the machine,
    ``host`` is its name. ``workers_use`` and ``machine_use`` are observations during the phases.
    ``warm`` is the share of the present fetches that memory serves, ``None`` if unknown.
    ``trials``: what was tried on the script's own loader; empty if nothing was.
    ``asked_seconds`` is the time that was given, ``interrupted`` says why the analysis ended early.
    """

    setup: Setup
    costs: Costs
    phases: tuple[Phase, ...]
    operations: tuple[OperationTime, ...] = ()
    batch_times: tuple[float, ...] = ()
    waits: tuple[Wait, ...] = ()
    device_reads: float | None = None
    command: str = ""
    made: str = ""
    machine: str = ""
    host: str = ""
    notes: tuple[str, ...] = ()
    ranks: tuple[AnalysisReport, ...] = ()
    workers_use: WorkerUse | None = None
    machine_use: tuple[MachineUse, ...] = ()
    warm: float | None = None
    asked_seconds: float = 0.0
    interrupted: str = ""
    trials: tuple[RemedyTrial, ...] = ()
    version: int = VERSION

    def phase(self, name: PhaseName) -> Phase | None:
        return next((phase for phase in self.phases if phase.name == name), None)

    def rate(self, name: PhaseName) -> float | None:
        phase = self.phase(name)
        return None if phase is None else phase.rate.value

    def __str__(self) -> str:
        from penstock.diagnose.analyze.judge import result_of
        from penstock.diagnose.analyze.remedies import remedies
        from penstock.diagnose.analyze.text import lines_of

        result = result_of(self)
        return "\n".join(lines_of(self, remedies(self, result=result), result))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, for ``penstock what-if``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AnalysisReport:
        """Read a saved report; raise ``ReportError`` if the file is missing or is not a report."""
        try:
            plain = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ReportError(
                f"there is no file {path}. `penstock analyze -- python train.py` writes a report."
            ) from None
        except (OSError, ValueError) as error:
            raise ReportError(f"{path} cannot be read as a report: {error}") from error
        try:
            return report_from_dict(plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"{path} is not a report of `penstock analyze`: {error}") from error


def report_from_dict(plain: Mapping[str, Any]) -> AnalysisReport:
    """The report from the output of ``AnalysisReport.to_dict``."""
    if plain.get("version") != VERSION:
        raise ReportError(
            f"the report has version {plain.get('version')!r}, and this release of Penstock reads "
            f"version {VERSION} only. Run `penstock analyze` again."
        )
    known = {field.name for field in fields(AnalysisReport)}
    given = {name: value for name, value in plain.items() if name in known}
    costs = dict(given["costs"])
    costs["scaling"] = {int(workers): value for workers, value in costs["scaling"].items()}
    costs["sizes"] = tuple(costs.get("sizes", ()))
    costs["after_wait"] = tuple((wait, lost) for wait, lost in costs.get("after_wait", ()))
    return AnalysisReport(
        **{
            **given,
            "setup": Setup(**given["setup"]),
            "costs": Costs(**costs),
            "phases": tuple(map(_phase, given["phases"])),
            "operations": tuple(OperationTime(**operation) for operation in given["operations"]),
            "batch_times": tuple(given["batch_times"]),
            "waits": tuple(Wait(**wait) for wait in given["waits"]),
            "notes": tuple(given["notes"]),
            "ranks": tuple(report_from_dict(rank) for rank in given["ranks"]),
            "workers_use": _workers_use(given.get("workers_use")),
            "trials": tuple(map(trial_from_dict, given.get("trials", ()))),
            "machine_use": tuple(MachineUse(**use) for use in given.get("machine_use", ())),
        }
    )


def _phase(plain: Mapping[str, Any]) -> Phase:
    times = {name: plain.get(name) for name in ("step", "wait")}
    intervals = {name: time and Interval(**time) for name, time in times.items()}
    return Phase(**{**plain, "rate": Rate(**plain["rate"]), **intervals})


def _workers_use(plain: Mapping[str, Any] | None) -> WorkerUse | None:
    if plain is None:
        return None
    places = tuple((place, share) for place, share in plain["places"])
    return WorkerUse(**{**plain, "places": places})
