"""Metrics for Prometheus: snapshots in its text format, and the server behind ``metrics_port=``.

The metric names and labels are documented in docs/watch.md, and a test compares the two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PipelineError
from penstock.watch import running
from penstock.watch.cluster_metrics import CLUSTER_METRICS
from penstock.watch.machines import ClusterStatus
from penstock.watch.publish import snapshot_of
from penstock.watch.rates import distinct
from penstock.watch.serving import ADDRESS, Page, PageServer
from penstock.watch.snapshot import Snapshot

PATH = "/metrics"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, str]
LabelledValue = tuple[Labels, float]
ValuesOf = Callable[[Snapshot], Iterable[LabelledValue]]


@dataclass(frozen=True)
class Metric:
    """One metric: its name, its help text, and how its values are read from a snapshot."""

    name: str
    help: str
    values: ValuesOf
    labels: tuple[str, ...] = ()
    """Labels in addition to ``loader`` and ``rank``."""

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def exposition(
    snapshots: Sequence[Snapshot], *, pids: bool = False, cluster: ClusterStatus | None = None
) -> str:
    """All metrics of these loaders as text, and those of the machines of a cluster.

    ``pids`` adds a label with the process number.
    """
    lines = []
    for metric in METRICS:
        values = [
            (_loader_labels(snapshot, pids) | labels, value)
            for snapshot in snapshots
            for labels, value in metric.values(snapshot)
        ]
        if values:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines += [f"{metric.name}{_format_labels(labels)} {_number(v)}" for labels, v in values]
    for measured in CLUSTER_METRICS:
        found = [] if cluster is None else list(measured.lines(cluster))
        if found:
            lines.append(f"# HELP {measured.name} {measured.help}")
            lines.append(f"# TYPE {measured.name} {measured.kind}")
            lines += [f"{name}{_format_labels(labels)} {_number(v)}" for name, labels, v in found]
    return "".join(f"{line}\n" for line in lines)


def _loader_labels(snapshot: Snapshot, pids: bool) -> Labels:
    labels = {"loader": str(snapshot.number), "rank": str(snapshot.standing.rank)}
    return {"pid": str(snapshot.pid), **labels} if pids else labels


def _format_labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(int(value))


def _single(read: Callable[[Snapshot], float | None]) -> ValuesOf:
    def values(snapshot: Snapshot) -> Iterable[LabelledValue]:
        value = read(snapshot)
        return [] if value is None else [({}, value)]

    return values


def _stops(read: Literal["samples", "seconds"]) -> ValuesOf:
    def values(snapshot: Snapshot) -> Iterable[LabelledValue]:
        stages = snapshot.stats.stages
        names = distinct([stage.name for stage in stages])
        return [
            ({"stop": name}, getattr(stage, read))
            for name, stage in zip(names, stages, strict=True)
        ]

    return values


def _caches(read: str) -> ValuesOf:
    def values(snapshot: Snapshot) -> Iterable[LabelledValue]:
        caches = snapshot.stats.caches
        return [({"cache": str(i)}, getattr(cache, read)) for i, cache in enumerate(caches)]

    return values


def _elsewhere(snapshot: Snapshot) -> Iterable[LabelledValue]:
    return [({"machine": found.name}, found.samples) for found in snapshot.stats.machines]


def _reuse(stop: Literal["refurbish", "echo", "device"], read: str) -> ValuesOf:
    def value(snapshot: Snapshot) -> float | None:
        stats = getattr(snapshot.stats, stop)
        return None if stats is None else getattr(stats, read)

    return _single(value)


def _queue(snapshot: Snapshot) -> Iterable[LabelledValue]:
    standing = snapshot.standing
    return [
        ({"state": "finished"}, standing.finished),
        ({"state": "unfinished"}, standing.unfinished),
    ]


def _info(snapshot: Snapshot) -> Iterable[LabelledValue]:
    standing = snapshot.standing
    labels = {"world": str(standing.world), "share": standing.share or "", "name": standing.name}
    return [({**labels, "workers": snapshot.stats.pool.kind}, 1)]


def _metric(name: str, help: str, read: Callable[[Snapshot], float | None]) -> Metric:
    return Metric(f"penstock_{name}", help, _single(read))


METRICS: tuple[Metric, ...] = (
    Metric(
        "penstock_loader_info",
        "1 for each loader; the labels describe it.",
        _info,
        ("world", "share", "name", "workers"),
    ),
    _metric("samples_total", "Samples delivered to the training loop.", lambda s: s.stats.samples),
    _metric("batches_total", "Batches delivered to the training loop.", lambda s: s.stats.batches),
    _metric("batch_bytes_total", "Bytes of the delivered batches.", lambda s: s.stats.bytes),
    _metric("read_bytes_total", "Bytes read from the source.", lambda s: s.stats.bytes_read),
    _metric(
        "elapsed_seconds_total",
        "Time since the first batch was requested.",
        lambda s: s.stats.elapsed,
    ),
    _metric(
        "wait_seconds_total",
        "Time that the training loop waited for batches.",
        lambda s: s.stats.wait,
    ),
    _metric("stall_ratio", "Share of the elapsed time spent waiting.", lambda s: s.stats.stall),
    _metric("epoch", "Epoch of the next batch.", lambda s: s.standing.epoch),
    _metric("batch", "Number of the next batch in its epoch.", lambda s: s.standing.batch),
    _metric("epoch_batches", "Batches in an epoch, if known.", lambda s: s.standing.batches),
    Metric(
        "penstock_queue_batches",
        "Batches ahead of the training loop, finished or in preparation.",
        _queue,
        ("state",),
    ),
    _metric("slots", "Slots (batch buffers) in use.", lambda s: s.standing.slots),
    _metric("slot_bytes", "Memory of all slots, in bytes.", lambda s: s.standing.slot_bytes),
    Metric(
        "penstock_stop_samples_total",
        "Samples that passed a stage.",
        _stops("samples"),
        ("stop",),
    ),
    Metric(
        "penstock_stop_seconds_total",
        "Time spent in a stage alone, summed over all workers.",
        _stops("seconds"),
        ("stop",),
    ),
    _metric("workers", "Workers of the loader.", lambda s: s.stats.pool.workers),
    _metric(
        "worker_busy_seconds_total",
        "Busy time, summed over all workers.",
        lambda s: s.stats.pool.busy,
    ),
    _metric(
        "worker_restarts_total",
        "Workers that died and were replaced.",
        lambda s: s.stats.pool.restarts,
    ),
    _metric(
        "task_retries_total",
        "Tasks run again because their worker died.",
        lambda s: s.stats.retries,
    ),
    _metric(
        "bad_samples_total", "Bad samples that were skipped or substituted.", lambda s: s.stats.bad
    ),
    _metric(
        "corrupt_values_total",
        "Cached values that were damaged and prepared again.",
        lambda s: s.stats.corrupt,
    ),
    Metric(
        "penstock_samples_elsewhere_total",
        "Samples that another machine has prepared.",
        _elsewhere,
        ("machine",),
    ),
    *(
        Metric(f"penstock_cache_{name}", text, _caches(read), ("cache",))
        for name, text, read in (
            ("hits_total", "Cache hits.", "hits"),
            ("misses_total", "Cache misses.", "misses"),
            ("samples", "Samples in a cache.", "admitted"),
            ("used_bytes", "Bytes in a cache.", "used"),
            ("budget_bytes", "Byte budget of a cache.", "budget"),
        )
    ),
    *(
        Metric(f"penstock_refurbish_{name}", text, _reuse("refurbish", read))
        for name, text, read in (
            ("fresh_total", "Samples prepared anew above refurbish.", "fresh"),
            ("reused_total", "Samples that refurbish reused.", "reused"),
            ("kept_samples", "Most samples that refurbish keeps.", "kept"),
            ("used_bytes", "Bytes that refurbish keeps.", "used"),
        )
    ),
    *(
        Metric(f"penstock_echo_{name}", text, _reuse("echo", read))
        for name, text, read in (
            ("fresh_total", "Samples prepared for echo.", "fresh"),
            ("delivered_total", "Samples that echo delivered.", "delivered"),
            ("factor", "Echo factor of this epoch.", "factor"),
        )
    ),
    *(
        Metric(f"penstock_device_{name}", text, _reuse("device", read))
        for name, text, read in (
            ("samples_total", "Samples that the device prepared.", "samples"),
            ("cpu_samples_total", "Samples that the CPU prepared beside it.", "cpu_samples"),
            ("threshold", "Last tiny-batches that are the device's alone.", "threshold"),
            ("copied_bytes_total", "Bytes copied to the device for its samples.", "copied"),
            ("buffer_bytes", "Memory of the device for its samples.", "buffers"),
        )
    ),
)
"""All metrics, in the order in which they are served."""


@dataclass(slots=True)
class _Exporter:
    server: PageServer
    leases: set[object] = field(default_factory=set)


_lock = threading.Lock()
_exporters: dict[int, _Exporter] = {}


class MetricsLease:
    """A loader's claim on the metrics server of a port. The last claim to close ends the server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def close(self) -> None:
        with _lock:
            exporter = _exporters.get(self._port)
            if exporter is None or self not in exporter.leases:
                return
            exporter.leases.discard(self)
            if exporter.leases:
                return
            del _exporters[self._port]
        exporter.server.close()


def serve_metrics(port: int) -> MetricsLease:
    """Serve the metrics of this process on a port until the lease is closed."""
    with _lock:
        if port not in _exporters:
            pages = {PATH: Page(CONTENT_TYPE, metrics_of_process)}
            try:
                server = PageServer(port, pages, f"penstock-metrics-{port}")
            except OSError as error:
                raise PipelineError(
                    f"metrics_port is {port}: cannot bind the metrics server to {ADDRESS}:{port}: "
                    f"{error.strerror}. Each process, for example each rank of a job, needs a port "
                    f"of its own: metrics_port={port} + rank."
                ) from None
            _exporters[port] = _Exporter(server)
        lease = MetricsLease(port)
        _exporters[port].leases.add(lease)
        return lease


def metrics_of_process() -> bytes:
    """The metrics of all open loaders of this process, as Prometheus text."""
    snapshots: list[Snapshot] = []
    for number, loader in running.loaders():
        # Fails for a loader that is being closed or is loading a checkpoint at this moment.
        with suppress(Exception):
            snapshots.append(snapshot_of(loader, number))
    return exposition(snapshots).encode()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _exporters.clear()


os.register_at_fork(after_in_child=_after_fork)
