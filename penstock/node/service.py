"""The node's main loop: accepts members, handles their messages, and ends when all have left."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from penstock.engine.checkpoint import differences
from penstock.engine.pools.wire import ProtocolError, Wire
from penstock.errors import PenstockError
from penstock.node.directory import NodeDirectory, peer_of
from penstock.node.group import Group, Peer
from penstock.node.protocol import (
    ABOUT_BATCHES,
    RELEASE,
    VERSION,
    VOCABULARY,
    BeginEpoch,
    Broken,
    Code,
    EndNode,
    GetStatus,
    Join,
    Refused,
    Several,
    Status,
    Welcome,
    requested_size,
)
from penstock.node.staging import WorkerLimit
from penstock.node.status import status_of
from penstock.store.shared import SharedStores

_log = logging.getLogger("penstock.node")


class Service:
    """One node. ``run`` returns when there was no member for ``idle`` seconds."""

    def __init__(
        self,
        directory: NodeDirectory,
        *,
        workers: int,
        staging: int,
        idle: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.staging = staging
        self.started = time.time()
        self.groups: dict[str, Group] = {}
        self.peers: dict[int, Peer] = {}
        self.workers = WorkerLimit(workers)
        self.shared_stores = SharedStores()
        self._idle = idle
        self._clock = clock
        self._last_number = 0
        self._ending = False
        self._closing: list[threading.Thread] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        listener = self.directory.listen()
        self._selector.register(listener, selectors.EVENT_READ, None)
        _log.info("node %d starts with %d workers", os.getpid(), self.workers.size)
        last_needed = self._clock()
        try:
            while not self._ending:
                for event, _ in self._selector.select(timeout=0.5):
                    if event.data is None:
                        self._accept(listener)
                    else:
                        self._receive(event.data)
                if any(peer.group is not None for peer in self.peers.values()):
                    last_needed = self._clock()
                elif self._clock() - last_needed > self._idle:
                    break
        finally:
            # First, so that no job attaches to a node that is about to end.
            self.directory.socket.unlink(missing_ok=True)
            listener.close()
            for peer in list(self.peers.values()):
                peer.wire.close()
            for group in list(self.groups.values()):
                group.close()
            for closing in self._closing:
                closing.join()
            self.shared_stores.close()
            self._selector.close()
            _log.info("node %d ends", os.getpid())

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            # Only this user can open the directory. The peer is root, or has inherited a socket.
            _log.warning("refused a connection from process %d of user %d", pid, uid)
            sock.close()
            return
        self._last_number += 1
        peer = Peer(self._last_number, Wire(sock, VOCABULARY), pid)
        self.peers[peer.number] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)

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
                if isinstance(message, Several):
                    messages = [VOCABULARY.unpack(packed) for packed in message.messages]
                self._handle_all(peer, messages, fds)
            finally:
                for fd in fds:  # handlers remove the ones they use
                    os.close(fd)
        except OSError:
            self._disconnect(peer)
        except PenstockError as error:
            peer.send(Refused(str(error)))
        except ProtocolError as error:
            _log.warning("disconnected process %d: %s", peer.pid, error)
            self._disconnect(peer)
        except Exception:  # a member that sends nonsense must not end the node for the others
            _log.exception("cannot handle %s from process %d:", kind, peer.pid)
            peer.send(Refused(f"the node cannot handle {kind}; its log says why"))
            self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        if self.peers.pop(peer.number, None) is None:
            return
        self._selector.unregister(peer.wire.socket)
        peer.wire.close()
        group = peer.group
        if group is None:
            return
        group.leave(peer)
        _log.info("%s: process %d has left, members: %d", group.name, peer.pid, len(group.peers))
        if not group.peers:
            del self.groups[group.name]
            self._divide_budget()
            # In a thread: a worker may be busy with a sample, and other groups must not wait.
            closing = threading.Thread(target=group.close, name=f"penstock-end-{group.name}")
            closing.start()
            self._closing = [thread for thread in self._closing if thread.is_alive()] + [closing]

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
        group = self.groups.get(name)
        if group is not None and group.broken is not None:
            peer.send(Broken(group.broken))
            return
        if group is None:
            group = self.groups[name] = Group(
                name,
                request.description,
                request.unit or request.size,
                self.staging,
                self.workers,
                self.shared_stores,
            )
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
        _log.info("%s: process %d has joined, members: %d", name, peer.pid, len(group.peers))
        peer.send(Welcome(not group.coded, unit, peer.part))

    def _handle_all(self, peer: Peer, messages: list[tuple[Any, ...]], fds: list[int]) -> None:
        """Handle messages that came together. Those about batches go to the group together."""
        for about_batches, run in groupby(messages, key=lambda m: isinstance(m, ABOUT_BATCHES)):
            if about_batches:
                _group_of(peer).handle(peer, list(run))
                continue
            for message in run:
                self._handle(peer, message, fds)

    def _handle(self, peer: Peer, message: tuple[Any, ...], fds: list[int]) -> None:
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, Code):
            _group_of(peer).load(message, fds.pop(0))
        elif isinstance(message, BeginEpoch):
            _group_of(peer).begin(peer, message)
        elif isinstance(message, (GetStatus, EndNode)):
            self._ending |= isinstance(message, EndNode)
            peer.send(Status(status_of(self)))
        else:
            raise TypeError(f"a node does not handle {type(message).__name__}")

    def _divide_budget(self) -> None:
        for group in self.groups.values():
            group.state.budget = self.staging // len(self.groups)


def _group_of(peer: Peer) -> Group:
    if peer.group is None:
        raise PenstockError("a member must send Join before any other message")
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
