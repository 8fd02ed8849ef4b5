"""Decides which machine prepares which batch of a group that has members on several machines.

Pure: events and the time in, decisions out. Each machine of a group has one ``Spanning``.

- **Dealing**: ``MachineTurns`` says which machine a batch belongs to, by its number and the speeds
  that the machines have announced. Machines that disagree for a moment prepare a batch twice. That
  costs time and nothing else: batches are named by their samples, and preparing gives equal bits.
- **Asking**: a batch of another machine is asked for as soon as a member here wants it, within a
  credit of bytes for each machine. A machine that is asked for a batch prepares it, even if it
  thinks that the batch belongs to another.
- **Hedging**: a batch that takes longer than nearly all before is prepared here, too. The batches
  of a machine that is lost are prepared here at once.
- **Measuring**: if receiving a batch takes longer than preparing it here with all workers, the
  batches of that machine are prepared here. One is asked for now and then, to measure again.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.cluster.membership import HostedGroup, Machine

SharedName = tuple[str, int, int, str]
"""The name of a batch: part (rank, world and batch size), epoch, number, digest of its samples."""

Route = Literal["here", "ask", "wait"]
"""What to do with a batch: prepare it here, ask its machine for it, or wait for credit."""

TURNS = 64
"""Batches after which the deal of machines with different speeds repeats."""

EQUAL = 1.5
"""Machines whose speeds differ by less than this factor are dealt equally many batches. Speeds are
measured while other programs run, and a new deal may let a few batches be prepared twice."""

MEASURED = 32
"""Batches that are prepared here before the speed of this machine is announced."""

CHANGED = 1.4
"""The announced speed changes when the measured one differs from it by this factor."""

TOTAL_BYTES = 512 << 20
"""Bytes of batches that may be on their way, over all machines. One batch may exceed it."""

FIRST_BATCHES, MOST_BATCHES = 2, 8
"""Batches that a machine may be asked for at the same time: at the start, and at most."""

FIRST_DELAY, LEAST_DELAY, MOST_DELAY = 5.0, 0.25, 10.0
"""Seconds after which a batch is hedged: before a machine has sent one, at least, and at most. The
first is long because the other machine may still be starting its workers."""

QUANTILE, QUANTILE_STEP, MARGIN = 0.95, 0.1, 2.0
"""The share of batches that should arrive before the delay divided by ``MARGIN``, and how fast the
estimate moves."""

LATE = 3
"""Batches in a row that are late before a machine counts as slow."""

PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds until a machine that is lost, slow or behind a slow link is asked again. They double each
time that it is so again."""

FASTER = 0.8
"""A link that was too slow is used again if a batch takes less than this share of the time that
preparing it takes here. Otherwise the choice would change with every measurement."""

FORGETTING = 0.9
"""Weight of earlier transfers in the rate of a link, after each transfer."""


class AskBatch(NamedTuple):
    """Ask this machine for a batch."""

    request: int
    machine: str
    name: SharedName


class PrepareHere(NamedTuple):
    """Prepare this batch here, although another machine was asked for it."""

    name: SharedName


class MachineTurns:
    """Which machine prepares a batch. ``speeds``: samples per second by machine, 0 if not known.

    >>> deal = MachineTurns({"a": 0, "b": 500})
    >>> [deal.owner("0/1 x 8", number) for number in range(4)]
    ['b', 'a', 'b', 'a']
    >>> faster = MachineTurns({"a": 100, "b": 300})
    >>> [faster.owner("0/1 x 8", number) for number in range(8)].count("b")
    6
    """

    def __init__(self, speeds: Mapping[str, int]) -> None:
        self.machines = tuple(sorted(speeds))
        known = [speeds[name] for name in self.machines]
        self._turns: tuple[str, ...] = self.machines
        differ = max(known, default=0) > EQUAL * min(known, default=0) > 0
        if differ and len(known) <= TURNS // 2:
            self._turns = tuple(_in_turns(dict(zip(self.machines, known, strict=True))))

    def owner(self, part: str, number: int) -> str:
        # Not all parts begin with the same machine: it would be busy, and the others idle.
        return self._turns[(number + zlib.crc32(part.encode())) % len(self._turns)]


def _in_turns(speeds: Mapping[str, int]) -> Iterable[str]:
    """``TURNS`` machines in proportion to their speeds, well mixed."""
    credit = dict.fromkeys(speeds, 0)
    total = sum(speeds.values())
    for _ in range(TURNS):
        for name, speed in speeds.items():
            credit[name] += speed
        chosen = max(credit, key=lambda name: (credit[name], name))
        credit[chosen] -= total
        yield chosen


@dataclass(slots=True)
class SpanCounts:
    """Batches since the start.

    - ``prepared``: prepared here, for members here or on other machines. ``received``: from other
      machines. ``sent``: to other machines.
    - ``hedged``: prepared here because another machine was late. ``again``: all that were prepared
      here although another machine was asked: hedged, refused, or the machine was lost.
    - ``late``: received, but prepared here already. ``local``: prepared here because the machine
      that they belong to is lost, slow, or behind a slow link.
    """

    prepared: int = 0
    received: int = 0
    sent: int = 0
    hedged: int = 0
    again: int = 0
    late: int = 0
    local: int = 0


@dataclass(slots=True)
class _AskedBatch:
    machine: str
    name: SharedName
    asked: float
    hedge_at: float
    size: int
    hedged: bool = False
    arriving: bool = False
    useless: bool = False
    """The batch was prepared here meanwhile."""


Trouble = Literal["", "lost", "late", "link"]


@dataclass(slots=True)
class PeerLink:
    """What is known of another machine.

    ``trouble``: why its batches are prepared here: it is lost, its batches are late, or receiving
    them takes longer than preparing them. ``rate``: bytes per second while batches arrive.
    """

    trouble: Trouble = ""
    ask_at: float = 0.0
    pause: float = PAUSE
    requests: int = 0
    in_flight: int = 0
    most: int = FIRST_BATCHES
    rate: float | None = None
    typical: float | None = None
    late: int = 0
    _arriving: int = 0
    _since: float = 0.0
    _busy: float = 0.0
    _nbytes: float = 0.0

    @property
    def delay(self) -> float:
        """Seconds after which a batch is hedged."""
        if self.typical is None:
            return FIRST_DELAY
        return min(max(MARGIN * self.typical, LEAST_DELAY), MOST_DELAY)

    def avoid(self, trouble: Trouble, now: float) -> None:
        """Ask it again after a pause, which is longer each time."""
        self.trouble, self.most, self.late = trouble, 1, 0
        self.ask_at = now + self.pause
        self.pause = min(2.0 * self.pause, LONGEST_PAUSE)

    def trust(self) -> None:
        self.trouble, self.pause, self.late = "", PAUSE, 0

    def measure_again(self) -> None:
        """Forget the rate of the link: only the next batch counts."""
        self._busy = self._nbytes = 0.0

    def begins(self, now: float) -> None:
        """A batch begins to arrive."""
        self._count_time(now)
        self._arriving += 1

    def ends(self, nbytes: int, now: float) -> None:
        """A batch has arrived, or a part of one of which the rest will not come."""
        self._count_time(now)
        self._arriving -= 1
        self._nbytes += nbytes
        if nbytes and self._busy > 0:
            self.rate = self._nbytes / self._busy
        self._busy *= FORGETTING
        self._nbytes *= FORGETTING

    def _count_time(self, now: float) -> None:
        # Batches that arrive at the same time share the link: their time counts once.
        if self._arriving:
            self._busy += now - self._since
        self._since = now

    def in_time(self, seconds: float) -> None:
        """Follow the quantile of the seconds that a batch takes."""
        if self.typical is None:
            self.typical = seconds
        elif seconds > self.typical:
            self.typical = max(self.typical * (1 + QUANTILE_STEP * QUANTILE), 0.5 * seconds)
        else:
            self.typical *= 1 - QUANTILE_STEP * (1 - QUANTILE)
        self.late = 0
        self.most = min(self.most + 1, MOST_BATCHES)

    def too_late(self) -> None:
        self.late += 1
        self.most = max(1, self.most // 2)


@dataclass(slots=True)
class _Speed:
    """How fast this machine prepares batches, with all its workers."""

    batches: int = 0
    seconds: float | None = None
    rows: float = 0.0
    announced: int = 0

    def measured(self, rows: int, seconds: float) -> bool:
        """Returns whether the announced speed has changed."""
        self.batches += 1
        if self.seconds is None:
            self.seconds, self.rows = seconds, float(rows)
        else:
            self.seconds += 0.1 * (seconds - self.seconds)
            self.rows += 0.1 * (rows - self.rows)
        if self.batches < MEASURED or self.seconds <= 0:
            return False
        speed = max(1, min(round(self.rows / self.seconds), (1 << 62)))
        if self.announced and 1 / CHANGED < speed / self.announced < CHANGED:
            return False
        self.announced = speed
        return True


@dataclass
class Spanning:
    """The batches of one group on the machine ``me``. ``total_bytes``: that may be on their way."""

    me: str
    total_bytes: int = TOTAL_BYTES
    counts: SpanCounts = field(default_factory=SpanCounts)
    peers: dict[str, PeerLink] = field(default_factory=dict)
    sendable: bool = True
    """Whether batches can be sent to other machines: not if they need a pickle."""
    _deals: dict[str, MachineTurns] = field(default_factory=dict)
    _incarnations: dict[str, int] = field(default_factory=dict)
    _requests: dict[int, _AskedBatch] = field(default_factory=dict)
    _by_name: dict[SharedName, int] = field(default_factory=dict)
    _waiting: dict[SharedName, float] = field(default_factory=dict)
    _owed: dict[SharedName, None] = field(default_factory=dict)
    """Batches that other machines have asked for: they are prepared here."""
    _last: int = 0
    _size: int = 0
    _speed: _Speed = field(default_factory=_Speed)

    # Queries.

    def owner(self, name: SharedName) -> str:
        """The machine that a batch belongs to."""
        deal = self._deals.get(name[0])
        # A batch with a negative number fits no batch of the others: see ``RecutFeed``.
        return self.me if deal is None or name[2] < 0 else deal.owner(name[0], name[2])

    def hosts(self, part: str) -> tuple[str, ...]:
        """The machines with members of this part, this one included."""
        deal = self._deals.get(part)
        return (self.me,) if deal is None else deal.machines

    def route(self, name: SharedName, now: float) -> Route:
        """What to do with a batch that members here want."""
        if name in self._owed or name in self._by_name or not self.sendable:
            return "here"
        owner = self.owner(name)
        if owner == self.me:
            return "here"
        peer = self._peer(owner)
        if peer.trouble:
            return "here" if now < peer.ask_at or peer.requests else "ask"
        in_flight = sum(other.in_flight for other in self.peers.values())
        fits = not in_flight or in_flight + self._size <= self.total_bytes
        if fits and peer.requests < peer.most:
            return "ask"
        if peer.late:
            return "here"
        since = self._waiting.setdefault(name, now)
        return "wait" if now - since < peer.delay else "here"

    @property
    def in_flight(self) -> int:
        """Bytes of batches that may be on their way."""
        return sum(peer.in_flight for peer in self.peers.values())

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    @property
    def speed(self) -> int:
        """Samples per second that this machine announces; 0 before it has measured them."""
        return self._speed.announced

    @property
    def preparing_seconds(self) -> float | None:
        """Seconds that a batch takes here, with all workers; ``None`` if not known."""
        return self._speed.seconds

    def receiving_seconds(self, machine: str) -> float | None:
        """Seconds that a batch takes over the link to this machine; ``None`` if not known."""
        peer = self.peers.get(machine)
        return None if peer is None or not peer.rate or not self._size else self._size / peer.rate

    def is_asked(self, name: SharedName) -> bool:
        """Whether another machine was asked for this batch and has not answered."""
        return name in self._by_name

    # The machines of the group.

    def placed(
        self, hosts: Mapping[str, Mapping[str, int]], machines: Iterable[Machine], now: float
    ) -> list[PrepareHere]:
        """The machines of the group have changed. ``hosts``: see ``hosts_of``.

        ``machines``: all of the cluster.
        """
        self._deals = {part: MachineTurns({self.me: 0, **speeds}) for part, speeds in hosts.items()}
        incarnations = {machine.name: machine.incarnation for machine in machines}
        present = {name for speeds in hosts.values() for name in speeds} - {self.me}
        gone = [name for name in self.peers if name not in present]
        decisions: list[PrepareHere] = []
        for name in {*gone, *self._restarted(incarnations)}:
            decisions += self._give_up(name, now)
            self.peers.pop(name, None)
        self._incarnations = {name: incarnations.get(name, 0) for name in present}
        return decisions

    def _restarted(self, incarnations: Mapping[str, int]) -> list[str]:
        return [
            name
            for name, incarnation in self._incarnations.items()
            if name in incarnations and incarnations[name] != incarnation
        ]

    def lost(self, machine: str, now: float) -> list[PrepareHere]:
        """A connection was reset: its batches are prepared here until it answers again."""
        self._peer(machine).avoid("lost", now)
        return self._give_up(machine, now)

    def _give_up(self, machine: str, now: float) -> list[PrepareHere]:
        decisions: list[PrepareHere] = []
        for request, asked in list(self._requests.items()):
            if asked.machine == machine:
                decisions += self._unanswered(request, asked, now)
        return decisions

    # Asking.

    def ask(self, name: SharedName, now: float) -> AskBatch:
        """Ask for a batch whose ``route`` is ``"ask"``. Report what comes of it."""
        machine = self.owner(name)
        peer = self._peer(machine)
        if peer.trouble:
            peer.measure_again()
            # If it does not answer, the next attempt is later.
            peer.ask_at = now + peer.pause
            peer.pause = min(2.0 * peer.pause, LONGEST_PAUSE)
        self._waiting.pop(name, None)
        self._last += 1
        self._requests[self._last] = _AskedBatch(machine, name, now, now + peer.delay, self._size)
        self._by_name[name] = self._last
        peer.requests += 1
        peer.in_flight += self._size
        return AskBatch(self._last, machine, name)

    def arriving(self, request: int, nbytes: int, now: float) -> bool:
        """The head of a batch has arrived; ``nbytes`` will follow. Returns whether it is needed."""
        asked = self._requests.get(request)
        if asked is None or asked.useless:
            return False
        peer = self._peer(asked.machine)
        peer.in_flight += nbytes - asked.size
        asked.size, asked.arriving = nbytes, True
        self._size = max(self._size, nbytes)
        peer.begins(now)
        return True

    def arrived(self, request: int, now: float) -> bool:
        """All of a batch is here. Returns whether it is the first: use it, or drop it."""
        asked = self._end(request)
        if asked is None:
            self.counts.late += 1
            return False
        peer = self._peer(asked.machine)
        if asked.arriving:
            peer.ends(asked.size, now)
        if not asked.hedged:
            peer.in_time(now - asked.asked)
        self._judge(asked.machine, peer, now)
        if asked.useless:
            self.counts.late += 1
            return False
        self.counts.received += 1
        return True

    def _judge(self, machine: str, peer: PeerLink, now: float) -> None:
        """Compare the link with the workers here, after a batch has arrived."""
        here, there = self.preparing_seconds, self.receiving_seconds(machine)
        limit = FASTER if peer.trouble == "link" else 1.0
        if here is None or there is None or there <= limit * here:
            peer.trust()
        elif peer.trouble != "link":
            peer.avoid("link", now)

    def unanswered(self, request: int, now: float) -> list[PrepareHere]:
        """A machine has refused to send a batch, or a request has failed."""
        asked = self._requests.get(request)
        return [] if asked is None else self._unanswered(request, asked, now)

    def _unanswered(self, request: int, asked: _AskedBatch, now: float) -> list[PrepareHere]:
        self._end(request)
        if asked.arriving:
            self._peer(asked.machine).ends(0, now)
        if asked.useless or asked.hedged:
            return []
        self.counts.again += 1
        peer = self._peer(asked.machine)
        peer.too_late()
        self._avoid_late(peer, now)
        return [PrepareHere(asked.name)]

    def _avoid_late(self, peer: PeerLink, now: float) -> None:
        if peer.late >= LATE and not peer.trouble:
            peer.avoid("late", now)

    def unsendable(self) -> None:
        """Batches of this group cannot be sent: all are prepared where they are needed."""
        self.sendable = False

    def tick(self, now: float) -> list[PrepareHere]:
        """Time has passed: hedge the batches that are late."""
        decisions: list[PrepareHere] = []
        for asked in self._requests.values():
            if asked.hedged or asked.useless or now < asked.hedge_at:
                continue
            asked.hedged = True
            self.counts.hedged += 1
            self.counts.again += 1
            peer = self._peer(asked.machine)
            peer.too_late()
            self._avoid_late(peer, now)
            decisions.append(PrepareHere(asked.name))
        return decisions

    # Preparing.

    def prepared(self, name: SharedName, rows: int, nbytes: int, seconds: float) -> bool:
        """A batch was prepared here. ``seconds``: that it takes with all workers of the machine.

        Returns whether the announced speed has changed.
        """
        self.counts.prepared += 1
        self._size = max(self._size, nbytes)
        self._owed.pop(name, None)
        self._waiting.pop(name, None)
        request = self._by_name.get(name)
        if request is not None:
            self._requests[request].useless = True
        elif self.owner(name) != self.me:
            self.counts.local += 1
        return self._speed.measured(rows, seconds)

    def ended(self, name: SharedName) -> None:
        """A batch could not be prepared here, or nobody wants it any more."""
        self._owed.pop(name, None)
        self._waiting.pop(name, None)
        request = self._by_name.get(name)
        if request is not None:
            self._requests[request].useless = True

    # What other machines ask.

    def asked_by(
        self, machine: str, name: SharedName, now: float
    ) -> tuple[bool, list[PrepareHere]]:
        """Another machine asks for a batch. Returns whether this machine prepares or has it.

        Two machines that ask each other for the same batch disagree on the deal: the one whose name
        comes first prepares it.
        """
        request = self._by_name.get(name)
        decisions: list[PrepareHere] = []
        if request is not None:
            asked = self._requests[request]
            if asked.machine != machine or asked.hedged or asked.useless:
                # It is on its way from a third machine, or is being prepared here.
                return True, []
            if machine < self.me:
                return False, []
            decisions = self._unanswered(request, asked, now)
        self._owed[name] = None
        return True, decisions

    # Requests.

    def _peer(self, name: str) -> PeerLink:
        return self.peers.setdefault(name, PeerLink())

    def _end(self, request: int) -> _AskedBatch | None:
        asked = self._requests.pop(request, None)
        if asked is not None:
            if self._by_name.get(asked.name) == request:
                del self._by_name[asked.name]
            peer = self._peer(asked.machine)
            peer.requests -= 1
            peer.in_flight -= asked.size
        return asked


def hosts_of(
    hosted: HostedGroup, machines: Iterable[Machine], me: str
) -> dict[str, dict[str, int]]:
    """By part of this group: the speeds of the machines that have members of it, as the view has
    them. Parts that only this machine has are left out."""
    found: dict[str, dict[str, int]] = {part: {} for part in hosted.parts}
    for machine in machines:
        for other in machine.groups:
            for part in other.parts if other[:2] == hosted[:2] else ():
                if part in found:
                    found[part][machine.name] = other.speed
    return {part: speeds for part, speeds in found.items() if speeds.keys() - {me}}


def apart(hosted: HostedGroup, machines: Iterable[Machine], me: str) -> list[str]:
    """Machines with a group of the same name that prepares something else."""
    return sorted(
        machine.name
        for machine in machines
        if machine.name != me
        and any(
            other.name == hosted.name and other.content != hosted.content
            for other in machine.groups
        )
    )


def announced_unit(name: str, content: str, machines: Iterable[Machine], me: str) -> int | None:
    """Samples in a batch of this group on other machines; ``None`` if no other has the group."""
    units: Sequence[tuple[str, int]] = [
        (machine.name, other.unit)
        for machine in machines
        if machine.name != me
        for other in machine.groups
        if (other.name, other.content) == (name, content)
    ]
    return min(units)[1] if units else None


def seconds_with(workers: int, busy: float) -> float:
    """Seconds of a batch that keeps one worker busy for ``busy`` seconds, with all workers."""
    return max(busy, 1e-9) / max(1, workers) if math.isfinite(busy) else 1e-9
