"""Plain values, collections and arrays, by type and content."""

from __future__ import annotations

import struct
import sys
from enum import Enum
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from penstock.fingerprint.walk import Emitter, RefusalError, Walk, choosers, exact, plain

LONG = 64
"""Sequences of at least this length are hashed by column if all items have one plain type: a list
of a million (path, label) pairs takes 0.4 seconds instead of 8."""


def of_torch(name: str) -> Any:
    """A class of torch; ``None`` if torch is not loaded, and so has no instances.

    A folder of the user may be loaded under the name ``torch``: it has no such class.
    """
    return getattr(sys.modules.get("torch"), name, None)


def content(data: Any) -> bytes:
    """The digest of a buffer."""
    return xxhash.xxh3_128(data).digest()


def _sequence(walk: Walk, obj: list[Any] | tuple[Any, ...]) -> None:
    kind = type(obj).__name__
    if len(obj) >= LONG and _columns(walk, kind, obj):
        return
    walk.emit(kind, len(obj))
    place = -1
    try:
        for item in obj:
            place += 1
            walk.add(item)
    except RefusalError as refused:
        raise refused.at(f"item {place} of a {kind}") from refused.__cause__


def _columns(walk: Walk, kind: str, obj: list[Any] | tuple[Any, ...]) -> bool:
    """Hash a sequence by column; return false, without hashing, if its items differ in type."""
    kinds = set(map(type, obj))
    if len(kinds) != 1:
        return False
    only = kinds.pop()
    if only is str:
        joined = "".join(obj).encode("utf-8", "surrogatepass")
        lengths = np.fromiter(map(len, obj), dtype="<i8", count=len(obj))
        walk.emit(f"{kind} of str", content(joined), content(lengths))
    elif only is float:
        walk.emit(f"{kind} of float", len(obj), content(np.array(obj, dtype="<f8")))
    elif only is int:
        try:
            walk.emit(f"{kind} of int", len(obj), content(np.array(obj, dtype="<i8")))
        except OverflowError:
            return False
    elif only is tuple and len({len(item) for item in obj}) == 1 and obj[0]:
        walk.emit(f"{kind} of tuple", len(obj), len(obj[0]))
        for place in range(len(obj[0])):
            _sequence(walk, [item[place] for item in obj])
    else:
        return False
    return True


def _set(walk: Walk, obj: set[Any] | frozenset[Any]) -> None:
    walk.emit(type(obj).__name__, *sorted(walk.apart(item) for item in obj))


def _dict(walk: Walk, obj: Any) -> None:
    walk.emit("dict", len(obj))
    for key, digest in sorted(((k, walk.apart(k)) for k in obj), key=lambda pair: pair[1]):
        walk.emit("key", digest)
        try:
            walk.add(obj[key])
        except RefusalError as refused:
            raise refused.at(f"value of {key!r} in a dict") from refused.__cause__


def _slice(walk: Walk, obj: Any) -> None:
    walk.emit("slice")
    walk.add((obj.start, obj.stop, obj.step))


def _memoryview(walk: Walk, obj: memoryview) -> None:
    walk.emit("memoryview", obj.format, *(obj.shape or ()))
    walk.emit("content", content(obj.tobytes()))


def _path(walk: Walk, obj: PurePath) -> None:
    walk.emit("path", str(obj))


def _enum(walk: Walk, obj: Enum) -> None:
    walk.emit("enum", str(obj.name))
    walk.add(type(obj))
    walk.add(obj.value)


def _dtype(walk: Walk, dtype: Any) -> None:
    walk.emit("dtype", repr(dtype.descr) if dtype.names else dtype.str)


def _array(walk: Walk, obj: Any) -> None:
    walk.emit("array", *obj.shape)
    _dtype(walk, obj.dtype)
    if obj.dtype.hasobject or obj.dtype.kind == "T":
        walk.add(obj.ravel().tolist())
    elif obj.dtype.itemsize:
        walk.emit("content", content(np.ascontiguousarray(obj).reshape(-1).view(np.uint8)))


def _numpy_scalar(walk: Walk, obj: Any) -> None:
    walk.emit("numpy scalar")
    _array(walk, np.asarray(obj))


def _tensor(walk: Walk, obj: Any) -> None:
    torch = sys.modules["torch"]
    walk.emit("tensor", str(obj.dtype), *obj.shape)
    flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    walk.emit("content", content(flat.view(torch.uint8).numpy()))


def _choose(obj: Any) -> Emitter | None:
    # An object with its own fingerprint method uses that, whatever its base classes are.
    if hasattr(type(obj), "__fingerprint__"):
        return None
    if isinstance(obj, Enum):
        return _enum
    if isinstance(obj, PurePath):
        return _path
    if isinstance(obj, np.dtype):
        return _dtype
    if isinstance(obj, np.generic):
        return _numpy_scalar
    tensor = of_torch("Tensor")
    if tensor is not None and isinstance(obj, tensor) and str(obj.layout) == "torch.strided":
        return _tensor
    return None


def register_values() -> None:
    plain.update(
        {
            type(None): lambda walk, obj: walk.emit("None"),
            type(...): lambda walk, obj: walk.emit("Ellipsis"),
            type(NotImplemented): lambda walk, obj: walk.emit("NotImplemented"),
            bool: lambda walk, obj: walk.emit("bool", int(obj)),
            int: lambda walk, obj: walk.emit("int", obj),
            float: lambda walk, obj: walk.emit("float", struct.pack("<d", obj)),
            complex: lambda walk, obj: walk.emit("complex", struct.pack("<dd", obj.real, obj.imag)),
            str: lambda walk, obj: walk.emit("str", obj),
            bytes: lambda walk, obj: walk.emit("bytes", obj),
            bytearray: lambda walk, obj: walk.emit("bytearray", bytes(obj)),
            range: lambda walk, obj: walk.emit("range", obj.start, obj.stop, obj.step),
            slice: _slice,
            tuple: _sequence,
        }
    )
    exact.update(
        {
            list: _sequence,
            set: _set,
            frozenset: _set,
            dict: _dict,
            MappingProxyType: _dict,
            memoryview: _memoryview,
            np.ndarray: _array,
            np.memmap: _array,
        }
    )
    choosers.append(_choose)
