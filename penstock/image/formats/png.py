"""PNG: chunks with checksums; the pixels are one zlib stream, spread over the IDAT chunks.

libpng accepts some streams that are damaged, and prints an error for others. So every chunk is
checked, and the stream is unpacked here. OpenCV gets it uncompressed: unpacking it a second time
would make decoding a half slower.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from penstock.image.formats.damaged import Damaged

_SIGNATURE = 8
_LONGEST_SIDE = (1 << 31) - 1
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PALETTE = 3
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_LENGTHS = {
    b"IHDR": 13,
    b"IEND": 0,
    b"gAMA": 4,
    b"cHRM": 32,
    b"sRGB": 1,
    b"pHYs": 9,
    b"acTL": 8,
    b"fcTL": 26,
}
"""Chunks of fixed length."""

_PASSES = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)
"""The passes of an interlaced picture: first row, first column, and the steps down and right."""

_LAST_FILTER = 4

_MOST_TEXT = 1 << 26
"""Bytes that compressed texts and profiles may unpack to, all together."""

_MOST_BEHIND = 1 << 20
"""Bytes that may follow the last row, after unpacking. Some encoders write a few."""

PngChunk = tuple[bytes, memoryview | bytes]


def size(data: memoryview) -> tuple[int, int]:
    if data.nbytes < _SIGNATURE + 25 or bytes(data[12:16]) != b"IHDR":
        raise Damaged("its header is cut short")
    width, height = struct.unpack_from(">II", data, 16)
    if not 0 < width <= _LONGEST_SIDE or not 0 < height <= _LONGEST_SIDE:
        raise Damaged(f"its header states {width} x {height} pixels")
    return height, width


def checked(data: memoryview) -> bytes:
    height, width = size(data)
    chunks = _chunks(data)
    depth, colour, method, filtering, interlaced = bytes(chunks[0][1][8:13])
    if depth not in _DEPTHS.get(colour, ()) or method or filtering or interlaced > 1:
        raise Damaged("its header states an unknown kind of pixels")
    names = [name for name, _ in chunks]
    if names[0] != b"IHDR" or names.count(b"IHDR") > 1 or b"IDAT" not in names:
        raise Damaged("it has no pixels, or two headers")
    first = names.index(b"IDAT")
    stream = [content for name, content in chunks if name == b"IDAT"]
    if names[first : first + len(stream)] != [b"IDAT"] * len(stream):
        raise Damaged("its pixels are interrupted")
    _check_palette(chunks[:first], names, colour)
    _check_texts(chunks)
    _check_animation(chunks, height, width)
    bits = depth * _CHANNELS[colour]
    sides = [(height, width)]
    if interlaced:
        sides = [
            (-(-(height - top) // down), -(-(width - left) // right))
            for top, left, down, right in _PASSES
        ]
    passes = [
        (rows, 1 + -(-columns * bits // 8)) for rows, columns in sides if rows > 0 and columns > 0
    ]
    pixels = _unpacked(stream, passes)
    palette: list[PngChunk] = [
        # Pixels cannot name the colours beyond, and libpng complains about them.
        (name, content[: 3 << depth])
        for name, content in chunks
        if name == b"PLTE" and colour == _PALETTE
    ]
    kept = [chunks[0], *palette, (b"IDAT", zlib.compress(pixels, 0)), (b"IEND", b"")]
    return bytes(data[:_SIGNATURE]) + b"".join(_packed(*chunk) for chunk in kept)


def _chunks(data: memoryview) -> list[PngChunk]:
    """All chunks up to the end of the image, with the right checksums."""
    chunks: list[PngChunk] = []
    at = _SIGNATURE
    while not chunks or chunks[-1][0] != b"IEND":
        if at + 12 > data.nbytes:
            raise Damaged("it is cut short: its end is missing")
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > data.nbytes:
            raise Damaged(f"it is cut short within chunk {name!r}")
        if not (name.isalpha() and name.isascii()):
            raise Damaged(f"a chunk has the name {name!r}")
        if zlib.crc32(data[at + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise Damaged(f"chunk {name!r} has a wrong checksum")
        if _LENGTHS.get(name, length) != length:
            raise Damaged(f"chunk {name!r} has {length} bytes")
        if name[:1].isupper() and name not in _CRITICAL:
            raise Damaged(f"chunk {name!r} is unknown, and needed to read the file")
        chunks.append((name, data[at + 8 : end]))
        at = end + 4
    return chunks


def _packed(name: bytes, content: memoryview | bytes) -> bytes:
    checksum = zlib.crc32(content, zlib.crc32(name))
    return struct.pack(">I4s", len(content), name) + content + struct.pack(">I", checksum)


def _check_palette(before: list[PngChunk], names: list[bytes], colour: int) -> None:
    palettes = [len(content) for name, content in before if name == b"PLTE"]
    if len(palettes) != names.count(b"PLTE") or len(palettes) > 1:
        raise Damaged("its palette is in a wrong place")
    if colour == _PALETTE and not palettes:
        raise Damaged("its palette is missing")
    if palettes and (palettes[0] % 3 or not 0 < palettes[0] <= 3 * 256):
        raise Damaged(f"its palette has {palettes[0]} bytes")
    least = {0: 2, 2: 6, 3: 1}.get(colour, 0)
    for name, content in before:
        if name == b"tRNS" and len(content) < least:
            raise Damaged(f"chunk {name!r} has {len(content)} bytes")


def _check_texts(chunks: list[PngChunk]) -> None:
    """Compressed texts and profiles: of the known kind, and not a hidden gigabyte."""
    unpacked = 0
    for name, content in chunks:
        if name not in (b"iCCP", b"zTXt", b"iTXt"):
            continue
        _, separator, rest = bytes(content).partition(b"\0")
        if name == b"iTXt":
            if len(rest) < 2 or not rest[0]:
                continue
            method, packed = rest[1], rest[2:].split(b"\0", 2)[-1]
        else:
            if not separator or not rest:
                raise Damaged(f"chunk {name!r} is cut short")
            method, packed = rest[0], rest[1:]
        if method:
            raise Damaged(f"chunk {name!r} has an unknown compression")
        try:
            unpacked += len(zlib.decompressobj().decompress(packed, _MOST_TEXT - unpacked + 1))
        except zlib.error:
            continue  # the text is unreadable, the pixels are not
        if unpacked > _MOST_TEXT:
            raise Damaged(f"chunk {name!r} unpacks to more than {_MOST_TEXT:,} bytes")


def _check_animation(chunks: list[PngChunk], height: int, width: int) -> None:
    """Frames of an animation are numbered without gaps, and lie within the picture."""
    expected = 0
    for name, content in chunks:
        if name not in (b"fcTL", b"fdAT"):
            continue
        if len(content) < 4 or struct.unpack_from(">I", content)[0] != expected:
            raise Damaged("the frames of its animation are out of order")
        expected += 1
        if name == b"fcTL":
            columns, rows, left, top = struct.unpack_from(">IIII", content, 4)
            if not rows or not columns or top + rows > height or left + columns > width:
                raise Damaged("a frame of its animation lies outside the picture")
    if expected and b"acTL" not in [name for name, _ in chunks]:
        raise Damaged("its animation has no header")


def _unpacked(stream: list[memoryview | bytes], passes: list[tuple[int, int]]) -> bytes:
    """The pixels of a zlib stream, which must begin with these passes of (rows, bytes in a row)."""
    expected = sum(rows * length for rows, length in passes)
    unpack = zlib.decompressobj()
    try:
        pixels = unpack.decompress(b"".join(stream), expected + _MOST_BEHIND + 1)
    except zlib.error as error:
        raise Damaged(f"its pixels are damaged ({error})") from None
    if not expected <= len(pixels) <= expected + _MOST_BEHIND or not unpack.eof:
        raise Damaged("it has too few or far too many pixels, or their checksum is missing")
    pixels = pixels[:expected]
    levels = np.frombuffer(pixels, np.uint8)
    at = 0
    for rows, length in passes:
        if levels[at : at + rows * length : length].max() > _LAST_FILTER:
            raise Damaged("its pixels are damaged (an unknown filter)")
        at += rows * length
    return pixels
