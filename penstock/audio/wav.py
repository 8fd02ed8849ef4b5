"""WAV files, read from their bytes: a call of libsndfile costs more than a short clip does.

What is not plain numbers (compressed, odd widths) is left to libsndfile, but only once its chunks
are known to be whole: libsndfile gives what there is of a file that was cut short.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_INTEGER, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""What follows the format number where WAVE_FORMAT_EXTENSIBLE gives it as a GUID."""

_PLACEHOLDER = 0x7FFF0000
"""Sizes from here on are what recorders write that cannot go back to fill in the real one: ffmpeg
0xFFFFFFFF, sox 0x7FFFF000. The sound then goes on to the end of the file."""


class Unreadable(Exception):
    """The file is damaged; the message says how."""


class Plain(NamedTuple):
    """Numbers as they lie in a file, (frames, channels); times ``scale`` they lie within 1."""

    numbers: NDArray[Any]
    scale: float
    rate: int


class _Format(NamedTuple):
    tag: int
    channels: int
    rate: int
    block: int
    bits: int


def is_wav(data: memoryview) -> bool:
    return bytes(data[:4]) in (b"RIFF", b"RF64") and bytes(data[8:12]) == b"WAVE"


def read_wav(data: memoryview) -> Plain | None:
    """The sound of a WAV file; ``None`` if it is whole, and nothing this module reads."""
    found, sound = _chunks(data)
    kind = (found.tag, found.bits)
    width = found.bits // 8
    if kind not in _READERS or not found.channels or found.block != width * found.channels:
        return None
    frames = sound.nbytes // found.block
    if not frames:
        raise Unreadable("it holds no sound (0 frames)")
    numbers, scale = _READERS[kind](sound[: frames * found.block])
    return Plain(numbers.reshape(frames, found.channels), scale, found.rate)


def _chunks(data: memoryview) -> tuple[_Format, memoryview]:
    """The format and the bytes of the sound, whatever other chunks there are."""
    (whole,) = struct.unpack_from("<I", data, 4)
    found: _Format | None = None
    large: int | None = None
    at = 12
    while at + 8 <= data.nbytes:
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        left = data.nbytes - at
        if name == b"data":
            if found is None:
                raise Unreadable("its sound comes before the chunk that tells its format")
            if large is not None and size == 0xFFFFFFFF:
                size = large
            elif size >= _PLACEHOLDER or (size == 0 and whole in (0, 0xFFFFFFFF)):
                size = left
            if size > left:
                raise Unreadable(
                    f"it is cut short: the header tells of {size:,} bytes of sound, and {left:,} "
                    "are there"
                )
            return found, data[at : at + size]
        if size > left:
            raise Unreadable(
                f"it is cut short: its chunk {name!r} has {size:,} bytes, and {left:,} are there"
            )
        if name == b"fmt ":
            found = _format(data[at : at + size])
        elif name == b"ds64" and size >= 16:  # RF64: sizes of 64 bits
            (large,) = struct.unpack_from("<Q", data, at + 8)
        at += size + size % 2
    raise Unreadable("it is cut short, or it never had any sound: there is no chunk b'data'")


def _format(chunk: memoryview) -> _Format:
    if chunk.nbytes < 16:
        raise Unreadable(f"its format chunk has {chunk.nbytes} bytes, and 16 are the least")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and chunk.nbytes >= 40 and bytes(chunk[26:40]) == _GUID_TAIL:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    return _Format(tag, channels, rate, block, bits)


def _bytes(sound: memoryview) -> tuple[NDArray[Any], float]:
    return np.frombuffer(sound, np.uint8).astype(np.int16) - np.int16(128), 2.0**-7


def _three_bytes(sound: memoryview) -> tuple[NDArray[Any], float]:
    # Four bytes every three, the lowest of them the last of the number before: thirty times as
    # fast as to copy three by three.
    spaced = np.empty(sound.nbytes + 1, np.uint8)
    spaced[1:] = np.frombuffer(sound, np.uint8)
    overlapping: NDArray[Any] = np.ndarray((sound.nbytes // 3,), "<i4", spaced, 0, (3,))
    return overlapping & np.int32(-256), 2.0**-31


_READERS: dict[tuple[int, int], Callable[[memoryview], tuple[NDArray[Any], float]]] = {
    (_INTEGER, 8): _bytes,
    (_INTEGER, 16): lambda sound: (np.frombuffer(sound, "<i2"), 2.0**-15),
    (_INTEGER, 24): _three_bytes,
    (_INTEGER, 32): lambda sound: (np.frombuffer(sound, "<i4"), 2.0**-31),
    (_FLOAT, 32): lambda sound: (np.frombuffer(sound, "<f4"), 1.0),
    (_FLOAT, 64): lambda sound: (np.frombuffer(sound, "<f8"), 1.0),
}
