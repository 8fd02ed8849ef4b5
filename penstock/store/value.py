"""How one value lies in a store: behind a header that proves it, and what it costs there."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import Any

import xxhash

Buffer = bytes | bytearray | memoryview
Value = Buffer | Sequence[Buffer]
"""What can be put: bytes, or a list or tuple of the parts that make them up in their order."""

# 16 bytes: LMDB starts a large value 16 bytes into a page, so the payload is aligned to 32.
_HEADER = struct.Struct("<HHIQ")
_MAGIC = 0x5053
_VERSION = 1
_KEY = struct.Struct("=q")
_WORD = (1 << 64) - 1

HEADER_NBYTES = _HEADER.size
MAX_NBYTES = (1 << 32) - 1
"""Of a value with its header: LMDB counts in 32 bits."""

# LMDB takes the system's page, but none over 32 KiB.
_PAGE = min(mmap.PAGESIZE, 1 << 15)
_PAGE_HEADER = 16
_NODE_HEADER = 8
_SLOT = 2
_PAGE_NUMBER = 8

# Keys that arrive shuffled leave pages 65 to 70 % full (ln 2 in the limit; less just after a
# wave of splits): measured with 20,000 values for each of ten sizes between 10 B and 2 KB.
_FILL = 0.65


def pack_key(key: int) -> bytes:
    return _KEY.pack(key)


def unpack_key(packed: Buffer) -> int:
    key: int = _KEY.unpack(packed)[0]
    return key


def frame(key: int, value: Value) -> bytes:
    """The value with its header: what is written."""
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    length = 0
    digest = xxhash.xxh3_64(seed=key & _WORD)
    for part in parts:
        length += len(part) if isinstance(part, bytes) else memoryview(part).nbytes
        digest.update(part)
    header = _HEADER.pack(_MAGIC, _VERSION, length & 0xFFFFFFFF, digest.intdigest())
    return b"".join((header, *parts))


def payload(key: int, framed: memoryview) -> bytes | None:
    """What was put under this key, or ``None`` where it is not what was written.

    The length comes first: where the tree itself is damaged a value may claim more bytes than
    the map has, and they must not be touched.
    """
    if len(framed) < HEADER_NBYTES:
        return None
    magic, version, length, digest = _HEADER.unpack_from(framed)
    if magic != _MAGIC or version != _VERSION or length != len(framed) - HEADER_NBYTES:
        return None
    found = bytes(framed[HEADER_NBYTES:])
    # Seeded with the key, so that a sound value under another value's key is found out too.
    return found if xxhash.xxh3_64_intdigest(found, seed=key & _WORD) == digest else None


def cost(nbytes: int, page: int = _PAGE) -> int:
    """The bytes that a value of ``nbytes`` occupies in a store, tree and page ends included.

    A large value has whole pages to itself; small ones share pages that are never quite full.
    It is an upper estimate, within an eighth of the truth but for values of a third to half a
    page: the whole page they are taken for is right where keys arrive in order, and half as much
    again where they arrive shuffled.

    >>> cost(100, page=4096), cost(3000, page=4096), cost(110_000, page=4096)
    (212, 4138, 110634)
    """
    stored = HEADER_NBYTES + nbytes
    node = _NODE_HEADER + _KEY.size + stored
    # Each leaf has an entry in the branch above it.
    leaf = page + (_NODE_HEADER + _KEY.size + _SLOT) / _FILL
    # LMDB moves a value out of its leaf, to pages of its own, where two would not fit in one.
    if node > (((page - _PAGE_HEADER) // 2) & ~1) - _SLOT:
        pages = -(-(_PAGE_HEADER + stored) // page)
        entry = _NODE_HEADER + _KEY.size + _PAGE_NUMBER + _SLOT
        return pages * page + int(entry / _FILL * leaf / page) + 2
    most = (page - _PAGE_HEADER) // (node + (node & 1) + _SLOT)
    return int(leaf / (_FILL * most if most > 2 else 1)) + 1
