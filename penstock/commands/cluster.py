"""``penstock cluster``: let the nodes of several machines work together."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.errors import ClusterError

if TYPE_CHECKING:
    from penstock.node.directory import NodeDirectory

EXAMPLE = """\
examples:
  penstock cluster start                       on the first machine; says what to do on others
  penstock cluster join 10.0.0.1 --cache 64GB  on every other machine
  penstock cluster join 10.0.0.1 --cores 32    also lends cores to the jobs of other machines
  penstock cluster status                      machines, and what they have sent each other
  penstock cluster leave                       this machine works alone again

Loaders with cluster="auto" then use one cache that is divided over all machines. The machines need
the same secrets: `start` makes them, and prints where they are.
"""

LOOKS, PAUSE = 6, 0.25
"""Looks that wait for reports of the other machines, and seconds between two of them."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Joins the nodes of several machines, so that they share one cache."
    parser.epilog = EXAMPLE
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser("start", help="begin a cluster on this machine")
    join = actions.add_parser("join", help="join the cluster of another machine")
    join.add_argument(
        "seeds", metavar="ADDRESS", help="machines of the cluster, with commas between them"
    )
    for action in (start, join):
        action.add_argument(
            "--address",
            default="",
            help="where other machines reach this one, such as 10.0.0.1:7411",
        )
        action.add_argument(
            "--cache", default="0", metavar="SIZE", help="room for samples of other machines' jobs"
        )
        action.add_argument(
            "--cores",
            type=int,
            default=0,
            metavar="N",
            help="cores that jobs on other machines may use while jobs here do not (0)",
        )
        action.add_argument(
            "--secret", default="", metavar="DIR", help="directory of the token and certificate"
        )
    status = actions.add_parser("status", help="show the machines of the cluster")
    status.add_argument("--json", action="store_true", help="print JSON")
    actions.add_parser("leave", help="leave the cluster")


def run(arguments: argparse.Namespace) -> int:
    from penstock.node.directory import NodeDirectory

    directory = NodeDirectory()
    if arguments.action == "status":
        return _show_status(directory, as_json=arguments.json)
    if arguments.action == "leave":
        return _leave(directory)
    return _enter(directory, arguments)


def _enter(directory: NodeDirectory, arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from penstock import config
    from penstock.cluster.find import PORT, default_host, parse_addresses, parse_own_address
    from penstock.cluster.secrets import make_secrets, read_secrets
    from penstock.node.client import enter_cluster
    from penstock.node.protocol import EnterCluster

    secret = Path(arguments.secret) if arguments.secret else config.cluster_secret()
    starts, made = arguments.action == "start", False
    if starts and not secret.exists():
        make_secrets(secret)
        made = True
    read_secrets(secret)
    address = arguments.address
    if starts:
        address = address or f"{default_host()}:{PORT}"
    if address:
        address = parse_own_address(address, "--address")
    seeds = [address] if starts else list(parse_addresses(arguments.seeds, "ADDRESS"))
    cache = config.size(arguments.cache, "--cache")
    cores = arguments.cores
    if cores < 0:
        raise ClusterError(f"--cores {cores}: give the number of cores to lend, or 0 for none")
    entered = enter_cluster(
        directory, EnterCluster(seeds, address, str(secret.absolute()), cache, cores, stay=True)
    )
    out = sys.stdout.write
    out(f"This machine is {entered.machine} of the cluster, at {entered.address}.\n")
    if starts:
        out(
            f"Secrets: {secret}{' (new)' if made else ''}\n"
            "On every other machine, copy them to the same place (mode 0700), then:\n"
            f"  penstock cluster join {entered.address}\n"
        )
    out('Loaders with cluster="auto" use it. `penstock cluster leave` ends it.\n')
    return 0


def _leave(directory: NodeDirectory) -> int:
    from penstock.node.client import leave_cluster

    status = leave_cluster(directory)
    if status is None:
        sys.stdout.write("No node is running.\n")
    else:
        sys.stdout.write("This machine leaves the cluster as soon as no job of its own uses it.\n")
    return 0


def _show_status(directory: NodeDirectory, *, as_json: bool) -> int:
    cluster = _status(directory)
    if as_json:
        sys.stdout.write(json.dumps(cluster, indent=2) + "\n")
        return 0
    if cluster is None:
        raise ClusterError(
            "the node of this machine is not part of a cluster. Start one with `penstock cluster "
            "start`, or join one with `penstock cluster join ADDRESS`."
        )
    from penstock.watch.machines import lines_of, rows_of

    sys.stdout.write("\n".join([*lines_of(rows_of(cluster)), *guest_lines(cluster)]) + "\n")
    return 0


def guest_lines(cluster: dict[str, Any]) -> list[str]:
    """What this machine has prepared for others, as lines of text."""
    from penstock.host.text import aligned, many

    return aligned(
        [
            (
                f"pipeline {guest['recipe']}",
                f"{many(guest['tiny_batches'], 'tiny-batch', 'tiny-batches')} of "
                f"{many(guest['samples'], 'sample')} prepared here for other machines"
                + (f"; refused: {guest['refused']}" if guest["refused"] else ""),
            )
            for guest in cluster["guests"]
        ]
    )


def _status(directory: NodeDirectory) -> dict[str, Any] | None:
    """The cluster part of the node's status, with reports of the other machines if they answer.

    The node asks them when somebody looks, so the first look has no reports.
    """
    from penstock.node.client import request_status

    cluster: dict[str, Any] | None = None
    for look in range(LOOKS):
        if look:
            time.sleep(PAUSE)
        status = request_status(directory)
        cluster = None if status is None else status.get("cluster")
        if cluster is None or all(
            machine["report"] or machine["state"] != "alive" for machine in cluster["machines"]
        ):
            break
    return cluster
