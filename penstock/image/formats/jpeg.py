"""JPEG: segments of tables, and scans of entropy-coded data. libjpeg reads the content of both.

libjpeg warns about damage and goes on, and so do most programs that use it; what it cannot read
becomes grey. simplejpeg, when strict, makes every warning an error. A few warnings are harmless:
bytes without a meaning in the header or behind the last pixel, a damaged colour profile, an unknown
version of JFIF, and parameters of a scan that only a progressive file may have. Some cameras and
programs write such files.

simplejpeg does not read colours of a rare resolution. The codes of such a file are checked here,
and OpenCV decodes it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from penstock.image.formats import huffman, opencv
from penstock.image.formats.damaged import Damaged
from penstock.native import Image, load_simplejpeg

MOST_SCANS = 500
"""Each scan of a progressive file is a pass over all pixels, and takes few bytes: without a limit,
a small file takes minutes. Encoders write about 10 scans; libjpeg-turbo's fuzzers stop at 500."""

_HUFFMAN_TABLES = 0xC4
_SEQUENTIAL = (0xC0, 0xC1)
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SKIPPED = frozenset((0xC4, 0xCC, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
"""Segments of tables, comments and application data."""

_SCAN, _END, _COMMENT = 0xDA, 0xD9, 0xFE
_RESTART_INTERVAL = 0xDD
_PROFILE = 0xE2

_JFIF_SEGMENT, _JFIF = 0xE0, b"JFIF\0"

_MOST_BLOCKS = 10
"""Blocks of all colours in a unit, by the standard."""

_WHOLE_SPECTRUM = b"\x00\x3f\x00"
"""The end of the header of a scan that is not progressive: coefficients 0 to 63, all bits."""

_SQUARE = (b"\x11\x11\x11", b"\x22\x11\x11")

_KNOWN_SAMPLING = (
    *(bytes([luma, 0x11, 0x11]) for luma in (0x11, 0x21, 0x22, 0x12, 0x41, 0x14)),
    *(bytes([equal] * 3) for equal in (0x21, 0x12, 0x31, 0x13)),
    *(b"\x22\x21\x21", b"\x22\x12\x12"),
)
"""Sampling factors of three components that simplejpeg reads; it refuses all others."""

_MARKER = re.compile(rb"\xff\xff*([^\x00\xff])", re.DOTALL)
"""A marker in entropy-coded data, where 0xFF is followed by 0. Since the pattern begins with a
literal byte, re skips to the next 0xFF with memchr: 26 us for 110 KB, and 540 us for ``\\xff+``."""

_BEFORE_END = re.compile(r"extraneous bytes before marker 0xd9$")
"""simplejpeg reports its first warning only, as text. This one says that libjpeg has decoded all
rows without a warning, and then found bytes before the end of the image. Should simplejpeg change
the text, files with such bytes are refused, and skipping rows saves no time; nothing damaged is
accepted."""


Parts = tuple[tuple[int, int], ...]


class Header(NamedTuple):
    """The segments before the first scan.

    ``at``: offset of the two bytes of the height. ``square``: colour has the full resolution, or
    half of it in both directions. ``scan_at``: offset behind the header of the first scan.
    ``restart``: units between two restarts, or 0. ``units``: units of the whole picture. ``stray``:
    where bytes without a meaning begin and end. ``profiles``: the same of colour profiles.
    ``version_at``: offset of the version of JFIF, or 0. ``tables``: where Huffman tables begin and
    end. ``known_sampling``: simplejpeg reads colours of this resolution. ``sequential``:
    Huffman codes, and not progressive.
    """

    height: int
    width: int
    components: int
    at: int
    progressive: bool
    square: bool
    several_scans: bool
    scan_at: int
    restart: int
    units: int
    stray: Parts
    profiles: Parts
    version_at: int
    tables: Parts
    known_sampling: bool
    sequential: bool


def size(data: memoryview) -> tuple[int, int]:
    header = read_header(data)
    return header.height, header.width


def checked(data: memoryview, header: Header | None = None) -> memoryview | bytes:
    header = header or read_header(data)
    if header.several_scans:
        _count_scans(data, header)
    return _without(data, header.stray)


def decode(data: memoryview | bytes, colours: str) -> Image:
    """The pixels of a file from ``checked``; raises ``Damaged``."""
    decode_jpeg = load_simplejpeg().decode_jpeg
    try:
        image: Image = decode_jpeg(data, colours)
    except ValueError as error:
        why = str(error)
    else:
        return image
    header = read_header(memoryview(data))
    mended = _mended(memoryview(data), header)
    if not header.known_sampling:
        whole = _with_whole_scan(memoryview(mended), read_header(memoryview(mended)))
        return opencv.decode(whole, colours)
    if mended != data:
        try:
            data = mended
            image = decode_jpeg(data, colours)
        except ValueError as error:
            why = str(error)
        else:
            return image
    if not _BEFORE_END.search(why):
        raise Damaged(why)
    if header.restart:
        # The end comes too early if restart markers are missing.
        if header.several_scans:
            raise Damaged(why)
        check_scan(memoryview(data), read_header(memoryview(data)))
    lenient: Image = decode_jpeg(data, colours, strict=False)
    return lenient


def decode_rows(
    data: memoryview | bytes, rows: int, columns: int, by: int, out: Any, *, more: bool
) -> bool:
    """Decode the first rows into ``out``, shrunk by ``by``; whether they are free of damage.

    ``more``: the header of ``data`` states a smaller height than there is data for. Such a file
    must not have restart markers.
    """
    try:
        load_simplejpeg().decode_jpeg(
            data, "RGB", min_height=rows, min_width=columns, min_factor=by, buffer=out
        )
    except ValueError as error:
        return more and _BEFORE_END.search(str(error)) is not None
    return True


def read_header(data: memoryview) -> Header:
    at, frame, frame_at, restart, version_at = 2, 0, 0, 0, 0
    stray: list[tuple[int, int]] = []
    profiles: list[tuple[int, int]] = []
    tables: list[tuple[int, int]] = []
    try:
        while True:
            if data[at] != 0xFF or data[at + 1] == 0:
                begin, at = at, _next_marker(data, at)
                stray.append((begin, at))
            while (marker := data[at + 1]) == 0xFF:
                at += 1
            if not marker:
                continue  # 0xFF 0 behind bytes that fill: no marker either
            length = data[at + 2] << 8 | data[at + 3]
            end = at + 2 + length
            if length < 2 or end > data.nbytes:
                raise Damaged("Premature end of JPEG file, within its header")
            if marker in _FRAMES:
                if frame or length < 8 or length != 8 + 3 * data[at + 9]:
                    raise Damaged("it has two frames, or one of a wrong length")
                frame, frame_at = marker, at + 4
            elif marker == _RESTART_INTERVAL and length == 4:
                restart = data[at + 4] << 8 | data[at + 5]
            elif marker == _SCAN:
                if length < 8:
                    raise Damaged("the header of its scan is cut short")
                break
            elif marker not in _SKIPPED:
                raise Damaged(f"its header has an unexpected marker 0x{marker:02x}")
            elif marker == _PROFILE:
                profiles.append((at, end))
            elif marker == _HUFFMAN_TABLES:
                tables.append((at + 4, end))
            elif marker == _JFIF_SEGMENT and bytes(data[at + 4 : at + 9]) == _JFIF:
                version_at = at + 9
            at = end
    except IndexError:
        raise Damaged("Premature end of JPEG file, within its header") from None
    if not frame:
        raise Damaged("its frame header is missing")
    bits, components = data[frame_at], data[frame_at + 5]
    height = data[frame_at + 1] << 8 | data[frame_at + 2]
    width = data[frame_at + 3] << 8 | data[frame_at + 4]
    if bits != 8:
        raise Damaged(f"its samples have {bits} bits; only 8 are supported")
    if components not in (1, 3, 4) or not height or not width:
        raise Damaged(f"its header states {width} x {height} pixels, {components} colours")
    factors = bytes(data[frame_at + 7 : frame_at + 6 + 3 * components : 3])
    across = max(1, *(factor >> 4 for factor in factors)) if components > 1 else 1
    down = max(1, *(factor & 15 for factor in factors)) if components > 1 else 1
    return Header(
        height,
        width,
        components,
        frame_at + 1,
        frame in _PROGRESSIVE,
        components == 1 or factors in _SQUARE,
        frame in _PROGRESSIVE or data[at + 4] < components,
        end,
        restart,
        -(-width // (8 * across)) * -(-height // (8 * down)),
        tuple(stray),
        tuple(profiles),
        version_at,
        tuple(tables),
        components != 3 or factors in _KNOWN_SAMPLING,
        frame in _SEQUENTIAL,
    )


def _next_marker(data: memoryview, at: int) -> int:
    """The position of the next 0xFF that no 0 follows."""
    while data[at] != 0xFF or data[at + 1] == 0:
        at += 1 if data[at] != 0xFF else 2
    return at


def check_scan(data: memoryview, header: Header) -> None:
    """The only scan of a file is followed by the end, and has the right restart markers.

    Finds out about a scan that is not decoded whether its markers are as they should be. Errors
    within the entropy-coded data are not found.
    """
    restarts = 0
    at = header.scan_at
    while True:
        found = _MARKER.search(data, at)
        if found is None:
            raise Damaged("Premature end of JPEG file")
        marker, at = found[1][0], found.end()
        if marker == _END:
            break
        if not 0xD0 <= marker <= 0xD7:
            _check_after_scan(data, found.start())
            break
        if not header.restart and bytes(data[at : at + 2]) == b"\xff\xd9":
            break  # behind the last unit: it does no harm
        if not header.restart or marker != 0xD0 + restarts % 8:
            raise Damaged("Corrupt JPEG data: a restart marker out of order")
        restarts += 1
    if header.restart:
        expected = (header.units - 1) // header.restart
        if not expected <= restarts <= expected + 1:
            raise Damaged(f"Corrupt JPEG data: {restarts} restart markers in place of {expected}")


def _check_after_scan(data: memoryview, at: int) -> None:
    """Only comments and application data may stand between the scan and the end."""
    while at + 4 <= data.nbytes and data[at] == 0xFF:
        marker = data[at + 1]
        if marker != _COMMENT and not 0xE0 <= marker <= 0xEF:
            raise Damaged(f"Corrupt JPEG data: marker 0x{marker:02x} within a scan")
        at += 2 + (data[at + 2] << 8 | data[at + 3])
        if bytes(data[at : at + 2]) == b"\xff\xd9":
            return
    raise Damaged("Corrupt JPEG data: a marker within a scan")


def _with_whole_scan(data: memoryview, header: Header) -> bytes:
    """The file without bytes behind its last block; every code of its only scan is checked."""
    frame = bytes(data[header.at + 5 : header.at + 5 + 3 * header.components])
    scan = bytes(data[header.scan_at - 4 - 2 * header.components : header.scan_at])
    if header.several_scans or not header.sequential or scan[0] != header.components:
        raise Damaged("its colours have an unusual resolution, which is supported in one scan only")
    check_scan(data, header)
    tables: dict[int, huffman.HuffmanTable] = {}
    for begin, end in header.tables:
        huffman.read_tables(bytes(data[begin:end]), tables)
    factors = dict(zip(frame[::3], frame[1::3], strict=True))
    blocks = []
    for component, chosen in zip(scan[1:-3:2], scan[2:-3:2], strict=True):
        first, others = tables.get(chosen >> 4), tables.get(0x10 | chosen & 15)
        if component not in factors or first is None or others is None:
            raise Damaged("its scan names a colour or a Huffman table that is missing")
        factor = factors.pop(component)
        blocks += [(first, others)] * ((factor >> 4) * (factor & 15))
    if not 0 < len(blocks) <= _MOST_BLOCKS:
        raise Damaged(f"its header states {len(blocks)} blocks in a unit")
    end = next(
        found.start()
        for found in _MARKER.finditer(data, header.scan_at)
        if not 0xD0 <= found[1][0] <= 0xD7
    )
    scan = bytes(data[header.scan_at : end])
    whole = huffman.whole_scan(scan, blocks, header.units, header.restart)
    return bytes(data[: header.scan_at]) + whole + b"\xff\xd9"


def _count_scans(data: memoryview, header: Header) -> None:
    scans = 1
    at = header.scan_at
    while (found := _MARKER.search(data, at)) is not None and found[1][0] != _END:
        at = found.end()
        marker = found[1][0]
        if 0xD0 <= marker <= 0xD7 or at + 2 > data.nbytes:
            continue
        scans += marker == _SCAN
        if scans > MOST_SCANS:
            raise Damaged(f"it has more than {MOST_SCANS} scans")
        at += data[at] << 8 | data[at + 1]


def _mended(data: memoryview, header: Header) -> bytes:
    """The file without peculiarities of its header that do not change the pixels."""
    copy = bytearray(data)
    if header.version_at and copy[header.version_at] not in (1, 2):
        copy[header.version_at] = 1
    if not header.several_scans:
        copy[header.scan_at - 3 : header.scan_at] = _WHOLE_SPECTRUM
    return bytes(_without(memoryview(copy), header.profiles))


def _without(data: memoryview, stray: Parts) -> memoryview | bytes:
    if not stray:
        return data
    parts, at = [], 0
    for begin, end in stray:
        parts.append(data[at:begin])
        at = end
    return b"".join([*parts, data[at:]])
