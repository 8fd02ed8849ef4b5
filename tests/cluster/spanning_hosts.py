"""Simulated machines with jobs of one group: each runs ``GroupState`` and ``Spanning``.

Messages, transfers and preparations take time of the clock only. The glue between the two is that
of ``node/span.py`` and ``node/group.py``, without threads.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from penstock.cluster.membership import HostedGroup, Machine
from penstock.cluster.spanning import PrepareHere, Spanning, hosts_of
from penstock.node.state import BatchName, Decision, Drop, Give, GroupState

PART, SIZE, ROWS, DEPTH = "0/1 x 8", 1000, 8, 4
STEP = 0.01


@dataclass
class Job:
    """A job: takes all batches of each epoch in order."""

    length: int
    epochs: int
    step: float
    epoch: int = 0
    asked: int = 0
    untaken: list[BatchName] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)
    busy: bool = False

    @property
    def ended(self) -> bool:
        return len(self.taken) == self.length * self.epochs


@dataclass
class Host:
    """A machine: its group, its workers, and the requests of other machines that wait there."""

    name: str
    incarnation: int
    cost: float
    workers: int
    state: GroupState
    spanning: Spanning
    jobs: dict[int, Job] = field(default_factory=dict)
    again: list[BatchName] = field(default_factory=list)
    preparing: int = 0
    remote: dict[str, int] = field(default_factory=dict)
    waiting: dict[tuple[int, BatchName], list[tuple[str, int]]] = field(default_factory=dict)
    running: bool = True


class SpanningHosts:
    """Machines with jobs, on one clock. ``bandwidth``: bytes per second of each link;
    ``latency``: seconds of a message."""

    def __init__(
        self,
        costs: list[float],
        *,
        jobs: int = 1,
        length: int = 20,
        epochs: int = 2,
        steps: list[float] | None = None,
        workers: int = 1,
        bandwidth: float = 1e8,
        latency: float = 0.0005,
        budget: int = 100 * SIZE,
        silent: frozenset[str] = frozenset(),
        total_bytes: int = 1 << 29,
    ) -> None:
        self.now = 0.0
        self.length, self.epochs = length, epochs
        self.bandwidth, self.latency, self.budget = bandwidth, latency, budget
        self.total_bytes = total_bytes
        self.prepared: Counter[tuple[int, int]] = Counter()
        self.most_in_flight = 0
        self.silent = silent
        """Machines that receive requests and never answer."""
        self.hosts: dict[str, Host] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._incarnations = count(), count(1)
        for number, cost in enumerate(costs):
            step = STEP if steps is None else steps[number]
            host = self.add(f"m{number}", cost, workers)
            for member in range(1, jobs + 1):
                host.jobs[member] = Job(length, epochs, step)
        self.install()
        for host in self.hosts.values():
            self.begin(host)

    # Machines.

    def add(self, name: str, cost: float, workers: int = 1) -> Host:
        spanning = Spanning(name, total_bytes=self.total_bytes)
        host = Host(
            name, next(self._incarnations), cost, workers, GroupState(self.budget), spanning
        )
        self.hosts[name] = host
        return host

    def begin(self, host: Host) -> None:
        for member, job in host.jobs.items():
            host.state.join(member, PART, "detach", self.now)
            if not job.ended:
                self._begin_epoch(host, member, job)

    def _begin_epoch(self, host: Host, member: int, job: Job) -> None:
        job.epoch, done = divmod(len(job.taken), self.length)
        job.asked = done
        _, decisions = host.state.begin(member, job.epoch, self.length, 0, done, self.now)
        self._carry_out(host, decisions)
        self._want(host, member, job)

    def install(self) -> None:
        """All machines learn of a new view at once."""
        machines = [
            Machine(
                host.name,
                f"{host.name}:1",
                host.incarnation,
                groups=(HostedGroup("n", "c", ROWS, host.spanning.speed, (PART,)),),
            )
            for host in self.hosts.values()
            if host.running
        ]
        for host in self.running:
            [mine] = [one.groups[0] for one in machines if one.name == host.name]
            hosts = hosts_of(mine, machines, host.name)
            self._here(host, host.spanning.placed(hosts, machines, self.now))
            self._pump(host)

    @property
    def running(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.running]

    def kill(self, name: str, *, notice: float = 1.0) -> None:
        """The node dies. Its jobs start another one; the others notice the loss."""
        dead = self.hosts[name]
        dead.running = False
        for host in self.running:
            self._after(0.001, host, partial(self._lost, host, name))
        self._at(self.now + notice, self.install)

    def restart(self, name: str) -> None:
        dead = self.hosts[name]
        host = self.add(name, dead.cost, dead.workers)
        host.jobs = dead.jobs
        for job in host.jobs.values():
            job.untaken, job.busy = [], False
        self.begin(host)
        self._at(self.now + 0.3, self.install)

    def _lost(self, host: Host, name: str) -> None:
        self._here(host, host.spanning.lost(name, self.now))
        self._pump(host)

    # Running.

    def run(self, limit: float = 1e4) -> None:
        """Run until all jobs have ended."""
        for host in self.running:
            self._pump(host)
        self._at(self.now + 0.02, self._tick)
        while self._events and not self.ended:
            at, _, event = heapq.heappop(self._events)
            self.now = max(self.now, at)
            assert self.now < limit, "the jobs do not end"
            event()
        assert self.ended

    @property
    def ended(self) -> bool:
        return all(job.ended for host in self.hosts.values() for job in host.jobs.values())

    def _tick(self) -> None:
        for host in self.running:
            self._here(host, host.spanning.tick(self.now))
            self._carry_out(host, host.state.tick(self.now))
            self._pump(host)
        self._at(self.now + 0.02, self._tick)

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _after(self, seconds: float, host: Host, event: Callable[[], None]) -> None:
        """An event on this machine, unless it has died by then."""

        def happen() -> None:
            if host.running:
                event()

        self._at(self.now + seconds, happen)

    def _here(self, host: Host, decisions: list[PrepareHere]) -> None:
        host.again += [BatchName(*decision.name) for decision in decisions]

    # One machine.

    def _pump(self, host: Host) -> None:
        """Ask other machines, and let idle workers begin."""
        now, state, spanning = self.now, host.state, host.spanning
        while True:
            name, decisions = state.choose(now, lambda name: spanning.route(name, now) == "ask")
            self._carry_out(host, decisions)
            if name is None:
                break
            ask = spanning.ask(name, now)
            ahead = state.batches_before(name)
            slowest = state.slowest(PART)
            assert slowest is not None
            position = (slowest.epoch, slowest.first, slowest.done)
            self._request(host, ask.request, ask.machine, name, ahead, position)
        self.most_in_flight = max(self.most_in_flight, spanning.in_flight)
        while host.preparing < host.workers:
            chosen = self._choose(host)
            if chosen is None:
                break
            host.preparing += 1
            self._after(host.cost, host, partial(self._finish, host, chosen))

    def _choose(self, host: Host) -> BatchName | None:
        while host.again:
            name = host.again.pop(0)
            if host.state.is_preparing(name):
                return name
        name_or_none, decisions = host.state.choose(
            self.now, lambda name: host.spanning.route(name, self.now) == "here"
        )
        self._carry_out(host, decisions)
        return name_or_none

    def _finish(self, host: Host, name: BatchName) -> None:
        host.preparing -= 1
        self.prepared[name.epoch, name.number] += 1
        if host.state.is_preparing(name):
            elsewhere = host.spanning.owner(name) != host.name
            if host.spanning.prepared(name, ROWS, SIZE, host.cost / host.workers):
                self._at(self.now + 0.5, self.install)
            made = host.state.prepared(name, SIZE, self.now, local=elsewhere)
            self._carry_out(host, made)
        self._pump(host)

    def _carry_out(self, host: Host, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Drop):
                host.spanning.ended(decision.name)
            elif isinstance(decision, Give):
                if decision.member < 0:
                    self._reply(host, decision)
                else:
                    job = host.jobs[decision.member]
                    job.untaken.append(decision.name)
                    self._take(host, decision.member, job)

    # Jobs.

    def _want(self, host: Host, member: int, job: Job) -> None:
        done = len(job.taken) - job.epoch * self.length
        while job.asked < self.length and job.asked < done + DEPTH:
            name = BatchName(PART, job.epoch, job.asked, "")
            job.asked += 1
            self._carry_out(host, host.state.want(member, name, self.now))
        self._pump(host)

    def _take(self, host: Host, member: int, job: Job) -> None:
        if job.busy or not job.untaken:
            return
        job.busy = True
        name = job.untaken.pop(0)
        job.taken.append((name.epoch, name.number))
        self._after(0.0, host, lambda: self._took(host, member, job, name))

    def _took(self, host: Host, member: int, job: Job, name: BatchName) -> None:
        self._carry_out(host, host.state.took(member, name, self.now))
        self._after(job.step, host, lambda: self._stepped(host, member, job, name))

    def _stepped(self, host: Host, member: int, job: Job, name: BatchName) -> None:
        self._carry_out(host, host.state.released(member, name, self.now))
        job.busy = False
        if not job.ended and len(job.taken) % self.length == 0 and job.asked == self.length:
            self._begin_epoch(host, member, job)
        elif not job.ended:
            self._want(host, member, job)
        self._take(host, member, job)
        self._pump(host)

    # Between machines.

    def _request(
        self,
        host: Host,
        request: int,
        machine: str,
        name: BatchName,
        ahead: int,
        position: tuple[int, int, int],
    ) -> None:
        other = self.hosts.get(machine)
        if other is None or not other.running:
            self._after(self.latency, host, lambda: self._lost(host, machine))
            return
        if machine in self.silent:
            return

        def arrive() -> None:
            accepted, decisions = other.spanning.asked_by(host.name, name, self.now)
            self._here(other, decisions)
            if not accepted:
                self._after(self.latency, host, lambda: self._refused(host, request))
                self._pump(other)
                return
            number = other.remote.get(host.name)
            if number is None:
                number = other.remote[host.name] = -1 - len(other.remote)
                other.state.join(number, PART, "detach", self.now, remote=True)
            epoch, first, done = position
            _, begun = other.state.begin(number, epoch, self.length, first, done, self.now)
            self._carry_out(other, begun)
            other.waiting.setdefault((number, name), []).append((host.name, request))
            self._carry_out(other, other.state.want(number, name, self.now, ahead))
            self._pump(other)

        self._after(self.latency, other, arrive)

    def _refused(self, host: Host, request: int) -> None:
        self._here(host, host.spanning.unanswered(request, self.now))
        self._pump(host)

    def _reply(self, host: Host, give: Give) -> None:
        for machine, request in host.waiting.pop((give.member, give.name), []):
            other = self.hosts[machine]
            host.spanning.counts.sent += 1
            self._after(self.latency, other, partial(self._arriving, other, request))
            seconds = self.latency + SIZE / self.bandwidth
            self._after(seconds, other, partial(self._arrived, other, request, give.name))
            self._after(seconds, host, partial(self._sent, host, give))

    def _sent(self, host: Host, give: Give) -> None:
        self._carry_out(host, host.state.released(give.member, give.name, self.now))

    def _arriving(self, host: Host, request: int) -> None:
        host.spanning.arriving(request, SIZE, self.now)

    def _arrived(self, host: Host, request: int, name: BatchName) -> None:
        if host.spanning.arrived(request, self.now) and host.state.is_preparing(name):
            made = host.state.prepared(name, SIZE, self.now, received=True, local=True)
            self._carry_out(host, made)
        self._pump(host)
