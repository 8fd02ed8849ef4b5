"""The status of a node in a cluster, as ``ClusterService.status`` returns it, for tests."""

from __future__ import annotations

from typing import Any

from penstock.cluster.request_times import BOUNDS
from penstock.cluster.survey import CacheReport, MachineReport

CONTENT = "c0ffee" * 5


def times(**counts: int) -> list[int]:
    """Requests by time; ``ms5=3`` means three that took between 2 and 5 ms."""
    found = [0] * (len(BOUNDS) + 1)
    for name, count in counts.items():
        found[BOUNDS.index(int(name.removeprefix("ms")) / 1e3)] = count
    return found


def machine(
    name: str, *, here: bool = False, head: bool = False, unsent: int = 0, **more: Any
) -> dict[str, Any]:
    """A machine that holds 100 samples; its batches had 10, 20 and 5 from the three places."""
    cache = CacheReport(CONTENT, 100, 4_000_000, 8_000_000, False, 10, 20, 5, 1, unsent)
    report = MachineReport(8, 2.5, 1_000, 2_000, (cache,))
    counted = more.get("times", times())
    return {
        "name": name,
        "address": f"10.0.0.{ord(name[-1]) - 96}:7411",
        "role": "trains",
        "state": "alive",
        "cache_bytes": 8_000_000,
        "is": {"head": head, "this machine": here},
        "sent": 0,
        "received": 0,
        "requests": sum(counted),
        "failed": 0,
        "seconds": 0.5,
        "times": counted,
        "hedged_requests": 0,
        "report": report.as_dict(),
        "report_age": 0.5,
        **more,
    }


def cluster(*machines: dict[str, Any]) -> dict[str, Any]:
    """The status of node ``a``."""
    here = machine("a", here=True, head=True)
    return {
        "machine": "a",
        "address": here["address"],
        "view": "0.1.2",
        "head": here["address"],
        "machines": [here, *machines],
        "caches": [],
    }
