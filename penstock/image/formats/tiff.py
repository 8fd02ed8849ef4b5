"""TIFF: a directory of tags, and strips or tiles of pixels; only the first picture is read.

The decoder gets a copy with a new directory, which has the tags that describe the pixels and no
others: libtiff complains about unusual tags, and reads some of them.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from penstock.image.formats import fax, lzw
from penstock.image.formats.damaged import Damaged
from penstock.native import load_simplejpeg

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOURS = 256, 257, 258, 259, 262
_FILL_ORDER, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES = 266, 273, 277, 278, 279
_PLANAR, _T4, _T6, _PREDICTOR, _PALETTE = 284, 292, 293, 317, 320
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 322, 323, 324, 325
_EXTRA, _SAMPLE_FORMAT, _JPEG_TABLES, _SUBSAMPLING, _REFERENCE = 338, 339, 347, 530, 532

_KEPT = (
    *(_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOURS, _FILL_ORDER, _STRIPS, _SAMPLES, _ROWS),
    *(_STRIP_BYTES, _PLANAR, _T4, _T6, _PREDICTOR, _PALETTE, _TILE_WIDTH, _TILE_HEIGHT, _TILES),
    *(_TILE_BYTES, _EXTRA, _SAMPLE_FORMAT, _JPEG_TABLES, _SUBSAMPLING, _REFERENCE),
)
_SHORT, _LONG, _LONG8 = 3, 4, 16
_NUMBERS = (_SHORT, _LONG, _LONG8)
"""Types of whole numbers."""

_TYPES = {
    1: (1, "B"),
    2: (1, "c"),
    3: (2, "H"),
    4: (4, "I"),
    5: (8, ""),
    6: (1, "b"),
    7: (1, "B"),
    8: (2, "h"),
    9: (4, "i"),
    10: (8, ""),
    11: (4, "f"),
    12: (8, "d"),
    13: (4, "I"),
    16: (8, "Q"),
    17: (8, "q"),
    18: (8, "Q"),
}
"""Bytes of one value of a type, and its letter for ``struct``."""

_MOST_TAGS = 4096
_NONE, _LZW, _JPEG, _DEFLATE, _OLD_DEFLATE, _PACKBITS = 1, 5, 7, 8, 32946, 32773
_FAX: dict[int, fax.FaxKind] = {2: "group 3, no ends", 3: "group 3", 4: "group 4"}
_TWO_DIMENSIONAL = 1
_WHITE_IS_0, _BLACK_IS_0, _RGB, _INDEXED, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_CHANNELS = {_WHITE_IS_0: 1, _BLACK_IS_0: 1, _RGB: 3, _INDEXED: 1, _CMYK: 4, _YCBCR: 3}
_UNSIGNED, _FLOAT = 1, 3


class _Tag(NamedTuple):
    kind: int
    values: int
    raw: bytes


class _TagDirectory(NamedTuple):
    order: str
    big: bool
    tags: dict[int, _Tag]

    def numbers(self, tag: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        found = self.tags.get(tag)
        if found is None:
            return default
        if found.kind not in _NUMBERS:
            raise Damaged(f"tag {tag} is not a number")
        letter = _TYPES[found.kind][1]
        return struct.unpack(f"{self.order}{found.values}{letter}", found.raw)

    def number(self, tag: int, default: int | None = None) -> int:
        found = self.numbers(tag, () if default is None else (default,))
        if len(found) != 1:
            raise Damaged(f"tag {tag} is missing, or has {len(found)} values")
        return found[0]


def size(data: memoryview) -> tuple[int, int]:
    return _size(_directory(data))


def _size(directory: _TagDirectory) -> tuple[int, int]:
    height, width = directory.number(_HEIGHT), directory.number(_WIDTH)
    if not 0 < height < 1 << 31 or not 0 < width < 1 << 31:
        raise Damaged(f"its header states {width} x {height} pixels")
    return height, width


def checked(data: memoryview) -> bytes:
    directory = _completed(_directory(data))
    _check_pixels(data, directory)
    return _with_directory(data, directory)


def _directory(data: memoryview) -> _TagDirectory:
    order = "<" if data[0] == ord("I") else ">"
    big = b"+" in bytes(data[2:4])
    try:
        if big:
            offset_size, zero, at = struct.unpack_from(order + "HHQ", data, 4)
            if offset_size != 8 or zero:
                raise Damaged("its header is damaged")
            (count,) = struct.unpack_from(order + "Q", data, at)
            at += 8
        else:
            (at,) = struct.unpack_from(order + "I", data, 4)
            (count,) = struct.unpack_from(order + "H", data, at)
            at += 2
        if not 0 < count <= _MOST_TAGS or at < 8:
            raise Damaged(f"its directory has {count} tags")
        tags: dict[int, _Tag] = {}
        entry, inline = (20, 8) if big else (12, 4)
        if at + entry * count > data.nbytes:
            raise Damaged("its directory is cut short")
        for here in range(at, at + entry * count, entry):
            number, kind, values = struct.unpack_from(order + ("HHQ" if big else "HHI"), data, here)
            if number not in _KEPT and (kind not in _TYPES or not values):
                continue  # readers skip tags of a type that they do not know
            if kind not in _TYPES:
                raise Damaged(f"tag {number} has type {kind}")
            if number in tags and number in _KEPT:
                raise Damaged(f"tag {number} is there twice")
            length = values * _TYPES[kind][0]
            place = here + entry - inline
            if length > inline:
                (place,) = struct.unpack_from(order + ("Q" if big else "I"), data, place)
            if not values or place + length > data.nbytes:
                raise Damaged(f"tag {number} is cut short")
            tags[number] = _Tag(kind, values, bytes(data[place : place + length]))
    except struct.error:
        raise Damaged("its directory is cut short") from None
    return _TagDirectory(order, big, tags)


def _completed(directory: _TagDirectory) -> _TagDirectory:
    """The directory with tags that some programs leave out, where the others imply them."""
    order, big, tags = directory
    number = directory.number
    samples = number(_SAMPLES, 1)
    added = {}
    if number(_COLOURS) == _RGB and samples == 4 and _EXTRA not in tags:
        added[_EXTRA] = _Tag(_SHORT, 1, bytes(2))
    plain = number(_COMPRESSION, _NONE) == _NONE
    if plain and _STRIPS in tags and _STRIP_BYTES not in tags:
        height, width = _size(directory)
        rows = max(1, min(number(_ROWS, height), height))
        in_row = width * max(directory.numbers(_BITS, (1,)))
        in_row *= samples if number(_PLANAR, 1) == 1 else 1
        down = -(-height // rows)
        lengths = [
            min(rows, height - index % down * rows) * -(-in_row // 8)
            for index in range(len(directory.numbers(_STRIPS)))
        ]
        if max(lengths) < 1 << 32:
            raw = struct.pack(f"{order}{len(lengths)}I", *lengths)
            added[_STRIP_BYTES] = _Tag(_LONG, len(lengths), raw)
    return _TagDirectory(order, big, {**tags, **added})


def _check_pixels(data: memoryview, directory: _TagDirectory) -> None:
    height, width = _size(directory)
    number = directory.number
    compression, colours = number(_COMPRESSION, _NONE), number(_COLOURS)
    samples, planar = number(_SAMPLES, 1), number(_PLANAR, 1)
    bits = _check_kind(directory, colours, samples)
    separate = planar == 2 and samples > 1
    if planar not in (1, 2) or number(_FILL_ORDER, 1) not in (1, 2):
        raise Damaged("its directory states an unknown order of pixels")
    if number(_PREDICTOR, 1) not in (1, 2, 3):
        raise Damaged("its directory states an unknown predictor")
    tiled = _TILES in directory.tags
    if tiled == (_STRIPS in directory.tags):
        raise Damaged("it has neither strips nor tiles, or both")
    if tiled:
        rows, columns = number(_TILE_HEIGHT), number(_TILE_WIDTH)
        offsets, lengths = directory.numbers(_TILES), directory.numbers(_TILE_BYTES)
    else:
        rows, columns = min(number(_ROWS, height), height), width
        offsets = directory.numbers(_STRIPS)
        lengths = directory.numbers(_STRIP_BYTES)
    if (not 0 < rows <= 1 << 20 and not rows == height) or not 0 < columns < 1 << 31:
        raise Damaged("its strips or tiles have no size")
    if tiled and (rows % 16 or columns % 16 or rows * columns > 1 << 28):
        raise Damaged(f"it has tiles of {columns} x {rows} pixels")
    down = -(-height // rows)
    count = down * -(-width // columns) * (samples if separate else 1)
    if len(offsets) != count or len(lengths) != count:
        raise Damaged(f"it has {len(offsets)} strips or tiles in place of {count}")
    in_row = columns * bits * (1 if separate else samples)
    if colours == _YCBCR and compression != _JPEG:
        across, along = directory.numbers(_SUBSAMPLING, (2, 2))[:2]
        if (across, along) != (1, 1):
            raise Damaged("it has colours of lower resolution, which is supported in JPEGs only")
    for index, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if not length or offset + length > data.nbytes:
            raise Damaged("it is cut short: a strip or tile lies beyond its end")
        here = rows
        if not tiled:
            here = min(rows, height - index % down * rows)
        part = bytes(data[offset : offset + length])
        if compression == _JPEG:
            _check_jpeg(directory, part, here, columns)
        elif compression not in _FAX:
            _check_part(part, here * -(-in_row // 8), compression)
        elif bits != 1 or samples != 1:
            raise Damaged("it is compressed as a fax, and not black and white")
        else:
            _check_fax(directory, part, here, columns)


def _check_kind(directory: _TagDirectory, colours: int, samples: int) -> int:
    """Bits of a sample."""
    depths = set(directory.numbers(_BITS, (1,)))
    formats = set(directory.numbers(_SAMPLE_FORMAT, (_UNSIGNED,)))
    extra = len(directory.numbers(_EXTRA))
    if colours not in _CHANNELS or samples != _CHANNELS[colours] + extra or samples > 5:
        raise Damaged("its directory states an unknown kind of colours")
    if len(directory.numbers(_BITS, (1,))) not in (1, samples) or len(depths) != 1:
        raise Damaged("its directory states different bits for its colours")
    (bits,) = depths
    known: tuple[int, ...] = (1, 2, 4, 8, 16) if _CHANNELS[colours] == 1 else (8, 16)
    if formats == {_FLOAT} and colours == _BLACK_IS_0:
        known = (32,)
    elif formats != {_UNSIGNED} or (extra and bits not in (8, 16)):
        known = ()
    if bits not in known:
        raise Damaged(f"it has {bits} bits for each colour")
    if colours == _INDEXED:
        palette = directory.numbers(_PALETTE)
        if bits > 8 or extra or len(palette) != 3 << bits:
            raise Damaged("its palette is missing, or too short")
    return bits


def _check_part(part: bytes, expected: int, compression: int) -> None:
    """A strip or tile unpacks to as many bytes as its pixels have."""
    if compression == _NONE:
        found = len(part)
    elif compression in (_DEFLATE, _OLD_DEFLATE):
        unpack = zlib.decompressobj()
        try:
            found = len(unpack.decompress(part, expected + 1))
        except zlib.error as error:
            raise Damaged(f"its pixels are damaged ({error})") from None
        if not unpack.eof and found <= expected:
            raise Damaged("its pixels are cut short")
    elif compression == _LZW:
        if part[0] == 0 and part[1:2] and part[1] & 1:
            raise Damaged("it is compressed by an outdated kind of LZW")
        found = lzw.unpacked_length(part, 8, expected, tiff=True)
    elif compression == _PACKBITS:
        found = _packbits_length(part, expected)
    else:
        raise Damaged(f"it is compressed by method {compression}, which is not supported")
    if found < expected:
        raise Damaged(f"a strip or tile has {found:,} bytes of pixels in place of {expected:,}")


def _packbits_length(part: bytes, enough: int) -> int:
    at = found = 0
    while at < len(part) and found < enough:
        count = part[at]
        if count < 128:
            at += 2 + count
            found += 1 + count
            if at > len(part):
                raise Damaged("its pixels are cut short")
        else:
            at += 2 if count > 128 else 1
            found += 257 - count if count > 128 else 0
            if at > len(part):
                raise Damaged("its pixels are cut short")
    return found


def _check_fax(directory: _TagDirectory, part: bytes, rows: int, columns: int) -> None:
    low_first = directory.number(_FILL_ORDER, 1) == 2
    for _ in fax.rows(part, columns, rows, _fax_kind(directory), low_first=low_first):
        pass


def _fax_kind(directory: _TagDirectory) -> fax.FaxKind:
    kind = _FAX[directory.number(_COMPRESSION)]
    if kind == "group 3" and directory.number(_T4, 0) & _TWO_DIMENSIONAL:
        return "group 3, two-dimensional"
    return kind


def _check_jpeg(directory: _TagDirectory, part: bytes, rows: int, columns: int) -> None:
    """A strip or tile is a JPEG, whose tables may be in a tag."""
    tables = directory.tags.get(_JPEG_TABLES)
    if tables is not None:
        if tables.raw[:2] != b"\xff\xd8" or tables.raw[-2:] != b"\xff\xd9":
            raise Damaged("its JPEG tables are damaged")
        part = tables.raw[:-2] + part[2:]
    simplejpeg = load_simplejpeg()
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(part)
        if (height, width) != (rows, columns):
            raise Damaged("a strip or tile has another size than its directory states")
        simplejpeg.decode_jpeg(part, "GRAY" if colours != "CMYK" else "CMYK")
    except ValueError as error:
        raise Damaged(f"a strip or tile is damaged ({error})") from None


def _with_directory(data: memoryview, directory: _TagDirectory) -> bytes:
    """The file with a new directory at its end."""
    order, big, tags = directory
    begin = data.nbytes + -data.nbytes % 8
    kept = [(number, tags[number]) for number in sorted(_KEPT) if number in tags]
    entry, inline = (20, 8) if big else (12, 4)
    values_at = begin + (16 if big else 6) + entry * len(kept)
    entries, values = [], b""
    for number, tag in kept:
        content = tag.raw.ljust(inline, b"\0")
        if len(tag.raw) > inline:
            content = struct.pack(order + ("Q" if big else "I"), values_at + len(values))
            values += tag.raw + bytes(-len(tag.raw) % 8)
        entries.append(
            struct.pack(order + ("HHQ" if big else "HHI"), number, tag.kind, tag.values) + content
        )
    count = struct.pack(order + ("Q" if big else "H"), len(kept))
    new = count + b"".join(entries) + bytes(inline) + values
    header = (
        bytes(data[:8]) + struct.pack(order + "Q", begin)
        if big
        else bytes(data[:4]) + struct.pack(order + "I", begin)
    )
    return header + bytes(data[len(header) :]).ljust(begin - len(header), b"\0") + new
