"""Heartbeats and views as records of the wire, and back. ``protocol`` has checked the records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.cluster.membership import (
    Heartbeat,
    HeartbeatAnswer,
    HostedGroup,
    Machine,
    MachineLoad,
    Stamp,
    ViewUpdate,
)
from penstock.cluster.protocol import HeartbeatReply, HeartbeatSent, WireMachine


def pack_heartbeat(beat: Heartbeat) -> HeartbeatSent:
    """A heartbeat for the wire."""
    return HeartbeatSent(
        _packed(beat.sender),
        list(beat.stamp),
        beat.head,
        beat.size,
        [beat.load.free_bytes, beat.load.idle_cores],
        [list(suspect) for suspect in beat.suspects],
        beat.leaving,
    )


def heartbeat_of(record: HeartbeatSent) -> Heartbeat:
    """The heartbeat that another machine has sent.

    >>> beat = Heartbeat(Machine("a", "a:1", 5), Stamp(0, 5, 1), "a:1", 1, suspects=(("b", 2),))
    >>> heartbeat_of(pack_heartbeat(beat)) == beat
    True
    """
    return Heartbeat(
        _machine(record.sender),
        Stamp(*record.stamp),
        record.head,
        record.size,
        MachineLoad(*record.load),
        tuple((name, incarnation) for name, incarnation in record.suspects),
        record.leaving,
    )


def pack_answer(answer: HeartbeatAnswer) -> HeartbeatReply:
    """The answer to a heartbeat, for the wire."""
    update, packed = answer.update, None
    if update is not None:
        since = None if update.since is None else list(update.since)
        machines = [_packed(machine) for machine in update.machines]
        packed = [list(update.stamp), update.head, since, machines, list(update.gone)]
    return HeartbeatReply(
        _packed(answer.sender), list(answer.stamp), answer.head, answer.size, packed
    )


def answer_of(record: HeartbeatReply) -> HeartbeatAnswer:
    """The answer that another machine has sent."""
    update = None
    if record.update is not None:
        stamp, head, since, machines, gone = record.update
        update = ViewUpdate(
            Stamp(*stamp),
            head,
            None if since is None else Stamp(*since),
            tuple(map(_machine, machines)),
            tuple(gone),
        )
    sender, stamp = _machine(record.sender), Stamp(*record.stamp)
    return HeartbeatAnswer(sender, stamp, record.head, record.size, update)


def _packed(machine: Machine) -> WireMachine:
    ranks = [[content, digest, list(numbers)] for content, digest, numbers in machine.ranks]
    groups = [[*group[:4], list(group.parts)] for group in machine.groups]
    return [
        machine.name,
        machine.address,
        machine.incarnation,
        machine.cores,
        machine.cache_bytes,
        machine.version,
        machine.role,
        ranks,
        groups,
    ]


def _machine(fields: list[Any]) -> Machine:
    ranks = tuple((content, digest, tuple(numbers)) for content, digest, numbers in fields[7])
    groups = tuple(
        HostedGroup(name, content, unit, speed, tuple(parts))
        for name, content, unit, speed, parts in fields[8]
    )
    return replace(Machine(*fields[:7]), ranks=ranks, groups=groups)
