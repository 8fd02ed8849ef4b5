"""Snapshots in Prometheus' text format: a counter or gauge for all that a loader counts.

Names and labels are documented in docs/watch.md, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.watch.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, str]
Value = tuple[Labels, float]


@dataclass(frozen=True)
class Metric:
    """One name: what it means, and what a snapshot has to say of it."""

    name: str
    help: str
    values: Callable[[Snapshot], Iterable[Value]]
    labels: tuple[str, ...] = ()
    """Those beside ``loader`` and ``rank``."""

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def exposition(snapshots: Sequence[Snapshot], *, pids: bool = False) -> str:
    """All metrics of these loaders; ``pids`` tells those of several processes apart."""
    lines = []
    for metric in METRICS:
        values = [
            (_whose(snapshot, pids) | labels, value)
            for snapshot in snapshots
            for labels, value in metric.values(snapshot)
        ]
        if values:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines += [f"{metric.name}{_written(labels)} {_number(v)}" for labels, v in values]
    return "".join(f"{line}\n" for line in lines)


def _whose(snapshot: Snapshot, pids: bool) -> Labels:
    whose = {"loader": str(snapshot.number), "rank": str(snapshot.standing.rank)}
    return {"pid": str(snapshot.pid), **whose} if pids else whose


def _written(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(int(value))


def _one(read: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Iterable[Value]]:
    def values(snapshot: Snapshot) -> Iterable[Value]:
        found = read(snapshot)
        return [] if found is None else [({}, found)]

    return values


def _stops(read: Literal["samples", "seconds"]) -> Callable[[Snapshot], Iterable[Value]]:
    def values(snapshot: Snapshot) -> Iterable[Value]:
        stages = snapshot.stats.stages
        names = distinct([stage.name for stage in stages])
        return [
            ({"stop": name}, getattr(stage, read))
            for name, stage in zip(names, stages, strict=True)
        ]

    return values


def distinct(names: Sequence[str]) -> list[str]:
    """Names of which no two are the same.

    >>> distinct(["source", "scale", "scale"])
    ['source', 'scale', 'scale 2']
    """
    found: list[str] = []
    for name in names:
        number, shown = 1, name
        while shown in found:
            number += 1
            shown = f"{name} {number}"
        found.append(shown)
    return found


def _caches(read: str) -> Callable[[Snapshot], Iterable[Value]]:
    def values(snapshot: Snapshot) -> Iterable[Value]:
        caches = snapshot.stats.caches
        return [({"cache": str(i)}, getattr(one, read)) for i, one in enumerate(caches)]

    return values


def _reuse(stop: Literal["refurbish", "echo"], read: str) -> Callable[[Snapshot], Iterable[Value]]:
    def of(snapshot: Snapshot) -> float | None:
        found = getattr(snapshot.stats, stop)
        return None if found is None else getattr(found, read)

    return _one(of)


def _queue(snapshot: Snapshot) -> Iterable[Value]:
    standing = snapshot.standing
    return [
        ({"state": "finished"}, standing.finished),
        ({"state": "unfinished"}, standing.unfinished),
    ]


def _info(snapshot: Snapshot) -> Iterable[Value]:
    standing = snapshot.standing
    told = {"world": str(standing.world), "share": standing.share or "", "name": standing.name}
    return [({**told, "workers": snapshot.stats.pool.kind}, 1)]


def _metric(name: str, help: str, read: Callable[[Snapshot], float | None]) -> Metric:
    return Metric(f"penstock_{name}", help, _one(read))


METRICS: tuple[Metric, ...] = (
    Metric(
        "penstock_loader_info",
        "1 for each loader, with what it is in the labels.",
        _info,
        ("world", "share", "name", "workers"),
    ),
    _metric("samples_total", "Samples handed out.", lambda s: s.stats.samples),
    _metric("batches_total", "Batches handed out.", lambda s: s.stats.batches),
    _metric("batch_bytes_total", "Bytes of the batches handed out.", lambda s: s.stats.bytes),
    _metric("read_bytes_total", "Bytes that the source gave.", lambda s: s.stats.bytes_read),
    _metric(
        "elapsed_seconds_total",
        "Time since the first batch was asked for.",
        lambda s: s.stats.elapsed,
    ),
    _metric("wait_seconds_total", "Time that the loop waited for batches.", lambda s: s.stats.wait),
    _metric(
        "stall_ratio", "Share of the time waited since the loader began.", lambda s: s.stats.stall
    ),
    _metric("epoch", "The epoch that the next batch belongs to.", lambda s: s.standing.epoch),
    _metric("batch", "The next batch's number in its epoch.", lambda s: s.standing.batch),
    _metric("epoch_batches", "Batches in an epoch, where known.", lambda s: s.standing.batches),
    Metric(
        "penstock_queue_batches",
        "Batches ahead of the loop: finished, or still being prepared.",
        _queue,
        ("state",),
    ),
    _metric("slots", "Pieces of memory that batches take now.", lambda s: s.standing.slots),
    _metric("slot_bytes", "Bytes that all slots occupy.", lambda s: s.standing.slot_bytes),
    Metric(
        "penstock_stop_samples_total",
        "Samples that passed a stop.",
        _stops("samples"),
        ("stop",),
    ),
    Metric(
        "penstock_stop_seconds_total",
        "Time spent in a stop alone, over all workers.",
        _stops("seconds"),
        ("stop",),
    ),
    _metric("workers", "Workers of the loader.", lambda s: s.stats.pool.workers),
    _metric(
        "worker_busy_seconds_total",
        "Working time of all workers, added up.",
        lambda s: s.stats.pool.busy,
    ),
    _metric(
        "worker_restarts_total",
        "Workers that died and were replaced.",
        lambda s: s.stats.pool.restarts,
    ),
    _metric(
        "task_retries_total",
        "Tasks done again because their worker died.",
        lambda s: s.stats.retries,
    ),
    _metric(
        "bad_samples_total", "Samples that were skipped or substituted.", lambda s: s.stats.bad
    ),
    _metric(
        "corrupt_values_total",
        "Cached values that were damaged, and prepared again.",
        lambda s: s.stats.corrupt,
    ),
    *(
        Metric(f"penstock_cache_{name}", text, _caches(read), ("cache",))
        for name, text, read in (
            ("hits_total", "Samples that a cache had.", "hits"),
            ("misses_total", "Samples that a cache did not have.", "misses"),
            ("samples", "Samples in a cache.", "admitted"),
            ("used_bytes", "Bytes that a cache holds.", "used"),
            ("budget_bytes", "Bytes that a cache may hold.", "budget"),
        )
    ),
    *(
        Metric(f"penstock_refurbish_{name}", text, _reuse("refurbish", read))
        for name, text, read in (
            ("fresh_total", "Samples that came from above refurbish.", "fresh"),
            ("reused_total", "Samples that refurbish used again.", "reused"),
            ("kept_samples", "Samples that refurbish keeps at most.", "kept"),
            ("used_bytes", "Bytes that refurbish holds.", "used"),
        )
    ),
    *(
        Metric(f"penstock_echo_{name}", text, _reuse("echo", read))
        for name, text, read in (
            ("fresh_total", "Samples that came to an echo.", "fresh"),
            ("delivered_total", "Samples that an echo made of them.", "delivered"),
            ("factor", "The echo factor of this epoch.", "factor"),
        )
    ),
)
"""Every name that is served, in this order."""
