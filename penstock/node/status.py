"""The status of a node: as plain data, which the node sends, and as lines of text."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock import config
from penstock.config import show_size
from penstock.host.process import stat_of
from penstock.host.text import aligned, many, span

if TYPE_CHECKING:
    from penstock.engine.build import Assembly
    from penstock.node.group import Group
    from penstock.node.service import Service
    from penstock.node.state import Member
    from penstock.stats import Meter

FEW_DESCRIPTORS = 1024
"""Below this limit of open files a node warns, because fewer batches can be staged."""

NodeStatus = Mapping[str, Any]
"""The data that ``status_of`` returns, or a part of it."""


# As data.


_UNUSED = "No job is attached: the node ends by itself unless one attaches."
_STAYS = "No job is attached. The node stays in its cluster until `penstock cluster leave`."


def status_of(service: Service) -> dict[str, Any]:
    return {
        "release": penstock.__version__,
        "pid": os.getpid(),
        "ending": service.ending,
        "stays": service.stays,
        "place": str(service.directory.path),
        "log": str(service.directory.log),
        "up": time.time() - service.started,
        "cpu": cpu_seconds(),
        "cores": config.cores(),
        "workers": service.workers.size,
        "staging": service.staging,
        "lingering": service.lingering,
        "descriptors": {"open": _open_descriptors(), "limit": service.descriptors},
        "held_by": sorted({peer.held.keeper for peer in service.peers.values() if peer.held}),
        "groups": [_group(group) for group in service.groups.values()],
        "cluster": None if service.cluster is None else service.cluster.status(),
    }


def _group(group: Group) -> dict[str, Any]:
    with group.lock:
        state = group.state
        status: dict[str, Any] = {
            "name": group.name,
            "ready": group.assembly is not None,
            "broken": None if group.broken is None else group.broken_text,
            "stalls": group.stalls,
            "trouble": group.trouble or None,
            "staged": state.staged,
            "staged_batches": state.staged_batches,
            "budget": state.budget,
            "prepared": state.prepared_batches,
            "remote": None if group.remote is None else group.remote.status(),
            "given": state.given_batches,
            "span": None if group.span is None else group.span.status(),
            "members": [
                {
                    "pid": group.peers[number].pid,
                    "part": member.part,
                    "lag": member.lag,
                    **position(member),
                    "taken": member.taken,
                    "ready": state.lead(number),
                    "joined": group.peers[number].since,
                    "unread": group.peers[number].unsent,
                }
                for number, member in state.members.items()
                if number in group.peers
            ],
        }
        assembly, meter = group.assembly, group.meter
    if assembly is not None and meter is not None:
        status.update(_stores(assembly, meter))
    return status


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def position(member: Member) -> dict[str, int | None]:
    """Epoch and batch of the member's training loop, and batches in that epoch.

    A member asks in advance, so it may have begun an epoch before its loop has ended the last.
    """
    epochs = [name.epoch for name in (*member.untaken, *member.wants)]
    epoch, batches = min([member.epoch, *epochs]), member.length
    batch: int | None = member.done
    if epoch < member.epoch:
        # All remaining batches of the earlier epoch have been asked for.
        batch = None if batches is None else max(0, batches - epochs.count(epoch))
    return {"epoch": epoch, "batch": batch, "batches": batches}


def _stores(assembly: Assembly, meter: Meter) -> dict[str, Any]:
    stats = assembly.keepers.stats(meter.answered())
    status: dict[str, Any] = {
        "workers": str(assembly.choice),
        "caches": [
            {
                "hits": cache.hits,
                "misses": cache.misses,
                "samples": cache.admitted,
                "bytes": cache.used,
                "budget": cache.budget,
                "full": cache.full,
            }
            for cache in stats.caches
        ],
        "refurbish": None,
    }
    refurbish = stats.refurbish
    if refurbish is not None:
        status["refurbish"] = {
            "fresh": refurbish.fresh,
            "reused": refurbish.reused,
            "kept": refurbish.kept,
            "bytes": refurbish.used,
        }
    return status


def cpu_seconds() -> float:
    """CPU seconds that this process and its workers have used, living or dead."""
    # The system adds the time of children that have ended to that of their parent.
    own = os.times()
    used = own.user + own.system + own.children_user + own.children_system
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                used += _cpu_seconds_of(child)
    return used


def _cpu_seconds_of(pid: str) -> float:
    fields = stat_of(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# As text.


def lines_of(node: NodeStatus, now: float, before: NodeStatus | None = None) -> list[str]:
    """The status as lines of text. ``before``: an earlier status, for rates since then."""
    groups = node["groups"]
    average = f"{node['cpu'] / max(node['up'], 1e-9):.2f} of {node['cores']} cores"
    facts = [
        (
            "node",
            f"process {node['pid']}, up {span(node['up'])}, {many(node['workers'], 'worker')}",
        ),
        ("CPU", f"{node['cpu']:,.1f} s, on average {average}{_cores_now(node, before)}"),
        ("staged", _staged(groups, node["staging"]) + _lingering(node["lingering"])),
        ("saved", saved(_sum(groups, "prepared"), _sum(groups, "given"))),
        ("log", node["log"]),
    ]
    if node["descriptors"]["limit"] < FEW_DESCRIPTORS:
        facts.append(("files", _few_files(node["descriptors"])))
    lines = aligned(facts)
    if not groups:
        lines += ["", _STAYS if node["stays"] else _UNUSED]
    for group in groups:
        lines += ["", *_group_lines(group, now, _rate(node, before, group["name"]))]
    return lines


def saved(prepared: int, given: int) -> str:
    """How many preparations sharing has saved.

    >>> saved(120, 480)
    'prepared 120, given 480: 3.0 of 4 preparations saved'
    >>> saved(8, 6)
    'prepared 8, given 6: nothing yet'
    """
    counts = f"prepared {prepared:,}, given {given:,}: "
    if given <= prepared or not prepared:
        return counts + "nothing yet"
    times = given / prepared
    return counts + f"{times - 1:.1f} of {f'{times:.1f}'.removesuffix('.0')} preparations saved"


def behind(members: Sequence[NodeStatus]) -> list[int | None]:
    """How many batches each member is behind the foremost; ``None`` if unknown.

    Members may have batches of different sizes, so positions are compared as parts of an epoch.
    """
    positions = [
        member["epoch"] + member["batch"] / member["batches"] if member["batches"] else None
        for member in members
    ]
    foremost = max((at for at in positions if at is not None), default=None)
    return [
        None if at is None or foremost is None else round((foremost - at) * member["batches"])
        for at, member in zip(positions, members, strict=True)
    ]


def names_of(node: NodeStatus) -> list[str]:
    """The group and process of every member."""
    return [
        f"{group['name']}: process {member['pid']}"
        for group in node["groups"]
        for member in group["members"]
    ]


def part_text(part: str) -> str:
    """Which batches a member takes, in words.

    >>> part_text("0/1 x 64"), part_text("1/4 x 32")
    ('all, by 64', 'rank 1 of 4, by 32')
    """
    match = re.fullmatch(r"(\d+)/(\d+) x (\d+)", part)
    if match is None:
        return part
    rank, world, size = match.groups()
    return ("all" if world == "1" else f"rank {rank} of {world}") + f", by {size}"


def _group_lines(group: NodeStatus, now: float, rate: str) -> list[str]:
    members = group["members"]
    if group["broken"] is not None:
        note = f"cannot go on: {group['broken'].splitlines()[0] if group['broken'] else '?'}"
    elif not group["ready"]:
        note = "its pipeline is being set up"
    else:
        note = group["workers"]
    rows = [("process", "part", "epoch", "batch", "ready", "behind", "joined")]
    for member, late in zip(members, behind(members), strict=True):
        length = "" if member["batches"] is None else f" of {member['batches']:,}"
        rows.append(
            (
                str(member["pid"]),
                part_text(member["part"]),
                str(member["epoch"]),
                f"{'?' if member['batch'] is None else format(member['batch'], ',')}{length}",
                str(member["ready"]),
                "?" if late is None else f"{late:,}",
                f"{span(now - member['joined'], units=1)} ago",
            )
        )
    facts = [
        ("staged", _staged([group], group["budget"])),
        ("saved", saved(group["prepared"], group["given"]) + rate),
        *(("cache", _cache(cache)) for cache in group.get("caches", ())),
    ]
    facts += span_facts(group.get("span"))
    if group["trouble"]:
        facts.append(("trouble", f"{many(group['stalls'], 'time')}, the last: {group['trouble']}"))
    facts += [("helped by", line) for line in remote_lines(group.get("remote"))]
    if group.get("refurbish"):
        facts.append(("refurbish", _refurbish(group["refurbish"])))
    table = aligned(rows, right={0, 2, 3, 4, 5})
    title = f"{group['name']}: {many(len(members), 'member')}, {note}"
    return [title, *(f"  {line}" for line in [*table, *aligned(facts)])]


def span_facts(span: NodeStatus | None) -> list[tuple[str, str]]:
    """The other machines of a group, in words; empty if it has none."""
    if span is None:
        return []
    facts: list[tuple[str, str]] = []
    others = len(span["machines"]) - 1
    if others > 0 or span["received"] or span["sent"]:
        counts = (
            f"with {many(others, 'other machine')}: prepared here {span['prepared']:,}, received "
            f"{span['received']:,}, sent {span['sent']:,}"
        )
        late = [
            f"{span[key]:,} {words}"
            for key, words in (
                ("again", "prepared here although another machine was asked"),
                ("hedged", "of them because it was late"),
                ("local", "of another machine prepared here without asking it"),
            )
            if span[key]
        ]
        facts.append(("batches", "; ".join([counts, *late])))
    here = span["preparing_seconds"]
    for name, link in sorted(span["links"].items()):
        facts.append(("link", f"{name}: {_link(link, here)}"))
    if not span["sendable"]:
        facts.append(("batches", "are not plain data: each machine prepares all of its own"))
    if span["separate"]:
        names = ", ".join(span["separate"])
        facts.append(("separate", f"{names}: the group there has this name, and another pipeline"))
    return facts


_TROUBLES = {
    "": "its batches are asked for",
    "lost": "it cannot be reached: its batches are prepared here",
    "late": "its batches came too late: they are prepared here for now",
    "link": "receiving takes longer than preparing: its batches are prepared here",
}


def _link(link: NodeStatus, here: float | None) -> str:
    text = _TROUBLES[link["trouble"]]
    if link["seconds"] is not None and here is not None:
        text += f" (a batch takes {1e3 * link['seconds']:,.1f} ms to receive, {1e3 * here:,.1f} ms"
        text += " to prepare)"
    return text


def remote_lines(remote: NodeStatus | None) -> list[str]:
    """What other machines have prepared, a line for each.

    >>> helper = {"state": "ready", "cores": 4, "tiny_batches": 12, "samples": 240,
    ...           "bytes": 7_000_000, "again": 1, "rate": 199.6, "reason": ""}
    >>> remote_lines({"withheld": "", "machines": {"b": helper}})
    ['b (4 cores, ready): 12 tiny-batches, 240 samples, 7.0 MB, 200/s; 1 prepared again here']
    """
    if not remote:
        return []
    lines = [f"no other machine: {remote['withheld']}"] if remote["withheld"] else []
    for name, found in remote["machines"].items():
        again = f"; {found['again']:,} prepared again here" if found["again"] else ""
        why = f" ({found['reason'].splitlines()[0]})" if found["reason"] else ""
        lines.append(
            f"{name} ({many(found['cores'], 'core')}, {found['state']}): "
            f"{many(found['tiny_batches'], 'tiny-batch', 'tiny-batches')}, "
            f"{many(found['samples'], 'sample')}, {show_size(found['bytes'])}, "
            f"{found['rate']:,.0f}/s{again}{why}"
        )
    return lines


def _staged(groups: Sequence[NodeStatus], budget: int) -> str:
    batches = many(_sum(groups, "staged_batches"), "batch", "batches")
    return f"{batches}, {show_size(_sum(groups, 'staged'))} of {show_size(budget)}"


def _lingering(nbytes: int) -> str:
    return f"; {show_size(nbytes)} in use by jobs that have left" if nbytes else ""


def _few_files(descriptors: NodeStatus) -> str:
    return (
        f"{descriptors['open']} of {descriptors['limit']} open, so fewer batches are staged: raise "
        "the hard limit (ulimit -Hn)"
    )


def _cache(cache: NodeStatus) -> str:
    size = f"{show_size(cache['bytes'])} of {show_size(cache['budget'])}"
    full = ", full" if cache["full"] else ""
    return (
        f"{cache['samples']:,} samples, {size}{full}; {cache['hits']:,} hits, "
        f"{cache['misses']:,} misses"
    )


def _refurbish(refurbish: NodeStatus) -> str:
    return (
        f"keeps {refurbish['kept']:,} samples, {show_size(refurbish['bytes'])}; "
        f"{refurbish['reused']:,} reused, {refurbish['fresh']:,} fresh"
    )


def _cores_now(node: NodeStatus, before: NodeStatus | None) -> str:
    if before is None or before["pid"] != node["pid"] or node["up"] <= before["up"]:
        return ""
    # The time of a worker that has just ended is missing for a moment.
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


def _sum(groups: Sequence[NodeStatus], key: str) -> int:
    return sum(group[key] for group in groups)
