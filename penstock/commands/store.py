"""``penstock store``."""

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
from penstock.store import collect_stale
from penstock.store.catalogue import Kept, Leftover, Told, in_memory, on_disk, remove, verify
from penstock.store.listing import listed, proved, short, users

EXAMPLE = """\
examples:
  penstock store list                          what is kept on disk and in memory
  penstock store verify                        read all of it, and check every value
  penstock store clear 3f2a9c                  remove what has this fingerprint
  penstock store clear --all --older-than 7d   remove what was not used for a week
  penstock store list --place /data/kept       look there, and nowhere else

What a living process has open is never removed.
"""

LEAST = 4
"""Characters of a fingerprint that have to be written: an empty variable in a script is no name."""

_AGES = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows what caches and refurbish keep on disk and in memory, checks it, and removes it."
    )
    parser.epilog = EXAMPLE
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    asked: dict[str, argparse.ArgumentParser] = {
        "list": commands.add_parser("list", help="show what is kept"),
        "verify": commands.add_parser(
            "verify", help="read every value and check it; exits with 1 if one is damaged"
        ),
        "clear": commands.add_parser("clear", help="remove what no living process has open"),
    }
    for name, one in asked.items():
        one.add_argument(
            "--place",
            metavar="DIR",
            type=Path,
            action="append",
            help="look in this directory, and not where stores are kept by default; may be "
            "given several times",
        )
        if name != "list":
            one.add_argument(
                "fingerprints",
                metavar="FINGERPRINT",
                nargs="*",
                help="a fingerprint, or how it begins",
            )
    asked["list"].add_argument("--json", action="store_true", help="print it as JSON")
    asked["clear"].add_argument("--all", action="store_true", help="all stores, and leftovers")
    asked["clear"].add_argument(
        "--older-than",
        metavar="AGE",
        type=age,
        default=0.0,
        help="only stores that were not used for so long: 90min, 12h, 7d, 2w",
    )
    asked["clear"].set_defaults(misused=asked["clear"].error)


def run(arguments: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": _list,
        "verify": _verify,
        "clear": _clear,
    }
    return actions[arguments.action](arguments)


def age(text: str) -> float:
    """Seconds.

    >>> age("90min"), age("7d")
    (5400.0, 604800.0)
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(s|min|h|d|w)", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write 90min, 12h, 7d or 2w")
    return float(found[1]) * _AGES[found[2]]


def _list(arguments: argparse.Namespace) -> int:
    stores, left = _found(arguments.place)
    if arguments.json:
        plain = {"stores": list(map(_plain, stores)), "leftovers": list(map(_plain, left))}
        _say(json.dumps(plain, indent=2))
    else:
        _say(*listed(stores, left, time.time()))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    stores, _ = _found(arguments.place)
    stores = _chosen(stores, arguments.fingerprints)
    if not stores:
        _say("Nothing is kept.")
    damaged = False
    for one in stores:
        with _shown(short(one)) as told:
            proof = verify(one, told)
        damaged = damaged or not (proof.sound or one.void)
        _say(proved(one, proof))
    return int(damaged)


def _clear(arguments: argparse.Namespace) -> int:
    names: Sequence[str] = arguments.fingerprints
    if bool(names) == arguments.all:
        arguments.misused("name the fingerprints to remove, or give --all")
    stores, left = _found(arguments.place)
    stores = _chosen(stores, names)
    freed = kept_back = 0
    for one in stores:
        if time.time() - one.last_use < arguments.older_than:
            continue
        if one.where == "memory" or not remove(one.place):
            # What lies in memory goes when its process does.
            kept_back += 1
            _say(f"kept     {short(one)}  {users(one)}")
        else:
            freed += one.nbytes
            _say(f"removed  {short(one)}  {show_size(one.nbytes)}  {one.place}")
    if arguments.all and left:
        gone = set(collect_stale(left[0].place.parent))
        for dead in left:
            if dead.place in gone:
                freed += dead.nbytes
                _say(f"removed  left in memory  {show_size(dead.nbytes)}  {dead.place}")
    _say(f"freed {show_size(freed)}")
    return int(bool(names) and kept_back > 0)


def _found(places: list[Path] | None) -> tuple[list[Kept], list[Leftover]]:
    if places is None:
        stores, left = in_memory()
        return [*on_disk(), *stores], left
    for place in places:
        if not place.is_dir():
            raise StoreError(f"--place {place} is not a directory. Name one that holds stores.")
    return on_disk(places), []


def _chosen(stores: list[Kept], names: Sequence[str]) -> list[Kept]:
    """Those that have these fingerprints; all where none is named."""
    if not names:
        return stores
    chosen: list[Kept] = []
    for name in names:
        if len(name) < LEAST:
            raise StoreError(
                f"{name!r} is too little of a fingerprint. Write {LEAST} characters or more."
            )
        found = [one for one in stores if one.identity.startswith(name)]
        known = sorted({one.identity for one in found})
        if not found:
            raise StoreError(
                f"nothing is kept under the fingerprint {name!r}. `penstock store list` shows all; "
                "what lies in a directory of your own is found with --place DIR."
            )
        if len(known) > 1:
            raise StoreError(
                f"several fingerprints begin with {name!r}: {', '.join(known)}. Write more of it."
            )
        chosen += [one for one in found if one not in chosen]
    return chosen


def _plain(one: Kept | Leftover) -> dict[str, Any]:
    return {**asdict(one), "place": str(one.place)}


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def _shown(name: str) -> Iterator[Told | None]:
    """A bar on the other stream, where somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
