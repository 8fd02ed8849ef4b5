"""Simulated machines with ``ClusterMembership``: a virtual clock, a network that can be cut."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from penstock.cluster.membership import (
    BEAT,
    Beat,
    ClusterMembership,
    ClusterView,
    Heartbeat,
    HeartbeatAnswer,
    Installed,
    Machine,
    MemberDecision,
    Probe,
    ViewUpdate,
)

TICK = 0.25
"""Seconds between two ticks of a machine."""

DEADLINE = BEAT
"""Seconds after which a message to a machine that is cut off counts as not answered."""


@dataclass
class Traffic:
    """Messages and estimated bytes since the start. ``at``: messages handled by each machine."""

    messages: int = 0
    nbytes: int = 0
    at: dict[str, int] = field(default_factory=dict)
    bytes_from: dict[str, int] = field(default_factory=dict)

    def count(self, sender: str, receiver: str, nbytes: int) -> None:
        self.messages += 1
        self.nbytes += nbytes
        self.at[receiver] = self.at.get(receiver, 0) + 1
        self.bytes_from[sender] = self.bytes_from.get(sender, 0) + nbytes


class Machines:
    """A number of machines, named ``m0``, ``m1`` and so on, of which the first are seeds.

    Messages take ``delay`` seconds, plus up to as much again. Machines that are cut off from each
    other are in different groups: see ``cut``.
    """

    def __init__(self, size: int, seeds: int, seed: int = 0, delay: float = 0.005) -> None:
        self.now = 0.0
        self.traffic = Traffic()
        self.delay = delay
        self.seeds = [f"m{number}:1" for number in range(min(seeds, size))]
        self.members: dict[str, ClusterMembership] = {}
        self.group_of: dict[str, int] = {}
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._incarnations = count(1)
        for number in range(size):
            self.start(f"m{number}")

    # What happens to machines.

    def start(self, name: str, version: int = 1) -> None:
        """Start a machine, or restart it with a new incarnation."""
        incarnation = next(self._incarnations)
        machine = Machine(name, f"{name}:1", incarnation, cache_bytes=1 << 30, version=version)
        member = ClusterMembership(machine, self.seeds, self.now)
        self.members[name] = member
        self._after(self._random.random() * TICK, lambda: self._tick(member))

    def kill(self, name: str) -> None:
        self.members.pop(name, None)

    def leave(self, name: str) -> None:
        """Stop a machine that says goodbye."""
        self._act(self.members[name], self.members[name].leave(self.now))
        self.kill(name)

    def reset(self, name: str, other: str) -> None:
        """A machine notices that its connection to another one is reset."""
        member = self.members[name]
        self._act(member, member.lost(other, self.now))

    def cut(self, groups: Iterable[Iterable[str]]) -> None:
        """Let machines reach only those of their group. Machines in no group reach each other."""
        self.group_of = {name: number for number, group in enumerate(groups, 1) for name in group}

    def heal(self) -> None:
        self.group_of = {}

    # Watching.

    def views(self) -> dict[str, ClusterView]:
        return {name: member.view for name, member in self.members.items()}

    def agree(self) -> bool:
        """Whether all machines that run have the same view, which lists exactly them, and one of
        them is the head."""
        views = list(self.views().values())
        running = {member.me for member in self.members.values()}
        listed = set(views[0].machines) == running
        return listed and len(self.heads()) == 1 and all(view == views[0] for view in views)

    def heads(self) -> list[str]:
        return [name for name, member in self.members.items() if member.is_head]

    # The clock.

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass, at most ``seconds``. Returns the seconds until ``until`` was true."""
        started, end = self.now, self.now + seconds
        checked = self.now
        while self._events and self._events[0][0] <= end:
            if until is not None and self._events[0][0] > checked:
                if until():
                    return checked - started
                checked = self._events[0][0] + 0.01
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end
        return seconds

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def _tick(self, member: ClusterMembership) -> None:
        if self.members.get(member.me.name) is member:
            self._act(member, member.tick(self.now))
            self._after(TICK, lambda: self._tick(member))

    # The network.

    def _reaches(self, one: str, other: str) -> bool:
        return self.group_of.get(one, 0) == self.group_of.get(other, 0)

    def _way(self) -> float:
        return self.delay * (1.0 + self._random.random())

    def _act(self, member: ClusterMembership, decisions: list[MemberDecision]) -> None:
        for decision in decisions:
            match decision:
                case Beat(address, heartbeat):
                    self._send(member, address, heartbeat)
                case Probe(machine):
                    self._probe(member, machine)
                case Installed():
                    pass

    def _send(self, member: ClusterMembership, address: str, heartbeat: Heartbeat) -> None:
        name = address.partition(":")[0]
        self.traffic.count(member.me.name, name, size_of(heartbeat))

        def arrive() -> None:
            receiver = self.members.get(name)
            if not self._reaches(member.me.name, name):
                self._after(DEADLINE, fail)
            elif receiver is None:
                self._after(self._way(), fail)
            else:
                answer, decisions = receiver.heartbeat(heartbeat, self.now)
                self._act(receiver, decisions)
                self.traffic.count(name, member.me.name, size_of(answer))
                self._after(self._way(), lambda: come_back(answer))

        def come_back(answer: HeartbeatAnswer) -> None:
            if not self._reaches(member.me.name, name):
                self._after(DEADLINE, fail)
            elif self.members.get(member.me.name) is member:
                self._act(member, member.answered(address, answer, self.now))

        def fail() -> None:
            if self.members.get(member.me.name) is member:
                self._act(member, member.unanswered(address, self.now))

        self._after(self._way(), arrive)

    def _probe(self, member: ClusterMembership, machine: Machine) -> None:
        self.traffic.count(member.me.name, machine.name, 64)

        def tell() -> None:
            running = self.members.get(machine.name)
            alive = running is not None and running.me.incarnation == machine.incarnation
            reached = self._reaches(member.me.name, machine.name)
            if self.members.get(member.me.name) is member:
                self._act(member, member.probed(machine, alive and reached, self.now))

        reached = self._reaches(member.me.name, machine.name)
        self._after(2 * self._way() if reached else DEADLINE, tell)


def size_of(message: Heartbeat | HeartbeatAnswer) -> int:
    """Estimated bytes on the wire: numbers of 8 bytes, and names and addresses as they are."""
    nbytes = 80 + machine_bytes(message.sender)
    if isinstance(message, Heartbeat):
        return nbytes + sum(len(name) + 9 for name, _ in message.suspects)
    return nbytes + (0 if message.update is None else update_bytes(message.update))


def machine_bytes(machine: Machine) -> int:
    return len(machine.name) + len(machine.address) + 8 * 4 + 8


def update_bytes(update: ViewUpdate) -> int:
    return (
        48 + sum(map(machine_bytes, update.machines)) + sum(len(name) + 1 for name in update.gone)
    )
