"""The cluster part of a node: finds other machines, serves them samples, and asks them for samples.

``membership`` and ``partition`` decide; this module carries their decisions out. A thread ticks
them several times a second, and a few threads wait for other machines. Every call has a deadline,
so nothing here waits without a limit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.cluster.divided_cache import DividedCache
from penstock.cluster.find import numeric, own_address, split_address
from penstock.cluster.flight import FlightServer, connect
from penstock.cluster.lending import Lender
from penstock.cluster.membership import (
    BEAT,
    Beat,
    ClusterMembership,
    ClusterView,
    HostedGroup,
    Installed,
    Machine,
    MachineLoad,
    Probe,
    Role,
)
from penstock.cluster.partition import Ask, OfferValues, Tell
from penstock.cluster.protocol import (
    LARGEST_ANSWER,
    MOST_GROUPS,
    VERSION,
    Acknowledged,
    BatchHead,
    GetGroupPosition,
    GetKeptSamples,
    GetMachineStatus,
    GroupPosition,
    HeartbeatSent,
    Hello,
    KeptSamples,
    MachineStatus,
    Offered,
    RemoteTask,
    Spilled,
    WantedBatch,
    WantedValues,
    integers,
    pack_kept,
    unpack_kept,
)
from penstock.cluster.recipes import Recipes
from penstock.cluster.records import answer_of, heartbeat_of, pack_answer, pack_heartbeat
from penstock.cluster.request_times import RequestTimes
from penstock.cluster.secrets import Secrets, read_secrets
from penstock.cluster.spanning import AskBatch, announced_unit
from penstock.cluster.survey import MOST_CACHES, CacheReport, MachineReport, Survey, report_of
from penstock.cluster.transport import (
    KeyAnswer,
    Link,
    PeerFault,
    PeerLost,
    PeerNonsense,
    PeerRefused,
    Refuse,
    RemoteRows,
)
from penstock.engine.pools.wire import RELEASE, ProtocolError, pack_integers
from penstock.host.idle_cores import IdleCores
from penstock.order import Generations
from penstock.store import HeapStore, SampleStore
from penstock.store.admission import split_keys, version_keys
from penstock.store.shared import SharedStores

_log = logging.getLogger("penstock.node.cluster")

TICK = 0.02
"""Seconds between two looks at requests that take too long: the shortest delay of a hedge."""

CALL = 2.0 * config.cluster_patience()
"""Seconds that another machine may take to answer a control message, or to accept a connection."""

TRANSFER = 10.0 * config.cluster_patience()
"""Seconds that a transfer of samples may take. Long before that they are read from storage."""

PART = 8
"""Answers of another machine that are used together."""

CONTROL, TRANSFERS = 16, 64
"""Control messages and transfers of samples that may be under way at the same time."""

AGAIN = 1.0
"""Seconds after a failed connection in which no other is tried."""

GONE, MOST_GONE = 600.0, 32
"""Seconds for which machines that have left are shown, and most of them."""


class TaskServer(Protocol):
    """Prepares tiny-batches for other machines. See ``Handler.run``."""

    def run(self, peer: str, task: RemoteTask) -> Iterator[RemoteRows]: ...

    def status(self) -> list[dict[str, Any]]:
        """What it prepares, as plain data."""


class SpanningGroup(Protocol):
    """A group of this machine that may have members on others (``node/span.py``)."""

    @property
    def key(self) -> str: ...

    @property
    def hosted(self) -> HostedGroup:
        """The group as this machine announces it. Takes no lock."""

    def placed(self, machines: Sequence[Machine]) -> None: ...

    def reached(self, part: str, epoch: int) -> int:
        """The first batch of an epoch that is still kept; 0 if no member here is in it."""

    def tick(self) -> None: ...

    def serve(self, peer: str, wanted: WantedBatch) -> tuple[BatchHead, list[Any]]: ...

    def receive(self, ask: AskBatch, head: BatchHead, pieces: Iterator[memoryview]) -> None: ...

    def request_failed(self, ask: AskBatch, *, lost: bool) -> None: ...


class _NotTried(PeerLost):
    """A connection has failed a moment ago, and was not tried again."""


class ClusterService:
    """The place of one node among others. ``stores``: caches that are divided over the machines.

    ``recipes``: the pipelines that machines give each other. ``guests``: serves the tiny-batches of
    other machines; ``None`` if this one prepares none.
    """

    def __init__(
        self,
        seeds: Sequence[str],
        secrets: Secrets,
        *,
        host: str,
        port: int,
        name: str,
        cache_bytes: int = 0,
        cores: int = 0,
        recipes: Recipes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seeds = tuple(seeds)
        self.recipes = recipes or Recipes(config.cluster_recipes(config.cluster_secret()))
        self.guests: TaskServer | None = None
        self.stores = SharedStores(self._divide)
        self._secrets = secrets
        self._clock = clock
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._links: dict[str, Link] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._again: dict[str, float] = {}
        """By address: when a connection that has failed may be tried again."""
        self._caches: dict[str, DividedCache] = {}
        self._groups: dict[str, SpanningGroup] = {}
        self._guest_bytes = cache_bytes
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        """Bytes of samples by machine; under an empty name those of machines not in the list."""
        self.times = RequestTimes(clock)
        self._survey = Survey()
        self._idle_cores = IdleCores(config.cores())
        self._load_at = clock()
        """When the load of this machine is measured again."""
        self._known: dict[str, Machine] = {}
        """The machines of the last view, by name."""
        self._gone: dict[str, tuple[float, Machine]] = {}
        """Machines that have left, by name, and when."""
        self._faults: dict[str, tuple[type[PeerFault], str]] = {}
        """By address: the last fault, which is in the log. It ends with the next connection."""
        incarnation = time.time_ns()
        self._hello = Hello(VERSION, RELEASE, name, incarnation)
        self._server = FlightServer(self, self._hello, secrets, host=host, port=port)
        self.machine, self.address = name, self._server.address
        me = Machine(name, self.address, incarnation, cores, cache_bytes, role="helps")
        self._membership = ClusterMembership(me, self.seeds, clock())
        self._callers = ThreadPoolExecutor(CONTROL, thread_name_prefix="penstock-cluster")
        # Of its own: transfers that wait for a slow machine must not hold up heartbeats.
        self._movers = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="penstock-cluster-move")
        # Requests for batches wait until these are prepared; samples must not wait for that.
        self._batches = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="penstock-cluster-batch")
        self._notifier = ThreadPoolExecutor(1, thread_name_prefix="penstock-cluster-notify")
        self._ticker = threading.Thread(
            target=self._tick_often, name="penstock-cluster-tick", daemon=True
        )

    @classmethod
    def start(
        cls,
        seeds: Sequence[str],
        *,
        address: str = "",
        secret: str = "",
        cache_bytes: int = 0,
        cores: int = 0,
    ) -> ClusterService:
        """Enter the cluster of these machines. Raises ClusterError.

        ``address``: where other machines reach this one; by default it is found out. ``secret``:
        directory of the secrets, by default the usual one.
        """
        place = Path(secret) if secret else config.cluster_secret()
        secrets = read_secrets(place)
        seeds = tuple(dict.fromkeys(map(numeric, seeds)))
        host, port = split_address(numeric(address)) if address else own_address(seeds)
        service = cls(
            seeds,
            secrets,
            host=host,
            port=port,
            name=machine_name(host, port),
            cache_bytes=cache_bytes,
            cores=cores,
            recipes=Recipes(config.cluster_recipes(place)),
        )
        service.begin()
        return service

    def begin(self) -> None:
        """Look for the other machines, and go on until ``close``."""
        _log.info("%s enters the cluster of %s", self.machine, ", ".join(self.seeds))
        self._ticker.start()

    def knows(self, seeds: Collection[str]) -> bool:
        """Whether a machine of this cluster has one of these addresses."""
        with self._lock:
            known = {machine.address for machine in self._membership.view.machines}
        return not (known | {*self.seeds}).isdisjoint({*seeds, *map(numeric, seeds)})

    def reseed(self, seeds: Sequence[str]) -> None:
        """From now on, these machines may be head: earlier ones may have gone for good."""
        with self._lock:
            if seeds and tuple(seeds) != self.seeds:
                self.seeds = tuple(seeds)
                self._membership.reseed(self.seeds, self._clock())

    def close(self) -> None:
        """Leave the cluster, and end all threads."""
        with self._lock:
            goodbyes = self._membership.leave(self._clock())
        self._closing.set()
        self._ticker.join()
        for beat in goodbyes:
            if isinstance(beat, Beat):
                with suppress(PeerFault):
                    self._link(beat.address).control(pack_heartbeat(beat.heartbeat), timeout=0.5)
        self.stores.close()
        self._server.close()
        for link in list(self._links.values()):
            link.close()
        self._callers.shutdown(wait=True, cancel_futures=True)
        self._movers.shutdown(wait=True, cancel_futures=True)
        self._batches.shutdown(wait=True, cancel_futures=True)
        self._notifier.shutdown(wait=True)

    # Time.

    def _tick_often(self) -> None:
        while not self._closing.wait(TICK):
            try:
                with self._lock:
                    now = self._clock()
                    if now >= self._load_at:
                        self._load_at = now + BEAT
                        self._membership.load = self._load()
                    decisions: list[Any] = list(self._membership.tick(now))
                    caches = list(self._caches.values())
                    groups = list(self._groups.values())
                    others = [name for name in self._membership.view.named if name != self.machine]
                    due = self._survey.due(others, now)
                self._decided(decisions)
                for name in due:
                    self._call(self._ask_for_report, name)
                for cache in caches:
                    cache.tick()
                for group in groups:
                    group.tick()
            except Exception:  # the next tick may succeed; without ticks nothing is hedged
                _log.exception("a tick of the cluster has failed")

    # ClusterMembership.

    def _decided(self, decisions: Iterable[Any]) -> None:
        for decision in decisions:
            if isinstance(decision, Beat):
                self._call(self._beat, decision)
            elif isinstance(decision, Probe):
                self._call(self._probe, decision.machine)
            elif isinstance(decision, Installed):
                self._install(decision.view)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function that waits for another machine in a thread of its own."""
        _submit(self._callers, function, *arguments)

    def notify(self, done: Callable[[], None]) -> None:
        """Call this soon, in a thread that waits for no other machine."""
        _submit(self._notifier, done)

    def _beat(self, beat: Beat) -> None:
        try:
            reply = self._link(beat.address).control(pack_heartbeat(beat.heartbeat), timeout=CALL)
            answer = answer_of(reply)
        except PeerFault as fault:
            self._note(beat.address, fault)
            with self._lock:
                decisions = self._membership.unanswered(beat.address, self._clock())
        else:
            with self._lock:
                decisions = self._membership.answered(beat.address, answer, self._clock())
        self._decided(decisions)

    def _probe(self, machine: Machine) -> None:
        alive = False
        try:
            link = self._link(machine.address)
            link.control(GetMachineStatus(), timeout=CALL)
            alive = link.incarnation == machine.incarnation
        except PeerFault as fault:
            self._note(machine.address, fault)
        with self._lock:
            decisions = self._membership.probed(machine, alive, self._clock())
        self._decided(decisions)
        if alive:
            for cache in self._all_caches():
                cache.trust(machine.name)

    def _install(self, view: ClusterView) -> None:
        names = ", ".join(machine.name for machine in view.machines)
        _log.info("view %s: %s", ".".join(map(str, view.stamp)), names)
        with self._lock:
            self._note_gone(view)
            addresses = {machine.address for machine in view.machines} | {*self.seeds}
            gone = [address for address in self._links if address not in addresses]
            links = [self._links.pop(address) for address in gone]
        for link in links:
            link.close()
        for cache in self._all_caches():
            cache.place(view.machines)
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group.placed(view.machines)

    def _all_caches(self) -> list[DividedCache]:
        with self._lock:
            return list(self._caches.values())

    def announce(self) -> None:
        """Tell the other machines how much room this one has, which ranks it trains, and which
        groups have members here."""
        with self._lock:
            hosted = [group.hosted for group in self._groups.values()]
            groups = tuple(sorted(group for group in hosted if group.parts)[:MOST_GROUPS])
            caches = list(self._caches.values())
            room = max([self._guest_bytes, *(cache.budget for cache in caches)])
            ranks = tuple(sorted(cache.hosted for cache in caches if cache.hosted[2]))
            me = self._membership.me
            role: Role = "trains" if ranks or groups else "helps"
            changed = replace(me, cache_bytes=room, ranks=ranks, groups=groups, role=role)
            self._membership.change(changed, self._clock())

    # The workers of other machines (see ``Lenders``).

    def lend(self, cores: int) -> None:
        """Let jobs on other machines use this many cores of this one."""
        with self._lock:
            self._membership.change(replace(self._membership.me, cores=cores), self._clock())

    def lenders(self) -> list[Lender]:
        """The other machines that lend cores."""
        with self._lock:
            machines, suspects = self._membership.view.machines, self._membership.suspects
        return [
            Lender(machine.name, machine.incarnation, machine.cores)
            for machine in machines
            if machine.name != self.machine and machine.cores and machine.name not in suspects
        ]

    def ask_rows(self, machine: str, task: RemoteTask, *, timeout: float) -> Iterator[RemoteRows]:
        """Let another machine prepare a tiny-batch. Raises PeerFault."""
        try:
            for rows in self._link(self._address_of(machine)).run(task, timeout=timeout):
                self._count(self.received, machine, sum(map(len, rows.leaves)))
                yield rows
        except PeerLost as fault:
            self._failed(machine, fault)
            raise

    # The samples of a machine for which this one prepares a tiny-batch (see ``LentValues``).

    def lent_here(self, content: str, indices: Sequence[int]) -> list[Any]:
        """The values that this machine has itself; ``None`` for others."""
        cache = self._cache(content)
        return [None] * len(indices) if cache is None else cache.lend(indices)

    def ask_lent(self, machine: str, content: str, indices: Sequence[int]) -> list[Any]:
        """The values that the machine has which lends them; ``None`` for those it does not send.

        It answers at once. Raises PeerFault.
        """
        wanted = WantedValues.of(
            content, np.array(indices, np.int64), most_bytes=LARGEST_ANSWER, lent=True
        )
        values: list[Any] = [None] * len(indices)
        link = self._link(self._address_of(machine))
        for answer in link.get(wanted, timeout=TRANSFER):
            values[answer.place] = answer.value
        self._count(
            self.received, machine, sum(len(value) for value in values if value is not None)
        )
        return values

    # Connections.

    def _link(self, address: str) -> Link:
        """The connection to this address. Raises PeerFault."""
        with self._lock:
            link = self._links.get(address)
            connecting = self._connecting.setdefault(address, threading.Lock())
        if link is not None:
            return link
        with connecting:
            with self._lock:
                link = self._links.get(address)
            if link is None:
                if self._clock() < self._again.get(address, 0.0):
                    raise _NotTried(f"{address} could not be reached a moment ago")
                try:
                    link = connect(address, self._secrets, self._hello, timeout=CALL)
                except PeerFault:
                    self._again[address] = self._clock() + AGAIN
                    raise
                with self._lock:
                    self._links[address] = link
                    self._faults.pop(address, None)
        return link

    def _lose(self, address: str) -> None:
        """Forget a connection that has failed; the next call makes another."""
        with self._lock:
            link = self._links.pop(address, None)
        if link is not None:
            link.close()

    def _note(self, address: str, fault: PeerFault) -> None:
        if isinstance(fault, _NotTried):
            return
        if isinstance(fault, PeerLost):
            self._lose(address)
        with self._lock:
            before = self._faults.get(address)
            self._faults[address] = type(fault), str(fault)
        if before is None or before[0] is not type(fault):  # and not again every second
            _log.warning("%s: %s", type(fault).__name__, fault)

    def _address_of(self, name: str) -> str:
        with self._lock:
            machine = self._membership.view.named.get(name)
        if machine is None:
            raise PeerLost(f"{name} is not in the cluster any more")
        return machine.address

    def _failed(self, name: str, fault: PeerFault) -> bool:
        """A call to a machine has failed. Returns whether the machine is lost."""
        with suppress(PeerLost):
            self._note(self._address_of(name), fault)
        if not isinstance(fault, (PeerLost, PeerRefused)):
            return False
        with self._lock:
            decisions = self._membership.lost(name, self._clock())
        self._decided(decisions)
        return True

    # Divided caches: what they ask of other machines.

    def _divide(
        self,
        content: str,
        own: SampleStore,
        arrivals: SampleStore,
        *,
        lends: bool,
        samples: int,
        generations: Generations | None = None,
    ) -> DividedCache:
        cache = DividedCache(
            content,
            self.machine,
            own,
            arrivals,
            lends=lends,
            samples=samples,
            service=self,
            clock=self._clock,
            generations=generations,
        )
        with self._lock:
            before = self._caches.get(content)
            self._caches[content] = cache
        if before is not None:
            before.close()
        return cache

    def opened(self, cache: DividedCache) -> None:
        """A cache is ready to be divided."""
        with self._lock:
            machines = self._membership.view.machines
        cache.place(machines)
        self.announce()

    def closed(self, cache: DividedCache) -> None:
        with self._lock:
            if self._caches.get(cache.content) is cache:
                del self._caches[cache.content]
        if not self._closing.is_set():
            self.announce()

    def ask(self, cache: DividedCache, ask: Ask) -> None:
        """Fetch samples from another machine, in a thread of its own."""
        _submit(self._movers, self._fetch, cache, ask)

    def _fetch(self, cache: DividedCache, ask: Ask) -> None:
        indices, generations = _names(cache, ask.keys)
        wanted = WantedValues.of(cache.content, indices, generations, most_bytes=ask.most_bytes)
        try:
            link = self._link(self._address_of(ask.owner))
            answers = self.times.timed(ask.owner, link.get(wanted, timeout=TRANSFER))
            # In parts: a sample that the owner has to wait for must not delay the others.
            while part := list(islice(answers, PART)):
                self._count(self.received, ask.owner, bytes_of(part))
                cache.answered(ask, part)
        except PeerFault as fault:
            cache.request_failed(ask, lost=self._failed(ask.owner, fault))

    def offer(self, cache: DividedCache, offer: OfferValues, values: Sequence[Any]) -> None:
        """OfferValues samples to another machine, in a thread of its own."""
        _submit(self._movers, self._put, cache, offer, values)

    def _put(self, cache: DividedCache, offer: OfferValues, values: Sequence[Any]) -> None:
        (indices, generations), sizes = _names(cache, offer.keys), [len(v) for v in values]
        try:
            link = self._link(self._address_of(offer.to))
            offered = Offered.of(cache.content, indices, generations, sizes)
            kept = link.put(offered, list(values), timeout=TRANSFER)
        except PeerFault as fault:
            self._failed(offer.to, fault)
            cache.offered(offer, None)
            return
        self._count(self.sent, offer.to, sum(sizes))
        cache.offered(offer, kept)

    def learn(self, cache: DividedCache, machine: str) -> None:
        """Ask another machine what it keeps, in a thread of its own."""
        self._call(self._learn, cache, machine)

    def _learn(self, cache: DividedCache, machine: str) -> None:
        indices = np.zeros(0, np.int64)
        try:
            link = self._link(self._address_of(machine))
            answer = link.control(GetKeptSamples(cache.content), timeout=CALL)
            indices = unpack_kept(answer.kept, cache.samples)
        except ProtocolError as error:
            _log.warning("%s: %s", machine, error)
        except PeerFault as fault:
            self._failed(machine, fault)
        cache.learnt(machine, indices)

    def tell(self, cache: DividedCache, tell: Tell) -> None:
        """Tell the owner of samples where they are, in a thread of its own."""
        self._call(self._tell, cache, tell)

    def _tell(self, cache: DividedCache, tell: Tell) -> None:
        indices, generations = _names(cache, list(tell.holders))
        try:
            link = self._link(self._address_of(tell.owner))
            packed, holders = pack_integers(indices) or b"", list(tell.holders.values())
            versions = pack_integers(generations)
            link.control(Spilled(cache.content, packed, versions, holders), timeout=CALL)
        except PeerFault as fault:
            self._failed(tell.owner, fault)

    # Groups with members on several machines.

    def opened_group(self, group: SpanningGroup) -> None:
        """A group of this machine may have members on others."""
        with self._lock:
            self._groups[group.key] = group
            machines = self._membership.view.machines
        group.placed(machines)
        self.announce()

    def closed_group(self, group: SpanningGroup) -> None:
        with self._lock:
            if self._groups.get(group.key) is group:
                del self._groups[group.key]
        if not self._closing.is_set():
            self.announce()

    def unit_of(self, name: str, content: str) -> int | None:
        """Samples in a batch of this group on other machines; ``None`` if they do not have it."""
        with self._lock:
            machines = self._membership.view.machines
        return announced_unit(name, content, machines, self.machine)

    def ask_position(
        self, group: SpanningGroup, part: str, epoch: int, done: Callable[[int], None]
    ) -> bool:
        """Find out which batch of an epoch the members on other machines have reached.

        Returns whether there are any. Then ``done`` is called with the batch, in another thread,
        within a limited time.
        """
        name, content = group.hosted[:2]
        with self._lock:
            asked = [
                machine.name
                for machine in self._membership.view.machines
                if machine.name != self.machine
                and any(
                    other[:2] == (name, content) and part in other.parts for other in machine.groups
                )
            ]
        if asked:
            self._call(self._ask_position, asked, GetGroupPosition(group.key, part, epoch), done)
        return bool(asked)

    def _ask_position(
        self, machines: Sequence[str], wanted: GetGroupPosition, done: Callable[[int], None]
    ) -> None:
        first = 0
        for machine in machines:
            try:
                answer = self._link(self._address_of(machine)).control(wanted, timeout=CALL)
                first = max(first, answer.first)
            except PeerFault as fault:
                self._failed(machine, fault)
        done(first)

    def ask_batch(self, group: SpanningGroup, ask: AskBatch, wanted: WantedBatch) -> None:
        """Ask another machine for a batch, in a thread of its own."""
        _submit(self._batches, self._fetch_batch, group, ask, wanted)

    def _fetch_batch(self, group: SpanningGroup, ask: AskBatch, wanted: WantedBatch) -> None:
        try:
            link = self._link(self._address_of(ask.machine))
            head, pieces = link.batch(wanted, timeout=wanted.wait + TRANSFER)
            group.receive(ask, head, pieces)
            self._count(self.received, ask.machine, head.nbytes)
        except PeerFault as fault:
            group.request_failed(ask, lost=self._failed(ask.machine, fault))
        except ValueError as error:
            self._failed(ask.machine, PeerNonsense(f"{ask.machine} sent an odd batch: {error}"))
            group.request_failed(ask, lost=False)
        except BaseException:
            group.request_failed(ask, lost=False)
            raise

    # What other machines ask (see ``Handler``).

    def control(self, peer: str, message: Any) -> Any:
        if isinstance(message, HeartbeatSent):
            beat = heartbeat_of(message)
            with self._lock:
                answer, decisions = self._membership.heartbeat(beat, self._clock())
            self._decided(decisions)
            return pack_answer(answer)
        if isinstance(message, GetGroupPosition):
            with self._lock:
                group = self._groups.get(message.group)
            return GroupPosition(0 if group is None else group.reached(message.part, message.epoch))
        if isinstance(message, GetKeptSamples):
            cache = self._cache(message.fingerprint)
            plain = cache is not None and not cache.versions
            return KeptSamples(pack_kept(cache.kept()) if cache is not None and plain else b"")
        if isinstance(message, Spilled):
            cache = self._cache(message.fingerprint)
            if cache is not None and _fits(cache, message):
                cache.told(dict(zip(_keys(message), message.holders, strict=True)))
            return Acknowledged()
        return MachineStatus(self.report().as_dict())

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        keys = _keys(wanted)
        cache = self._cache(wanted.fingerprint)
        if cache is None or not _fits(cache, wanted):
            yield [KeyAnswer(place, "absent") for place in range(len(keys))]
            return
        served = _lent(cache, keys) if wanted.lent else cache.serve(peer, keys, wanted.most_bytes)
        for answers in served:
            self._count(self.sent, peer, bytes_of(answers))
            yield answers

    def put(self, peer: str, offered: Offered, values: Iterator[memoryview]) -> list[bool]:
        keys, versions = _keys(offered), offered.generations is not None
        cache = self._cache(offered.fingerprint) or self._guest(offered.fingerprint, versions)
        if cache is None or not _fits(cache, offered):
            return [False] * len(keys)
        kept = []
        for key, value in zip(keys, values, strict=True):
            self._count(self.received, peer, len(value))
            kept.append(cache.keep_offered(key, value))
        return kept

    def run(self, peer: str, task: RemoteTask) -> Iterator[RemoteRows]:
        if self.guests is None:
            raise Refuse("busy", "this machine prepares no samples for others")
        for rows in self.guests.run(peer, task):
            self._count(self.sent, peer, sum(memoryview(leaf).nbytes for leaf in rows.leaves))
            yield rows

    def batch(self, peer: str, wanted: WantedBatch) -> tuple[BatchHead, list[Any]]:
        with self._lock:
            group = self._groups.get(wanted.group)
        if group is None:
            return BatchHead.without("absent"), []
        head, buffers = group.serve(peer, wanted)
        self._count(self.sent, peer, head.nbytes)
        return head, buffers

    def _cache(self, content: str) -> DividedCache | None:
        with self._lock:
            cache = self._caches.get(content)
        return cache if cache is not None and cache.is_open else None

    def _guest(self, content: str, versions: bool) -> DividedCache | None:
        """A cache for samples of jobs that run on other machines only."""
        with self._lock:
            used = sum(cache.budget for cache in self._caches.values() if cache.guest)
            room = self._guest_bytes - used
            if room <= 0 or content in self._caches:
                return None
            cache = DividedCache(
                content,
                self.machine,
                HeapStore(room, overshoot=0),
                HeapStore(room, overshoot=0),
                lends=False,
                samples=1,
                service=self,
                clock=self._clock,
                guest=True,
                versions=versions,
            )
            self._caches[content] = cache
        cache.open_as_guest()
        return cache

    # Status.

    def _load(self) -> MachineLoad:
        """The load of this machine. The caller holds the lock."""
        free = sum(max(0, cache.budget - cache.used) for cache in self._caches.values())
        return MachineLoad(free, self._idle_cores.look())

    def _note_gone(self, view: ClusterView) -> None:
        """Remember the machines that the new view does not have. The caller holds the lock."""
        now = self._clock()
        for name, machine in self._known.items():
            if name not in view.named:
                self._gone[name] = (now, machine)
        self._known = dict(view.named)
        kept = [
            (name, (when, machine))
            for name, (when, machine) in self._gone.items()
            if name not in view.named and now - when <= GONE
        ]
        self._gone = dict(kept[-MOST_GONE:])
        for counter in (self.sent, self.received):
            for name in [name for name in counter if name not in self._known]:
                if name and name not in self._gone:
                    counter[""] += counter.pop(name)

    def _count(self, counter: Counter[str], machine: str, nbytes: int) -> None:
        """Count bytes of samples that were exchanged with a machine.

        Whoever has the token may call itself anything. Only machines of the list, and those that
        have left it lately, are counted by name, so that the counters do not grow.
        """
        with self._lock:
            listed = machine in self._membership.view.named or machine in self._gone
            counter[machine if listed else ""] += nbytes

    def _ask_for_report(self, name: str) -> None:
        try:
            answer = self._link(self._address_of(name)).control(GetMachineStatus(), timeout=CALL)
        except PeerFault:
            return  # heartbeats and probes find out what is wrong with it
        report = report_of(answer.status)
        if report is not None:
            with self._lock:
                self._survey.reported(name, report, self._clock())

    def report(self) -> MachineReport:
        """This machine alone, for others that ask."""
        with self._lock:
            caches = list(self._caches.values())[:MOST_CACHES]
            load = self._membership.load
            sent, received = sum(self.sent.values()), sum(self.received.values())
        found = []
        for cache in caches:
            status = cache.status()
            found.append(CacheReport(**{name: status[name] for name in CacheReport.__slots__}))
        return MachineReport(config.cores(), load.idle_cores, sent, received, tuple(found))

    def status(self) -> dict[str, Any]:
        """The machines of the cluster and the caches of this one, as plain data.

        Somebody looks at it, so other machines are asked for their reports from now on, for some
        seconds. The next status has them.
        """
        own, caches = self.report(), [cache.status() for cache in self._all_caches()]
        hedged: Counter[str] = Counter()
        for cache in caches:
            hedged.update(cache["hedged_requests"])
        with self._lock:
            membership, now = self._membership, self._clock()
            self._survey.watched(now)
            view, suspects, head = membership.view, membership.suspects, membership.head
            refused = [said for kind, said in self._faults.values() if kind is PeerRefused]
            machines = []
            for machine in view.machines:
                here = machine.name == self.machine
                report = (0.0, own) if here else self._survey.of(machine.name, now)
                machines.append(
                    {
                        **self._described(machine),
                        "state": "suspected" if machine.name in suspects else "alive",
                        "is": {"head": machine.address == head, "this machine": here},
                        "hedged_requests": hedged[machine.name],
                        "report": None if report is None else report[1].as_dict(),
                        "report_age": None if report is None else report[0],
                    }
                )
            for when, machine in self._gone.values():
                machines.append(
                    {
                        **self._described(machine),
                        "state": "gone",
                        "gone_for": now - when,
                        "is": {"head": False, "this machine": False},
                        "hedged_requests": hedged[machine.name],
                        "report": None,
                        "report_age": None,
                    }
                )
        return {
            "guests": [] if self.guests is None else self.guests.status(),
            "machine": self.machine,
            "address": self.address,
            "view": ".".join(map(str, view.stamp)),
            "head": head,
            "machines": machines,
            "refused": refused,
            "caches": caches,
        }

    def _described(self, machine: Machine) -> dict[str, Any]:
        """What the list of machines says of one, and what this machine has exchanged with it."""
        return {
            "name": machine.name,
            "address": machine.address,
            "role": machine.role,
            "lent_cores": machine.cores,
            "cache_bytes": machine.cache_bytes,
            "sent": self.sent[machine.name],
            "received": self.received[machine.name],
            **self.times.of(machine.name).as_dict(),
        }


def _names(
    cache: DividedCache, keys: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The indices and generations of samples, as messages have them."""
    indices, generations = split_keys(np.array(keys, np.int64))
    return indices, generations if cache.versions else None


def _keys(record: WantedValues | Offered | Spilled) -> list[int]:
    """The keys of the samples in a message."""
    generations = None if record.generations is None else integers(record.generations)
    keys: list[int] = version_keys(integers(record.indices), generations).tolist()
    return keys


def _fits(cache: DividedCache, record: WantedValues | Offered | Spilled) -> bool:
    """Whether a message is about versions of samples if the cache is, and only then."""
    return cache.versions == (record.generations is not None)


def _lent(cache: DividedCache, keys: Sequence[int]) -> Iterator[list[KeyAnswer]]:
    for first in range(0, len(keys), PART):
        values = cache.lend(keys[first : first + PART])
        yield [
            KeyAnswer(place, "absent" if value is None else "present", value)
            for place, value in enumerate(values, first)
        ]


def _submit(executor: ThreadPoolExecutor, function: Callable[..., None], *arguments: Any) -> None:
    def run() -> None:
        try:
            function(*arguments)
        except Exception:
            _log.exception("a thread of the cluster has failed")

    with suppress(RuntimeError):  # the node is closing
        executor.submit(run)


def bytes_of(answers: Iterable[KeyAnswer]) -> int:
    """Bytes of the values in these answers."""
    return sum(len(answer.value) for answer in answers if answer.value is not None)


def machine_name(host: str, port: int) -> str:
    """A name for this machine's node that stays the same when the node restarts."""
    place = f"{host} {port} {os.getuid()} {config.runtime_dir()}"
    digest = hashlib.blake2b(place.encode(), digest_size=3).hexdigest()
    return f"{socket.gethostname()[:200]}-{digest}"
