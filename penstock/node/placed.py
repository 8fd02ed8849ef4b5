"""Nodes that Ray places: how a loader finds the one of its machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.cluster.find import ray_is_connected
from penstock.cluster.placing import PlacementOptions
from penstock.errors import ClusterError
from penstock.node.keeper import NodeKeeper
from penstock.node.protocol import EnterCluster

LIMIT = 180.0
"""Seconds that the command may take which a process without Ray runs."""


def make_keeper(
    options: PlacementOptions, host: str, fetch: Callable[[str, float], bytes | None]
) -> NodeKeeper:
    """The keeper of a machine, in an actor of Ray."""
    return NodeKeeper(options, host, fetch)


def enter_by_ray() -> EnterCluster:
    """What a loader tells the node of its machine, after Ray has placed it. Raises ClusterError.

    A process that is not connected to Ray stays so: a command connects in its place. Ray's threads
    do not belong into a process that trains, unless its user has put them there.
    """
    found = find_placed() if ray_is_connected() else _ask_command()
    return EnterCluster(
        found["seeds"],
        found["address"],
        found["secret"],
        found["cache_bytes"],
        found["cores"],
        stay=False,
    )


def find_placed() -> dict[str, Any]:
    """Place nodes by Ray if there are none, and wait for the node of this machine."""
    from penstock.cluster.ray import PlacedNodes, place_nodes

    def is_here(placed: PlacedNodes) -> bool:
        return placed.here in placed.reports and placed.reports[placed.here][1].state == "in"

    placed = place_nodes(make_keeper, stay=False, done=is_here)
    if not is_here(placed):
        machine, report = placed.reports.get(placed.here, (None, None))
        if machine is None or report is None:
            raise ClusterError(
                'Ray does not list the machine of this process. cluster="ray" is for processes '
                "on machines of the Ray cluster."
            )
        why = report.reason or "Ray has not started its actor yet"
        raise ClusterError(f"the node of this machine is not in the cluster: {why}")
    machine, report = placed.reports[placed.here]
    return {
        "seeds": list(placed.seeds),
        "address": report.address,
        "secret": report.secret,
        "cache_bytes": placed.options.cache_bytes,
        "cores": int(min(placed.options.cores, machine.cpus)),
    }


def _ask_command() -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from penstock.cli import main; "
    command = [sys.executable, "-c", code + "sys.exit(main())", "cluster", "start", "--ray"]
    try:
        done = subprocess.run(
            [*command, "--for-loader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"Ray has not placed the node of this machine within {LIMIT:g} s. See `ray status`, "
            "and `penstock cluster status --ray`."
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it has ended without a word"]
        raise ClusterError(f"Ray cannot place the node of this machine: {' '.join(lines[-8:])}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
