"""The node's main loop: accepts members, handles their messages, and ends when all have left."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.engine.checkpoint import differences
from penstock.engine.pools.wire import ProtocolError, Wire
from penstock.errors import PenstockError
from penstock.node.copies import CopyDecision, DeviceCopies
from penstock.node.directory import NodeDirectory, peer_of
from penstock.node.group import Group
from penstock.node.log import trim
from penstock.node.peer import Peer
from penstock.node.protocol import (
    ABOUT_BATCHES,
    ABOUT_COPIES,
    RELEASE,
    VERSION,
    VOCABULARY,
    AskCopy,
    AskProgress,
    BeginEpoch,
    Broken,
    Code,
    CopyMade,
    EndNode,
    EnterCluster,
    Entered,
    GetStatus,
    HoldNode,
    Join,
    LeaveCluster,
    LeaveGroup,
    Progress,
    Refused,
    Released,
    Several,
    ShareCopies,
    Status,
    StopSharing,
    Welcome,
    check,
    requested_size,
)
from penstock.node.span import digests_of
from penstock.node.staging import LACKING, WorkerLimit
from penstock.node.state import MOST, BatchName
from penstock.node.status import FEW_DESCRIPTORS, status_of
from penstock.store.shared import SharedStores

if TYPE_CHECKING:
    from penstock.cluster.mailbox import KeeperCourier
    from penstock.cluster.recipes import Recipes
    from penstock.cluster.service import ClusterService
    from penstock.node.guests import Guests

_log = logging.getLogger("penstock.node")


TICK = 0.5
"""Seconds between two looks at the groups and the log."""

LARGEST_MESSAGE = 64 << 20
"""Bytes of the longest message that a member may send. Pipelines are sent as descriptors."""

DESCRIPTORS_PER_BATCH = 4
"""Open files that a staged batch may take: its slot, the mapping of it, and copies that wait to be
sent."""


class Service:
    """One node. ``run`` returns when there was no member for ``idle`` seconds.

    ``descriptors``: limit of open files of this process.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        *,
        workers: int,
        staging: int,
        idle: float,
        clock: Callable[[], float] = time.monotonic,
        descriptors: int = 1 << 20,
    ) -> None:
        self.directory = directory
        self.staging = staging
        self.descriptors = descriptors
        self.started = time.time()
        self.groups: dict[str, Group] = {}
        self.copies: dict[tuple[str, str, str], DeviceCopies] = {}
        """By group, part and device."""
        self.peers: dict[int, Peer] = {}
        self.workers = WorkerLimit(workers)
        self.shared_stores = SharedStores(clock=clock)
        self.cluster: ClusterService | None = None
        self.guests: Guests | None = None
        """Prepares samples for jobs on other machines."""
        self.stays = False
        """The node does not end without members, because other machines use it: a command has put
        it into a cluster, until another takes it out."""
        self._held_until = float("-inf")
        """The node stays until then: the process that kept it in its cluster may come back."""
        self._courier: KeeperCourier | None = None
        self._idle = idle
        self._releasing: threading.Thread | None = None
        self._clock = clock
        self._last_number = 0
        self._ending = False
        self._closing: list[tuple[threading.Thread, Group]] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._spare: int | None = None
        """A descriptor to give up when there is none left to accept a connection with."""
        self._backlog: deque[Peer] = deque()
        """Peers with messages that could not be sent at once."""
        self._alarm, self._bell = Wire.pair()

    def listen(self) -> None:
        """Open the socket of this node."""
        self._listener = self.directory.listen()
        self._listener.setblocking(False)
        for end in (self._alarm, self._bell):
            end.setblocking(False)
        self._reserve()

    def run(self) -> None:
        if self._listener is None:
            self.listen()
        listener = self._listener
        if listener is None:
            raise RuntimeError("the node does not listen")
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._answer_bell)
        _log.info("node %d starts with %d workers", os.getpid(), self.workers.size)
        if self.descriptors < FEW_DESCRIPTORS:
            _log.warning(
                "this node may have %d open files (ulimit -Hn), so it stages at most %d batches",
                self.descriptors,
                self._most_batches(),
            )
        last_needed, ticked = self._clock(), float("-inf")
        try:
            while not self._ending:
                for event, mask in self._selector.select(timeout=TICK):
                    if isinstance(event.data, Peer):
                        self._serve(event.data, mask)
                    else:
                        event.data()
                if time.monotonic() - ticked >= TICK:
                    ticked = time.monotonic()
                    self._tick()
                if self.stays or self._is_used():
                    last_needed = self._clock()
                elif self._clock() - last_needed > self._idle:
                    break
        finally:
            # First, so that no job attaches to a node that is about to end.
            with contextlib.suppress(OSError):
                self.directory.socket.unlink(missing_ok=True)
            listener.close()
            for peer in list(self.peers.values()):
                peer.close()
            for group in list(self.groups.values()):
                group.close()
            for closing, _ in self._closing:
                closing.join()
            if self._releasing is not None:
                self._releasing.join()
            self.shared_stores.close()
            if self.guests is not None:
                self.guests.close()
            if self.cluster is not None:
                self.cluster.close()
            self._selector.close()
            self._alarm.close()
            self._bell.close()
            if self._spare is not None:
                os.close(self._spare)
            _log.info("node %d ends", os.getpid())

    @property
    def ending(self) -> bool:
        """Whether ``run`` is about to return because somebody has asked for it."""
        return self._ending

    def _is_used(self) -> bool:
        """Whether a job is attached, or another process wants this node to stay."""
        if self._clock() < self._held_until:
            return True
        return any(peer.group is not None or peer.held for peer in self.peers.values())

    def _tick(self) -> None:
        """What must happen again and again, whatever members do."""
        for peer in list(self.peers.values()):
            if peer.unsent and not peer.blocked:
                self._send_unsent(peer)
        for group in list(self.groups.values()):
            group.watch()
        if self.guests is not None:
            self.guests.tick()
        ended = [pair for pair in self._closing if not pair[0].is_alive() and pair[1].ended]
        if ended:
            self._closing = [pair for pair in self._closing if pair not in ended]
            self._divide_budget()
        self._release_unused()
        trim(self.directory.log)
        self._reserve()

    def _release_unused(self) -> None:
        """Free the caches that only jobs needed which have ended, and no new job has asked for."""
        if self._releasing is not None and self._releasing.is_alive():
            return
        stores = [self.shared_stores, *([] if self.cluster is None else [self.cluster.stores])]
        idle = [one for one in stores if one.unused(self._idle)]
        if idle:
            # In a thread: freeing many samples takes a while, and members must not wait.
            self._releasing = threading.Thread(
                target=self._drop_unused, args=(idle,), name="penstock-release"
            )
            self._releasing.start()

    def _drop_unused(self, stores: Sequence[SharedStores]) -> None:
        for one in stores:
            one.drop_unused(self._idle)

    # Connections.

    def _reserve(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in LACKING:
                self._turn_away(error)
            return  # otherwise the process at the other end has gone
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            # Only this user can open the directory. The peer is root, or has inherited a socket.
            _log.warning("refused a connection from process %d of user %d", pid, uid)
            sock.close()
            return
        sock.setblocking(False)
        self._last_number += 1
        wire = Wire(sock, VOCABULARY, largest=LARGEST_MESSAGE)
        peer = Peer(self._last_number, wire, pid, self._ring_bell)
        self.peers[peer.number] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _turn_away(self, error: OSError) -> None:
        """Refuse a connection for lack of descriptors. Left alone, it would wake us for ever."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept() if self._listener is not None else (None, None)
            if sock is not None:
                pid, _ = peer_of(sock)
                _log.warning("refused process %d: %s (limit %d)", pid, error, self.descriptors)
                refused = Refused(
                    f"the node cannot serve another process: {error}. It may have "
                    f"{self.descriptors} open files; raise the hard limit (ulimit -Hn) and restart "
                    "the node, or run fewer jobs."
                )
                sock.setblocking(False)
                wire = Wire(sock, VOCABULARY)
                with contextlib.suppress(OSError):
                    wire.send(refused)
                wire.close()
        self._reserve()

    def _ring_bell(self, peer: Peer) -> None:
        """Called in any thread: messages for this peer wait, or it is to be disconnected."""
        self._backlog.append(peer)
        with contextlib.suppress(OSError):  # it is full, so it rings already, or the node ends
            self._alarm.send(b"!")

    def _answer_bell(self) -> None:
        with contextlib.suppress(OSError):
            while self._bell.recv(1):
                pass
        while self._backlog:
            peer = self._backlog.popleft()
            if peer.number in self.peers:
                self._send_unsent(peer)

    def _send_unsent(self, peer: Peer) -> None:
        peer.flush()
        if peer.fault:
            _log.warning("disconnected process %d: %s", peer.pid, peer.fault)
            self._disconnect(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.blocked else 0)
        self._selector.modify(peer.wire.socket, events, peer)

    def _serve(self, peer: Peer, mask: int) -> None:
        if peer.number not in self.peers:
            return  # disconnected by an earlier event
        if mask & selectors.EVENT_WRITE:
            self._send_unsent(peer)
        if mask & selectors.EVENT_READ and peer.number in self.peers:
            self._receive(peer)

    def _receive(self, peer: Peer) -> None:
        kind = "a message"
        try:
            received = peer.wire.receive()
            if received is None:
                self._disconnect(peer)
                return
            message, fds = received
            kind = type(message).__name__
            messages = [message]
            try:
                check(message)
                if isinstance(message, Several):
                    messages = [VOCABULARY.unpack(packed) for packed in message.messages]
                    for inner in messages:
                        if isinstance(inner, Several):
                            raise ProtocolError("Several in Several")
                        check(inner)
                self._handle_all(peer, messages, fds)
            finally:
                for fd in fds:  # handlers remove the ones they use
                    os.close(fd)
        except BlockingIOError:
            pass  # there was nothing to read after all
        except OSError as error:
            _log.warning("disconnected process %d: %s", peer.pid, error)
            self._disconnect(peer)
        except PenstockError as error:
            peer.send(Refused(str(error)))
        except ProtocolError as error:
            _log.warning("disconnected process %d: %s", peer.pid, error)
            peer.send(Refused(f"the node cannot read a message of this process: {error}"))
            self._disconnect(peer)
        except Exception:  # a member that sends nonsense must not end the node for the others
            _log.exception("cannot handle %s from process %d:", kind, peer.pid)
            peer.send(Refused(f"the node cannot handle {kind}; its log says why"))
            self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        if self.peers.pop(peer.number, None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.wire.socket)
        self._leave(peer)
        self._leave_copies(peer)
        if peer.held is not None:
            self._held_until = self._clock() + peer.held.grace
            _log.info("%s (process %d) no longer holds this node", peer.held.keeper, peer.pid)
        peer.close()
        if peer.mapped:
            peer.mapped.clear()
            self._divide_budget()

    def _leave(
        self, peer: Peer, used: list[BatchName] | None = None
    ) -> dict[BatchName, tuple[int, int]]:
        """Remove a peer from its group. Returns the batches that it may still read."""
        group, peer.group = peer.group, None
        if group is None:
            return {}
        kept = group.leave(peer, used)
        _log.info("%s: process %d has left, members: %d", group.name, peer.pid, len(group.peers))
        if not group.peers:
            del self.groups[group.name]
            # In a thread: a worker may be busy with a sample, and other groups must not wait.
            closing = threading.Thread(target=group.close, name=f"penstock-end-{group.name}")
            closing.start()
            self._closing.append((closing, group))
            self._divide_budget()
        return kept

    # Messages.

    def _join(self, peer: Peer, request: Join) -> None:
        if peer.group is not None:
            raise PenstockError(f"this member has joined the group {peer.group.name!r} already")
        if (request.version, request.release) != (VERSION, RELEASE):
            peer.send(
                Refused(
                    f"a node of Penstock {RELEASE} is running (process {os.getpid()}), and this "
                    f"job has Penstock {request.release}. Wait until the node's jobs have ended, "
                    "or set PENSTOCK_RUNTIME_DIR to another directory to start a separate node."
                )
            )
            return
        name = request.group
        if request.clustered and self.cluster is None:
            raise PenstockError("a process must send EnterCluster before it joins a cluster")
        group = self.groups.get(name)
        if group is not None and group.broken is not None:
            peer.send(Broken(group.broken))
            return
        if group is None:
            cluster = self.cluster if request.clustered else None
            group = self.groups[name] = Group(
                name,
                request.description,
                request.unit or self._unit_elsewhere(request) or request.size,
                self.staging,
                self.workers,
                self._stores(request),
                self._clock,
                cluster,
            )
            if group.span is not None:
                group.span.open()
            self._divide_budget()
        else:
            differing = differences(group.description, request.description)
            if differing:
                peer.send(Refused(_refusal(group, request, differing)))
                return
        # A member that comes back keeps the batch size it began with.
        unit = request.unit or group.unit
        size = requested_size(request.size, unit, request.cuts)
        group.join(peer, f"{request.part} x {size}", request.lag)
        if request.dealt is not None:
            group.host(request.dealt, int(request.part.partition("/")[0]))
        _log.info("%s: process %d has joined, members: %d", name, peer.pid, len(group.peers))
        peer.send(Welcome(not group.coded, unit, peer.part))

    def _handle_all(self, peer: Peer, messages: list[tuple[Any, ...]], fds: list[int]) -> None:
        """Handle messages that came together. Those about batches go to the group together."""
        for about_batches, run in groupby(messages, key=lambda m: isinstance(m, ABOUT_BATCHES)):
            if about_batches and peer.has_left:
                self._released(peer, list(run))
            elif about_batches:
                _group_of(peer).handle(peer, list(run))
            else:
                for message in run:
                    self._handle(peer, message, fds)

    def _handle(self, peer: Peer, message: tuple[Any, ...], fds: list[int]) -> None:
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, Code):
            group = _group_of(peer)
            if not fds:
                raise ProtocolError("Code without the descriptor of the pipeline")
            group.load(message, fds.pop(0))
        elif isinstance(message, BeginEpoch):
            _group_of(peer).begin(peer, message)
        elif isinstance(message, AskProgress):
            peer.send(Progress(_group_of(peer).doing(peer)))
        elif isinstance(message, LeaveGroup):
            peer.has_left = True
            used = [BatchName(peer.part, *name) for name in message.used]
            peer.mapped = self._leave(peer, used)
            self._divide_budget()
        elif isinstance(message, ShareCopies):
            self._share_copies(peer, message)
        elif isinstance(message, ABOUT_COPIES):
            self._about_copies(peer, message)
        elif isinstance(message, EnterCluster):
            peer.send(self._enter_cluster(message))
        elif isinstance(message, HoldNode):
            self._hold(peer, message)
            peer.send(Status(status_of(self)))
        elif isinstance(message, LeaveCluster):
            self.stays, self._held_until = False, float("-inf")
            for holder in self.peers.values():
                holder.held = None
            # What it has for other machines is of no use to them any more.
            self._ending |= not self._is_used()
            peer.send(Status(status_of(self)))
        elif isinstance(message, (GetStatus, EndNode)):
            self._ending |= isinstance(message, EndNode)
            peer.send(Status(status_of(self)))
        else:
            raise TypeError(f"a node does not handle {type(message).__name__}")

    # Copies on devices.

    def _share_copies(self, peer: Peer, request: ShareCopies) -> None:
        if (request.version, request.release) != (VERSION, RELEASE):
            raise PenstockError(f"this node has Penstock {RELEASE}")
        if peer.copies is not None or peer.group is not None:
            raise PenstockError("a member shares copies on a connection of its own")
        key = request.group, request.part, request.device
        peer.copies_key, peer.copies = key, self.copies.setdefault(key, DeviceCopies())
        peer.copies.join(peer.number)

    def _about_copies(self, peer: Peer, message: tuple[Any, ...]) -> None:
        copies, me = peer.copies, peer.number
        if copies is None:
            raise PenstockError("a process must send ShareCopies before it asks for copies")
        if isinstance(message, StopSharing):
            self._carry_out(copies.leaving(me))
            return
        name = BatchName("", *message[:3])
        if isinstance(message, AskCopy):
            self._carry_out(copies.ask(me, name))
        elif isinstance(message, CopyMade):
            made = copies.made(me, name, message.version, message.layout, message.handles)
            self._carry_out(made)
        else:
            self._carry_out(copies.end(me, name))

    def _carry_out(self, decisions: Sequence[CopyDecision]) -> None:
        for decision in decisions:
            peer = self.peers.get(decision.member)
            if peer is not None:
                peer.send(decision)

    def _leave_copies(self, peer: Peer) -> None:
        copies, peer.copies = peer.copies, None
        if copies is not None:
            self._carry_out(copies.leave(peer.number))
            if not copies.members:
                self.copies.pop(peer.copies_key, None)

    # Other machines.

    def _enter_cluster(self, request: EnterCluster) -> Entered:
        """Work with the nodes of other machines from now on. Raises PenstockError."""
        if self.cluster is None:
            if not request.seeds:
                raise PenstockError(
                    "the node of this machine is not part of a cluster. Start one with `penstock "
                    "cluster start`, join one with `penstock cluster join ADDRESS`, or give the "
                    'addresses of the machines, such as cluster="10.0.0.1,10.0.0.2".'
                )
            # Not imported by nodes that work alone: Arrow Flight takes a second and many megabytes.
            from penstock.cluster.service import ClusterService
            from penstock.node.guests import Guests

            self.cluster = ClusterService.start(
                request.seeds,
                address=request.address,
                secret=request.secret,
                cache_bytes=request.cache_bytes,
                cores=request.cores,
            )
            self.guests = Guests(
                self.cluster.recipes, self.cluster, self.workers, request.cores, self._clock
            )
            self.cluster.guests = self.guests
        elif request.found and self.stays:
            pass
        elif request.seeds and not self.cluster.knows(request.seeds):
            raise PenstockError(
                f"the node of this machine is in the cluster of {', '.join(self.cluster.seeds)}, "
                f"and this job asks for that of {', '.join(request.seeds)}. A node is in one "
                "cluster at a time: wait until its jobs have ended, or set PENSTOCK_RUNTIME_DIR to "
                "another directory to start a separate node."
            )
        elif request.stay and self.guests is not None:
            # `penstock cluster join` once more: the machine lends another number of cores.
            self.guests.lend(request.cores)
            self.cluster.lend(request.cores)
        self.stays |= request.stay
        # Starting may take longer than the idle time. The process that asked is about to use it.
        self._held_until = max(self._held_until, self._clock() + self._idle)
        return Entered(self.cluster.machine, self.cluster.address)

    def _hold(self, peer: Peer, message: HoldNode) -> None:
        if self.cluster is None:
            raise PenstockError("a process must send EnterCluster before it holds the node")
        if peer.held is None:
            _log.info("%s (process %d) holds this node", message.keeper, peer.pid)
            self._use_courier(self.cluster.recipes, message)
        peer.held = message
        self.cluster.reseed(message.seeds)

    def _use_courier(self, recipes: Recipes, message: HoldNode) -> None:
        """Let the keeper bring recipes to other machines, those published before included."""
        from penstock.cluster.mailbox import KeeperCourier

        if not message.courier:
            return
        if self._courier is None:
            self._courier = KeeperCourier(message.keeper, message.courier)
            renew: Callable[[], None] = partial(recipes.add_courier, self._courier)
        else:
            # A new keeper at the same socket has none of the recipes.
            renew = self._courier.renew
        # In a thread: it waits for the keeper, and members must not.
        threading.Thread(target=renew, name="penstock-courier", daemon=True).start()

    def _stores(self, request: Join) -> SharedStores:
        if request.clustered and self.cluster is not None:
            return self.cluster.stores
        return self.shared_stores

    def _unit_elsewhere(self, request: Join) -> int | None:
        """The batch size of the same group on another machine, if the member can use it."""
        if not request.clustered or self.cluster is None:
            return None
        unit = self.cluster.unit_of(*digests_of(request.group, request.description))
        if unit is None or requested_size(request.size, unit, request.cuts) != unit:
            return None
        return unit

    def _released(self, peer: Peer, messages: list[tuple[Any, ...]]) -> None:
        """A process that has left its group no longer uses batches."""
        for message in messages:
            if not isinstance(message, Released):
                continue  # it was sent before the process left
            name = BatchName(peer.part, *message)
            times, nbytes = peer.mapped.pop(name, (0, 0))
            if times > 1:
                peer.mapped[name] = (times - 1, nbytes)
        self._divide_budget()

    # Budgets.

    @property
    def lingering(self) -> int:
        """Bytes of batches that belong to no group any more and are not free yet.

        Jobs that have left still read them, or their group is being closed.
        """
        mapped = sum(size for peer in self.peers.values() for _, size in peer.mapped.values())
        return mapped + sum(group.memory for _, group in self._closing)

    def _most_batches(self) -> int:
        return max(2, min(MOST, self.descriptors // (2 * DESCRIPTORS_PER_BATCH)))

    def _divide_budget(self) -> None:
        count = max(1, len(self.groups))
        left = max(0, self.staging - self.lingering)
        for group in self.groups.values():
            group.state.budget = left // count
            group.state.most_batches = max(2, self._most_batches() // count)


def _group_of(peer: Peer) -> Group:
    if peer.group is None:
        raise PenstockError("a process must send Join before any other message")
    return peer.group


def _refusal(group: Group, request: Join, differing: list[str]) -> str:
    pids = ", ".join(str(peer.pid) for peer in group.peers.values())
    reason = (
        f"the jobs of {group.name!r} (process {pids}) prepare something else: "
        f"{'; '.join(differing)}. Give this job another name, or make its pipeline and options "
        "equal to theirs."
    )
    directory = request.description.get("directory")
    if directory is not None and directory != group.description.get("directory"):
        reason += (
            " Your code may open files by relative paths, so all jobs of a group must run in one "
            "directory: for Ray Tune set RAY_CHDIR_TO_TRIAL_DIR=0, for Hydra "
            "hydra.job.chdir=False."
        )
    return reason
