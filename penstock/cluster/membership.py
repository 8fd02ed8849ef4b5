"""Decides which machines belong to the cluster: heartbeats, views, suspicion, the head.

Pure: events and the time in, decisions out. Every machine has one ``ClusterMembership``. The
*head*, one of the seeds, makes a numbered *view*, the list of machines; the others send it a
heartbeat every second, and get what has changed as the answer. So control messages grow with the
number of machines, not with its square.

A view is advice. Samples are named by what made them, so a machine with an outdated view reads from
storage what it could have had from another machine, and nothing worse. This is why two heads may
exist for a while (the network is cut in two), and why no agreement protocol is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from penstock.config import cluster_patience

BEAT = 1.0
"""Seconds between two heartbeats of a machine."""

LIMIT = 3.0 * cluster_patience()
"""Seconds of silence after which the head removes a machine, and a machine looks for a new head."""

GATHER = 0.25
"""Seconds in which the head gathers changes for one new view. The machines of a job start at about
the same time; without it 1,000 of them would cause 1,000 views."""

LOG = 64
"""Views whose changes the head remembers. A machine with an older view is sent the whole list."""

FLAPPING, LONGEST_HOLD = 60.0, 30.0
"""A machine that was removed more than once in ``FLAPPING`` seconds stays outside for ``LIMIT``
seconds, doubled with every removal, up to ``LONGEST_HOLD``: its keys must not move all the time."""

LONGEST_PAUSE = 30.0
"""Most seconds between two probes of a machine that does not answer; the pause doubles from
``BEAT``."""

Role = Literal["trains", "helps"]


class HostedGroup(NamedTuple):
    """A group (``share=``) that has members on a machine.

    ``name``, ``content``: digests of its name and of what it prepares. ``unit``: samples in its
    batches. ``speed``: samples per second that the machine prepares, 0 if not known. ``parts``: the
    ranks and batch sizes of its members.
    """

    name: str
    content: str
    unit: int
    speed: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster, as its node describes itself.

    - ``name`` stays the same when the node restarts; ``incarnation`` grows with every start (the
      time of the start in nanoseconds). A machine with a new incarnation has an empty cache.
    - ``cache_bytes``: room for samples; it is the machine's weight in placement.
    - ``version``: of the protocol. Machines of another version are not admitted.
    - ``role``: ``"helps"`` for machines without training processes of their own.
    - ``ranks``: of each cache, the ranks that train on this machine: (content, digest, ranks). The
      digest says how the samples are dealt to ranks in the first epoch.
    - ``groups``: the groups that have members on this machine.
    """

    name: str
    address: str
    incarnation: int
    cores: int = 0
    cache_bytes: int = 0
    version: int = 1
    role: Role = "trains"
    ranks: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    groups: tuple[HostedGroup, ...] = ()


class Stamp(NamedTuple):
    """The number of a view. The larger stamp is newer, and no two views have the same one.

    Seed number p of s uses only terms with ``term % s == p``, so that two heads never use the same
    term. ``incarnation`` is that of the head: after a restart it may use its old term again.
    """

    term: int
    incarnation: int
    version: int


NEVER = Stamp(-1, 0, 0)
"""Older than every view of a head."""


@dataclass(frozen=True)
class ClusterView:
    """The machines of the cluster, sorted by name, as the head with this address listed them."""

    stamp: Stamp
    head: str
    machines: tuple[Machine, ...]

    @cached_property
    def named(self) -> Mapping[str, Machine]:
        """The machines by name. The head looks one up with every heartbeat."""
        return {machine.name: machine for machine in self.machines}


@dataclass(frozen=True, slots=True)
class ViewUpdate:
    """A new view, or the difference from an older one.

    - ``since``: the stamp of the older view; ``None`` if ``machines`` is the whole list.
    - ``machines``: all machines, or those that are new or changed. ``gone``: names of those that
      are no longer in the view.
    """

    stamp: Stamp
    head: str
    since: Stamp | None
    machines: tuple[Machine, ...]
    gone: tuple[str, ...] = ()

    def apply(self, view: ClusterView) -> ClusterView | None:
        """The new view; ``None`` if this is the difference from another view than ``view``."""
        if self.since is None:
            named: dict[str, Machine] = {}
        elif self.since == view.stamp:
            named = dict(view.named)
        else:
            return None
        named.update((machine.name, machine) for machine in self.machines)
        for name in self.gone:
            named.pop(name, None)
        return ClusterView(self.stamp, self.head, _sorted(named.values()))


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The current state of a machine, for status pages and for the choice of remote workers."""

    free_bytes: int = 0
    idle_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a machine tells the head every second, and seeds while it looks for a head.

    - ``stamp``: of the sender's view. ``head``: address of the head that the sender follows, its
      own if it is the head, empty if it follows nobody. ``size``: machines in its view.
    - ``suspects``: (name, incarnation) of machines that did not answer the sender.
    - ``leaving``: the sender ends; it is removed at once.
    """

    sender: Machine
    stamp: Stamp
    head: str
    size: int
    load: MachineLoad = MachineLoad()
    suspects: tuple[tuple[str, int], ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The answer to a heartbeat; the fields mean the same as there.

    ``update``: what the sender of the heartbeat lacks. Only heads send it.
    """

    sender: Machine
    stamp: Stamp
    head: str
    size: int
    update: ViewUpdate | None = None


class Beat(NamedTuple):
    """Send this heartbeat. Report the result with ``answered`` or ``unanswered``."""

    address: str
    heartbeat: Heartbeat


class Probe(NamedTuple):
    """Ask this machine whether it is alive. Report the result with ``probed``."""

    machine: Machine


class Installed(NamedTuple):
    """This machine has a new view."""

    view: ClusterView


MemberDecision = Beat | Probe | Installed


@dataclass(slots=True)
class _Suspect:
    incarnation: int
    probe_at: float
    pause: float = BEAT


@dataclass(slots=True)
class _Headship:
    """What only a head knows.

    - ``seen``: when each machine was last heard of. ``loads``: their latest loads.
    - ``joining``, ``going``: changes for the next view, which is made at ``issue_at``.
    - ``log``: for each of the last views, the names that it changed.
    - ``removals``: how often each machine was removed lately, and when last.
    """

    seen: dict[str, float]
    loads: dict[str, MachineLoad] = field(default_factory=dict)
    joining: dict[str, Machine] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)
    issue_at: float | None = None
    log: dict[int, set[str]] = field(default_factory=dict)
    removals: dict[str, tuple[int, float]] = field(default_factory=dict)


class ClusterMembership:
    """The membership of one machine. ``seeds``: addresses of the machines that may be head, the
    same list in the same order on every machine; three to seven are enough.

    >>> a, b = Machine("a", "a:1", incarnation=1), Machine("b", "b:1", incarnation=1)
    >>> first, second = (ClusterMembership(machine, ["a:1"], now=0.0) for machine in (a, b))
    >>> first.tick(0.0)[-1].view.stamp
    Stamp(term=0, incarnation=1, version=1)
    >>> [beat] = second.tick(0.0)
    >>> answer, _ = first.heartbeat(beat.heartbeat, 0.1)
    >>> [installed] = first.tick(0.1 + GATHER)
    >>> [machine.name for machine in installed.view.machines]
    ['a', 'b']
    """

    def __init__(self, me: Machine, seeds: Iterable[str], now: float) -> None:
        self.me = me
        self.seeds = tuple(seeds)
        self.view = ClusterView(NEVER, "", (me,))
        self.load = MachineLoad()
        self._highest = -1
        """The highest term that this machine has heard of."""
        self._following = ""
        self._heard = now
        """When a head last answered."""
        self._missed = 0
        """Heartbeats in a row that the head has not answered."""
        self._hints = 0
        """Heads that others have named, and that were tried, since a head last answered."""
        self._next_beat = now
        self._searching_since = now
        self._silent_head = ""
        self._silent_seeds: set[str] = set()
        self._headless_seeds: set[str] = set()
        self._suspects: dict[str, _Suspect] = {}
        self._headship: _Headship | None = None

    # Queries.

    @property
    def is_head(self) -> bool:
        return self._headship is not None

    @property
    def head(self) -> str:
        """Address of the head that this machine follows; empty while it looks for one."""
        return self._following

    @property
    def suspects(self) -> frozenset[str]:
        """Machines of the view that did not answer this machine. They are not to be asked."""
        return frozenset(self._suspects)

    @property
    def loads(self) -> dict[str, MachineLoad]:
        """The latest load of each machine. Only the head knows them."""
        return {} if self._headship is None else dict(self._headship.loads)

    # Events.

    def heartbeat(
        self, beat: Heartbeat, now: float
    ) -> tuple[HeartbeatAnswer, list[MemberDecision]]:
        """Another machine has sent a heartbeat."""
        self._highest = max(self._highest, beat.stamp.term)
        self.heard(beat.sender.name, beat.sender.incarnation)
        decisions: list[MemberDecision] = []
        claims = beat.head == beat.sender.address
        if claims and not self._wins(beat.size, beat.stamp):
            self._follow(beat.sender.address, now)
        if beat.leaving and beat.sender.address == self._following:
            self._search(now)
        headship = self._headship
        if headship is None:
            return self._answer(None), decisions
        if not claims and beat.sender.version == self.me.version:
            self._report_in(headship, beat, now)
            for name, incarnation in beat.suspects:
                decisions += self._doubt(name, incarnation, now)
        # A newer view than ours comes from a head that is gone, or that yields to this one.
        if beat.stamp.term > self.view.stamp.term:
            decisions += self._begin_term(self.view.machines)
        return self._answer(self._update_since(beat.stamp)), decisions

    def answered(self, address: str, answer: HeartbeatAnswer, now: float) -> list[MemberDecision]:
        """The machine at ``address`` has answered a heartbeat."""
        self._highest = max(self._highest, answer.stamp.term)
        self._silent_seeds.discard(address)
        self.heard(answer.sender.name, answer.sender.incarnation)
        if answer.head != address:
            self._hinted(address, answer.head, now)
            return []
        self._headless_seeds.discard(address)
        if self._headship is not None:
            if self._wins(answer.size, answer.stamp):
                newer = answer.stamp.term > self.view.stamp.term
                return self._begin_term(self.view.machines) if newer else []
            self._follow(address, now)
        elif self._following not in ("", address):
            return []  # The two heads settle it between them.
        self._following = address
        self._heard, self._missed, self._hints, self._silent_head = now, 0, 0, ""
        return self._install(answer.update)

    def unanswered(self, address: str, now: float) -> list[MemberDecision]:
        """A heartbeat was refused, its connection was reset, or its deadline has passed."""
        if address in self.seeds:
            self._silent_seeds.add(address)
            self._headless_seeds.discard(address)
        if address == self._following and not self.is_head:
            self._missed += 1
            # A reset connection may be an accident; two in a row mean that nobody is there.
            if self._missed >= 2:
                self._search(now)
            self._next_beat = now
        return []

    def lost(self, name: str, now: float) -> list[MemberDecision]:
        """A connection to this machine was reset, or a request to it has timed out."""
        machine = self.view.named.get(name)
        if machine is None or name == self.me.name or name in self._suspects:
            return []
        self._suspects[name] = _Suspect(machine.incarnation, now + BEAT)
        # The next heartbeat reports it; a head probes it itself.
        self._next_beat = now
        return self._doubt(name, machine.incarnation, now)

    def heard(self, name: str, incarnation: int) -> None:
        """This machine has answered, or has asked something: it is alive."""
        suspect = self._suspects.get(name)
        if suspect is not None and incarnation >= suspect.incarnation:
            del self._suspects[name]

    def probed(self, machine: Machine, alive: bool, now: float) -> list[MemberDecision]:
        """The result of a ``Probe``. A head removes a machine that does not answer."""
        if alive:
            self.heard(machine.name, machine.incarnation)
            return []
        known = self.view.named.get(machine.name)
        if self._headship is not None and known == machine and machine != self.me:
            self._remove(self._headship, machine.name, now)
        return []

    def change(self, me: Machine, now: float) -> None:
        """This machine describes itself anew: its room has changed, or the ranks that it trains."""
        if me == self.me:
            return
        self.me = me
        self._next_beat = now
        headship = self._headship
        if headship is not None:
            headship.joining[me.name] = me
            self._issue_soon(headship, now)

    def reseed(self, seeds: Iterable[str], now: float) -> None:
        """Other machines may be head from now on. A head that is not among them steps down.

        Machines that get the new list later may follow another head for a while, as when a network
        is cut in two. Stamps stay unique: they have the incarnation of their head.
        """
        self.seeds = tuple(seeds)
        self._silent_seeds.intersection_update(self.seeds)
        self._headless_seeds.intersection_update(self.seeds)
        if self._headship is not None and self.me.address not in self.seeds:
            self._headship = None
            self._search(now)
        self._next_beat = now

    def leave(self, now: float) -> list[MemberDecision]:
        """This node ends. The others need not wait for the limit."""
        targets = [self._following] if self._following and not self.is_head else self._other_seeds()
        self._headship = None
        beat = self._heartbeat(leaving=True)
        return [Beat(address, beat) for address in targets]

    def tick(self, now: float) -> list[MemberDecision]:
        """Time has passed. Call it several times a second."""
        decisions: list[MemberDecision] = []
        if not self.is_head and self._following and now - self._heard > LIMIT:
            self._search(now)
        if not self.is_head and not self._following and self._may_take_over(now):
            decisions += self._take_over(now)
        if self._headship is not None:
            decisions += self._preside(self._headship, now)
        for name, suspect in self._suspects.items():
            if now >= suspect.probe_at:
                suspect.pause = min(2 * suspect.pause, LONGEST_PAUSE)
                suspect.probe_at = now + suspect.pause
                decisions.append(Probe(self.view.named[name]))
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            # A head greets the other seeds: that is how two heads meet when a cut network heals.
            following = self._following and not self.is_head
            targets = [self._following] if following else self._other_seeds()
            beat = self._heartbeat()
            decisions += [Beat(address, beat) for address in targets]
        return decisions

    # Following a head.

    def _other_seeds(self) -> list[str]:
        return [address for address in self.seeds if address != self.me.address]

    def _follow(self, address: str, now: float) -> None:
        """Follow this head, unless another one is alive; a machine that is head steps down."""
        settled = self._following and now - self._heard <= LIMIT
        if self._headship is None and (settled or self._following == address):
            return
        self._headship = None
        self._following = address
        self._heard, self._missed, self._next_beat = now, 0, now

    def _hinted(self, address: str, head: str, now: float) -> None:
        """A machine that is not a head has named the head that it follows, or none."""
        if self._headship is not None:
            return
        if address in self.seeds:
            self._headless_seeds.add(address)
        if self._following not in ("", address):
            return
        # Two machines that name each other must not keep this one waiting, so hints are counted.
        useful = head not in ("", self._silent_head, self.me.address, address)
        if useful and self._hints < len(self.seeds):
            self._hints += 1
            self._following = head
            self._heard, self._missed, self._next_beat = now + BEAT - LIMIT, 0, now
        elif self._following:
            self._following = ""
            self._begin_search(now)

    def _search(self, now: float) -> None:
        self._silent_head, self._following = self._following, ""
        self._begin_search(now)

    def _begin_search(self, now: float) -> None:
        self._searching_since = now
        self._next_beat = min(self._next_beat, now)
        self._silent_seeds.clear()
        self._headless_seeds.clear()
        if self._silent_head in self.seeds:
            self._silent_seeds.add(self._silent_head)

    def _may_take_over(self, now: float) -> bool:
        """Whether this machine is the first seed that is alive, as far as it can know.

        It waits for every other seed to answer or to fail, but not for ever.
        """
        if self.me.address not in self.seeds:
            return False
        place = self.seeds.index(self.me.address)
        if now - self._searching_since > LIMIT * (1 + place):
            return True
        earlier = set(self.seeds[:place])
        later = set(self.seeds[place + 1 :])
        return earlier <= self._silent_seeds and later <= (
            self._silent_seeds | self._headless_seeds
        )

    def _wins(self, size: int, stamp: Stamp) -> bool:
        """Whether this machine stays head beside another one with such a view.

        The larger cluster keeps its head: a machine with a bad link, which was alone for a while,
        must not take over the others each time that it comes back.
        """
        return self.is_head and (len(self.view.machines), self.view.stamp) > (size, stamp)

    # Being the head.

    def _take_over(self, now: float) -> list[MemberDecision]:
        self._following = self.me.address
        self._hints = 0
        # Machines of the old view have the usual time to report; their keys do not move meanwhile.
        known = [
            machine
            for machine in self.view.machines
            if machine.name != self.me.name and machine.address != self._silent_head
        ]
        self._silent_head = ""
        self._headship = _Headship({machine.name: now for machine in known})
        return self._begin_term((*known, self.me))

    def _begin_term(self, machines: Iterable[Machine]) -> list[MemberDecision]:
        """Make the first view of a term that is above all terms heard of."""
        seeds, place = len(self.seeds), self.seeds.index(self.me.address)
        term = self._highest + 1
        term += (place - term) % seeds
        self._highest = term
        headship = self._headship
        assert headship is not None
        headship.log.clear()
        stamp = Stamp(term, self.me.incarnation, 1)
        return self._set_view(ClusterView(stamp, self.me.address, _sorted(machines)))

    def _report_in(self, headship: _Headship, beat: Heartbeat, now: float) -> None:
        """A machine has reported to this head."""
        sender = beat.sender
        known = self.view.named.get(sender.name)
        if beat.leaving:
            if known is not None and known.incarnation <= sender.incarnation:
                headship.going.add(sender.name)
                headship.joining.pop(sender.name, None)
                self._issue_soon(headship, now)
            return
        if known is not None and sender.incarnation < known.incarnation:
            return  # A message of the machine's previous life.
        headship.loads[sender.name] = beat.load
        if known == sender and sender.name not in headship.going:
            headship.seen[sender.name] = now
        elif known is not None or now >= self._held_until(headship, sender.name):
            headship.joining[sender.name] = sender
            headship.going.discard(sender.name)
            headship.seen[sender.name] = now
            self._issue_soon(headship, now)

    def _held_until(self, headship: _Headship, name: str) -> float:
        """When a machine that was removed may come back."""
        count, last = headship.removals.get(name, (0, 0.0))
        if count < 2:
            return last
        return last + min(LIMIT * 2.0 ** (count - 2), LONGEST_HOLD)

    def _remove(self, headship: _Headship, name: str, now: float) -> None:
        if name in headship.going:
            return
        headship.joining.pop(name, None)
        headship.going.add(name)
        count, last = headship.removals.get(name, (0, now))
        headship.removals[name] = (count + 1 if now - last <= FLAPPING else 1, now)
        self._issue_soon(headship, now)

    def _issue_soon(self, headship: _Headship, now: float) -> None:
        if headship.issue_at is None:
            headship.issue_at = now + GATHER

    def _doubt(self, name: str, incarnation: int, now: float) -> list[MemberDecision]:
        """A machine is reported as silent. The head asks it before it removes it."""
        machine = self.view.named.get(name)
        if self._headship is None or machine is None or machine.incarnation != incarnation:
            return []
        return [] if name in (self.me.name, *self._headship.going) else [Probe(machine)]

    def _preside(self, headship: _Headship, now: float) -> list[MemberDecision]:
        for name, seen in list(headship.seen.items()):
            if now - seen > LIMIT:
                del headship.seen[name]
                self._remove(headship, name, now)
        if headship.issue_at is None or now < headship.issue_at:
            return []
        headship.issue_at = None
        before = self.view.named
        named = dict(before)
        for name in headship.going:
            named.pop(name, None)
            headship.seen.pop(name, None)
            headship.loads.pop(name, None)
        named.update(headship.joining)
        changed = headship.going | headship.joining.keys()
        headship.going, headship.joining = set(), {}
        if named == before:
            return []
        stamp = self.view.stamp._replace(version=self.view.stamp.version + 1)
        headship.log[stamp.version] = changed
        headship.log.pop(stamp.version - LOG, None)
        return self._set_view(ClusterView(stamp, self.me.address, _sorted(named.values())))

    def _update_since(self, stamp: Stamp) -> ViewUpdate | None:
        """What a machine with the view of this stamp lacks."""
        view, headship = self.view, self._headship
        assert headship is not None
        if stamp == view.stamp:
            return None
        missing = range(stamp.version + 1, view.stamp.version + 1)
        same_term = stamp[:2] == view.stamp[:2]
        if not same_term or not missing or any(number not in headship.log for number in missing):
            return ViewUpdate(view.stamp, view.head, None, view.machines)
        names = set().union(*(headship.log[number] for number in missing))
        named = view.named
        changed = tuple(named[name] for name in sorted(names & named.keys()))
        return ViewUpdate(
            view.stamp, view.head, stamp, changed, tuple(sorted(names - named.keys()))
        )

    # Messages and views.

    def _heartbeat(self, *, leaving: bool = False) -> Heartbeat:
        suspects = tuple((name, found.incarnation) for name, found in self._suspects.items())
        size = len(self.view.machines)
        following = "" if leaving else self._following
        return Heartbeat(self.me, self.view.stamp, following, size, self.load, suspects, leaving)

    def _answer(self, update: ViewUpdate | None) -> HeartbeatAnswer:
        size = len(self.view.machines)
        return HeartbeatAnswer(self.me, self.view.stamp, self._following, size, update)

    def _install(self, update: ViewUpdate | None) -> list[MemberDecision]:
        if update is None or update.stamp <= self.view.stamp:
            return []
        view = update.apply(self.view)
        return [] if view is None else self._set_view(view)

    def _set_view(self, view: ClusterView) -> list[MemberDecision]:
        self.view = view
        self._highest = max(self._highest, view.stamp.term)
        named = view.named
        # A restarted machine is not the one that failed to answer.
        for name, suspect in list(self._suspects.items()):
            if name not in named or named[name].incarnation != suspect.incarnation:
                del self._suspects[name]
        return [Installed(view)]


def _sorted(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    return tuple(sorted(machines, key=lambda machine: machine.name))
