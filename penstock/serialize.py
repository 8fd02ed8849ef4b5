"""Serialise samples and batches into one frame of bytes: a pickle (protocol 5), then the arrays.

Arrays and tensors are not copied into the pickle. Unpacked arrays are views of the frame. A frame
consists of counts and lengths, the pickle, and the arrays, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import io
import pickle
import struct
import sys
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

_ALIGN = 64
_HEAD = struct.Struct("<IQ")
_LENGTH = struct.Struct("<Q")
_LARGE = 1 << 16


def aligned(offset: int) -> int:
    """The offset rounded up to a multiple of a cache line."""
    return -(-offset // _ALIGN) * _ALIGN


class Packed:
    """A serialised object with its buffers, ready to be written as one frame of ``nbytes``.

    ``pickled``: the object is a pickle, which runs code when it is read.
    """

    __slots__ = ("_blob", "_buffers", "nbytes", "pickled")

    def __init__(self, blob: bytes, buffers: Sequence[memoryview], *, pickled: bool = True) -> None:
        self.pickled = pickled
        self._blob = blob
        self._buffers = buffers
        end = _HEAD.size + _LENGTH.size * len(buffers) + len(blob)
        for buffer in buffers:
            end = aligned(end) + buffer.nbytes
        self.nbytes = end

    def write_into(self, target: memoryview) -> None:
        """Write the frame. Bytes between the arrays are not written."""
        at = _HEAD.size
        _HEAD.pack_into(target, 0, len(self._buffers), len(self._blob))
        for buffer in self._buffers:
            _LENGTH.pack_into(target, at, buffer.nbytes)
            at += _LENGTH.size
        target[at : at + len(self._blob)] = self._blob
        at += len(self._blob)
        for buffer in self._buffers:
            at = aligned(at)
            _copy(buffer, target[at : at + buffer.nbytes])
            at += buffer.nbytes

    def digest(self) -> bytes:
        """A digest of the object. Arrays count by address and length, not by content."""
        state = hashlib.blake2b(self._blob, digest_size=16)
        for buffer in self._buffers:
            array = np.frombuffer(buffer, dtype=np.uint8)
            state.update(_HEAD.pack(0, array.ctypes.data) + _LENGTH.pack(array.nbytes))
        return state.digest()

    def tobytes(self) -> bytearray:
        frame = bytearray(self.nbytes)
        self.write_into(memoryview(frame))
        return frame


def _copy(buffer: memoryview, target: memoryview) -> None:
    if buffer.nbytes < _LARGE:
        target[:] = buffer
    else:
        # NumPy releases the GIL while it copies.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(buffer, np.uint8))


def pack(value: Any, *, by_value: bool = False) -> Packed:
    """Pickle an object. Arrays and tensors are kept as buffers.

    ``by_value``: include the code of functions and classes that the reader cannot import.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:
            return True  # not contiguous: it is copied into the pickle
        return False

    stream = io.BytesIO()
    if not by_value:
        writer = pickle.Pickler(stream, protocol=5, buffer_callback=keep)
        tensor = _tensor_type()
        if tensor is not None:
            table: Any = copyreg.dispatch_table
            writer.dispatch_table = ChainMap({tensor: _reduce_tensor}, table)
        try:
            writer.dump(value)
            return Packed(stream.getvalue(), buffers)
        except (pickle.PicklingError, AttributeError, TypeError):
            # A class of the user's script came to this worker by value, and is sent back by value.
            buffers.clear()
            stream = io.BytesIO()
    _WithCode(stream, protocol=5, buffer_callback=keep).dump(value)
    return Packed(stream.getvalue(), buffers)


class _WithCode(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        if type(value) is _tensor_type():
            return _reduce_tensor(value)
        return super().reducer_override(value)


def _tensor_type() -> type | None:
    """torch's tensor type; ``None`` if torch is not loaded, and so there are no tensors."""
    return getattr(sys.modules.get("torch"), "Tensor", None)


def unpack(frame: Any) -> Any:
    """The object in a frame. Its arrays are views of ``frame`` and keep it alive."""
    blob, buffers = split_frame(frame)
    return pickle.loads(blob, buffers=buffers)


def split_frame(frame: Any) -> tuple[memoryview, list[memoryview]]:
    """The serialised object in a frame, and its buffers. ValueError if the frame is too short."""
    view = memoryview(frame).cast("B")
    try:
        count, length = _HEAD.unpack_from(view, 0)
        if _HEAD.size + count * _LENGTH.size + length > len(view):
            raise ValueError("the frame is shorter than its lengths say")
        sizes = struct.unpack_from(f"<{count}Q", view, _HEAD.size)
    except struct.error as error:
        raise ValueError(str(error)) from None
    at = _HEAD.size + count * _LENGTH.size
    blob = view[at : at + length]
    at += length
    buffers = []
    for nbytes in sizes:
        at = aligned(at)
        buffers.append(view[at : at + nbytes])
        at += nbytes
    if at > len(view):
        raise ValueError("the frame is shorter than its lengths say")
    return blob, buffers


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to an array, which is stored after the pickle. torch would copy it into the
    pickle."""
    parts = tensor_parts(tensor)
    return tensor.__reduce_ex__(5) if parts is None else (rebuild_tensor, parts)


def is_tensor(value: Any) -> bool:
    return type(value) is _tensor_type()


def tensor_parts(tensor: Any) -> tuple[Any, str | None] | None:
    """A tensor as an array, and its dtype if NumPy does not have that; ``None`` if it cannot be
    one."""
    torch = sys.modules["torch"]
    plain = tensor.detach()
    if (
        plain.device.type != "cpu"
        or plain.layout != torch.strided
        or plain.is_quantized  # its scale is not in an array
        or plain.requires_grad is not tensor.requires_grad
    ):
        return None
    try:
        # A view that conjugates or negates when it is read has no array before it is computed.
        plain = plain.resolve_conj().resolve_neg()
        return plain.numpy(), None
    except RuntimeError:
        return None
    except TypeError:  # a dtype that NumPy does not have, such as bfloat16
        try:
            raw = plain.contiguous().view(torch.uint8 if plain.dim() else plain.dtype).numpy()
        except (TypeError, RuntimeError):
            return None
        return raw, str(plain.dtype).removeprefix("torch.")


def rebuild_tensor(array: Any, dtype: str | None) -> Any:
    """The tensor of ``tensor_parts``. Raises ValueError if it never gives this ``dtype``."""
    # torch is imported here: only a process that receives a tensor needs it.
    torch = importlib.import_module("torch")
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    if dtype is None:
        return tensor
    named = getattr(torch, dtype, None)
    # Any byte can be seen as a number, but not as a truth value or as a quantized number.
    if not isinstance(named, torch.dtype) or named is torch.bool or dtype.startswith("q"):
        raise ValueError(f"no tensor of dtype {dtype!r} is written as raw bytes")
    if not array.size:
        # torch refuses a view of another dtype because of the strides of an empty array.
        *sides, last = array.shape
        width = torch.empty(0, dtype=named).element_size()
        return torch.empty((*sides, last * array.itemsize // width), dtype=named)
    return tensor.view(named)
