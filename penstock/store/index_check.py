"""A check of the index in an LMDB file, read with ``pread`` and never through a map.

LMDB trusts its pages: a damaged index can crash the process that reads or changes it, and a page
behind the end of the file certainly does. This check reads the pages of the index as plain bytes,
so damage is a result here and not a crash. It covers what LMDB relies on: the two meta pages, the
trees with their keys, the list of free pages, and that no page is used twice. The pages of large
values are not read; values have checksums of their own.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_HEADER = 16
"""Bytes at the beginning of a page: page number, padding, flags, then the bounds of its room."""

_PAGE_HEAD = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ48s48sQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")
_BRANCH, _LEAF, _META_PAGE = 1, 2, 8
_BIG, _SUBTREE = 1, 2
_NODE = 8
_NONE = (1 << 64) - 1
_INTEGER_KEYS = 8
_DEEPEST = 32
_SMALLEST_PAGE, _LARGEST_PAGE = 256, 1 << 16

_Numbers = NDArray[np.int64]
"""Numbers of pages, or places in a page."""


class IndexDamage(Exception):
    """The index cannot be trusted. The text says what was found."""


class _Database(NamedTuple):
    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def of(cls, packed: bytes) -> _Database:
        return cls(*_DATABASE.unpack(packed))


class _Meta(NamedTuple):
    """A meta page: which trees there are, and how many pages."""

    page_size: int
    map_size: int
    free: _Database
    main: _Database
    last: int
    transaction: int


class _Span(NamedTuple):
    """A page of a tree, and the keys between which all its keys must be."""

    page: int
    low: bytes | None
    high: bytes | None


class _LeafPage(NamedTuple):
    """The entries of a leaf: where their data are, how long, and with which flags."""

    page: bytes
    keys: list[bytes]
    at: _Numbers
    nbytes: _Numbers
    flags: _Numbers


def check_index(fd: int, databases: dict[bytes, bool]) -> int:
    """The number of the last transaction of an LMDB file. Raises IndexDamage.

    ``databases``: the names of its databases, and whether their keys are integers. No process may
    change the file meanwhile.
    """
    try:
        return _IndexCheck(fd).run(databases)
    except (ValueError, IndexError, struct.error, OverflowError) as error:
        raise IndexDamage(f"a page of it is not readable ({error})") from error


def full_size(fd: int) -> int:
    """Bytes up to the end of the last page that LMDB has allocated. Raises IndexDamage."""
    return _IndexCheck(fd).full


def last_transaction(fd: int) -> int:
    """LMDB's number of the last transaction. Raises IndexDamage."""
    return _IndexCheck(fd).transaction


class _IndexCheck:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._nbytes = os.fstat(fd).st_size
        self._meta = self._newest_meta()
        self._size = self._meta.page_size
        self._last = self._meta.last
        # Every page that is used or free: the first of a row of pages, and their number.
        self._starts: list[_Numbers] = [np.arange(2)]
        self._counts: list[_Numbers] = [np.ones(2, np.int64)]

    @property
    def full(self) -> int:
        return (self._last + 1) * self._size

    @property
    def transaction(self) -> int:
        return self._meta.transaction

    def run(self, databases: dict[bytes, bool]) -> int:
        meta = self._meta
        if self.full > self._nbytes:
            raise IndexDamage(f"its file ends {self.full - self._nbytes} bytes early")
        if meta.free.flags != _INTEGER_KEYS or meta.main.flags != 0:
            raise IndexDamage("a meta page has unknown flags")
        records: list[tuple[_Database, bool]] = []
        _Tree(self, meta.free, integers=True).check(self._check_free_pages)
        _Tree(self, meta.main, integers=False).check(
            lambda leaf: records.extend(self._records(leaf, databases))
        )
        for database, integers in records:
            _Tree(self, database, integers=integers).check(_check_values)
        self._check_used_once()
        return meta.transaction

    def _newest_meta(self) -> _Meta:
        first = self._meta_page(0)
        metas = (first, self._meta_page(first.page_size))
        if metas[0].page_size != metas[1].page_size:
            raise IndexDamage("its meta pages disagree")
        number = int(metas[0].transaction < metas[1].transaction)
        newest = metas[number]
        # LMDB finds the meta page of a transaction by the lowest bit of its number.
        if newest.transaction and newest.transaction & 1 != number:
            raise IndexDamage("its meta pages are in the wrong order")
        if not 1 <= newest.last < 1 << 47 or (newest.last + 1) * newest.page_size > newest.map_size:
            raise IndexDamage("a meta page names an impossible number of pages")
        return newest

    def _meta_page(self, at: int) -> _Meta:
        raw = os.pread(self._fd, _HEADER + _META.size, at)
        if len(raw) < _HEADER + _META.size:
            raise IndexDamage("a meta page is missing")
        _, _, flags, _, _ = _PAGE_HEAD.unpack_from(raw)
        magic, version, _, map_size, free, main, last, transaction = _META.unpack_from(raw, _HEADER)
        if flags != _META_PAGE or magic != _MAGIC:
            raise IndexDamage("a meta page is damaged")
        if version != _VERSION:
            raise IndexDamage(f"it has LMDB's data version {version}")
        free_pages = _Database.of(free)
        size = free_pages.padding
        if not _SMALLEST_PAGE <= size <= _LARGEST_PAGE or size & (size - 1):
            raise IndexDamage(f"a meta page names pages of {size} bytes")
        return _Meta(size, map_size, free_pages, _Database.of(main), last, transaction)

    @property
    def page_size(self) -> int:
        return self._size

    def read(self, number: int) -> bytes:
        """A page of a tree."""
        if not 2 <= number <= self._last:
            raise IndexDamage(f"it refers to page {number}, which does not exist")
        page = os.pread(self._fd, self._size, number * self._size)
        if len(page) != self._size:
            raise IndexDamage("the file ends early")
        self.note(np.array([number]), np.ones(1, np.int64))
        return page

    def note(self, starts: _Numbers, counts: _Numbers) -> None:
        """Remember that these pages have an owner."""
        if len(starts) and (starts.min() < 2 or (starts + counts - 1).max() > self._last):
            raise IndexDamage("it refers to pages outside of the file")
        self._starts.append(starts)
        self._counts.append(counts)

    def _data(self, leaf: _LeafPage, i: int) -> bytes:
        at, nbytes = int(leaf.at[i]), int(leaf.nbytes[i])
        if leaf.flags[i] & _BIG:
            return os.pread(self._fd, nbytes, at)
        return leaf.page[at : at + nbytes]

    def _check_free_pages(self, leaf: _LeafPage) -> None:
        for i in range(len(leaf.keys)):
            data = self._data(leaf, i)
            count = int.from_bytes(data[:8], "little")
            if len(data) % 8 or leaf.flags[i] & _SUBTREE or count > len(data) // 8 - 1:
                raise IndexDamage("its list of free pages is damaged")
            free = np.frombuffer(data, "<u8", count, 8)
            if count and (free[0] > self._last or (free[1:] >= free[:-1]).any()):
                raise IndexDamage("its list of free pages is damaged")
            self.note(free.astype(np.int64), np.ones(count, np.int64))

    def _records(
        self, leaf: _LeafPage, databases: dict[bytes, bool]
    ) -> list[tuple[_Database, bool]]:
        found: list[tuple[_Database, bool]] = []
        for i, key in enumerate(leaf.keys):
            if key not in databases and not leaf.flags[i] & _SUBTREE:
                continue
            data = self._data(leaf, i)
            if leaf.flags[i] != _SUBTREE or len(data) != _DATABASE.size or key not in databases:
                raise IndexDamage("the record of a database is damaged")
            database = _Database.of(data)
            if database.flags != (_INTEGER_KEYS if databases[key] else 0):
                raise IndexDamage("the record of a database has unknown flags")
            found.append((database, databases[key]))
        return found

    def _check_used_once(self) -> None:
        starts, counts = np.concatenate(self._starts), np.concatenate(self._counts)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + counts)[order]
        if (starts[1:] < ends[:-1]).any():
            raise IndexDamage("a page of it is used twice")


class _Tree:
    """One tree of the file. Its keys are numbers of 8 bytes, or strings of bytes."""

    def __init__(self, file: _IndexCheck, database: _Database, *, integers: bool) -> None:
        self._file = file
        self._database = database
        self._integers = integers
        self._size = file.page_size
        self._branches = self._leaves = self._overflows = self._entries = 0

    def check(self, visit: Callable[[_LeafPage], None]) -> None:
        """Check all its pages. ``visit`` is called with each leaf."""
        database = self._database
        if (database.root == _NONE) != (database.depth == 0) or database.depth > _DEEPEST:
            raise IndexDamage("a tree has an impossible depth")
        level = [_Span(database.root, None, None)] if database.depth else []
        for _ in range(database.depth - 1):
            level = [below for span in level for below in self._branch(span)]
        for span in level:
            visit(self._leaf(span))
        found = (self._branches, self._leaves, self._overflows, self._entries)
        if found != (database.branches, database.leaves, database.overflows, database.entries):
            raise IndexDamage("a tree has other pages or entries than its record says")

    def _branch(self, span: _Span) -> list[_Span]:
        page, at, nbytes, flags, key_size = self._nodes(span.page, _BRANCH)
        keys = _keys(page, at, key_size)
        self._check_filled(span.page, at, _NODE + key_size)
        # The first key of a branch is not used: everything before the second one is below it.
        self._check_order(span, keys[1:])
        self._branches += 1
        bounds = [span.low, *keys[1:], span.high]
        children = (nbytes | flags << 32).tolist()
        return [_Span(child, bounds[i], bounds[i + 1]) for i, child in enumerate(children)]

    def _leaf(self, span: _Span) -> _LeafPage:
        page, at, nbytes, flags, key_size = self._nodes(span.page, _LEAF)
        if (flags & ~(_BIG | _SUBTREE)).any():
            raise IndexDamage(f"page {span.page} has an entry with unknown flags")
        keys = _keys(page, at, key_size)
        big = (flags & _BIG).astype(bool)
        self._check_filled(span.page, at, _NODE + key_size + np.where(big, 8, nbytes))
        self._check_order(span, keys)
        self._leaves += 1
        self._entries += len(keys)
        data = at + _NODE + key_size
        for i in np.flatnonzero(big).tolist():
            start = int.from_bytes(page[int(data[i]) : int(data[i]) + 8], "little")
            if start >> 47:
                raise IndexDamage("a value lies outside of the file")
            data[i] = start
        pages = (_HEADER - 1 + nbytes[big]) // self._size + 1
        self._overflows += int(pages.sum())
        self._file.note(data[big], pages)
        data[big] = data[big] * self._size + _HEADER
        return _LeafPage(page, keys, data, nbytes, flags)

    def _nodes(
        self, number: int, kind: int
    ) -> tuple[bytes, _Numbers, _Numbers, _Numbers, _Numbers]:
        """A page and its entries: place, length, flags and key length of each."""
        page = self._file.read(number)
        own, _, flags, lower, upper = _PAGE_HEAD.unpack_from(page)
        if own != number or flags != kind:
            raise IndexDamage(f"page {number} is not the page that the index expects")
        count = (lower - _HEADER) >> 1
        if lower & 1 or upper & 1 or not lower <= upper <= self._size:
            raise IndexDamage(f"page {number} has impossible bounds")
        if count < (2 if kind == _BRANCH else 1):
            raise IndexDamage(f"page {number} has too few entries")
        halves = np.frombuffer(page, "<u2").astype(np.int64)
        at = halves[_HEADER // 2 : _HEADER // 2 + count]
        if (at & 1).any() or at.min() != upper or at.max() > self._size - _NODE:
            raise IndexDamage(f"page {number} has an entry outside of its bounds")
        word = at >> 1
        nbytes = halves[word] | halves[word + 1] << 16
        return page, at, nbytes, halves[word + 2], halves[word + 3]

    def _check_filled(self, number: int, at: _Numbers, lengths: _Numbers) -> None:
        """The entries of a page fill its end without gaps: LMDB moves them without looking."""
        order = np.argsort(at, kind="stable")
        starts, ends = at[order], (at + (lengths + 1 & ~1))[order]
        if ends[-1] != self._size or (starts[1:] != ends[:-1]).any():
            raise IndexDamage(f"page {number} has entries that overlap")

    def _check_order(self, span: _Span, keys: list[bytes]) -> None:
        if not self._integers:
            ordered = all(one < other for one, other in itertools.pairwise(keys))
            ordered = ordered and (span.low is None or span.low <= keys[0])
            ordered = ordered and (span.high is None or keys[-1] < span.high)
        else:
            if any(len(key) != 8 for key in keys):
                raise IndexDamage(f"page {span.page} has a key that is not a number")
            numbers = np.frombuffer(b"".join(keys), "<u8")
            ordered = bool((numbers[:-1] < numbers[1:]).all())
            ordered = ordered and (span.low is None or _number(span.low) <= numbers[0])
            ordered = ordered and (span.high is None or numbers[-1] < _number(span.high))
        if not ordered:
            raise IndexDamage(f"page {span.page} has keys that are not in order")


def _check_values(leaf: _LeafPage) -> None:
    if (leaf.flags & _SUBTREE).any():
        raise IndexDamage("a value is marked as a database")


def _keys(page: bytes, at: _Numbers, sizes: _Numbers) -> list[bytes]:
    return [
        page[start : start + size]
        for start, size in zip((at + _NODE).tolist(), sizes.tolist(), strict=True)
    ]


def _number(key: bytes) -> int:
    return int.from_bytes(key, "little")
