"""The node's main loop: it lets members in, hears what they say, and ends when all have gone."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import groupby
from typing import Any

from penstock.engine.checkpoint import differences
from penstock.engine.pools.wire import ProtocolError, Wire
from penstock.errors import PenstockError
from penstock.node.group import Group, Peer
from penstock.node.place import Place, peer_of
from penstock.node.protocol import (
    ABOUT_BATCHES,
    RELEASE,
    VERSION,
    VOCABULARY,
    BeginEpoch,
    Broken,
    Code,
    EndNode,
    Join,
    Look,
    Refused,
    Several,
    Status,
    Welcome,
    common,
)
from penstock.node.staging import Crew
from penstock.node.status import status_of
from penstock.store.shared import SharedStores

Say = Callable[[str], None]


class Service:
    """One node. ``run`` returns when nobody has needed it for ``idle`` seconds."""

    def __init__(
        self,
        place: Place,
        *,
        workers: int,
        staging: int,
        idle: float,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = place
        self.staging = staging
        self.started = time.time()
        self.groups: dict[str, Group] = {}
        self.peers: dict[int, Peer] = {}
        self.crew = Crew(workers)
        self.commons = SharedStores()
        self._idle = idle
        self._say = say
        self._clock = clock
        self._next = 0
        self._ending = False
        self._closing: list[threading.Thread] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        listener = self.place.listen()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._say(f"node {os.getpid()} begins: {self.crew.size} workers")
        alone = self._clock()
        try:
            while not self._ending:
                for event, _ in self._selector.select(timeout=0.5):
                    if event.data is None:
                        self._accept(listener)
                    else:
                        self._hear(event.data)
                if any(peer.group is not None for peer in self.peers.values()):
                    alone = self._clock()
                elif self._clock() - alone > self._idle:
                    break
        finally:
            # First, so that nobody attaches to a node that is about to go.
            self.place.socket.unlink(missing_ok=True)
            listener.close()
            for peer in list(self.peers.values()):
                peer.wire.close()
            for group in list(self.groups.values()):
                group.close()
            for closing in self._closing:
                closing.join()
            self.commons.close()
            self._selector.close()
            self._say(f"node {os.getpid()} ends")

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            # The directory is this user's alone; whoever got here is root, or was given a line.
            self._say(f"process {pid} of user {uid} was turned away")
            sock.close()
            return
        self._next += 1
        peer = Peer(self._next, Wire(sock, VOCABULARY), pid)
        self.peers[peer.number] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _hear(self, peer: Peer) -> None:
        what = "a message"
        try:
            received = peer.wire.receive()
            if received is None:
                self._part(peer)
                return
            message, fds = received
            what = type(message).__name__
            messages = [message]
            if isinstance(message, Several):
                messages = [VOCABULARY.unpack(one) for one in message.messages]
            self._answer(peer, messages, fds)
        except OSError:
            self._part(peer)
        except PenstockError as error:
            peer.send(Refused(str(error)))
        except ProtocolError as error:
            self._say(f"process {peer.pid} was turned away: {error}")
            self._part(peer)
        except Exception:  # one that sends nonsense must not take the others with it
            self._say(f"process {peer.pid} sent {what}:\n{traceback.format_exc()}")
            peer.send(Refused(f"the node cannot handle {what}; its log says why"))
            self._part(peer)

    def _part(self, peer: Peer) -> None:
        if self.peers.pop(peer.number, None) is None:
            return
        self._selector.unregister(peer.wire.socket)
        peer.wire.close()
        group = peer.group
        if group is None:
            return
        group.leave(peer)
        self._say(f"{group.name}: process {peer.pid} has left, {len(group.peers)} are there")
        if not group.peers:
            del self.groups[group.name]
            self._deal_budget()
            # Its workers may be deep in a sample: the others must not wait for that.
            closing = threading.Thread(target=group.close, name=f"penstock-end-{group.name}")
            closing.start()
            self._closing = [one for one in self._closing if one.is_alive()] + [closing]

    def _join(self, peer: Peer, said: Join) -> None:
        if (said.version, said.release) != (VERSION, RELEASE):
            peer.send(
                Refused(
                    f"a node of Penstock {RELEASE} is running (process "
                    f"{os.getpid()}), and this is {said.release}. Wait until its jobs have ended, "
                    "or set PENSTOCK_RUNTIME_DIR to another directory to have a node of your own."
                )
            )
            return
        name = said.group
        group = self.groups.get(name)
        if group is not None and group.broken is not None:
            peer.send(Broken(group.broken))
            return
        if group is None:
            unit = said.unit or said.size
            group = self.groups[name] = Group(
                name, said.description, unit, self.staging, self.crew, self.commons
            )
            self._deal_budget()
        else:
            found = differences(group.description, said.description)
            if found:
                peer.send(Refused(_differs(name, found, group)))
                return
        # A member that comes back goes on in the batches it began with.
        unit = said.unit or group.unit
        group.join(peer, f"{said.part} x {common(said.size, unit, said.cuts)}", said.lag)
        self._say(f"{name}: process {peer.pid} has joined, {len(group.peers)} are there")
        peer.send(Welcome(not group.coded, unit, peer.part))

    def _answer(self, peer: Peer, messages: list[tuple[Any, ...]], fds: list[int]) -> None:
        """Handle messages that came together; those about batches go to the group together."""
        for about_batches, some in groupby(messages, key=lambda m: isinstance(m, ABOUT_BATCHES)):
            if about_batches:
                _group(peer).hear(peer, list(some))
                continue
            for message in some:
                self._handle(peer, message, fds)

    def _handle(self, peer: Peer, message: tuple[Any, ...], fds: list[int]) -> None:
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, Code):
            _group(peer).code(message, fds[0])
        elif isinstance(message, BeginEpoch):
            _group(peer).begin(peer, message)
        elif isinstance(message, (Look, EndNode)):
            self._ending |= isinstance(message, EndNode)
            peer.send(Status(status_of(self)))
        else:
            raise TypeError(f"a node does not take {type(message).__name__}")

    def _deal_budget(self) -> None:
        for group in self.groups.values():
            group.state.budget = self.staging // len(self.groups)


def _group(peer: Peer) -> Group:
    if peer.group is None:
        raise PenstockError("a member must join before it says anything else")
    return peer.group


def _differs(name: str, found: list[str], group: Group) -> str:
    others = ", ".join(str(peer.pid) for peer in group.peers.values())
    told = (
        f"the jobs of {name!r} (process {others}) prepare something else: {'; '.join(found)}. Give "
        "this job a name of its own, or make the two alike."
    )
    if any(one.startswith("directory ") for one in found):
        told += (
            " Code of your own may open files by relative paths, so it must run in one directory: "
            "for Ray Tune set RAY_CHDIR_TO_TRIAL_DIR=0, for Hydra hydra.job.chdir=False."
        )
    return told


def say(line: str) -> None:
    """Into the log, with the time."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    sys.stderr.flush()
