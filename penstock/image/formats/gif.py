"""GIF: blocks; of an animation only the first frame is read."""

from __future__ import annotations

import struct

from penstock.image.formats import lzw
from penstock.image.formats.damaged import Damaged

_HEADER = 13
_EXTENSION, _IMAGE, _END = b"!", b",", b";"
_HAS_COLOURS = 0x80


def size(data: memoryview) -> tuple[int, int]:
    if data.nbytes < _HEADER:
        raise Damaged("its header is cut short")
    width, height = struct.unpack_from("<HH", data, 6)
    if not height or not width:
        raise Damaged(f"its header states {width} x {height} pixels")
    return height, width


def checked(data: memoryview) -> bytes:
    canvas = size(data)
    at = _HEADER + _colours(data[10])
    while (kind := bytes(data[at : at + 1])) != _IMAGE:
        if kind != _EXTENSION:
            raise Damaged("it has no picture" if kind == _END else "it is damaged between blocks")
        label = bytes(data[at + 1 : at + 2])
        first, at = _blocks(data, at + 2)
        if label == b"\xf9" and len(first) < 4:
            raise Damaged("a control block is cut short")
    if at + 11 > data.nbytes:
        raise Damaged("it is cut short before its picture")
    left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
    if not height or not width or top + height > canvas[0] or left + width > canvas[1]:
        raise Damaged("its first frame lies outside the picture")
    if not (data[10] | data[at + 9]) & _HAS_COLOURS:
        raise Damaged("it has no colours")
    at += 10 + _colours(data[at + 9])
    if at >= data.nbytes:
        raise Damaged("it is cut short before its picture")
    bits = data[at]
    if not 2 <= bits <= 8:
        raise Damaged(f"its values have {bits} bits")
    pixels, end = _blocks(data, at + 1)
    if lzw.unpacked_length(pixels, bits, height * width) < height * width:
        raise Damaged("it is cut short: pixels of its first frame are missing")
    return bytes(data[:end]) + _END


def _colours(flags: int) -> int:
    """The bytes of a table of colours."""
    return 3 << (flags & 7) + 1 if flags & _HAS_COLOURS else 0


def _blocks(data: memoryview, at: int) -> tuple[bytes, int]:
    """The content of the blocks from ``at`` to an empty one, and the position behind it."""
    parts = []
    while at < data.nbytes and data[at]:
        end = at + 1 + data[at]
        parts.append(data[at + 1 : end])
        at = end
    if at >= data.nbytes:
        raise Damaged("it is cut short within a block")
    return b"".join(parts), at + 1
