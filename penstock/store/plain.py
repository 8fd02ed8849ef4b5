"""Samples as plain data: bytes that can be read without running any code.

Numbers, text, bytes, arrays, tensors, and tuples, lists and dicts of them are plain. They are
written with msgpack, and arrays behind it, as views of which they are read. Other objects need a
pickle. A pickle can run any code when it is read, so a store must say that it holds pickles.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from penstock.serialize import (
    Packed,
    is_tensor,
    pack,
    rebuild_tensor,
    split_frame,
    tensor_parts,
    unpack,
)

_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})

# The first byte of a serialised object: msgpack data follow. A pickle begins with 0x80.
_PLAIN = b"\x01"

# Codes of msgpack's extension types. Tuples are msgpack's own arrays: most samples are tuples.
_LIST, _ARRAY, _TENSOR, _SCALAR, _TEXT, _BYTES, _COMPLEX, _INT, _RAW, _CALL, _LARGE = range(1, 12)

# The number before a unit of time is not 0: NumPy divides by it, which would end the process.
_UNIT = r"\[(?:[1-9][0-9]{0,8})?[A-Za-z]{1,2}\]"
_DTYPE = re.compile(rf"[<>|](?:[biufc]|[SU]|[mM])[1-9][0-9]{{0,8}}(?:{_UNIT})?")
_MOST_DIMENSIONS = 32
_DEEPEST = 32
"""Lists in lists. Each is read by a call of its own, and the stack of a thread is finite."""

_LAST_CHARACTER = 0x10FFFF
_LARGE_BYTES = 4096
"""From this size on bytes are stored like arrays, which saves copies."""

# Place of the buffer, Fortran order, dimensions; then the sides and the name of the dtype.
_ARRAY_HEAD = struct.Struct("<IBB")

Restorers = Mapping[str, Callable[..., Any]]
"""Functions that restore objects, by the name under which a store knows them."""


class NotPlain(Exception):
    """An object that needs a pickle."""


class Raw:
    """Bytes that are stored behind the data, without a copy. They are read as a memoryview."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce__(self) -> tuple[object, ...]:
        return memoryview, (pickle.PickleBuffer(self.data),)


class Restored:
    """An object that is stored as the call that restores it: ``function(*arguments)``.

    Stores on disk refer to the function by ``name``; it must not be renamed.
    """

    __slots__ = ("_function", "arguments", "name")

    def __init__(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        self.name = name
        self._function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self._function, self.arguments


def pack_sample(sample: Any) -> Packed:
    """A sample as plain data, or pickled if it is not plain.

    >>> pack_sample((np.arange(3), "cat")).pickled, pack_sample({1, 2}).pickled
    (False, True)
    """
    try:
        return pack_plain(sample)
    except NotPlain:
        return pack(sample)


def pack_plain(sample: Any) -> Packed:
    """A sample as plain data. Raises NotPlain."""
    writer = _PlainWriter()
    try:
        blob = writer.packed(sample)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise NotPlain(str(error)) from None
    return Packed(_PLAIN + blob, writer.buffers, pickled=False)


def is_plain(frame: Any) -> bool:
    """Whether the sample in a frame can be read without running any code. Raises ValueError."""
    return bytes(split_frame(frame)[0][:1]) == _PLAIN


def unpack_sample(
    frame: Any, pickles: Callable[[], bool], restorers: Restorers | None = None
) -> Any:
    """The sample in a frame. Its arrays are views of ``frame``. Raises ValueError.

    ``pickles``: returns whether a pickle may be read, which can run any code.
    """
    blob, buffers = split_frame(frame)
    if blob[:1] != _PLAIN:
        if not pickles():
            raise ValueError("the sample is pickled, but its store holds no pickles")
        try:
            return unpack(frame)
        except Exception as error:  # the code of a class raises what it likes
            raise ValueError(f"the pickled sample cannot be read: {error}") from error
    reader = _PlainReader(buffers, restorers or {})
    try:
        return reader.read(blob[1:])
    except Exception as error:  # msgpack raises exceptions of many kinds
        raise ValueError(f"the sample cannot be read: {error}") from error


class _PlainWriter:
    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._depth = 0

    def packed(self, node: Any) -> bytes:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotPlain("a deep tree")
        packed: bytes = msgpack.packb(
            self._neutral(node),
            use_bin_type=True,
            unicode_errors="surrogatepass",
        )
        self._depth -= 1
        return packed

    def _neutral(self, node: Any) -> Any:
        """The same tree, of types that msgpack returns as they are."""
        kind = type(node)
        if kind is int:
            return node if -(1 << 63) <= node < 1 << 64 else _ext(_INT, str(node).encode())
        if kind is bytes and len(node) >= _LARGE_BYTES:
            return _ext(_LARGE, _number(self._buffer(memoryview(node))))
        if kind in _ATOMS:
            return node
        if kind is np.ndarray:
            return _ext(_ARRAY, self._array(node))
        if kind is tuple:
            kinds = set(map(type, node))
            # Long rows of numbers: what msgpack takes as it is need not be looked at one by one.
            if kinds == {float} or (kinds == {int} and _fit(node)):
                return node
            return tuple(map(self._neutral, node))
        if kind is list:
            return _ext(_LIST, self.packed(tuple(node)))
        if kind is dict:
            return {self._neutral(key): self._neutral(child) for key, child in node.items()}
        if is_tensor(node):
            parts = tensor_parts(node)
            if parts is None:
                raise NotPlain("a tensor that is not an array")
            return _ext(_TENSOR, self.packed((self._array(parts[0]), parts[1])))
        return self._rare(node)

    def _rare(self, node: Any) -> Any:
        kind = type(node)
        if kind is complex:
            return _ext(_COMPLEX, self.packed((node.real, node.imag)))
        if kind is np.str_:
            return _ext(_TEXT, str(node).encode("utf-8", "surrogatepass"))
        if kind is np.bytes_:
            return _ext(_BYTES, bytes(node))
        # A subclass of a NumPy scalar would be read as that scalar.
        if isinstance(node, np.generic) and kind is node.dtype.type and _is_scalar(node.dtype):
            return _ext(_SCALAR, self.packed((node.dtype.str, node.tobytes())))
        if kind is Raw:
            return _ext(_RAW, _number(self._buffer(memoryview(node.data).cast("B"))))
        if kind is Restored:
            return _ext(_CALL, self.packed((node.name, *node.arguments)))
        raise NotPlain(f"a {kind.__qualname__}")

    def _array(self, array: Any) -> bytes:
        """The description of an array; its content becomes a buffer."""
        dtype, shape = array.dtype, array.shape
        if not _is_plain(dtype) or len(shape) > _MOST_DIMENSIONS:
            raise NotPlain(f"an array of {dtype}")
        flags = array.flags
        fortran = flags.f_contiguous and not flags.c_contiguous
        row = array.T if fortran else np.ascontiguousarray(array)
        content = row.reshape(-1).view(np.uint8) if row.size else np.empty(0, np.uint8)
        if dtype.kind == "b" and row.size and content.max() > 1:
            # A mask of 0 and 255 seen as truth values. The reader accepts only 0 and 1.
            content = (content != 0).view(np.uint8)
        check_content(content, dtype)
        number = self._buffer(content.data)
        head = _ARRAY_HEAD.pack(number, fortran, len(shape))
        name: str = dtype.str
        return head + struct.pack(f"<{len(shape)}Q", *shape) + name.encode()

    def _buffer(self, buffer: memoryview) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1


class _PlainReader:
    def __init__(self, buffers: list[memoryview], restorers: Restorers) -> None:
        self._buffers = buffers
        self._restorers = restorers
        self._depth = 0

    def read(self, packed: Any) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("a deep tree")
        sample = msgpack.unpackb(
            packed,
            raw=False,
            use_list=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            ext_hook=self._extension,
        )
        self._depth -= 1
        return sample

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _ARRAY:
            return self._array(data)
        if code == _LARGE:
            return bytes(self._buffers[_place(data)])
        if code == _LIST:
            return list(self.read(data))
        if code == _TENSOR:
            described, dtype = self.read(data)
            if dtype is not None and not isinstance(dtype, str):
                raise ValueError("the dtype of a tensor is not a name")
            return rebuild_tensor(self._array(described), dtype)
        if code == _SCALAR:
            return self._scalar(*self.read(data))
        if code == _TEXT:
            return np.str_(data.decode("utf-8", "surrogatepass"))
        if code == _BYTES:
            return np.bytes_(data)
        if code == _COMPLEX:
            return complex(*map(float, self.read(data)))
        if code == _INT:
            return int(data)
        if code == _CALL:
            name, *arguments = self.read(data)
            return self._restorers[name](*arguments)
        if code == _RAW:
            return self._buffers[_place(data)]
        raise ValueError(f"unknown type {code}")

    def _array(self, described: bytes) -> Any:
        number, fortran, dimensions = _ARRAY_HEAD.unpack_from(described)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"an array has {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", described, _ARRAY_HEAD.size)
        dtype = _dtype(described[_ARRAY_HEAD.size + 8 * dimensions :])
        size = math.prod(shape)
        buffer = self._buffers[number]
        if size * dtype.itemsize != buffer.nbytes:
            raise ValueError("the buffer of an array has another size than its shape")
        if not size:
            return np.empty(shape, dtype)
        check_content(np.frombuffer(buffer, np.uint8), dtype)
        array = np.frombuffer(buffer, dtype)
        return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)

    def _scalar(self, name: str, raw: bytes) -> Any:
        dtype = _dtype(name.encode())
        if not _is_scalar(dtype) or len(raw) != dtype.itemsize:
            raise ValueError(f"a scalar of {len(raw)} bytes has the dtype {name}")
        check_content(np.frombuffer(raw, np.uint8), dtype)
        return np.frombuffer(raw, dtype)[0]


def _fit(numbers: tuple[int, ...]) -> bool:
    """Whether msgpack can write all these integers."""
    return min(numbers) >= -(1 << 63) and max(numbers) < 1 << 64


def _number(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _place(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _ext(code: int, data: bytes) -> Any:
    return msgpack.ExtType(code, data)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether the name of a dtype says all of it. A dtype that a library registered has no name."""
    return dtype.metadata is None and dtype.isbuiltin != 2 and _is_plain_name(dtype.str)


# Names are remembered, not dtypes: a dtype equals the same one with metadata, and to compare dtypes
# NumPy divides by the number before a unit of time.
@lru_cache(maxsize=256)
def _is_plain_name(name: str) -> bool:
    return _DTYPE.fullmatch(name) is not None


def _is_scalar(dtype: np.dtype[Any]) -> bool:
    """Whether scalars are written with this dtype. Text and bytes have types of their own."""
    return _is_plain(dtype) and dtype.kind not in "SU"


@lru_cache(maxsize=256)
def _dtype(name: bytes) -> np.dtype[Any]:
    """The dtype of this name. Raises ValueError."""
    text = name.decode("ascii")
    if not _is_plain_name(text) or not _is_plain(dtype := np.dtype(text)):
        raise ValueError(f"unknown dtype {text!r}")
    return dtype


def plain_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name, if arrays of it are plain data. Raises ValueError.

    >>> plain_dtype("<f4")
    dtype('float32')
    """
    return _dtype(name.encode("ascii", "replace"))


def check_content(content: np.ndarray[Any, np.dtype[np.uint8]], dtype: np.dtype[Any]) -> None:
    """Raise ValueError for bytes that NumPy relies on never to occur. Writers check too: a sample
    that cannot be read must not be stored."""
    if not content.size:
        return
    if dtype.kind == "b" and content.max() > 1:
        raise ValueError("an array of truth values has other values")
    if dtype.kind == "U":
        characters = content.view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if characters.max() > _LAST_CHARACTER:
            raise ValueError("a text has characters that do not exist")
