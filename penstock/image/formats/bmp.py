"""BMP: a header, sometimes a palette, and rows of pixels, mostly uncompressed."""

from __future__ import annotations

import struct

from penstock.image.formats.damaged import Damaged

_OLD_HEADER = 12
_HEADERS = (40, 52, 56, 64, 108, 124)
_PLAIN, _RUNS_8, _RUNS_4, _MASKS = range(4)
_DEPTHS = {
    _PLAIN: (1, 4, 8, 16, 24, 32),
    _RUNS_8: (8,),
    _RUNS_4: (4,),
    _MASKS: (16, 32),
}
_KNOWN_MASKS = {
    16: ((0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F)),
    32: ((0xFF0000, 0xFF00, 0xFF),),
}
_ALPHA_MASKS = (0, 0xFF000000)
_RED_FIRST = (0xFF, 0xFF00, 0xFF0000, 0xFF000000)
"""Masks of red, green, blue and alpha in files with transparency whose first byte is red."""


def size(data: memoryview) -> tuple[int, int]:
    if data.nbytes < 26:
        raise Damaged("its header is cut short")
    (header,) = struct.unpack_from("<I", data, 14)
    if header == _OLD_HEADER:
        width, height = struct.unpack_from("<HH", data, 18)
    elif header in _HEADERS:
        width, height = struct.unpack_from("<ii", data, 18)
        height = abs(height)  # negative: rows from top to bottom
    else:
        raise Damaged(f"its header states a length of {header}")
    if width < 1 or height < 1:
        raise Damaged(f"its header states {width} x {height} pixels")
    return height, width


def checked(data: memoryview) -> memoryview:
    height, width = size(data)
    header, begin = struct.unpack_from("<I", data, 14)[0], struct.unpack_from("<I", data, 10)[0]
    colours = kind = 0
    if data.nbytes < 14 + header:
        raise Damaged("its header is cut short")
    if header == _OLD_HEADER:
        planes, depth = struct.unpack_from("<HH", data, 22)
    else:
        planes, depth, kind = struct.unpack_from("<HHI", data, 26)
        (colours,) = struct.unpack_from("<I", data, 46)
    if depth not in _DEPTHS.get(kind, ()) or planes != 1:
        raise Damaged("its header states an unknown kind of pixels")
    least = 14 + header
    if kind == _MASKS:
        least = max(least, 14 + 52)
        _check_masks(data, header, depth)
    if depth <= 8:
        colours = colours or 1 << depth
        if colours > 1 << depth:
            raise Damaged(f"its palette states {colours} colours")
        least += colours * (3 if header == _OLD_HEADER else 4)
    if not least <= begin <= data.nbytes:
        raise Damaged("its pixels begin within its header, or beyond its end")
    pixels = data[begin:]
    if kind in (_RUNS_8, _RUNS_4):
        _check_runs(bytes(pixels), height, width, kind == _RUNS_4)
    elif pixels.nbytes < height * ((width * depth + 31) // 32 * 4):
        raise Damaged("it is cut short: rows are missing")
    return data


def _check_masks(data: memoryview, header: int, depth: int) -> None:
    if data.nbytes < 14 + 56:
        raise Damaged("its header is cut short")
    masks = struct.unpack_from("<III", data, 54)
    alpha = struct.unpack_from("<I", data, 66)[0] if header >= 56 else 0
    if depth == 32 and (*masks, alpha) == _RED_FIRST:
        return
    if masks not in _KNOWN_MASKS[depth] or (depth == 32 and alpha not in _ALPHA_MASKS):
        raise Damaged("its header states an unknown order of colours")


def _check_runs(data: bytes, height: int, width: int, half: bool) -> None:
    """The run lengths stay within the picture, fill it, and end with an end mark."""
    at = x = y = 0
    while True:
        if at + 2 > len(data):
            raise Damaged("it is cut short: the end of its pixels is missing")
        count, value = data[at], data[at + 1]
        at += 2
        if count:
            x += count
        elif value == 0:
            if x < width:
                raise Damaged("a row is too short")
            x, y = 0, y + 1
        elif value == 1:
            break
        elif value == 2:
            raise Damaged("it skips pixels, which have no colour then")
        else:
            length = -(-value // 2) if half else value
            at += length + length % 2
            x += value
        if x > width or y > height or (y == height and x):
            raise Damaged("its pixels leave the picture")
    if y < height - 1 or (y == height - 1 and x < width):
        raise Damaged("it is cut short: rows are missing")
