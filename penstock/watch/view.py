"""What every view of this machine shows: its loaders with their recent history, and its node."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.watch.live_directory import LiveDirectory
from penstock.watch.machines import ClusterRows, ClusterStatus, rows_of
from penstock.watch.rates import Rates, between, rates
from penstock.watch.snapshot import Snapshot

KEPT = 300.0
"""Seconds of history kept for the charts."""

PATIENCE = 2.0
"""Seconds that the node may take to answer. After that the view is shown without it."""


class ChartPoint(NamedTuple):
    """One point of the stall chart and of the speed chart."""

    time: float
    stall: float
    samples_per_second: float


class TrafficPoint(NamedTuple):
    """One point of the charts of the bytes between this machine and the others."""

    time: float
    received_per_second: float
    sent_per_second: float


@dataclass(slots=True)
class LoaderHistory:
    """One loader over time: its last two different snapshots, and the points of its charts.

    ``seen`` is the time of the last look.
    """

    last: Snapshot
    before: Snapshot | None = None
    seen: float = 0.0
    points: deque[ChartPoint] = field(default_factory=deque)

    @property
    def now(self) -> Rates:
        """Rates between the last two different snapshots."""
        return rates(self.before, self.last, self.seen)

    @property
    def overall(self) -> Rates:
        """Rates since the first batch."""
        return between(None, self.last.stats)

    def add(self, snapshot: Snapshot, now: float) -> None:
        """Record the snapshot that a look at time ``now`` has read."""
        new = snapshot.written != self.last.written
        if new:
            self.before, self.last = self.last, snapshot
        self.seen = now
        # During a long training step a loader publishes nothing, so there is no point to add.
        if (new and self.now.seconds > 0) or snapshot.waiting is not None:
            recent = self.now
            self.points.append(ChartPoint(now, recent.stall, recent.samples_per_second))
        while self.points and self.points[0].time < now - KEPT:
            self.points.popleft()

    def as_dict(self) -> dict[str, Any]:
        """The loader's snapshot, rates and chart points, ready for JSON."""
        last = self.last
        return {
            **last.as_dict(),
            "age": max(0.0, self.seen - last.written),
            "rates": asdict(self.now),
            "overall": asdict(self.overall),
            "points": [list(point) for point in self.points],
        }


class History:
    """The histories of all loaders that are running."""

    def __init__(self) -> None:
        self.loaders: dict[object, LoaderHistory] = {}

    def add(self, snapshots: Iterable[Snapshot], now: float) -> list[LoaderHistory]:
        """Record one look, and forget the loaders that are gone."""
        loaders: dict[object, LoaderHistory] = {}
        for snapshot in snapshots:
            loader = self.loaders.get(snapshot.key) or LoaderHistory(snapshot)
            loader.add(snapshot, now)
            loaders[snapshot.key] = loader
        self.loaders = loaders
        return list(loaders.values())


@dataclass
class View:
    """Loaders and node as of the last ``look``. Other threads may read it at the same time."""

    directory: LiveDirectory = field(default_factory=LiveDirectory)
    history: History = field(default_factory=History)
    loaders: list[LoaderHistory] = field(default_factory=list)
    node: dict[str, Any] | None = None
    node_before: dict[str, Any] | None = None
    cluster: ClusterRows | None = None
    traffic: deque[TrafficPoint] = field(default_factory=deque)
    time: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> None:
        """Read the status of all loaders and of the node."""
        node = _node_status()
        now, snapshots = time.time(), self.directory.snapshots()
        with self._lock:
            self.time, self.loaders = now, self.history.add(snapshots, now)
            self.node_before, self.node = self.node, node
            self._add_cluster(now)

    def _add_cluster(self, now: float) -> None:
        """Compute the rows of the cluster, and add a point to the chart of its traffic."""
        status, before = cluster_of(self.node), cluster_of(self.node_before)
        if status is None or self.node is None:
            self.cluster = None
            return
        seconds = 0.0
        if self.node_before is not None and self.node_before["pid"] == self.node["pid"]:
            seconds = self.node["up"] - self.node_before["up"]
        self.cluster = rows_of(status, before if seconds > 0 else None, seconds)
        if seconds > 0:
            machines = self.cluster.machines
            sent = sum(row.sent_per_second for row in machines)
            self.traffic.append(
                TrafficPoint(now, sum(row.received_per_second for row in machines), sent)
            )
        while self.traffic and self.traffic[0].time < now - KEPT:
            self.traffic.popleft()

    def cluster_status(self) -> ClusterStatus | None:
        """What the node says of its cluster; ``None`` if it is in none."""
        with self._lock:
            return cluster_of(self.node)

    def snapshots(self) -> list[Snapshot]:
        """The last snapshot of every loader."""
        with self._lock:
            return [loader.last for loader in self.loaders]

    def as_dict(self) -> dict[str, Any]:
        """The view, ready for JSON."""
        with self._lock:
            return {
                "time": self.time,
                "loaders": [loader.as_dict() for loader in self.loaders],
                "node": self.node,
                "cluster": None if self.cluster is None else self.cluster.as_dict(),
                "traffic": [list(point) for point in self.traffic],
            }

    def lines(self, *, ascii_only: bool = False) -> list[str]:
        """The view as lines of text."""
        from penstock.watch.rendering import lines_of

        lines = lines_of(self.loaders, ascii_only=ascii_only) or [self._no_loaders()]
        return [*lines, *self._node_lines()]

    def _no_loaders(self) -> str:
        problem = self.directory.problem()
        reason = f" Loaders cannot publish their status: {problem}" if problem else ""
        return f"No loader is running.{reason}"

    def _node_lines(self) -> list[str]:
        import penstock
        from penstock.node.status import lines_of

        node, before = self.node, self.node_before
        if node is None:
            return []
        if node.get("release") != penstock.__version__:
            return ["", f"node    process {node.get('pid')}, of Penstock {node.get('release')}"]
        return ["", *lines_of(node, self.time, before), *self._cluster_lines()]

    def _cluster_lines(self) -> list[str]:
        from penstock.watch.machines import lines_of

        return [] if self.cluster is None else ["", *lines_of(self.cluster)]


def cluster_of(node: dict[str, Any] | None) -> ClusterStatus | None:
    """The cluster part of a node's status; ``None`` if there is none, or of another release."""
    import penstock

    if node is None or node.get("release") != penstock.__version__:
        return None
    return node.get("cluster")


def _node_status() -> dict[str, Any] | None:
    from penstock.node.client import request_status

    try:
        return request_status(timeout=PATIENCE)
    except (PenstockError, OSError):  # it hangs or refuses access; `penstock status` says which
        return None
