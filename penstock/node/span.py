"""A group's batches on other machines: asks for them, receives them, and sends those it prepares.

``Spanning`` decides; this carries its decisions out for one ``Group``. Everything here that changes
the group's state holds the group's lock. Threads of the cluster call other machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cluster.batch_form import (
    check_columns,
    column_bytes,
    copy_into,
    layout_of,
    objects_of,
    pack_layout,
    read_plain,
)
from penstock.cluster.membership import HostedGroup, Machine
from penstock.cluster.protocol import (
    LARGEST_ANSWER,
    LARGEST_RECORD,
    LONGEST_REASON,
    MOST_BAD,
    MOST_KEYS,
    MOST_PARTS,
    BatchHead,
    BatchState,
    WantedBatch,
)
from penstock.cluster.spanning import (
    AskBatch,
    PrepareHere,
    Spanning,
    apart,
    hosts_of,
    seconds_with,
)
from penstock.engine.pools.wire import pack_integers
from penstock.engine.slots import Layout
from penstock.fingerprint import fingerprint
from penstock.node.protocol import Want
from penstock.node.staging import StagedBatch, StagingEngine
from penstock.node.state import BatchName, Decision, Drop, Fail, Give
from penstock.order.plan import BatchKeys
from penstock.serialize import pack, unpack
from penstock.store.plain import NotPlain, pack_plain

if TYPE_CHECKING:
    from penstock.node.group import Group

_log = logging.getLogger("penstock.node")

WAIT = 20.0
"""Seconds that another machine may take until a batch is ready. Long before that it is hedged."""

FORGOTTEN = 60.0
"""Seconds after its last request in which batches are kept for another machine."""


class SpanCalls(Protocol):
    """What a group needs of the cluster. All of these return at once."""

    machine: str

    def opened_group(self, group: GroupSpan) -> None: ...

    def closed_group(self, group: GroupSpan) -> None: ...

    def ask_position(
        self, group: GroupSpan, part: str, epoch: int, done: Callable[[int], None]
    ) -> bool: ...

    def announce(self) -> None: ...

    def ask_batch(self, group: GroupSpan, ask: AskBatch, wanted: WantedBatch) -> None: ...


_CONTENT = ("seed", "order", "samples", "on_error", "directory", "data", "stops", "kept")
"""The entries of a description that say what a batch contains. Others, such as the batch size, are
in the names of batches."""


def digests_of(name: str, description: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a group and what it prepares, as other machines know them."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return digest, fingerprint({entry: description.get(entry) for entry in _CONTENT})[:32]


class GroupSpan:
    """The other machines of one group. Made with the group, and closed with it."""

    def __init__(self, group: Group, calls: SpanCalls, clock: Callable[[], float]) -> None:
        self.name, self.content = digests_of(group.name, group.description)
        self.spanning = Spanning(calls.machine)
        self.separate: list[str] = []
        """Machines that have a group of the same name and another pipeline."""
        self._group = group
        self._calls = calls
        self._clock = clock
        self._lock = group.lock
        self._answered = threading.Condition(group.lock)
        self._keys: dict[BatchName, BatchKeys] = {}
        """The samples of batches that other machines were asked for."""
        self._again: deque[BatchName] = deque()
        """Those of them that are to be prepared here."""
        self._remote: dict[tuple[str, str], int] = {}
        """The member that stands for a machine, by machine and part."""
        self._last_asked: dict[int, float] = {}
        self._present: set[str] = set()
        """The machines of the cluster."""
        self._waiting: dict[tuple[int, BatchName], int] = {}
        """How many calls of other machines wait for a batch."""
        self._ready: dict[tuple[int, BatchName], StagedBatch | None] = {}
        """What they wait for; ``None`` if it could not be prepared."""
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[tuple[int, int, BatchName]] = deque()
        """Leases that have ended. Appended by the garbage collector, wherever it runs."""
        self._lease_number = 0
        self._layout: Layout | None = None
        self._closed = False
        self._warned = False

    # What the cluster announces and finds.

    @property
    def key(self) -> str:
        """The group, in requests for its batches."""
        return f"{self.name}.{self.content}"

    @property
    def hosted(self) -> HostedGroup:
        """The group as this machine announces it.

        Without the lock: the group may hold it while it tells its cache what to announce.
        """
        parts = tuple(sorted({peer.part for peer in list(self._group.peers.values())})[:MOST_PARTS])
        return HostedGroup(self.name, self.content, self._group.unit, self.spanning.speed, parts)

    def open(self) -> None:
        self._calls.opened_group(self)

    def changed(self) -> None:
        """Members have joined or left: tell the other machines."""
        if not self._closed:
            self._calls.announce()

    def placed(self, machines: Sequence[Machine]) -> None:
        """The machines of the cluster, or the groups on them, have changed."""
        hosted, me, now = self.hosted, self._calls.machine, self._clock()
        with self._lock:
            self.separate = apart(hosted, machines, me)
            hosts = hosts_of(hosted, machines, me)
            self._prepare_here(self.spanning.placed(hosts, machines, now))
            self._present = {machine.name for machine in machines}
            self._forget_idle(now)
            self.ask_others()
        self._group.kick()

    def reached(self, part: str, epoch: int) -> int:
        """The first batch of an epoch that is still kept; 0 if no member here is in it."""
        with self._lock:
            return self._group.state.reached(part, epoch)

    def find_position(self, part: str, epoch: int, done: Callable[[int], None]) -> bool:
        """Ask other machines where their members are. See ``ClusterService.ask_position``."""
        return not self._closed and self._calls.ask_position(self, part, epoch, done)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._answered.notify_all()
        self._calls.closed_group(self)

    # What the group's engine prepares. The caller holds the lock.

    def is_here(self, name: BatchName) -> bool:
        """Whether this machine prepares a batch that members want."""
        return self.spanning.route(name, self._clock()) == "here"

    @property
    def waits(self) -> bool:
        """Whether another machine was asked for a batch, or will be soon."""
        if self._keys:
            return True
        now = self._clock()
        return any(
            self.spanning.route(name, now) != "here" for name in self._group.state.open_batches()
        )

    def next_again(self) -> tuple[BatchName, BatchKeys] | None:
        """A batch that another machine was asked for and that is to be prepared here after all."""
        while self._again:
            name = self._again.popleft()
            keys = self._keys.get(name)
            if keys is not None:
                return name, keys
        return None

    def ask_others(self) -> None:
        """Ask other machines for the batches that members want and that belong to them."""
        group = self._group
        if self._closed or not group.can_receive:
            return
        now = self._clock()
        while True:
            name, decisions = group.state.choose(
                now, lambda name: self.spanning.route(name, now) == "ask"
            )
            group.carry_out(decisions)
            if name is None:
                return
            ahead = group.state.batches_before(name)
            self._keys[name] = keys = group.take_wanted(name)
            ask = self.spanning.ask(name, now)
            self._calls.ask_batch(self, ask, self._request(name, keys, ahead))

    def _request(self, name: BatchName, keys: BatchKeys, ahead: int) -> WantedBatch:
        slowest = self._group.state.slowest(name.part)
        position = [name.epoch, 0, 0, name.number]
        if slowest is not None:
            position = [slowest.epoch, slowest.first, slowest.length or 0, slowest.done]
        return WantedBatch(
            self.key,
            *name,
            pack_integers(keys.indices) or b"",
            pack_integers(keys.replicas),
            pack_integers(keys.spent),
            min(self._group.state.budget, LARGEST_ANSWER),
            WAIT,
            ahead,
            position,
        )

    def prepared(self, name: BatchName, staged: StagedBatch, busy: float, workers: int) -> bool:
        """A batch was prepared here. Returns whether other machines get it elsewhere.

        ``busy``: seconds that it kept workers busy, added up.
        """
        self._keys.pop(name, None)
        seconds = seconds_with(workers, busy)
        elsewhere = self.spanning.owner(name) != self._calls.machine
        if self.spanning.prepared(name, staged.rows, staged.size, seconds):
            threading.Thread(target=self.changed, name="penstock-announce", daemon=True).start()
        return elsewhere

    def failed(self, name: BatchName) -> None:
        """A batch could not be prepared here."""
        self._keys.pop(name, None)
        self.spanning.ended(name)

    def carry_out(self, decision: Decision) -> None:
        """Carry out what was decided for another machine."""
        if isinstance(decision, Drop):
            self.spanning.ended(decision.name)
        elif isinstance(decision, (Give, Fail)):
            key = (decision.member, decision.name)
            given = isinstance(decision, Give)
            self._ready[key] = self._group.staged(decision.name) if given else None
            self._answered.notify_all()

    def _prepare_here(self, decisions: Iterable[PrepareHere]) -> None:
        for decision in decisions:
            self._again.append(BatchName(*decision.name))

    # Time.

    def tick(self) -> None:
        """Called several times a second: hedge what is late, and forget what is not needed."""
        with self._lock:
            if self._closed:
                return
            now = self._clock()
            self._release_freed(now)
            self._prepare_here(self.spanning.tick(now))
            self._forget_idle(now)
            self.ask_others()
            state = self._group.state
            waiting = bool(self._again) or any(map(self.is_here, state.open_batches()))
        if waiting:
            self._group.kick(if_hungry=True)

    def _forget_idle(self, now: float) -> None:
        """Forget machines that have gone, or have asked for nothing for long."""
        for key, number in list(self._remote.items()):
            member = self._group.state.members[number]
            idle = now - self._last_asked[number] > (FORGOTTEN if key[0] in self._present else WAIT)
            # Not while a batch is being sent: another in its slot would change what arrives.
            if idle and not member.wants and not member.held:
                del self._remote[key], self._last_asked[number]
                self._group.carry_out(self._group.state.leave(number, now))

    # Receiving. In a thread of the cluster.

    def receive(self, ask: AskBatch, head: BatchHead, pieces: Iterator[memoryview]) -> None:
        """The answer to a request. Raises PeerFault if the pieces do not come, or ValueError."""
        name = BatchName(*ask.name)
        if head.state != "present":
            with self._lock:
                if head.state == "unsendable":
                    self._cannot_send()
                self._prepare_here(self.spanning.unanswered(ask.request, self._clock()))
            self._group.kick()
            return
        with self._lock:
            needed = self.spanning.arriving(ask.request, head.nbytes, self._clock())
            engine = self._group.can_receive
        staged = self._stage(engine, head, pieces) if needed and engine is not None else None
        if staged is None:
            self.request_failed(ask, lost=False)
            return
        staged = replace(staged, elsewhere={ask.machine: staged.rows})
        with self._lock:
            first = self.spanning.arrived(ask.request, self._clock())
            used = first and self._group.received(name, staged)
            keys = self._keys.pop(name, None) if first else None
            if used:
                self.ask_others()
        if not used and staged.slot is not None and engine is not None:
            engine.ring.release(staged.slot)
        if keys is not None and engine is not None:
            engine.note_received(keys)
        self._group.kick(if_hungry=True)

    def request_failed(self, ask: AskBatch, *, lost: bool) -> None:
        """A request has failed. ``lost``: the other machine cannot be reached."""
        with self._lock:
            now = self._clock()
            decisions = self.spanning.unanswered(ask.request, now)
            if lost:
                decisions = [*decisions, *self.spanning.lost(ask.machine, now)]
            self._prepare_here(decisions)
        self._group.kick()

    def _stage(
        self, engine: StagingEngine, head: BatchHead, pieces: Iterator[memoryview]
    ) -> StagedBatch | None:
        """Put a batch into a slot as if it was prepared here; ``None`` if there is no memory."""
        bad = [(index, name, stage, error) for index, name, stage, error in head.bad]
        if not head.rows:
            return StagedBatch(None, None, 0, 0, None, bad)
        if head.layout is None:
            value = read_plain(b"".join(pieces))
            packed = pack(value)
            slot = engine.slot_for(packed.nbytes)
            if slot is None:
                return None
            packed.write_into(memoryview(slot.map))
            return StagedBatch(slot, None, head.rows, packed.nbytes, None, bad)
        layout = self._known(engine, layout_of(head.layout))
        if head.rows > layout.rows or layout.row_nbytes * head.rows != head.nbytes:
            raise ValueError("a batch of another size than its layout says")
        beside = None
        if any(leaf.dtype is None for leaf in layout.leaves):
            objects = objects_of(head.beside or b"", layout, head.rows)
            beside = bytes(pack(objects).tobytes())
        slot = engine.slot_for(layout.nbytes)
        if slot is None:
            return None
        try:
            copy_into(column_bytes(layout, slot.map, head.rows), pieces)
            check_columns(layout, slot.map, head.rows)
        except BaseException:
            engine.ring.release(slot)
            raise
        return StagedBatch(slot, layout, head.rows, head.nbytes, beside, bad)

    def _known(self, engine: StagingEngine, layout: Layout) -> Layout:
        """An equal layout that members know already: they need not be sent another."""
        for known in (engine.layout, self._layout):
            if known == layout:
                return known
        self._layout = layout
        return layout

    # Sending. In a thread of the transport.

    def serve(self, peer: str, wanted: WantedBatch) -> tuple[BatchHead, list[Any]]:
        """The batch that another machine asks for. Waits until it is ready."""
        want = Want(wanted.epoch, wanted.number, wanted.indices, wanted.replicas, wanted.spent)
        name = want.named(wanted.part)
        if name.digest != wanted.digest:
            return BatchHead.without("absent"), []
        key = (0, name)
        with self._lock:
            number = self._seek(peer, name, want.keys(), wanted)
            if number is None:
                return BatchHead.without("absent"), []
            key = (number, name)
            self._waiting[key] = self._waiting.get(key, 0) + 1
        self._group.kick(if_hungry=True)
        with self._lock:
            try:
                until = self._clock() + wanted.wait
                while key not in self._ready and not self._closed:
                    left = until - self._clock()
                    if left <= 0 or not self._answered.wait(timeout=min(left, 1.0)):
                        self._release_freed(self._clock())
                    if left <= 0:
                        break
                if key not in self._ready:
                    if number in self._group.state.members:
                        self._withdraw(number, name)
                    return BatchHead.without("absent" if self._closed else "later"), []
                staged = self._ready[key]
            finally:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]
                    self._ready.pop(key, None)
        if staged is None:
            return BatchHead.without("failed"), []
        return self._send(number, name, staged)

    def _seek(self, peer: str, name: BatchName, keys: BatchKeys, wanted: WantedBatch) -> int | None:
        """Make another machine a seeker of a batch. ``None`` if it is not prepared here."""
        group, now = self._group, self._clock()
        parts = {member.part for member in group.peers.values()}
        if self._closed or group.broken is not None or name.part not in parts:
            return None
        if len(keys.indices) > MOST_KEYS or not group.has_samples(keys):
            return None
        accepted, decisions = self.spanning.asked_by(peer, name, now)
        self._prepare_here(decisions)
        if not accepted:
            return None
        number = self._remote.get((peer, name.part))
        if number is None:
            number = self._remote[peer, name.part] = group.next_remote()
            group.state.join(number, name.part, "detach", now, remote=True)
        self._last_asked[number] = now
        epoch, first, length, done = wanted.position
        _, begun = group.state.begin(number, epoch, length or None, first, done, now)
        group.carry_out(begun)
        if name in group.state.members[number].wants:
            return number  # it has asked before
        group.want_remote(number, name, keys, wanted.ahead)
        return number

    def _withdraw(self, number: int, name: BatchName) -> None:
        self._group.carry_out(self._group.state.withdraw(number, name, self._clock()))
        self.spanning.ended(name)

    def _send(
        self, number: int, name: BatchName, staged: StagedBatch
    ) -> tuple[BatchHead, list[Any]]:
        lease = self._lease(number, name, staged)
        try:
            head, buffers = _plain_batch(staged, lease)
        except NotPlain as error:
            _log.debug("%s: %s", self._group.name, error)
            with self._lock:
                self._cannot_send()
            return BatchHead.without("unsendable"), []
        with self._lock:
            self.spanning.counts.sent += head.state == "present"
        return head, buffers

    def _lease(self, number: int, name: BatchName, staged: StagedBatch) -> Any:
        """A buffer over the batch's slot. When its last view is gone, the batch is released."""
        size = 1 if staged.slot is None else staged.slot.size
        if staged.slot is None:
            buffer: Any = (ctypes.c_char * size)()
        else:
            buffer = (ctypes.c_char * size).from_buffer(staged.slot.map)
        with self._lock:
            self._lease_number += 1
            lease, freed = self._lease_number, self._freed
            self._leases[lease] = weakref.ref(buffer, lambda _: freed.append((lease, number, name)))
        return buffer

    def _release_freed(self, now: float) -> None:
        while self._freed:
            lease, number, name = self._freed.popleft()
            self._leases.pop(lease, None)
            if number in self._group.state.members:
                self._group.carry_out(self._group.state.released(number, name, now))

    def _cannot_send(self) -> None:
        self.spanning.unsendable()
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: its batches are not plain data (arrays, numbers, text, bytes, and tuples, "
                "lists and dicts of them), so they are not sent to other machines: each prepares "
                "all its batches itself",
                self._group.name,
            )

    # Status. The caller holds the lock.

    def status(self) -> dict[str, Any]:
        """Counters and choices, as plain data."""
        spanning, counts = self.spanning, self.spanning.counts
        parts = sorted({peer.part for peer in self._group.peers.values()})
        machines = {name for part in parts for name in spanning.hosts(part)}
        return {
            "machines": sorted(machines),
            "separate": list(self.separate),
            "sendable": spanning.sendable,
            "prepared": counts.prepared,
            "received": counts.received,
            "sent": counts.sent,
            "hedged": counts.hedged,
            "again": counts.again,
            "late": counts.late,
            "local": counts.local,
            "preparing_seconds": spanning.preparing_seconds,
            "links": {
                name: {
                    "trouble": peer.trouble,
                    "rate": peer.rate,
                    "seconds": spanning.receiving_seconds(name),
                }
                for name, peer in spanning.peers.items()
            },
        }


def _plain_batch(staged: StagedBatch, lease: Any) -> tuple[BatchHead, list[Any]]:
    """A batch as plain data: its head, and views of its slot. Raises NotPlain."""
    if len(staged.bad) > MOST_BAD:
        return BatchHead.without("failed"), []
    bad = [[index, *(text[:LONGEST_REASON] for text in texts)] for index, *texts in staged.bad]
    state: BatchState = "present"
    if staged.slot is None:
        return BatchHead(state, 0, 0, None, None, bad), []
    if staged.layout is None:
        value = unpack(memoryview(lease).cast("B")[: staged.nbytes])
        frame = pack_plain(value).tobytes()
        return BatchHead(state, staged.rows, len(frame), None, None, bad), [frame]
    beside = None
    if staged.beside is not None:
        # These bytes were packed in this process.
        beside = bytes(pack_plain(unpack(staged.beside)).tobytes())
        if len(beside) > LARGEST_RECORD // 2:
            raise NotPlain(f"{len(beside)} bytes of text")
    layout = pack_layout(staged.layout)
    buffers = column_bytes(staged.layout, lease, staged.rows)
    nbytes = sum(map(len, buffers))
    return BatchHead(state, staged.rows, nbytes, layout, beside, bad), list(buffers)
