"""Metrics of the machines of a cluster, from the status of this machine's node. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.cluster.request_times import BOUNDS
from penstock.watch.machines import ClusterStatus

MetricValues = Iterable[tuple[dict[str, str], float]]


@dataclass(frozen=True)
class ClusterMetric:
    """One metric: its name, its help text, and how its values are read from a status."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[ClusterStatus], MetricValues]
    histogram: bool = False

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        if self.histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    def lines(self, cluster: ClusterStatus) -> Iterator[tuple[str, dict[str, str], float]]:
        """The name, labels and value of each line; a histogram has lines of several names."""
        if not self.histogram:
            for labels, value in self.values(cluster):
                yield self.name, labels, value
            return
        for machine in _others(cluster):
            labels, passed = {"machine": machine["name"]}, 0
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), machine["times"], strict=True):
                passed += count
                yield f"{self.name}_bucket", {**labels, "le": bound}, passed
            yield f"{self.name}_sum", labels, float(machine["seconds"])
            yield f"{self.name}_count", labels, passed


def _others(cluster: ClusterStatus) -> list[ClusterStatus]:
    """All machines but this one."""
    return [machine for machine in cluster["machines"] if not machine["is"]["this machine"]]


def _between(field: str) -> Callable[[ClusterStatus], MetricValues]:
    """What was counted between this machine and each other one."""

    def values(cluster: ClusterStatus) -> MetricValues:
        return [({"machine": machine["name"]}, machine[field]) for machine in _others(cluster)]

    return values


def _reported(field: str) -> Callable[[ClusterStatus], MetricValues]:
    """What each machine reports about itself."""

    def values(cluster: ClusterStatus) -> MetricValues:
        return [
            ({"machine": machine["name"]}, machine["report"][field])
            for machine in cluster["machines"]
            if machine["report"] is not None
        ]

    return values


def _caches(cluster: ClusterStatus) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    for machine in cluster["machines"]:
        for cache in (machine["report"] or {}).get("caches", ()):
            yield {"machine": machine["name"], "cache": cache["content"][:12]}, cache


def _of_caches(field: str) -> Callable[[ClusterStatus], MetricValues]:
    def values(cluster: ClusterStatus) -> MetricValues:
        return [(labels, cache[field]) for labels, cache in _caches(cluster)]

    return values


PLACES = (("here", "local"), ("elsewhere", "remote"), ("storage", "storage"))
"""Where a sample was found, as a label, and the field of a report that counts it."""


def _found(cluster: ClusterStatus) -> MetricValues:
    return [
        ({**labels, "place": place}, cache[field])
        for labels, cache in _caches(cluster)
        for place, field in PLACES
    ]


def _states(cluster: ClusterStatus) -> MetricValues:
    found = Counter(machine["state"] for machine in cluster["machines"])
    return [({"state": state}, found[state]) for state in ("alive", "suspected", "gone")]


def _info(cluster: ClusterStatus) -> MetricValues:
    return [
        (
            {
                "machine": machine["name"],
                "address": machine["address"],
                "role": machine["role"],
                "state": machine["state"],
                "head": str(int(machine["is"]["head"])),
                "here": str(int(machine["is"]["this machine"])),
            },
            1,
        )
        for machine in cluster["machines"]
    ]


def _room(cluster: ClusterStatus) -> MetricValues:
    return [
        ({"machine": machine["name"]}, machine["cache_bytes"]) for machine in cluster["machines"]
    ]


ONE, CACHE = ("machine",), ("machine", "cache")

CLUSTER_METRICS: Sequence[ClusterMetric] = (
    ClusterMetric("penstock_cluster_machines", "Machines of the cluster.", ("state",), _states),
    ClusterMetric(
        "penstock_cluster_machine_info",
        "1 for each machine; the labels describe it.",
        ("machine", "address", "role", "state", "head", "here"),
        _info,
    ),
    ClusterMetric("penstock_cluster_cores", "Cores of a machine.", ONE, _reported("cores")),
    ClusterMetric(
        "penstock_cluster_idle_cores", "Idle cores of a machine.", ONE, _reported("idle_cores")
    ),
    ClusterMetric(
        "penstock_cluster_cache_budget_bytes", "Room for samples on a machine.", ONE, _room
    ),
    ClusterMetric(
        "penstock_cluster_cache_used_bytes",
        "Bytes of a divided cache on a machine.",
        CACHE,
        _of_caches("bytes"),
    ),
    ClusterMetric(
        "penstock_cluster_cache_samples",
        "Samples of a divided cache on a machine.",
        CACHE,
        _of_caches("samples"),
    ),
    ClusterMetric(
        "penstock_cluster_found_samples_total",
        "Samples of the batches of a machine, by the place where they were found.",
        (*CACHE, "place"),
        _found,
    ),
    ClusterMetric(
        "penstock_cluster_hedged_samples_total",
        "Samples that a machine read from storage because another did not send them in time.",
        CACHE,
        _of_caches("hedged"),
    ),
    ClusterMetric(
        "penstock_cluster_sent_bytes_total",
        "Bytes of samples sent from this machine to another.",
        ONE,
        _between("sent"),
    ),
    ClusterMetric(
        "penstock_cluster_received_bytes_total",
        "Bytes of samples received from another machine.",
        ONE,
        _between("received"),
    ),
    ClusterMetric(
        "penstock_cluster_request_seconds",
        "Time from a request to another machine until its first answer.",
        ONE,
        lambda cluster: (),
        histogram=True,
    ),
    ClusterMetric(
        "penstock_cluster_failed_requests_total",
        "Requests to another machine that failed.",
        ONE,
        _between("failed"),
    ),
    ClusterMetric(
        "penstock_cluster_hedged_requests_total",
        "Requests to another machine that were read from storage instead.",
        ONE,
        _between("hedged_requests"),
    ),
)
"""All metrics of a cluster, in the order in which they are served."""
