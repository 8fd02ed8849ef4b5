"""``penstock cluster``: let the nodes of several machines work together."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.errors import ClusterError

if TYPE_CHECKING:
    from penstock.cluster.ray import PlacedNodes
    from penstock.node.directory import NodeDirectory

EXAMPLE = """\
examples:
  penstock cluster start                       on the first machine; says what to do on others
  penstock cluster join 10.0.0.1 --cache 64GB  on every other machine
  penstock cluster join 10.0.0.1 --cores 32    also lends cores to the jobs of other machines
  penstock cluster status                      machines, and what they have sent each other
  penstock cluster leave                       this machine works alone again
  penstock cluster start --ray --cache 64GB    on all machines of a Ray cluster
  penstock cluster leave --ray                 ends that
  penstock cluster secrets --export | ssh gpu-2 penstock cluster secrets --import

Loaders with cluster="auto" then use one cache that is divided over all machines; with share="name",
too, a batch is prepared once for the jobs of all machines. The machines need the same secrets:
`start` makes them, and prints where they are.
"""

MEET = 2.0
"""Seconds that `join` waits for a machine of the cluster, before it says that none has answered."""

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
    start.add_argument("--for-loader", action="store_true", help=argparse.SUPPRESS)
    status = actions.add_parser("status", help="show the machines of the cluster")
    status.add_argument("--json", action="store_true", help="print JSON")
    leave = actions.add_parser("leave", help="leave the cluster")
    for action, what in (
        (start, "let Ray place nodes on all its machines"),
        (status, "show the nodes that Ray has placed"),
        (leave, "end the nodes that Ray has placed"),
    ):
        action.add_argument(
            "--ray",
            nargs="?",
            const="",
            metavar="ADDRESS",
            help=f"{what}; ADDRESS of its head (default: RAY_ADDRESS, or the one running here)",
        )
    secrets = actions.add_parser("secrets", help="copy the token and certificate by a pipe")
    way = secrets.add_mutually_exclusive_group(required=True)
    way.add_argument("--export", action="store_true", help="write them to stdout")
    way.add_argument("--import", dest="takes", action="store_true", help="read them from stdin")
    secrets.add_argument("--secret", default="", metavar="DIR", help="their directory")


def run(arguments: argparse.Namespace) -> int:
    from penstock.node.directory import NodeDirectory

    if arguments.action == "secrets":
        return _copy_secrets(arguments)
    if getattr(arguments, "ray", None) is not None:
        return _with_ray(arguments)
    directory = NodeDirectory()
    if arguments.action == "status":
        return _show_status(directory, as_json=arguments.json)
    if arguments.action == "leave":
        return _leave(directory)
    return _enter(directory, arguments)


def _enter(directory: NodeDirectory, arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from penstock import config
    from penstock.cluster.find import (
        PORT,
        default_host,
        is_loopback,
        parse_addresses,
        parse_own_address,
        split_address,
    )
    from penstock.cluster.secrets import make_secrets, read_secrets
    from penstock.host.text import many
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
    cores = _lent(arguments.cores)
    if not starts and not address:
        _check_seeds(seeds, directory)
    entered = enter_cluster(
        directory, EnterCluster(seeds, address, str(secret.absolute()), cache, cores, stay=True)
    )
    out = sys.stdout.write
    host = split_address(entered.address)[0]
    out(f"This machine is {entered.machine} of the cluster, at {entered.address}.\n")
    if starts:
        out(
            f"Secrets: {secret}{' (new)' if made else ''}\n"
            "On every other machine, copy them to the same place (mode 0700), then:\n"
            f"  penstock cluster join {entered.address}\n"
        )
        if is_loopback(host):
            out(
                f"Other machines cannot reach {host}: this machine has no other address. End this "
                "with `penstock cluster leave`, and give one: penstock cluster start --address "
                "10.0.0.1\n"
            )
    else:
        met, refused = _meets_others(directory)
        if refused:
            out("".join(f"Refused: {reason}\n" for reason in refused))
        elif not met:
            out(
                f"No machine has answered at {', '.join(seeds)} so far; the node goes on trying. "
                "If `penstock cluster status` does not show another machine soon, check the "
                f"address and the firewall; the log of the node says more: {directory.log}\n"
            )
    if cores:
        out(
            f"It lends {many(cores, 'core')} to jobs whose pipeline it finds in "
            f"{config.cluster_recipes(secret.absolute())}: other machines must see this directory, "
            "too (PENSTOCK_CLUSTER_RECIPES names another one).\n"
        )
    out('Loaders with cluster="auto" use it. `penstock cluster leave` ends it.\n')
    return 0


def _check_seeds(seeds: list[str], directory: NodeDirectory) -> None:
    """Raise ClusterError if the only machine to join is this one, which is in no cluster."""
    from penstock.cluster.find import addresses_of, is_local, split_address
    from penstock.node.client import request_status

    if len(seeds) != 1 or not any(map(is_local, addresses_of(split_address(seeds[0])[0]))):
        return
    status = request_status(directory)
    if status is None or status["cluster"] is None:
        raise ClusterError(
            f"{seeds[0]} is an address of this machine. Give the address of another one, as "
            "`penstock cluster start` prints it there. To begin a cluster here, use `penstock "
            "cluster start`."
        )


def _meets_others(directory: NodeDirectory) -> tuple[bool, list[str]]:
    """Whether the node knows another machine of the cluster within some seconds.

    And why machines refuse it, or it refuses them, as soon as one does.
    """
    from penstock.node.client import request_status

    until = time.monotonic() + MEET
    while True:
        status = request_status(directory)
        cluster = None if status is None else status["cluster"]
        met = cluster is not None and len(cluster["machines"]) > 1
        refused: list[str] = [] if cluster is None else cluster["refused"]
        if met or refused or time.monotonic() > until:
            return met, refused
        time.sleep(0.1)


def _lent(cores: int) -> int:
    if cores < 0:
        raise ClusterError(f"--cores {cores}: give the number of cores to lend, or 0 for none")
    return cores


def _copy_secrets(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from penstock import config
    from penstock.cluster.secrets import (
        export_secrets,
        fingerprint_of,
        import_secrets,
        make_secrets,
        read_secrets,
        write_secrets,
    )

    directory = Path(arguments.secret) if arguments.secret else config.cluster_secret()
    if arguments.export:
        if sys.stdout.isatty():
            raise ClusterError(
                "secrets are not written to a terminal. Give them to the other machine by a pipe: "
                "penstock cluster secrets --export | ssh MACHINE penstock cluster secrets --import"
            )
        secrets = read_secrets(directory) if directory.exists() else make_secrets(directory)
        sys.stdout.write(export_secrets(secrets))
        return 0
    if sys.stdin.isatty():
        raise ClusterError(
            "secrets are read from a pipe, not from a terminal: penstock cluster secrets --export "
            "| ssh THIS-MACHINE penstock cluster secrets --import"
        )
    given = import_secrets(sys.stdin.read())
    used = directory.exists() and any(directory.iterdir())
    # Tasks of a launcher may share a home directory: the first one has written them.
    if used and fingerprint_of(read_secrets(directory)) == fingerprint_of(given):
        sys.stdout.write(f"{directory} has these secrets already.\n")
        return 0
    write_secrets(directory, given)
    sys.stdout.write(f"Secrets: {directory} (new)\n")
    return 0


def _with_ray(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from penstock import config
    from penstock.cluster import ray as by_ray
    from penstock.node.placed import find_placed, make_keeper

    by_ray.connect(arguments.ray)
    try:
        if arguments.action == "leave":
            count = by_ray.remove_nodes()
            sys.stdout.write(f"Ray no longer keeps nodes in the cluster; it kept {count}.\n")
            return 0
        if arguments.action == "status":
            placed = by_ray.placed_nodes()
            if placed is None:
                raise ClusterError(
                    "Ray has placed no nodes. Place them with `penstock cluster start --ray`."
                )
            return _show_placed(placed, as_json=arguments.json)
        if arguments.for_loader:
            sys.stdout.write(json.dumps(find_placed()) + "\n")
            return 0
        if arguments.address:
            raise ClusterError(
                "--address is for one machine, and --ray places nodes on all machines, at the "
                "addresses by which Ray knows them. Leave out --address."
            )
        placed = by_ray.place_nodes(
            make_keeper,
            cores=_lent(arguments.cores or 0),
            cache_bytes=config.size(arguments.cache, "--cache"),
            stay=True,
            secret=Path(arguments.secret) if arguments.secret else None,
            done=lambda placed: placed.entered,
        )
        _show_placed(placed, as_json=False)
        if not any(report.state == "in" for _, report in placed.reports.values()):
            raise ClusterError("no node is in the cluster; the table says why.")
        sys.stdout.write(
            'Loaders with cluster="ray" use it. `penstock cluster leave --ray` ends it.\n'
        )
        return 0
    finally:
        by_ray.disconnect()


def _show_placed(placed: PlacedNodes, *, as_json: bool) -> int:
    from dataclasses import asdict

    from penstock.config import show_size
    from penstock.host.text import aligned, many

    if as_json:
        machines = [
            {"node": node, "host": machine.host, "cpus": machine.cpus, **asdict(report)}
            for node, (machine, report) in placed.reports.items()
        ]
        shown = {"seeds": list(placed.seeds), "machines": machines}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return 0
    options = placed.options
    rows = [("placed by Ray", "machine", "state", "jobs", "reason")]
    for node, (machine, report) in placed.reports.items():
        here = ", this machine" if node == placed.here else ""
        place = report.address or machine.host
        name = report.machine or node[:12]
        rows.append((place, name, report.state + here, str(report.members), report.reason))
    until = "until `leave --ray`" if options.stay else "until no job uses them"
    facts = [
        ("nodes", f"{many(len(placed.reports), 'machine')}, {until}"),
        ("each lends", f"{options.cores} cores, {show_size(options.cache_bytes)} of cache"),
    ]
    sys.stdout.write("\n".join([*aligned(facts), "", *aligned(rows, right={3})]) + "\n")
    return 0


def _leave(directory: NodeDirectory) -> int:
    from penstock.node.client import leave_cluster, wait_for_exit

    status = leave_cluster(directory)
    if status is None:
        sys.stdout.write("No node is running.\n")
    elif status["ending"] and wait_for_exit(status["pid"]):
        sys.stdout.write("This machine has left the cluster.\n")
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
    for reason in cluster["refused"]:
        sys.stdout.write(f"Refused: {reason}\n")
    for keeper in cluster["held_by"]:
        sys.stdout.write(f"The node of this machine is placed by {keeper}.\n")
    return 0


def guest_lines(cluster: dict[str, Any]) -> list[str]:
    """What this machine has prepared for others, what others have prepared for it, and its groups
    that span machines, as lines."""
    from penstock.host.text import aligned, many
    from penstock.node.status import remote_lines, span_facts

    facts = [
        (
            f"pipeline {guest['recipe']}",
            f"{many(guest['tiny_batches'], 'tiny-batch', 'tiny-batches')} of "
            f"{many(guest['samples'], 'sample')} prepared here for other machines"
            + (f"; refused: {guest['refused']}" if guest["refused"] else ""),
        )
        for guest in cluster["guests"]
    ]
    for group in cluster["groups"]:
        helped = [f"helped by {line}" for line in remote_lines(group.get("remote"))]
        spans = [text for _, text in span_facts(group.get("span"))]
        facts += [(f"group {group['name']}", text) for text in helped + spans]
    return aligned(facts)


def _status(directory: NodeDirectory) -> dict[str, Any] | None:
    """The cluster part of the node's status, with reports of the other machines if they answer.

    The node asks them when its status is requested, so the first status has no reports.
    """
    from penstock.node.client import request_status

    cluster: dict[str, Any] | None = None
    for look in range(LOOKS):
        if look:
            time.sleep(PAUSE)
        status = request_status(directory)
        cluster = None if status is None else status.get("cluster")
        if status is not None and cluster is not None:
            cluster = {**cluster, "held_by": status["held_by"], "groups": status["groups"]}
        if cluster is None or all(
            machine["report"] or machine["state"] != "alive" for machine in cluster["machines"]
        ):
            break
    return cluster
