"""A stored value: its header with a checksum, its cost, and the rule for storing it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import xxhash

Buffer = bytes | bytearray | memoryview


class Writable(Protocol):
    """An object that writes its own bytes into a given buffer, without an intermediate copy."""

    @property
    def nbytes(self) -> int: ...

    def write_into(self, target: memoryview) -> None: ...


class Lent:
    """A sample that is stored as an object and handed out without a copy. It must not be changed.

    ``nbytes`` is its size in serialised form.
    """

    __slots__ = ("nbytes", "sample")

    def __init__(self, sample: Any, nbytes: int) -> None:
        self.sample = sample
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes


Value = Buffer | Sequence[Buffer] | Writable
"""A value to store: bytes, a list or tuple of buffers to concatenate, or an object that writes its
own bytes."""

# 16 bytes: LMDB starts a large value 16 bytes into a page, so the payload is aligned to 32.
_HEADER = struct.Struct("<HHIQ")
# The header of a value with a tag. Its first fields are those of _HEADER.
_TAGGED = struct.Struct("<HHIQq")
_MAGIC = 0x5053
_VERSION = 1
_TAGGED_VERSION = 2
_KEY = struct.Struct("=q")
_WORD = (1 << 64) - 1
# Odd, with bits that look random: the seeds of neighbouring keys and tags differ in many bits.
_SPREAD = 0x9E3779B97F4A7C15

MAX_NBYTES = (1 << 32) - 1
"""Largest value with its header, in bytes: LMDB stores lengths in 32 bits."""

PIECE = (1 << 16) - 16
"""Size of the pieces of a tagged value, in bytes: with LMDB's page header a piece fills whole
pages."""

# From this size on NumPy copies, which releases the GIL: two threads read values of 560 KB 1.5
# times as fast. For smaller values the overhead of NumPy is larger than the copy.
_LARGE = 1 << 16

# LMDB uses the system's page size, up to 32 KiB.
_PAGE = min(mmap.PAGESIZE, 1 << 15)
_PAGE_HEADER = 16
_NODE_HEADER = 8
_SLOT = 2
_PAGE_NUMBER = 8

# Keys that arrive in random order leave pages 65 to 70 % full (ln 2 in the limit; less just after
# a wave of splits): measured with 20,000 values for each of ten sizes between 10 B and 2 KB.
_FILL = 0.65


def header_nbytes(tag: int | None) -> int:
    return (_HEADER if tag is None else _TAGGED).size


def pack_key(key: int) -> bytes:
    return _KEY.pack(key)


def unpack_key(packed: Buffer) -> int:
    key: int = _KEY.unpack(packed)[0]
    return key


def frame(key: int, value: Value | Lent, tag: int | None = None) -> bytes | bytearray:
    """The bytes to write to LMDB: the header, then the value."""
    if hasattr(value, "write_into"):
        return _written(key, cast(Writable, value), tag)
    if isinstance(value, Lent):
        raise TypeError(
            "a Lent sample stays in the memory of its process; an LmdbStore takes serialised "
            "samples only"
        )
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    length = 0
    checksum = xxhash.xxh3_64(seed=_seed(key, tag))
    for part in parts:
        length += len(part) if isinstance(part, bytes) else memoryview(part).nbytes
        checksum.update(part)
    return b"".join((_header(length, checksum.intdigest(), tag), *parts))


def _written(key: int, value: Writable, tag: int | None) -> bytearray:
    size = header_nbytes(tag)
    # Zeroed, because a Writable may leave gaps, and equal values must have equal bytes.
    framed = bytearray(size + value.nbytes)
    content = memoryview(framed)[size:]
    value.write_into(content)
    checksum = xxhash.xxh3_64_intdigest(content, seed=_seed(key, tag))
    framed[:size] = _header(len(content), checksum, tag)
    return framed


def to_buffer(value: Value) -> Buffer:
    """A copy of the value in one buffer, without a header."""
    if hasattr(value, "write_into"):
        writable = cast(Writable, value)
        buffer = np.empty(writable.nbytes, np.uint8).data
        writable.write_into(buffer)
        return buffer
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return b"".join(parts)


class ValueHeader(NamedTuple):
    """The header of a value. ``size`` is its own length, ``length`` that of the value behind it.

    ``tag`` is ``None`` for a value without a tag.
    """

    size: int
    length: int
    checksum: int
    tag: int | None


def read_header(first: memoryview) -> ValueHeader | None:
    """The header of a value; ``None`` if it is damaged. Only the header is read.

    ``first`` is the whole value, or the first piece of a tagged value. A damaged LMDB tree may
    return a value that claims more bytes than the map has: then its length does not match the
    header.
    """
    if len(first) < _HEADER.size:
        return None
    magic, version, length, checksum = _HEADER.unpack_from(first)
    if magic != _MAGIC:
        return None
    if version == _VERSION:
        header = ValueHeader(_HEADER.size, length, checksum, None)
        return header if len(first) == header.size + length else None
    if version == _TAGGED_VERSION and len(first) >= _TAGGED.size:
        header = ValueHeader(_TAGGED.size, length, checksum, _TAGGED.unpack_from(first)[4])
        return header if len(first) == min(header.size + length, PIECE) else None
    return None


def payload(
    key: int, first: memoryview, rest: Callable[[], Sequence[memoryview]] = tuple
) -> memoryview | None:
    """A writable copy of the value under this key; ``None`` if its bytes are damaged.

    ``rest`` returns the pieces after the first one.
    """
    header = read_header(first)
    if header is None:
        return None
    pieces = [first[header.size :]]
    if len(pieces[0]) < header.length:
        pieces += rest()
        if sum(map(len, pieces)) != header.length:
            return None
    content = copy_pieces(pieces)
    # The seed contains the key, so that an intact value under a wrong key is detected, and the
    # tag, so that a damaged tag is detected.
    checksum = xxhash.xxh3_64_intdigest(content, seed=_seed(key, header.tag))
    return content if checksum == header.checksum else None


def _header(length: int, checksum: int, tag: int | None) -> bytes:
    if tag is None:
        return _HEADER.pack(_MAGIC, _VERSION, length & 0xFFFFFFFF, checksum)
    return _TAGGED.pack(_MAGIC, _TAGGED_VERSION, length & 0xFFFFFFFF, checksum, tag)


def _seed(key: int, tag: int | None) -> int:
    return (key if tag is None else key + (tag + 1) * _SPREAD) & _WORD


def copy_pieces(pieces: Sequence[memoryview]) -> memoryview:
    """A writable copy of the concatenated pieces."""
    if len(pieces) > 1 or len(pieces[0]) < _LARGE:
        return memoryview(bytearray().join(pieces))
    copy = np.empty(len(pieces[0]), np.uint8)
    np.copyto(copy, np.frombuffer(pieces[0], np.uint8))
    return copy.data


@lru_cache(maxsize=1 << 14)
def cost(nbytes: int, page: int = _PAGE, *, tagged: bool = False) -> int:
    """Bytes that a value of ``nbytes`` occupies in a store, with its share of the tree and of
    partly filled pages.

    A large value has whole pages to itself; small values share pages that are never quite full.
    The result is an upper estimate, at most an eighth too high, except for values of a third to
    half a page: for these it counts one whole page each, which is right if keys arrive in order
    and half as much again if they arrive in random order. ``tagged``: the value has a tag and is
    stored in pieces.

    >>> cost(100, page=4096), cost(3000, page=4096), cost(110_000, page=4096)
    (212, 4138, 110634)
    """
    if not tagged:
        return _entry_cost(_HEADER.size + nbytes, page)
    full, last = divmod(_TAGGED.size + nbytes, PIECE)
    return full * _entry_cost(PIECE, page) + (_entry_cost(last, page) if last else 0)


def own_pages(stored: int, page: int, key: int = _KEY.size) -> int:
    """Number of pages that an entry with ``stored`` bytes of data has to itself; 0 if none.

    ``key``: bytes of its key.

    LMDB moves a value out of its leaf, to pages of its own, if a leaf cannot hold two of them.
    """
    if _NODE_HEADER + key + stored > (((page - _PAGE_HEADER) // 2) & ~1) - _SLOT:
        return -(-(_PAGE_HEADER + stored) // page)
    return 0


def _entry_cost(stored: int, page: int) -> int:
    """Bytes that one LMDB entry with ``stored`` bytes of data occupies."""
    node = _NODE_HEADER + _KEY.size + stored
    # Each leaf has an entry in the branch above it.
    leaf = page + (_NODE_HEADER + _KEY.size + _SLOT) / _FILL
    if pages := own_pages(stored, page):
        entry = _NODE_HEADER + _KEY.size + _PAGE_NUMBER + _SLOT
        return pages * page + int(entry / _FILL * leaf / page) + 2
    most = (page - _PAGE_HEADER) // (node + (node & 1) + _SLOT)
    return int(leaf / (_FILL * most if most > 2 else 1)) + 1


def default_overshoot(budget: int) -> int:
    """Bytes that a store accepts beyond its budget by default.

    ``cost`` is at most an eighth too high, and never too low for long.
    """
    return budget // 8 + (1 << 20)


class PutTarget(Protocol):
    """The contents of a store while the caller has exclusive write access."""

    def header(self, key: int) -> ValueHeader | None:
        """The header of the value under a key; ``None`` if there is no intact value."""

    def put(self, key: int, framed: Buffer, tag: int | None) -> None:
        """Store a value, replacing any value under the key."""


class PutItem(NamedTuple):
    """A value ready to be written. ``tag`` is ``None`` for a value without a tag."""

    key: int
    framed: Buffer
    tag: int | None
    cost: int
    pickled: bool = False

    @classmethod
    def of(cls, key: int, value: Value | Lent, tag: int | None = None) -> PutItem:
        framed = frame(key, value, tag)
        nbytes = len(framed) - header_nbytes(tag)
        pickled = bool(getattr(value, "pickled", False))
        return cls(key, framed, tag, cost(nbytes, tagged=tag is not None), pickled)


class PutResult(NamedTuple):
    """``held``: for each item, whether the store holds it now. ``refused``: items without room."""

    held: list[bool]
    refused: int


def put_all(target: PutTarget, items: Sequence[PutItem], room: int | None) -> PutResult:
    """Store the items that fit into ``room`` bytes; ``None`` means that nothing may be stored.

    A replaced value gives its bytes back to the room. LMDB reuses those pages only after this
    transaction, so the file needs spare room for everything that one transaction writes.
    """
    held: list[bool] = []
    refused = 0
    for key, framed, tag, needed, _ in items:
        old = target.header(key)
        # A stored value whose tag is one higher is newer: a late writer must not replace it.
        if old is not None and (tag is None or old.tag in (tag, tag + 1)):
            held.append(tag in (None, old.tag))
            continue
        freed = 0 if old is None else cost(old.length, tagged=old.tag is not None)
        if room is None or needed > room + freed or len(framed) > MAX_NBYTES:
            held.append(False)
            refused += 1
            continue
        target.put(key, framed, tag)
        room += freed - needed
        held.append(True)
    return PutResult(held, refused)
