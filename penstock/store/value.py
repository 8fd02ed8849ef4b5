"""How one value lies in a store: behind a header that proves it, and what it costs there."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import xxhash

Buffer = bytes | bytearray | memoryview


class Writer(Protocol):
    """What writes itself where it is wanted, and need not be made into bytes before."""

    @property
    def nbytes(self) -> int: ...

    def write_into(self, target: memoryview) -> None: ...


class Lent:
    """A sample that is kept as it is, and handed out again and again: nobody may change it.

    ``nbytes`` is what it would be as bytes.
    """

    __slots__ = ("nbytes", "sample")

    def __init__(self, sample: Any, nbytes: int) -> None:
        self.sample = sample
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes


Value = Buffer | Sequence[Buffer] | Writer
"""What can be put: bytes, a list or tuple of the parts that make them up in their order, or
something that writes them itself."""

# 16 bytes: LMDB starts a large value 16 bytes into a page, so the payload is aligned to 32.
_HEADER = struct.Struct("<HHIQ")
# The header of a value that has a tag; both begin alike.
_TAGGED = struct.Struct("<HHIQq")
_MAGIC = 0x5053
_VERSION = 1
_TAGGED_VERSION = 2
_KEY = struct.Struct("=q")
_WORD = (1 << 64) - 1
# Odd, and its bits look random: seeds of neighbouring keys and tags differ all over.
_SPREAD = 0x9E3779B97F4A7C15

MAX_NBYTES = (1 << 32) - 1
"""Of a value with its header: LMDB counts in 32 bits."""

PIECE = (1 << 16) - 16
"""Bytes of a tagged value that lie together: with LMDB's page header they make whole pages."""

# From here on NumPy copies, which lets other threads run meanwhile: two threads read values of
# 560 KB 1.5 times as fast. What is smaller is copied sooner than NumPy begins.
_LARGE = 1 << 16

# LMDB takes the system's page, but none over 32 KiB.
_PAGE = min(mmap.PAGESIZE, 1 << 15)
_PAGE_HEADER = 16
_NODE_HEADER = 8
_SLOT = 2
_PAGE_NUMBER = 8

# Keys that arrive shuffled leave pages 65 to 70 % full (ln 2 in the limit; less just after a
# wave of splits): measured with 20,000 values for each of ten sizes between 10 B and 2 KB.
_FILL = 0.65


def header_nbytes(tag: int | None) -> int:
    return (_HEADER if tag is None else _TAGGED).size


def pack_key(key: int) -> bytes:
    return _KEY.pack(key)


def unpack_key(packed: Buffer) -> int:
    key: int = _KEY.unpack(packed)[0]
    return key


def frame(key: int, value: Value, tag: int | None = None) -> bytes | bytearray:
    """The value with its header: what is written."""
    if hasattr(value, "write_into"):
        return _written(key, cast(Writer, value), tag)
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    length = 0
    proof = xxhash.xxh3_64(seed=_seed(key, tag))
    for part in parts:
        length += len(part) if isinstance(part, bytes) else memoryview(part).nbytes
        proof.update(part)
    return b"".join((_header(length, proof.intdigest(), tag), *parts))


def _written(key: int, value: Writer, tag: int | None) -> bytearray:
    size = header_nbytes(tag)
    # Zeroed, because what writes itself may leave gaps, and they are to be the same each time.
    framed = bytearray(size + value.nbytes)
    content = memoryview(framed)[size:]
    value.write_into(content)
    proof = xxhash.xxh3_64_intdigest(content, seed=_seed(key, tag))
    framed[:size] = _header(len(content), proof, tag)
    return framed


def laid_out(value: Value) -> Buffer:
    """The value in memory of its own, with no header."""
    if hasattr(value, "write_into"):
        writer = cast(Writer, value)
        made = np.empty(writer.nbytes, np.uint8).data
        writer.write_into(made)
        return made
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return b"".join(parts)


class Head(NamedTuple):
    """What the header of a sound value says; ``tag`` is ``None`` where it has none."""

    size: int
    length: int
    proof: int
    tag: int | None


def head(first: memoryview) -> Head | None:
    """The header of a value, ``None`` where it is damaged. Nothing behind it is touched.

    ``first`` is the value, or, of a tagged one, its first piece. Where the tree itself is damaged
    a value may claim more bytes than the map has, and only its own length gives it away.
    """
    if len(first) < _HEADER.size:
        return None
    magic, version, length, proof = _HEADER.unpack_from(first)
    if magic != _MAGIC:
        return None
    if version == _VERSION:
        found = Head(_HEADER.size, length, proof, None)
        return found if len(first) == found.size + length else None
    if version == _TAGGED_VERSION and len(first) >= _TAGGED.size:
        found = Head(_TAGGED.size, length, proof, _TAGGED.unpack_from(first)[4])
        return found if len(first) == min(found.size + length, PIECE) else None
    return None


def payload(
    key: int, first: memoryview, rest: Callable[[], Sequence[memoryview]] = tuple
) -> memoryview | None:
    """What was put under this key, or ``None`` where it is not what was written.

    ``rest`` gives the other pieces of a value that has some. What is returned is a copy that
    belongs to the caller, and may be written to.
    """
    found = head(first)
    if found is None:
        return None
    pieces = [first[found.size :]]
    if len(pieces[0]) < found.length:
        pieces += rest()
        if sum(map(len, pieces)) != found.length:
            return None
    content = copied(pieces)
    # Seeded with the key, so that a sound value under another value's key is found out too, and
    # with the tag, so that a damaged tag is.
    proof = xxhash.xxh3_64_intdigest(content, seed=_seed(key, found.tag))
    return content if proof == found.proof else None


def _header(length: int, proof: int, tag: int | None) -> bytes:
    if tag is None:
        return _HEADER.pack(_MAGIC, _VERSION, length & 0xFFFFFFFF, proof)
    return _TAGGED.pack(_MAGIC, _TAGGED_VERSION, length & 0xFFFFFFFF, proof, tag)


def _seed(key: int, tag: int | None) -> int:
    return (key if tag is None else key + (tag + 1) * _SPREAD) & _WORD


def copied(pieces: Sequence[memoryview]) -> memoryview:
    """One copy of them all, which may be written to."""
    if len(pieces) > 1 or len(pieces[0]) < _LARGE:
        return memoryview(bytearray().join(pieces))
    copy = np.empty(len(pieces[0]), np.uint8)
    np.copyto(copy, np.frombuffer(pieces[0], np.uint8))
    return copy.data


def cost(nbytes: int, page: int = _PAGE, *, tagged: bool = False) -> int:
    """The bytes that a value of ``nbytes`` occupies in a store, tree and page ends included.

    A large value has whole pages to itself; small ones share pages that are never quite full.
    It is an upper estimate, within an eighth of the truth but for values of a third to half a
    page: the whole page they are taken for is right where keys arrive in order, and half as much
    again where they arrive shuffled. ``tagged`` is for a value with a tag, which lies in pieces.

    >>> cost(100, page=4096), cost(3000, page=4096), cost(110_000, page=4096)
    (212, 4138, 110634)
    """
    if not tagged:
        return _cost(_HEADER.size + nbytes, page)
    full, last = divmod(_TAGGED.size + nbytes, PIECE)
    return full * _cost(PIECE, page) + (_cost(last, page) if last else 0)


def _cost(stored: int, page: int) -> int:
    """The same of what is stored under one key of LMDB's."""
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


def slack(budget: int) -> int:
    """What a store takes past its budget unless told: ``cost`` is within an eighth of the truth,
    and never under it for long."""
    return budget // 8 + (1 << 20)
