"""The state of a node as people read it: a snapshot in, lines of text out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import show_size
from penstock.host.text import aligned, many, span

NodeStatus = Mapping[str, Any]
"""What ``status_of`` has to say."""


def lines_of(node: NodeStatus, now: float, before: NodeStatus | None = None) -> list[str]:
    """All there is to see. ``before`` is an earlier snapshot, where what happens is watched."""
    groups = node["groups"]
    share = f"{node['cpu'] / max(node['up'], 1e-9):.2f} of {node['cores']} cores"
    facts = [
        (
            "node",
            f"process {node['pid']}, up {span(node['up'])}, {many(node['workers'], 'worker')}",
        ),
        ("CPU", f"{node['cpu']:,.1f} s, on average {share}{_cores_now(node, before)}"),
        ("staged", _staged(groups, node["staging"])),
        ("saved", saved(_sum(groups, "prepared"), _sum(groups, "given"))),
        ("log", node["log"]),
    ]
    out = aligned(facts, right=set())
    if not groups:
        out += ["", "Nobody is attached: it ends by itself unless a job comes."]
    for group in groups:
        out += ["", *_group_lines(group, now, _rate(node, before, group["name"]))]
    return out


def saved(prepared: int, given: int) -> str:
    """What sharing has saved so far.

    >>> saved(120, 480)
    'prepared 120, given 480: 3.0 of 4 preparations saved'
    >>> saved(8, 6)
    'prepared 8, given 6: nothing yet'
    """
    told = f"prepared {prepared:,}, given {given:,}: "
    if given <= prepared or not prepared:
        return told + "nothing yet"
    times = given / prepared
    return told + f"{times - 1:.1f} of {f'{times:.1f}'.removesuffix('.0')} preparations saved"


def behind(members: Sequence[NodeStatus]) -> list[int | None]:
    """How many batches each member is behind the furthest; ``None`` where that is not known.

    Members may have batches of different sizes, so it is the part of an epoch that counts.
    """
    done = [
        one["epoch"] + one["batch"] / one["batches"] if one["batches"] else None for one in members
    ]
    furthest = max((place for place in done if place is not None), default=None)
    return [
        None if place is None or furthest is None else round((furthest - place) * one["batches"])
        for place, one in zip(done, members, strict=True)
    ]


def names_of(node: NodeStatus) -> list[str]:
    """Every member, by its group and process."""
    return [
        f"{group['name']}: process {member['pid']}"
        for group in node["groups"]
        for member in group["members"]
    ]


def _group_lines(group: NodeStatus, now: float, rate: str) -> list[str]:
    members = group["members"]
    if group["broken"] is not None:
        note = f"cannot go on: {group['broken'].splitlines()[0] if group['broken'] else '?'}"
    elif not group["ready"]:
        note = "its pipeline is being set up"
    else:
        note = group["workers"]
    out = [f"{group['name']}: {many(len(members), 'member')}, {note}"]
    rows = [("process", "part", "epoch", "batch", "ready", "behind", "joined")]
    for one, late in zip(members, behind(members), strict=True):
        length = "" if one["batches"] is None else f" of {one['batches']:,}"
        rows.append(
            (
                str(one["pid"]),
                part(one["part"]),
                str(one["epoch"]),
                f"{'?' if one['batch'] is None else format(one['batch'], ',')}{length}",
                str(one["ready"]),
                "?" if late is None else f"{late:,}",
                f"{span(now - one['joined'], units=1)} ago",
            )
        )
    facts = [
        ("staged", _staged([group], group["budget"])),
        ("saved", saved(group["prepared"], group["given"]) + rate),
        *(("cache", _cache(one)) for one in group.get("caches", ())),
    ]
    if group.get("refurbish"):
        facts.append(("refurbish", _refurbish(group["refurbish"])))
    table = aligned(rows, right={0, 2, 3, 4, 5})
    return [*out, *(f"  {line}" for line in [*table, *aligned(facts, right=set())])]


def part(told: str) -> str:
    """Which batches a member takes, in words.

    >>> part("0/1 x 64"), part("1/4 x 32")
    ('all, by 64', 'rank 1 of 4, by 32')
    """
    found = re.fullmatch(r"(\d+)/(\d+) x (\d+)", told)
    if found is None:
        return told
    rank, world, size = found.groups()
    return ("all" if world == "1" else f"rank {rank} of {world}") + f", by {size}"


def _staged(groups: Sequence[NodeStatus], budget: int) -> str:
    batches = many(_sum(groups, "staged_batches"), "batch", "batches")
    return f"{batches}, {show_size(_sum(groups, 'staged'))} of {show_size(budget)}"


def _cache(one: NodeStatus) -> str:
    held = f"{one['samples']:,} samples, {show_size(one['bytes'])} of {show_size(one['budget'])}"
    return (
        f"{held}{', full' if one['full'] else ''}; {one['hits']:,} hits, {one['misses']:,} misses"
    )


def _refurbish(one: NodeStatus) -> str:
    return (
        f"keeps {one['kept']:,} samples, {show_size(one['bytes'])}; {one['reused']:,} reused, "
        f"{one['fresh']:,} fresh"
    )


def _cores_now(node: NodeStatus, before: NodeStatus | None) -> str:
    if before is None or before["pid"] != node["pid"] or node["up"] <= before["up"]:
        return ""
    # A worker that has ended between the two is counted a moment later.
    used = max(0.0, node["cpu"] - before["cpu"]) / (node["up"] - before["up"])
    return f", now {used:.2f}"


def _rate(node: NodeStatus, before: NodeStatus | None, name: str) -> str:
    if before is None or before["pid"] != node["pid"] or node["up"] <= before["up"]:
        return ""
    given = {group["name"]: group["given"] for group in node["groups"]}
    earlier = {group["name"]: group["given"] for group in before["groups"]}
    if name not in earlier or given[name] < earlier[name]:
        return ""
    return f"; {(given[name] - earlier[name]) / (node['up'] - before['up']):,.1f} batches/s"


def _sum(groups: Sequence[NodeStatus], what: str) -> int:
    return sum(group[what] for group in groups)
