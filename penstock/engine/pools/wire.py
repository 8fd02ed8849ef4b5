"""Messages between the processes of one machine: msgpack over Unix sockets.

Every message is one packet, which may carry file descriptors. A message that is too long for a
packet is sent as the descriptor of a memfd.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.engine.slots import shared_file

RELEASE = f"{penstock.__version__} on Python {sys.version_info.major}.{sys.version_info.minor}"
"""A node refuses jobs and machines of another release: pipelines are not portable between them."""

_PACKET = 1 << 16
_MOST_DESCRIPTORS = 8
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)
_CUT_OFF, _DESCRIPTORS_CUT_OFF = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_INLINE, _IN_MEMFD = b"\0", b"\1"
"""The first byte of a packet: the message follows, or is in the memfd that came along."""


_LARGEST = 1 << 31
"""Bytes of the longest message."""


class ProtocolError(Exception):
    """The other end sent bytes that are not a valid message."""


class LostDescriptorsError(ProtocolError):
    """Descriptors that came with a message were lost."""


class Vocabulary:
    """The kinds of records (named tuples) that a wire can send, each with a word as its tag.

    >>> from typing import NamedTuple
    >>> Point = NamedTuple("Point", [("x", int), ("y", int)])
    >>> words = Vocabulary(point=Point)
    >>> words.pack(Point(1, 2)), words.unpack(["point", 3, 4])
    (['point', 1, 2], Point(x=3, y=4))
    """

    def __init__(self, **records: type[tuple[Any, ...]]) -> None:
        self._records: dict[str, Any] = dict(records)
        self._words = {record: word for word, record in records.items()}

    def pack(self, record: tuple[Any, ...]) -> list[Any]:
        """The record as a list that msgpack can encode."""
        return [self._words[type(record)], *record]

    def unpack(self, message: Any) -> Any:
        """The record that was packed. Raises ProtocolError."""
        try:
            word, *fields = message
            return self._records[word](*fields)
        except (KeyError, TypeError, ValueError):
            shown = message[:1] if isinstance(message, list) else type(message).__name__
            raise ProtocolError(f"not a message: {shown!r}") from None

    def encode(self, record: tuple[Any, ...]) -> bytes:
        """The record as bytes."""
        # Names of files need not be valid UTF-8: Python has the other bytes as surrogates.
        encoded: bytes = msgpack.packb(
            self.pack(record), use_bin_type=True, unicode_errors="surrogatepass"
        )
        return encoded

    def decode(self, body: Any) -> Any:
        """The record that was encoded. Raises ProtocolError."""
        try:
            message = msgpack.unpackb(
                body, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
            )
        except Exception as error:  # msgpack raises exceptions of many kinds
            raise ProtocolError(f"not a message: {type(error).__name__}: {error}") from None
        return self.unpack(message)


def check_types(record: tuple[Any, ...], allowed: Sequence[tuple[type, ...]]) -> None:
    """Raise ProtocolError if a field of a record has another type than the ``allowed`` ones."""
    fields: tuple[str, ...] = type(record)._fields  # type: ignore[attr-defined]
    for value, types, field in zip(record, allowed, fields, strict=True):
        if type(value) not in types:
            kind = type(record).__name__
            raise ProtocolError(f"{kind} with {field} of type {type(value).__name__}")


class Wire:
    """One end of a socket pair. Sending and receiving may happen in different threads.

    ``largest``: bytes of the longest message to receive.
    """

    def __init__(
        self, sock: socket.socket, vocabulary: Vocabulary, largest: int = _LARGEST
    ) -> None:
        self.socket = sock
        self._vocabulary = vocabulary
        self._largest = largest

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def encode(self, record: tuple[Any, ...]) -> bytes:
        """The record as bytes, for ``send_encoded``."""
        return self._vocabulary.encode(record)

    def send(self, record: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        self.send_encoded(self.encode(record), fds)

    def send_encoded(self, body: bytes, fds: Sequence[int] = ()) -> None:
        if len(body) < _PACKET:
            if fds:
                socket.send_fds(self.socket, [_INLINE + body], list(fds))
            else:
                self.socket.send(_INLINE + body)
            return
        memfd = shared_file(len(body))
        try:
            _write_all(memfd, body)
            socket.send_fds(self.socket, [_IN_MEMFD], [*fds, memfd])
        finally:
            os.close(memfd)

    def post(self, record: tuple[Any, ...]) -> None:
        """Send a short message without waiting. Raises BlockingIOError if the socket is full."""
        self.socket.sendmsg([_INLINE + self.encode(record)], [], socket.MSG_DONTWAIT)

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next record and its descriptors; ``None`` when the other end has closed.

        Raises ProtocolError, and OSError if this process has too many open files.
        """
        try:
            packet, ancillary, flags = self._packet()
        except ConnectionResetError:
            return None
        fds = _descriptors(ancillary) if ancillary else []
        if not packet and not fds:
            return None
        try:
            if flags & _DESCRIPTORS_CUT_OFF:
                raise LostDescriptorsError(
                    f"descriptors of a message were lost: more than {_MOST_DESCRIPTORS} came "
                    "along, or this process has as many open files as it may have (ulimit -n)"
                )
            if flags & _CUT_OFF:
                raise ProtocolError(f"a packet of more than {_PACKET} bytes")
            return self._record(packet, fds), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _packet(self) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
        try:
            return self.socket.recvmsg(_PACKET + 1, _DESCRIPTOR_SPACE)[:3]
        except ConnectionResetError:
            # The other end closed before it had read all that we sent. Its last messages come
            # after this error.
            return self.socket.recvmsg(_PACKET + 1, _DESCRIPTOR_SPACE)[:3]

    def _record(self, packet: bytes, fds: list[int]) -> Any:
        if packet[:1] == _INLINE:
            return self._vocabulary.decode(packet[1:])
        if packet != _IN_MEMFD or not fds:
            raise ProtocolError(f"not a message: {packet[:8]!r}")
        memfd = fds.pop()
        try:
            return self._vocabulary.decode(_read_all(memfd, self._largest))
        except OSError as error:
            raise ProtocolError(f"not a message: {error}") from None
        finally:
            os.close(memfd)

    def close(self) -> None:
        self.socket.close()


def _write_all(fd: int, body: bytes) -> None:
    written = 0
    while written < len(body):
        written += os.pwrite(fd, memoryview(body)[written:], written)


def _read_all(fd: int, largest: int) -> bytes:
    """The content of a file. Read, not mapped: the sender of a mapped file could shorten it, and
    the kernel kills a process that reads beyond the end."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > largest:
        raise ProtocolError(f"not a message: a file of mode {found.st_mode:o}, {found.st_size} B")
    parts, place = [], 0
    while part := os.pread(fd, min(found.st_size - place, 1 << 24), place):
        parts.append(part)
        place += len(part)
    return b"".join(parts)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of a packet."""
    fds = array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds.tolist()


class MappedSlots:
    """The slots that a worker keeps mapped: the last ``limit`` ones it used.

    Both ends of a wire follow this rule, so the sender knows which descriptors it need not send.
    """

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._order: dict[int, None] = {}

    def touch(self, slot: int) -> tuple[bool, int | None]:
        """Record the use of a slot: whether it was mapped, and the slot to unmap for it."""
        mapped = slot in self._order
        self._order.pop(slot, None)
        self._order[slot] = None
        if len(self._order) > self._limit:
            oldest = next(iter(self._order))
            del self._order[oldest]
            return mapped, oldest
        return mapped, None

    def forget(self, slot: int) -> bool:
        """Record that a slot is unmapped. Returns whether it was mapped."""
        return self._order.pop(slot, self) is None


def pack_integers(array: NDArray[np.int64] | None) -> bytes | None:
    """Integers for a message: little-endian, 64 bits each."""
    return None if array is None else array.astype("<i8", copy=False).tobytes()


def unpack_integers(data: bytes | None) -> NDArray[np.int64] | None:
    """The integers that were packed."""
    return None if data is None else np.frombuffer(data, "<i8").astype(np.int64)
