"""Messages between the fetcher and the processes that it fetches for: msgpack over a Unix socket.

A message is a small header and a payload of bytes: the content of an object goes through no copy
that a codec would make.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

FRAME = struct.Struct("<IQ")
"""Length of the header, length of the payload."""

LONGEST_HEADER = 64 << 20
"""A request for all objects of a very large batch stays far below it."""

UNKNOWN = -1

StorageOptions = Mapping[str, str]
"""Settings of a store that its environment variables do not give, such as ``endpoint``."""


class WantedObject(NamedTuple):
    """An object, or a range of it, to be fetched.

    ``start``, ``end``: the range; both ``UNKNOWN`` for all of it. ``size``: of the whole object,
    ``UNKNOWN`` if it was not listed. ``etag``: its version, empty if unknown.
    """

    path: str
    start: int = UNKNOWN
    end: int = UNKNOWN
    size: int = UNKNOWN
    etag: str = ""

    @property
    def length(self) -> int:
        """Bytes to fetch; ``UNKNOWN`` for an object of unknown size."""
        return self.size if self.start == UNKNOWN else self.end - self.start


class FetchFailure(NamedTuple):
    """Why an object cannot be had.

    ``kind``: ``missing``, ``denied``, ``changed``, ``unreachable`` or ``settings``.
    """

    kind: str
    text: str


def encode(header: Any, payload_length: int = 0) -> bytes:
    """The bytes of a message up to its payload."""
    packed: bytes = msgpack.packb(header, unicode_errors="surrogateescape")
    return FRAME.pack(len(packed), payload_length) + packed


def decode(packed: bytes | bytearray | memoryview) -> Any:
    """The header of a message. Raises ValueError if it is damaged."""
    try:
        return msgpack.unpackb(packed, unicode_errors="surrogateescape")
    except Exception as error:  # msgpack raises exceptions of many kinds
        raise ValueError(f"a message of the fetcher is damaged: {error}") from None
