"""The node's end of a connection. Sending never waits for the process at the other end."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.slots import Layout
from penstock.node.copies import DeviceCopies
from penstock.node.protocol import BatchGiven, HoldNode
from penstock.node.staging import StagedBatch
from penstock.node.state import BatchName
from penstock.serialize import pack

if TYPE_CHECKING:
    from penstock.node.group import Group

MOST_UNREAD, MOST_UNREAD_BYTES = 1024, 32 << 20
"""Messages, and bytes of them, that wait for a process to read them. A member that takes no batches
is sent two of them, so one with more unread messages than this asks without reading the answers."""

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF}
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}
"""The process or the machine lacks something that it may have again later."""


class Peer:
    """The node's end of a connection: to a member, or to a process that is none yet.

    Messages that the socket has no room for are queued, with copies of their descriptors, and sent
    by ``flush``. ``waiting`` is called, in any thread, when something is queued for the first time,
    or when the peer is to be disconnected.
    """

    def __init__(
        self,
        number: int,
        wire: Wire,
        pid: int,
        waiting: Callable[[Peer], None] = lambda _: None,
    ) -> None:
        self.number = number
        self.wire = wire
        self.pid = pid
        self.part = ""
        self.group: Group | None = None
        self.has_left = False
        """It was a member, has left, and only reports which batches it still uses."""
        self.mapped: dict[BatchName, tuple[int, int]] = {}
        """The batches that it uses after it has left: how many times given, and the size."""
        self.held: HoldNode | None = None
        """It keeps the node in its cluster."""
        self.copies: DeviceCopies | None = None
        """The copies on a device that it shares with other jobs."""
        self.copies_key = ("", "", "")
        self.since = time.time()
        self.fault = ""
        """Why this peer must be disconnected; empty if it need not."""
        self.blocked = False
        """The socket is full. It reports when there is room again."""
        self._waiting = waiting
        self._known = MappedSlots()
        self._layout: Layout | None = None
        # Any thread that finishes a batch sends it. The lock is held for single sends only.
        self._lock = threading.Lock()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._unsent_bytes = 0

    @property
    def unsent(self) -> int:
        """Number of messages that the other end has yet to make room for."""
        return len(self._unsent)

    def send(self, message: tuple[Any, ...], fds: list[int] | None = None) -> None:
        body = self.wire.encode(message)
        with self._lock:
            if self.fault:
                return
            first = not self._unsent
            if not (first and self._sent(body, fds or [])):
                self._queue(body, fds or [], type(message).__name__)
            report = bool(self.fault) or (first and bool(self._unsent))
        if report:
            self._waiting(self)

    def flush(self) -> None:
        """Send what is queued, as far as the socket has room."""
        with self._lock:
            while self._unsent and self._sent(*self._unsent[0]):
                body, fds = self._unsent.popleft()
                self._unsent_bytes -= len(body)
                for fd in fds:
                    os.close(fd)
            self.blocked &= bool(self._unsent)

    def close(self) -> None:
        with self._lock:
            self.fault = self.fault or "closed"
            while self._unsent:
                for fd in self._unsent.popleft()[1]:
                    os.close(fd)
            self._unsent_bytes = 0
            self.wire.close()

    def _sent(self, body: bytes, fds: list[int]) -> bool:
        """Send a message; false if it must be tried again later."""
        try:
            self.wire.send_encoded(body, fds)
        except BlockingIOError:
            self.blocked = True
            return False
        except OSError as error:
            if error.errno in _LACKING:
                self.blocked = False
                return False
            if error.errno not in _GONE:
                self.fault = f"cannot send to it: {error}"
            # That a member has gone is noticed where its messages are read.
        return True

    def _queue(self, body: bytes, fds: list[int], kind: str) -> None:
        if (
            len(self._unsent) >= MOST_UNREAD or self._unsent_bytes + len(body) > MOST_UNREAD_BYTES
        ) and self._unsent:
            self.fault = f"it reads no messages, and {len(self._unsent):,} wait for it"
            return
        copies: list[int] = []
        try:
            # The slot may be closed before it is sent.
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError as error:
            for fd in copies:
                os.close(fd)
            self.fault = f"cannot send {kind} to it: {error}"
            return
        self._unsent.append((body, copies))
        self._unsent_bytes += len(body)

    def give(self, name: BatchName, staged: StagedBatch) -> None:
        """Send a batch, with its slot and layout if the member does not know them yet."""
        fds: list[int] = []
        slot = layout = None
        if staged.slot is not None:
            slot = staged.slot.id
            known, _ = self._known.touch(slot)
            if not known:
                fds = [staged.slot.fd]
        if staged.layout is not None and staged.layout is not self._layout:
            self._layout = staged.layout
            layout = bytes(pack(staged.layout).tobytes())
        whole = staged.layout is None
        _, epoch, number, digest = name
        given = BatchGiven(
            epoch,
            number,
            digest,
            slot,
            layout,
            whole,
            staged.rows,
            staged.nbytes,
            staged.beside,
            staged.bad,
            dict(staged.elsewhere),
        )
        self.send(given, fds)
