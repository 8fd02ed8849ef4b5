"""One pass over an object: everything it is made of becomes tagged, counted bytes under a hash."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import FingerprintError

REMEDY = (
    'Give version="..." in its place, and change that whenever the result changes; or define '
    "__fingerprint__(self) -> str on its class."
)


def fingerprint(obj: object) -> str:
    """32 hexadecimal digits that stand for everything that makes ``obj`` behave as it does.

    An object may speak for itself with a method ``__fingerprint__(self) -> str``. What cannot be
    known in the same way in another process raises FingerprintError, which says where it is.

    >>> fingerprint({"a": 1, "b": {2, 3}}) == fingerprint({"b": {3, 2}, "a": 1})
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    walk = Walk({})
    try:
        walk.add(obj)
    except RefusalError as refused:
        raise FingerprintError(refused.message()) from refused.__cause__
    except RecursionError as error:
        raise FingerprintError(
            f"{a(type(obj).__name__)} is nested too deeply to be fingerprinted. {REMEDY}"
        ) from error
    return walk.digest().hex()


def a(name: str) -> str:
    """The name with its article, for messages."""
    return f"{'an' if name[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {name}"


class RefusalError(Exception):
    """Something has no stable fingerprint; the way to it is added while the walk unwinds."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.way: list[str] = []

    def at(self, place: str) -> RefusalError:
        self.way.append(place)
        return self

    def message(self) -> str:
        if not self.way:
            return f"This cannot be fingerprinted: it is {self.what}. {REMEDY}"
        return f"Cannot fingerprint the {', in the '.join(self.way)}: it is {self.what}. {REMEDY}"


Writer = Callable[["Walk", Any], None]

plain: dict[type, Writer] = {}
"""Writers of what cannot contain itself (a tuple can, but only by way of something that may)."""

exact: dict[type, Writer] = {}
"""Writers of other values, by their exact type."""

choosers: list[Callable[[Any], Writer | None]] = []
"""Asked in turn for the writer of anything else."""

once: set[Writer] = set()
"""Writers of what refers to others of its kind in dense cycles (code, instances): each object is
written once and then referred to, for walking every way through would take exponential time."""


class Walk:
    """``_open`` holds what the walk is inside of, so that a cycle ends; ``_seen`` what it wrote."""

    def __init__(self, opened: dict[int, int]) -> None:
        self._hash = hashlib.blake2b(b"penstock fingerprint 1", digest_size=16)
        self._open = dict(opened)
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []

    def digest(self) -> bytes:
        return self._hash.digest()

    def apart(self, obj: object) -> bytes:
        """The digest of one object whatever came before it: what sets and dicts are sorted by."""
        walk = Walk(self._open)
        walk.add(obj)
        return walk.digest()

    def emit(self, tag: str, *parts: bytes | str | int) -> None:
        out = [tag.encode()]
        for part in parts:
            if isinstance(part, int):
                part = hex(part)
            out.append(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        self._hash.update(struct.pack(f"<{len(out) + 1}Q", len(out), *map(len, out)))
        for data in out:
            self._hash.update(data)

    def add(self, obj: Any) -> None:
        write = plain.get(type(obj))
        if write is not None:
            write(self, obj)
            return
        if id(obj) in self._open:
            self.emit("inside", self._open[id(obj)])
            return
        write = exact.get(type(obj)) or next(w for w in (c(obj) for c in choosers) if w is not None)
        if write in once:
            if id(obj) in self._seen:
                self.emit("again", self._seen[id(obj)])
                return
            self._seen[id(obj)] = len(self._seen)
            # An id means something only as long as its object lives.
            self._kept.append(obj)
        self._open[id(obj)] = len(self._open)
        try:
            write(self, obj)
        finally:
            del self._open[id(obj)]

    def add_named(self, place: str, values: Iterable[tuple[str, Any]]) -> None:
        """Values with names; ``place`` says where they are, with ``{}`` for the name."""
        for name, value in values:
            self.emit("name", name)
            try:
                self.add(value)
            except RefusalError as refused:
                raise refused.at(place.replace("{}", repr(name))) from refused.__cause__
