"""Where jobs of a group on one device agree, through the node, on who makes a copy of a batch."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

from penstock.device.shared_copy import MakeShared, UseShared
from penstock.engine.pools.wire import RELEASE, ProtocolError, Wire
from penstock.node.copies import MakeCopy, MayLeave, OwnerLeft, UseCopy
from penstock.node.directory import NodeDirectory
from penstock.node.protocol import (
    VERSION,
    VOCABULARY,
    AskCopy,
    CopyEnded,
    CopyMade,
    Refused,
    ShareCopies,
    StopSharing,
    Want,
)
from penstock.node.state import BatchName
from penstock.order.plan import BatchKeys

_log = logging.getLogger("penstock.device")

PATIENCE = 2.0
"""Seconds that a job waits for the copy of another before it makes its own. A copy takes a few
milliseconds; a job that takes longer is stopped, or very busy."""

LEAVE = 5.0
"""Seconds that a job waits when it ends for those who read its copies."""

AGAIN = 100
"""Batches after which a job asks again for the node, if there was none."""


class NodeCopyDesk:
    """A connection to the node for copies on a device. See ``CopyDesk``.

    ``part``: which batches of the group this job takes, and how large they are. If the node has
    ended, each job copies for itself; another node is asked after some batches.
    """

    def __init__(self, group: str, part: str, directory: NodeDirectory | None = None) -> None:
        self.name = f"share={group!r}"
        self._group = group
        self._part = part
        self._directory = directory or NodeDirectory()
        self._device = ""
        self._wire: Wire | None = None
        self._name = BatchName("", 0, 0, "")
        self._handles: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._gone: list[int] = []
        self._all_gone = False
        self._later = 0
        """Batches until the node is asked for again."""
        self._unanswered: set[BatchName] = set()
        """Batches whose answer this job did not wait for to the end. It may still come."""
        self.patience = PATIENCE
        _desks.add(self)

    def join(self, device: str) -> None:
        self._device = device
        self._connect()

    def _connect(self) -> None:
        sock = self._directory.connect()
        if sock is None:
            self._later = AGAIN
            return
        self._wire = Wire(sock, VOCABULARY)
        self._send(ShareCopies(VERSION, RELEASE, self._group, self._part, self._device))

    def _send(self, message: tuple[Any, ...]) -> None:
        """Send a message. If the node has gone, forget it."""
        if self._wire is None:
            return
        try:
            self._wire.socket.settimeout(self.patience)
            self._wire.send(message)
        except OSError as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            self._all_gone = True
            self._handles.clear()
            self._unanswered.clear()
            _log.info("%s: no copies are shared for now: %s", self.name, why)
        self._later = AGAIN

    def ask(self, keys: BatchKeys) -> MakeShared | UseShared | None:
        self._name = name = Want.of(keys).named("")
        if self._wire is None:
            self._later -= 1
            if self._later > 0:
                return None
            self._connect()
        if name in self._unanswered:
            return None  # the late answer could be taken for that to this request
        self._send(AskCopy(*name[1:]))
        while self._wire is not None:
            message = self._receive()
            if isinstance(message, (MakeCopy, UseCopy)):
                answered = BatchName("", *message.name[1:])
                if answered != name:
                    self._unanswered.discard(answered)
                    self._send(CopyEnded(*message.name[1:]))
                elif isinstance(message, UseCopy):
                    return UseShared(message.owner, message.place, message.version, message.layout)
                else:
                    place = message.place
                    return None if place is None else MakeShared(place, message.readers)
            elif message is None and self._wire is not None:
                self._send(CopyEnded(*name[1:]))
                self._unanswered.add(name)
                return None
        return None

    def _receive(self) -> Any:
        """The next message; ``None`` if there was none for too long, or the node has gone."""
        assert self._wire is not None
        try:
            self._wire.socket.settimeout(self.patience)
            received = self._wire.receive()
        except TimeoutError:
            return None
        except (OSError, ProtocolError) as error:
            self._lose(str(error))
            return None
        if received is None:
            self._lose("the node has ended")
            return None
        message, fds = received
        for fd in fds:
            os.close(fd)
        if isinstance(message, UseCopy) and message.handle is not None:
            # Kept even if the answer comes too late: a handle is sent once.
            self._handles[message.owner, message.place] = message.version, message.handle
        elif isinstance(message, OwnerLeft):
            self._gone.append(message.owner)
            self._handles = {k: one for k, one in self._handles.items() if k[0] != message.owner}
        elif isinstance(message, Refused):
            self._lose(message.reason)
        return message

    def made(self, version: int, layout: str, handles: dict[int, bytes]) -> None:
        self._send(CopyMade(*self._name[1:], version, layout, handles))

    def ended(self) -> None:
        self._send(CopyEnded(*self._name[1:]))

    def handle(self, owner: int, place: int, version: int) -> bytes | None:
        found, handle = self._handles.pop((owner, place), (-1, None))
        return handle if found == version else None

    def gone(self) -> Sequence[int] | None:
        gone, self._gone = self._gone, []
        everyone, self._all_gone = self._all_gone, False
        return None if everyone else gone

    def close(self) -> None:
        if self._wire is None:
            return
        self.patience = LEAVE
        self._send(StopSharing())
        while self._wire is not None:
            message = self._receive()
            if isinstance(message, (MakeCopy, UseCopy)):
                self._send(CopyEnded(*message.name[1:]))
            elif message is None or isinstance(message, MayLeave):
                break
        self.abandon()

    def abandon(self) -> None:
        """Close the connection at once."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


_desks: weakref.WeakSet[NodeCopyDesk] = weakref.WeakSet()


def _close_after_fork() -> None:
    # While the child has a copy of the socket, the node cannot see that this job has gone.
    for desk in list(_desks):
        desk.abandon()


os.register_at_fork(after_in_child=_close_after_fork)
