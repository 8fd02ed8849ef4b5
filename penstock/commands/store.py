"""``penstock store``: everything kept on disk and in memory, what made it, and when it goes."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.config import show_size, size
from penstock.errors import PenstockError, StoreError
from penstock.host.text import aligned, many, span
from penstock.store import collect_stale
from penstock.store.catalogue import (
    STORES,
    Leftover,
    ProgressCallback,
    Proof,
    StoreInfo,
    collect,
    discard,
    in_memory,
    on_disk,
    verify,
)
from penstock.store.ledger import KeptRecord, Ledger
from penstock.store.retention import Policy

EXAMPLE = """\
examples:
  penstock store list                          list everything kept on disk and in memory
  penstock store show 3f2a9c                   what made it, from which data, and who used it
  penstock store du                            bytes by kind and by data, and what they saved
  penstock store verify                        read every value and compare its checksum
  penstock store clear 3f2a9c                  remove what has this fingerprint
  penstock store clear --all --older-than 7d   remove everything not used for a week
  penstock store pin 3f2a9c                    never collect it; --off: again like the others
  penstock store policy --budget 200GB         when kept things are collected by themselves
  penstock store collect --dry-run             what would be collected now
  penstock store list --place /data/kept       list what is in this directory only

What a running process has open is never removed. Packed shards are listed, and never removed.
"""

LEAST = 4
"""Shortest prefix of a fingerprint that is accepted: an empty variable in a script must not match
every store."""

SHORT = 12
"""Characters of a fingerprint that are shown: enough to tell one from another."""

NOT_SET = -1.0
"""What an option is that says ``none``."""

RULES = {
    "budget": "collect the least recently used things above this total",
    "unused": "collect what was not used for this long",
    "age": "collect what was made this long ago",
    "obsolete": "collect what another pipeline has replaced, and was not used for this long",
}
"""The fields of a policy."""

_AGES = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows, verifies and removes what Penstock keeps: the stores of cache and refurbish, "
        "packed shards, listings of buckets, indexes and decompressed copies of shards."
    )
    parser.epilog = EXAMPLE
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions: dict[str, argparse.ArgumentParser] = {
        "list": commands.add_parser("list", help="list what is kept"),
        "show": commands.add_parser("show", help="show what made a thing, and who used it"),
        "du": commands.add_parser("du", help="show how much is kept, and how much it saved"),
        "verify": commands.add_parser(
            "verify", help="read every value and check it; exits with 1 if one is damaged"
        ),
        "clear": commands.add_parser("clear", help="remove what no running process has open"),
        "pin": commands.add_parser("pin", help="keep a thing from being collected"),
        "collect": commands.add_parser("collect", help="remove what the policy says, now"),
        "policy": commands.add_parser("policy", help="show or set the policy"),
    }
    for name, action in actions.items():
        if name not in ("collect", "policy"):
            action.add_argument(
                "--place",
                metavar="DIR",
                type=Path,
                action="append",
                help="look in this directory only; may be given several times",
            )
        if name in ("show", "verify", "clear", "pin"):
            action.add_argument(
                "fingerprints",
                metavar="FINGERPRINT",
                nargs="+" if name in ("show", "pin") else "*",
                help="a fingerprint, or its first characters",
            )
    for name in ("list", "show"):
        actions[name].add_argument("--json", action="store_true", help="print as JSON")
    actions["pin"].add_argument("--off", action="store_true", help="undo it")
    actions["collect"].add_argument(
        "--dry-run", action="store_true", help="remove nothing, only say what would be removed"
    )
    for name in ("collect", "policy"):
        _add_rules(actions[name])
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
        "show": _show,
        "du": _du,
        "verify": _verify,
        "clear": _clear,
        "pin": _pin,
        "collect": _collect,
        "policy": _policy,
    }
    return actions[arguments.action](arguments)


def _add_rules(action: argparse.ArgumentParser) -> None:
    """Options for the fields of a policy."""
    for name, what in RULES.items():
        action.add_argument(
            f"--{name}",
            metavar="SIZE" if name == "budget" else "AGE",
            type=_never_or(_bytes if name == "budget" else age),
            help=f"{what}; none: not for this reason",
        )


def _never_or(convert: Callable[[str], float]) -> Callable[[str], float | None]:
    def converted(text: str) -> float | None:
        return NOT_SET if text == "none" else convert(text)

    return converted


def _bytes(text: str) -> int:
    try:
        return size(text)
    except PenstockError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _given_policy(arguments: argparse.Namespace) -> Policy:
    """The policy in force, changed by the options that were given."""
    given = {name: getattr(arguments, name) for name in RULES}
    changes = {
        name: None if value == NOT_SET else value
        for name, value in given.items()
        if value is not None
    }
    return replace(Ledger().policy(), **changes)


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


def _show(arguments: argparse.Namespace) -> int:
    stores, _ = _find(arguments.place)
    chosen = _chosen(stores, arguments.fingerprints)
    if arguments.json:
        _say(json.dumps(list(map(_plain, chosen)), indent=2))
        return 0
    for number, store in enumerate(chosen):
        _say(*([""] if number else []), *shown(store, stores, time.time()))
    return 0


def _du(arguments: argparse.Namespace) -> int:
    stores, leftovers = _find(arguments.place)
    _say(*usage(stores, leftovers))
    return 0


def _pin(arguments: argparse.Namespace) -> int:
    stores, _ = _find(arguments.place)
    for store in _chosen(stores, arguments.fingerprints):
        if store.record is None:
            raise StoreError(
                f"{_short(store)} is not in the ledger, because no process of this version has "
                "opened it. Policies that go by last use apply to it; open it once, then pin it."
            )
        Ledger().pin(store.record.made.key, not arguments.off)
        _say(f"{'unpinned' if arguments.off else 'pinned'}  {_short(store)}  {store.place}")
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    removals = collect(_given_policy(arguments), time.time(), dry=arguments.dry_run)
    freed = 0
    for removal in removals:
        store, word = removal.info, "removed" if removal.done else "kept, in use"
        freed += store.nbytes if removal.done or arguments.dry_run else 0
        word = "would remove" if arguments.dry_run else word
        _say(f"{word}  {_short(store)}  {show_size(store.nbytes)}  {store.place}: {removal.reason}")
    _say(f"{'would free' if arguments.dry_run else 'freed'} {show_size(freed)}")
    return 0


def _policy(arguments: argparse.Namespace) -> int:
    policy = _given_policy(arguments)
    if policy != Ledger().policy():
        Ledger().set_policy(policy)
    _say(*ruled(policy))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    stores, _ = _find(arguments.place)
    stores = _chosen(stores, arguments.fingerprints)
    if not stores:
        _say("No stores found.")
    damaged = False
    for store in stores:
        with _progress_bar(_short(store)) as progress:
            proof = _verify_packed(store) if store.kind == "packed" else verify(store, progress)
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
        if store.kind == "packed":
            # These files were asked for by name: whoever did that removes them. A store of the
            # same samples has the same fingerprint.
            if names and len(stores) == 1:
                kept += 1
                _say(f"kept     {_short(store)}  packed shards; remove {store.place} by hand")
            continue
        # A memory store is removed when its process ends.
        if (store.pinned and not names) or not discard(store):
            kept += 1
            _say(f"kept     {_short(store)}  {_users(store) if store.in_use else 'pinned'}")
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


def shown(store: StoreInfo, stores: Sequence[StoreInfo], now: float) -> list[str]:
    """The lines of ``penstock store show`` for one thing."""
    record = store.record
    lines = [f"{store.kind or 'store'} {store.identity}"]
    rows = [
        ("place", str(store.place)),
        ("size", f"{show_size(store.nbytes)}{_counted(store)}"),
        ("in use", _users(store) if store.in_use else "no"),
    ]
    if record is None:
        rows.append(("made by", "not known: no process of this version has opened it"))
        return [*lines, *(f"  {line}" for line in aligned(rows))]
    made = record.made
    rows += [
        ("data", f"{made.origin or 'of no known place'}{_identity_of_data(made.data)}"),
        ("made", f"{span(now - record.created, units=1)} ago"),
        ("versions", ", ".join(f"{name} {found}" for name, found in made.versions.items())),
        ("last use", "now" if store.in_use else f"{span(now - store.last_use, units=1)} ago"),
        ("opened", many(record.opened, "time")),
        ("saved", saving(record)),
        ("pinned", "yes" if record.pinned else "no"),
    ]
    lines += [f"  {line}" for line in aligned(rows)]
    lines += ["", "ancestry", *(f"  {line}" for line in ancestry(store, stores))]
    if record.uses:
        table = [("used by", "process", "when", "for", "hits", "saved")]
        for use in reversed(record.uses):
            lasted = "?" if use.ended is None else span(use.ended - use.began, units=1)
            table.append(
                (
                    f"{use.user}@{use.host} {use.program}",
                    str(use.pid),
                    f"{span(now - use.began, units=1)} ago",
                    lasted,
                    f"{use.hits:,}",
                    _seconds(use.saved),
                )
            )
        lines += ["", *aligned(table, right={1, 4})]
    return lines


def _counted(store: StoreInfo) -> str:
    if store.samples is None:
        return ""
    return f", {many(store.samples, 'sample' if store.is_store else 'file')}"


def _identity_of_data(data: str) -> str:
    return f" (identity {data[:SHORT]})" if data else ""


def _seconds(saved: float) -> str:
    return f"{saved:.2f} s" if saved < 10 else span(saved)


def saving(record: KeptRecord) -> str:
    """How much a thing has saved, as text."""
    if record.made.kind == "packed":
        return "not measured"
    each = "" if record.made.kind not in STORES else f", {1e3 * record.cost:.2f} ms each"
    return f"{_seconds(record.saved)} of workers in {many(record.hits, 'hit')}{each}"


def ancestry(store: StoreInfo, stores: Sequence[StoreInfo]) -> list[str]:
    """A tree from the data to a thing, through everything kept on the way.

    Each thing stands below the things that it was made from.
    """
    chain = [store]
    while (above := _parent(chain[0], stores)) is not None and above not in chain:
        chain.insert(0, above)
    first = chain[0].record
    lines = [(first.made.origin if first is not None else "") or "data"]
    for depth, one in enumerate(chain):
        indent = "   " * depth
        mark = "  <- this" if one is store else ""
        lines.append(f"{indent}└─ {one.kind} {_short(one)}, {show_size(one.nbytes)}{mark}")
        if one.record is not None:
            before = chain[depth - 1].record if depth else None
            above_it = () if before is None else before.made.made_by
            for text in one.record.made.made_by:
                if text not in above_it:
                    lines.append(f"{indent}     {text}")
    return lines


def _parent(store: StoreInfo, stores: Sequence[StoreInfo]) -> StoreInfo | None:
    """The thing that another one was made from: a store above it, packed shards, or a listing."""
    if store.record is None:
        return None
    made = store.record.made
    for identity in reversed(made.parents):
        for one in stores:
            if one.identity == identity and one is not store:
                return one
    for kind in ("packed", "index", "decompressed", "listing"):
        for one in stores:
            if one.record is None or one.kind != kind or one is store or not made.origin:
                continue
            other = one.record.made
            found = other.place if kind == "packed" else other.origin
            if made.origin == found or made.origin.startswith(f"{found.rstrip('/')}/"):
                return one
    return None


def usage(stores: Sequence[StoreInfo], leftovers: Sequence[Leftover]) -> list[str]:
    """The lines of ``penstock store du``."""
    if not stores and not leftovers:
        return ["Nothing is kept."]
    tables: list[str] = []
    for title, name_of in (("kind", _kind_of), ("data", _data_of)):
        groups: dict[str, list[StoreInfo]] = {}
        for one in stores:
            groups.setdefault(name_of(one), []).append(one)
        rows = [(title, "things", "size", "in use", "pinned", "saved")]
        for name, group in sorted(groups.items(), key=lambda item: -_bytes_of(item[1])):
            records = [one.record for one in group if one.record is not None]
            rows.append(
                (
                    name,
                    str(len(group)),
                    show_size(_bytes_of(group)),
                    show_size(_bytes_of([one for one in group if one.in_use])),
                    show_size(_bytes_of([one for one in group if one.pinned])),
                    _seconds(sum(record.saved for record in records)),
                )
            )
        tables += [*aligned(rows, right={1, 2, 3, 4, 5}), ""]
    total = _bytes_of(stores) + sum(left.nbytes for left in leftovers)
    tables.append(f"{show_size(total)} in all. Saved: seconds of workers.")
    if leftovers:
        nbytes = show_size(sum(left.nbytes for left in leftovers))
        tables.append(f"{nbytes} of it was left in memory by dead processes")
    return tables


def _kind_of(store: StoreInfo) -> str:
    return f"{store.kind or 'store'}{', in memory' if store.where == 'memory' else ''}"


def _data_of(store: StoreInfo) -> str:
    return (store.record.made.origin if store.record is not None else "") or "not known"


def _bytes_of(stores: Sequence[StoreInfo]) -> int:
    return sum(store.nbytes for store in stores)


def ruled(policy: Policy) -> list[str]:
    """The lines of ``penstock store policy``."""
    rows = []
    for name, what in RULES.items():
        value = getattr(policy, name)
        if value is None:
            shown_value = "none"
        else:
            shown_value = show_size(value) if name == "budget" else span(value)
        rows.append((name, shown_value, what))
    return aligned(rows)


def _verify_packed(store: StoreInfo) -> Proof:
    from penstock.pack.pack import check

    found = check(store.place)
    wrong = "; ".join(found.wrong)
    return Proof(found.shards, len(found.wrong), wrong)


def verified(store: StoreInfo, proof: Proof) -> str:
    """The line of ``penstock store verify`` for one store."""
    name = f"{_short(store)}  {store.place}"
    if store.void:
        return f"{name}: not read, because {_void(store)}"
    if not store.is_store:
        state = f"{proof.damaged:,} damaged" if proof.damaged else "all readable"
        return f"{name}: {many(proof.values, 'file')}, {proof.wrong or state}"
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
            _users(store) if store.in_use else _void(store) or ("pinned" if store.pinned else ""),
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
