"""Messages between the processes of one machine: msgpack over Unix sockets.

Every message is one packet; descriptors travel along with it. A message too long for a packet
goes into a memfd of its own.
"""

from __future__ import annotations

import mmap
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Any

import msgpack

from penstock.engine.slots import shared_file

_PACKET = 1 << 16
_SPACE = socket.CMSG_SPACE(8 * array("i").itemsize)
"""Room for so many descriptors."""
_INLINE, _BESIDE = b"\0", b"\1"


class Wire:
    """One end of a socket pair. Sending and receiving may happen in different threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: Sequence[Any], fds: Sequence[int] = ()) -> None:
        body = msgpack.packb(message, use_bin_type=True)
        if len(body) < _PACKET:
            if fds:
                socket.send_fds(self.socket, [_INLINE + body], list(fds))
            else:
                self.socket.send(_INLINE + body)
            return
        beside = shared_file(len(body))
        try:
            os.pwrite(beside, body, 0)
            socket.send_fds(self.socket, [_BESIDE], [*fds, beside])
        finally:
            os.close(beside)

    def post(self, message: Sequence[Any]) -> None:
        """Send a short message without waiting; BlockingIOError where that cannot be done."""
        body = msgpack.packb(message, use_bin_type=True)
        self.socket.sendmsg([_INLINE + body], [], socket.MSG_DONTWAIT)

    def receive(self) -> tuple[list[Any], list[int]] | None:
        """The next message and its descriptors, ``None`` when the other end is gone."""
        try:
            packet, along, _, _ = self.socket.recvmsg(_PACKET + 1, _SPACE)
        except ConnectionResetError:
            return None
        if not packet:
            return None
        fds = _descriptors(along) if along else []
        if packet[:1] == _INLINE:
            return msgpack.unpackb(packet[1:], raw=False, strict_map_key=False), fds
        beside = fds.pop()
        try:
            with mmap.mmap(beside, 0, prot=mmap.PROT_READ) as body:
                return msgpack.unpackb(body, raw=False, strict_map_key=False), fds
        finally:
            os.close(beside)

    def close(self) -> None:
        self.socket.close()


def _descriptors(along: list[tuple[int, int, bytes]]) -> list[int]:
    """What came along with a message; nothing else does."""
    fds = array("i")
    for _, _, data in along:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds.tolist()


class Known:
    """Which slots a worker has mapped: both ends apply this same rule and so always agree."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._order: dict[int, None] = {}

    def touch(self, slot: int) -> tuple[bool, int | None]:
        """Use a slot: was it known, and which one is forgotten for it."""
        known = slot in self._order
        self._order.pop(slot, None)
        self._order[slot] = None
        if len(self._order) > self._most:
            oldest = next(iter(self._order))
            del self._order[oldest]
            return known, oldest
        return known, None
