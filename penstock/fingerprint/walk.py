"""The walk over an object: all its parts are hashed, each with a tag and its length."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import FingerprintError

REMEDY = (
    'Give version="..." instead, and change it whenever the result changes; or define '
    "__fingerprint__(self) -> str on its class."
)


def fingerprint(obj: object) -> str:
    """32 hexadecimal digits that depend on everything that decides how ``obj`` behaves.

    A class can define its own fingerprint with a method ``__fingerprint__(self) -> str``. An object
    whose fingerprint would differ in another process raises FingerprintError, which says where in
    ``obj`` it is.

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
    """The name with its indefinite article, for messages."""
    return f"{'an' if name[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {name}"


class RefusalError(Exception):
    """An object has no stable fingerprint. The path to it is added while the walk unwinds."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def at(self, place: str) -> RefusalError:
        """This error, with one more step of the path, from the inside to the outside."""
        self.path.append(place)
        return self

    def message(self) -> str:
        if not self.path:
            return f"Cannot fingerprint the object: it is {self.what}. {REMEDY}"
        return f"Cannot fingerprint the {', in the '.join(self.path)}: it is {self.what}. {REMEDY}"


Emitter = Callable[["Walk", Any], None]
"""Adds the parts of an object to the hash of a walk."""

plain: dict[type, Emitter] = {}
"""Emitters of types that cannot contain themselves, by exact type (a tuple can, but only through an
object of another type)."""

exact: dict[type, Emitter] = {}
"""Emitters of other types, by exact type."""

choosers: list[Callable[[Any], Emitter | None]] = []
"""Functions that return the emitter of any other object, or ``None``; tried in order."""

once: set[Emitter] = set()
"""Emitters of objects that refer to each other in dense cycles (code, instances). Each such object
is hashed once and then referred to: following every path would take exponential time."""


class Walk:
    """One walk. ``_open``: the objects that contain the current one, so that a cycle ends.

    ``_seen``: the objects it has hashed.
    """

    def __init__(self, opened: dict[int, int]) -> None:
        self._hash = hashlib.blake2b(b"penstock fingerprint 1", digest_size=16)
        self._open = dict(opened)
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []

    def digest(self) -> bytes:
        return self._hash.digest()

    def apart(self, obj: object) -> bytes:
        """The digest of one object, independent of the objects before it. Sets and dicts are sorted
        by it."""
        walk = Walk(self._open)
        walk.add(obj)
        return walk.digest()

    def emit(self, tag: str, *parts: bytes | str | int) -> None:
        """Add a tag and parts to the hash, each with its length."""
        out = [tag.encode()]
        for part in parts:
            if isinstance(part, int):
                part = hex(part)
            out.append(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        self._hash.update(struct.pack(f"<{len(out) + 1}Q", len(out), *map(len, out)))
        for data in out:
            self._hash.update(data)

    def add(self, obj: Any) -> None:
        """Add an object with all its parts."""
        emitter = plain.get(type(obj))
        if emitter is not None:
            emitter(self, obj)
            return
        if id(obj) in self._open:
            self.emit("inside", self._open[id(obj)])
            return
        emitter = exact.get(type(obj)) or next(
            chosen for chosen in (choose(obj) for choose in choosers) if chosen is not None
        )
        if emitter in once:
            if id(obj) in self._seen:
                self.emit("again", self._seen[id(obj)])
                return
            self._seen[id(obj)] = len(self._seen)
            # An id is valid only as long as its object lives.
            self._kept.append(obj)
        self._open[id(obj)] = len(self._open)
        try:
            emitter(self, obj)
        finally:
            del self._open[id(obj)]

    def add_named(self, place: str, values: Iterable[tuple[str, Any]]) -> None:
        """Add named values. ``place`` describes their location for errors, with ``{}`` for the
        name."""
        for name, value in values:
            self.emit("name", name)
            try:
                self.add(value)
            except RefusalError as refused:
                raise refused.at(place.replace("{}", repr(name))) from refused.__cause__
