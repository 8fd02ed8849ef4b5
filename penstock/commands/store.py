"""``penstock store``: list, verify and clear stores on disk and in memory."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.config import show_size
from penstock.errors import StoreError
from penstock.host.text import aligned, many, span
from penstock.store import collect_stale
from penstock.store.catalogue import (
    Leftover,
    ProgressCallback,
    Proof,
    StoreInfo,
    in_memory,
    on_disk,
    remove,
    verify,
)

EXAMPLE = """\
examples:
  penstock store list                          list all stores on disk and in memory
  penstock store verify                        read every value and compare its checksum
  penstock store clear 3f2a9c                  remove the store with this fingerprint
  penstock store clear --all --older-than 7d   remove stores not used for a week
  penstock store list --place /data/kept       list the stores in this directory only

A store that a running process has open is never removed.
"""

LEAST = 4
"""Shortest prefix of a fingerprint that is accepted: an empty variable in a script must not match
every store."""

SHORT = 12
"""Characters of a fingerprint that are shown: enough to tell one from another."""

_AGES = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists, verifies and removes the stores of cache and refurbish, on disk and in memory."
    )
    parser.epilog = EXAMPLE
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions: dict[str, argparse.ArgumentParser] = {
        "list": commands.add_parser("list", help="list the stores"),
        "verify": commands.add_parser(
            "verify", help="read every value and check it; exits with 1 if one is damaged"
        ),
        "clear": commands.add_parser(
            "clear", help="remove stores that no running process has open"
        ),
    }
    for name, action in actions.items():
        action.add_argument(
            "--place",
            metavar="DIR",
            type=Path,
            action="append",
            help="look in this directory instead of the default ones; may be given several times",
        )
        if name != "list":
            action.add_argument(
                "fingerprints",
                metavar="FINGERPRINT",
                nargs="*",
                help="a fingerprint, or its first characters",
            )
    actions["list"].add_argument("--json", action="store_true", help="print as JSON")
    actions["clear"].add_argument(
        "--all", action="store_true", help="all stores, and leftovers of dead processes"
    )
    actions["clear"].add_argument(
        "--older-than",
        metavar="AGE",
        type=age,
        default=0.0,
        help="only stores that were not used for this long: 90min, 12h, 7d, 2w",
    )
    actions["clear"].set_defaults(misused=actions["clear"].error)


def run(arguments: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": _list,
        "verify": _verify,
        "clear": _clear,
    }
    return actions[arguments.action](arguments)


def age(text: str) -> float:
    """An age in seconds.

    >>> age("90min"), age("7d")
    (5400.0, 604800.0)
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(s|min|h|d|w)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; write 90min, 12h, 7d or 2w")
    return float(match[1]) * _AGES[match[2]]


def _list(arguments: argparse.Namespace) -> int:
    stores, leftovers = _find(arguments.place)
    if arguments.json:
        plain = {"stores": list(map(_plain, stores)), "leftovers": list(map(_plain, leftovers))}
        _say(json.dumps(plain, indent=2))
    else:
        _say(*listed(stores, leftovers, time.time()))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    stores, _ = _find(arguments.place)
    stores = _chosen(stores, arguments.fingerprints)
    if not stores:
        _say("No stores found.")
    damaged = False
    for store in stores:
        with _progress_bar(_short(store)) as progress:
            proof = verify(store, progress)
        damaged = damaged or not (proof.sound or store.void)
        _say(verified(store, proof))
    return int(damaged)


def _clear(arguments: argparse.Namespace) -> int:
    names: Sequence[str] = arguments.fingerprints
    if bool(names) == arguments.all:
        arguments.misused("name the fingerprints to remove, or give --all")
    stores, leftovers = _find(arguments.place)
    stores = _chosen(stores, names)
    freed = kept = 0
    for store in stores:
        if time.time() - store.last_use < arguments.older_than:
            continue
        # A memory store is removed when its process ends.
        if store.where == "memory" or not remove(store.place):
            kept += 1
            _say(f"kept     {_short(store)}  {_users(store)}")
        else:
            freed += store.nbytes
            _say(f"removed  {_short(store)}  {show_size(store.nbytes)}  {store.place}")
    if arguments.all and leftovers:
        removed = set(collect_stale(leftovers[0].place.parent))
        for leftover in leftovers:
            if leftover.place in removed:
                freed += leftover.nbytes
                _say(f"removed  left in memory  {show_size(leftover.nbytes)}  {leftover.place}")
    _say(f"freed {show_size(freed)}")
    return int(bool(names) and kept > 0)


def _find(places: list[Path] | None) -> tuple[list[StoreInfo], list[Leftover]]:
    if places is None:
        stores, leftovers = in_memory()
        return [*on_disk(), *stores], leftovers
    for place in places:
        if not place.is_dir():
            raise StoreError(f"--place {place} is not a directory. Name one that holds stores.")
    return on_disk(places), []


def _chosen(stores: list[StoreInfo], names: Sequence[str]) -> list[StoreInfo]:
    """The stores with these fingerprints; all stores if none is named."""
    if not names:
        return stores
    chosen: list[StoreInfo] = []
    for name in names:
        if len(name) < LEAST:
            raise StoreError(
                f"the fingerprint {name!r} is too short. Write at least {LEAST} characters of it."
            )
        matches = [store for store in stores if store.identity.startswith(name)]
        identities = sorted({store.identity for store in matches})
        if not matches:
            raise StoreError(
                f"no store has the fingerprint {name!r}. `penstock store list` shows all stores; "
                "--place DIR finds those in a directory of your own."
            )
        if len(identities) > 1:
            raise StoreError(
                f"several fingerprints begin with {name!r}: {', '.join(identities)}. Write more "
                "characters of it."
            )
        chosen += [store for store in matches if store not in chosen]
    return chosen


def listed(stores: Sequence[StoreInfo], leftovers: Sequence[Leftover], now: float) -> list[str]:
    """The lines of ``penstock store list``: stores grouped by directory, then leftovers."""
    lines: list[str] = []
    for title, group in _by_directory(stores).items():
        rows = [("fingerprint", "kind", "samples", "size", "last use", ""), *_rows(group, now)]
        lines += [title, *(f"  {line}" for line in aligned(rows, right={2, 3})), ""]
    if leftovers:
        rows = [(str(leftover.place), show_size(leftover.nbytes)) for leftover in leftovers]
        lines += ["left in memory by dead processes: penstock store clear --all removes it"]
        lines += [*(f"  {line}" for line in aligned(rows, right={1})), ""]
    if not lines:
        return ["No stores found."]
    total = sum(store.nbytes for store in stores) + sum(left.nbytes for left in leftovers)
    count = many(len(stores), "store") + (f", {len(leftovers)} left behind" if leftovers else "")
    return [*lines, f"{count}, {show_size(total)}"]


def verified(store: StoreInfo, proof: Proof) -> str:
    """The line of ``penstock store verify`` for one store."""
    name = f"{_short(store)}  {store.place}"
    if store.void:
        return f"{name}: not read, because {_void(store)}"
    if proof.wrong:
        return f"{name}: {proof.wrong}; the store is emptied when it is next opened"
    if proof.damaged:
        return (
            f"{name}: {proof.damaged:,} of {proof.values:,} values damaged; they are prepared "
            "again when they are next needed"
        )
    return f"{name}: {proof.values:,} values, all intact"


def _by_directory(stores: Sequence[StoreInfo]) -> dict[str, list[StoreInfo]]:
    groups: dict[str, list[StoreInfo]] = {}
    for store in stores:
        # In memory every process has a directory of its own.
        disk = store.where == "disk"
        root = store.place.parent if disk else store.place.parent.parent
        groups.setdefault(f"{'on disk' if disk else 'in memory'}, {root}", []).append(store)
    return groups


def _rows(stores: Sequence[StoreInfo], now: float) -> list[tuple[str, ...]]:
    return [
        (
            _short(store),
            store.kind or "?",
            "?" if store.samples is None else f"{store.samples:,}",
            show_size(store.nbytes),
            "now" if store.in_use else f"{span(now - store.last_use, units=1)} ago",
            _users(store) if store.in_use else _void(store),
        )
        for store in stores
    ]


def _short(store: StoreInfo) -> str:
    return store.identity[:SHORT]


def _users(store: StoreInfo) -> str:
    """The processes that have the store open, as text."""
    if not store.users:
        return "in use"
    pids = ", ".join(map(str, store.users[:3])) + (", ..." if len(store.users) > 3 else "")
    return f"in use by process {pids}"


def _void(store: StoreInfo) -> str:
    return f"{store.void}: the store is emptied when it is next opened" if store.void else ""


def _plain(found: StoreInfo | Leftover) -> dict[str, Any]:
    return {**asdict(found), "place": str(found.place)}


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def _progress_bar(name: str) -> Iterator[ProgressCallback | None]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
