"""Simulated machines that share a cache: each runs ``Partition`` and ``Holdings``, on one clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.holdings import Holdings, OwnerReply
from penstock.cluster.membership import Machine
from penstock.cluster.partition import (
    Ask,
    Keep,
    OfferValues,
    Partition,
    PartitionDecision,
    ReadStorage,
    SendReply,
    Settled,
    Tell,
)
from penstock.cluster.placement import NOBODY, FirstOwners, Owners, Placement, VersionOwners
from penstock.order import Balanced, Cursor, Deal, Generations, Shuffled
from penstock.store.admission import Admission, Versions, version_keys

NETWORK = (0.0005, 0.004)
STORAGE = (0.001, 0.010)
"""Seconds of a message and of a read, least and most: less in all than the shortest hedge."""

LIMIT = 0.5
"""Seconds until the others have removed a machine that was killed."""


def value_of(key: int) -> str:
    return f"value {key}"


@dataclass
class Work:
    """A rank's batches of an epoch, and what has become of them."""

    batches: list[list[int]]
    opened: int = 0
    open: dict[int, list[int]] = field(default_factory=dict)
    delivered: list[list[str]] = field(default_factory=list)


@dataclass
class Host:
    """A machine: its store, values that have arrived, and the work of its ranks.

    ``reading``: by settled batch, what it still reads from storage.
    """

    machine: Machine
    holdings: Holdings
    partition: Partition
    store: dict[int, str]
    inbox: dict[int, str] = field(default_factory=dict)
    offering: dict[int, str] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    reading: dict[int, set[int]] = field(default_factory=dict)


class Hosts:
    """Machines ``m0``, ``m1`` and so on, and storage that counts its reads.

    ``budgets``: room of each machine in bytes. ``ranks``: number of machines that have ranks.
    ``each``: ranks of a machine. ``ahead``: batches that each rank asks for at once.
    ``reuse``: versions of samples are kept, and each is used this many times.
    """

    def __init__(
        self,
        samples: int,
        budgets: Sequence[int],
        *,
        sizes: Callable[[int], int] = lambda key: 1000,
        batch_size: int = 4,
        ahead: int = 2,
        seed: int = 0,
        drop_last: bool = False,
        ranks: int | None = None,
        each: int = 1,
        total_bytes: int = 1 << 28,
        reuse: int | None = None,
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.reads: Counter[int] = Counter()
        self.sent_values = 0
        self.sizes = sizes
        self.ahead = ahead
        self.total_bytes = total_bytes
        self.each = each
        world = each * (len(budgets) if ranks is None else ranks)
        self.generations = None if reuse is None else Generations(samples, reuse, samples, seed)
        order = Shuffled() if self.generations is None else Balanced(self.generations)
        self.deal = Deal(order, samples, seed, batch_size, drop_last, 0, world, "drop")
        self.names = [f"m{number}" for number in range(len(budgets))]
        self.budgets = dict(zip(self.names, budgets, strict=True))
        owners = [self.names[rank // each] for rank in range(world)]
        self.layout: Owners = FirstOwners.first_epoch("f", self.deal, owners)
        if self.generations is not None:
            self.layout = VersionOwners("f", tuple(self.names), self.generations, self._owners_in)
        self.silent: set[str] = set()
        """Machines that get messages and never answer."""
        self.hosts: dict[str, Host] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._incarnations = count(1)
        self._batch_ids = count()
        machines = [self._machine(name) for name in self.names]
        for machine in machines:
            self._start(machine, machines, newcomer=False)

    def _owners_in(self, epoch: int) -> NDArray[np.uint16]:
        ranks = self.deal.ranks(epoch)
        return np.where(ranks < 0, NOBODY, ranks // self.each).astype(np.uint16)

    # Machines come and go.

    def _machine(self, name: str) -> Machine:
        nbytes = self.budgets[name]
        return Machine(name, f"{name}:1", next(self._incarnations), cache_bytes=nbytes)

    def _start(self, machine: Machine, view: Sequence[Machine], *, newcomer: bool) -> None:
        kept = Admission(self.budgets[machine.name]) if self.generations is None else Versions()
        holdings = Holdings(machine.name, kept, self.sizes)
        placement = Placement(self.layout, view)
        partition = Partition(
            machine.name, placement, holdings, total_bytes=self.total_bytes, newcomer=newcomer
        )
        host = Host(machine, holdings, partition, {})
        self.hosts[machine.name] = host
        self._after(0.0, lambda: self._tick(host))

    def kill(self, name: str) -> None:
        """Kill a machine; the others learn of it one by one."""
        del self.hosts[name]
        self._announce()

    def start(self, name: str, budget: int) -> None:
        """Start a machine that is new, or was killed before."""
        self.budgets[name] = budget
        machine = self._machine(name)
        running = [host.machine for host in self.hosts.values()]
        self._start(machine, [*running, machine], newcomer=True)
        self._announce()

    def _announce(self) -> None:
        for host in self.hosts.values():
            self._after(LIMIT * self.random.random(), partial(self._place, host))

    def _place(self, host: Host) -> None:
        machines = [other.machine for other in self.hosts.values()]
        if self._runs(host):
            self._act(host, host.partition.placed(Placement(self.layout, machines), self.now))

    def _runs(self, host: Host) -> bool:
        return self.hosts.get(host.machine.name) is host

    # The clock.

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def _soon(self, span: tuple[float, float], act: Callable[[], None]) -> None:
        self._after(self.random.uniform(*span), act)

    def _tick(self, host: Host) -> None:
        if self._runs(host):
            self._act(host, host.partition.tick(self.now))
            self._after(0.05, lambda: self._tick(host))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until ``until`` is true. Returns whether that was in time."""
        end = self.now + seconds
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return False
            self.now, _, act = heapq.heappop(self._events)
            act()
        return True

    # Epochs.

    def begin_epoch(self, epoch: int) -> None:
        for host in self.hosts.values():
            host.works = []
        for rank in range(self.deal.world):
            self._begin(rank, [epoch])
        self._open_all()

    def begin_ranks(self, ranks: Iterable[int], epochs: Sequence[int]) -> None:
        """These ranks begin, with these epochs one after the other."""
        for rank in ranks:
            self._begin(rank, epochs)
        self._open_all()

    def _begin(self, rank: int, epochs: Sequence[int]) -> None:
        host = self.hosts.get(self.names[rank // self.each])
        if host is not None:
            deal = replace(self.deal, rank=rank)
            work = Work([])
            for epoch in epochs:
                batches = [batch.indices for batch in deal.batches(Cursor(epoch))]
                work.batches += [self._keys(indices, epoch) for indices in batches]
            host.works.append(work)

    def _open_all(self) -> None:
        for host in self.hosts.values():
            self._open(host)

    def _keys(self, indices: NDArray[np.int64], epoch: int) -> list[int]:
        made = self.generations
        versions = None if made is None else made.generations(indices, epoch)
        keys: list[int] = version_keys(indices, versions).tolist()
        return keys

    def is_done(self) -> bool:
        return all(
            len(work.delivered) == len(work.batches)
            for host in self.hosts.values()
            for work in host.works
        )

    def epoch(self, epoch: int, seconds: float = 100.0) -> int:
        """Run an epoch to its end, and check all values. Returns the reads from storage."""
        before = self.reads.total()
        self.begin_epoch(epoch)
        assert self.run(seconds, self.is_done), f"epoch {epoch} has not ended"
        self.check()
        self.run(1.0)  # Let offers arrive.
        return self.reads.total() - before

    def check(self) -> None:
        """Every batch has the right values, and the counters add up."""
        for host in self.hosts.values():
            for work in host.works:
                for batch, values in zip(work.batches, work.delivered, strict=False):
                    assert values == [value_of(key) for key in batch]
            counts = host.partition.counts
            settled = counts.local + counts.remote + counts.storage + counts.cancelled
            waiting = sum(host.partition._unsettled.values())
            assert settled + waiting == counts.asked

    def _open(self, host: Host) -> None:
        for work in host.works:
            while work.opened < len(work.batches) and len(work.open) < self.ahead:
                number = next(self._batch_ids)
                work.open[number] = work.batches[work.opened]
                work.opened += 1
                self._act(host, host.partition.want({number: work.open[number]}, self.now))
        self._deliver(host)

    def _deliver(self, host: Host) -> None:
        for work in host.works:
            while work.open:
                number, keys = next(iter(work.open.items()))
                if host.reading.get(number) != set():
                    break
                if any(self._value(host, key) is None for key in keys):
                    break
                work.delivered.append([str(self._value(host, key)) for key in keys])
                del work.open[number], host.reading[number]
                self._act(host, host.partition.used(number, self.now))
                wanted = {
                    key for other in host.works for keys in other.open.values() for key in keys
                }
                host.inbox = {key: value for key, value in host.inbox.items() if key in wanted}
                self._open(host)

    def _value(self, host: Host, key: int) -> str | None:
        return host.store.get(key) or host.inbox.get(key)

    # Carrying out decisions.

    def _act(self, host: Host, decisions: list[PartitionDecision]) -> None:
        for decision in decisions:
            match decision:
                case Ask():
                    self._soon(NETWORK, partial(self._asked, host, decision))
                case ReadStorage():
                    pass  # when the batch is settled, as the engine does
                case Keep(key):
                    host.store[key] = self._in_hand(host, key)
                case OfferValues(_, keys):
                    host.offering.update((key, self._in_hand(host, key)) for key in keys)
                    self._soon(NETWORK, partial(self._offered, host, decision))
                case Tell():
                    self._soon(NETWORK, partial(self._told, decision))
                case Settled(batch):
                    self._settled(host, batch)
                case SendReply(reply):
                    self._reply(host, reply)
        self._after(0.0, lambda: self._deliver(host) if self._runs(host) else None)

    def _settled(self, host: Host, batch: int) -> None:
        keys = host.partition.to_prepare(batch)
        host.reading[batch] = set(keys)
        for key in keys:
            self.reads[key] += 1
            self._soon(STORAGE, partial(self._read, host, batch, key))

    def _asked(self, host: Host, ask: Ask) -> None:
        owner = self.hosts.get(ask.owner)
        if owner is None:
            self._soon(NETWORK, lambda: self._lost(host, ask.owner))
        elif ask.owner not in self.silent:
            reply = owner.holdings.asked(
                host.machine.name, ask.request, ask.keys, ask.most_bytes, self.now
            )
            self._reply(owner, reply)

    def _reply(self, owner: Host, reply: OwnerReply) -> None:
        values = {key: owner.store[key] for key in reply.present}
        if reply.peer != owner.machine.name:
            self.sent_values += len(values)

        def arrive() -> None:
            reader = self.hosts.get(reply.peer)
            if reader is None:
                return
            sizes = {key: self.sizes(key) for key in values}
            reader.inbox.update(values)
            decisions = reader.partition.answered(
                owner.machine.name,
                reply.request,
                self.now,
                sizes,
                reply.absent,
                reply.redirected,
                reply.held,
                reply.left,
            )
            self._act(reader, decisions)

        self._soon(NETWORK, arrive)

    def _lost(self, host: Host, name: str) -> None:
        if self._runs(host):
            self._act(host, host.partition.lost(name, self.now))

    def _read(self, host: Host, batch: int, key: int) -> None:
        if not self._runs(host):
            return
        host.reading[batch].discard(key)
        host.inbox[key] = value_of(key)
        self._act(host, host.partition.read({key: self.sizes(key)}, self.now))

    def _in_hand(self, host: Host, key: int) -> str:
        return host.inbox[key] if key in host.inbox else host.offering[key]

    def _offered(self, host: Host, offer: OfferValues) -> None:
        taker = self.hosts.get(offer.to)
        if taker is None:
            self._soon(NETWORK, lambda: self._lost(host, offer.to))
            return
        kept: list[int] = []
        refused: list[int] = []
        for key in offer.keys:
            stays, replies = taker.holdings.keep(key, self.sizes(key), self.now)
            if stays:
                taker.store[key] = host.offering[key]
            (kept if stays else refused).append(key)
            for reply in replies:
                self._reply(taker, reply)
        self.sent_values += len(offer.keys)

        def tell() -> None:
            if self._runs(host):
                self._act(host, host.partition.offered(offer.to, kept, refused, self.now))

        self._soon(NETWORK, tell)

    def _told(self, tell: Tell) -> None:
        owner = self.hosts.get(tell.owner)
        if owner is not None:
            self._act(owner, owner.partition.told(tell.holders, self.now))

    # Watching.

    def held(self) -> Counter[int]:
        """How many machines hold each sample."""
        return Counter(key for host in self.hosts.values() for key in host.store)

    def count(self, name: str) -> int:
        return sum(getattr(host.partition.counts, name) for host in self.hosts.values())
