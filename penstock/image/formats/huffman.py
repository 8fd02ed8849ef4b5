"""The Huffman codes of a JPEG: are they whole?

Slow, as it is written in Python: only for the few files that simplejpeg cannot check.
"""

from __future__ import annotations

import re

from penstock.image.formats.damaged import Damaged

_RESTART = re.compile(rb"\xff+[\xd0-\xd7]")
_WINDOW = 16
"""Bits of the longest code."""

_MOST_BITS = 15
"""Bits of the largest difference between two blocks, and of the largest coefficient."""

HuffmanTable = list[int]
"""For each possible window of bits: bits of the code at its begin, with those behind the code that
belong to its value; and the symbol in the lowest 8 bits. 0: no such code."""


def read_tables(segment: bytes, tables: dict[int, HuffmanTable]) -> None:
    """Add the tables of a segment under their class (0x00 or 0x10) and number."""
    at = 0
    while at < len(segment):
        counts = segment[at + 1 : at + 17]
        symbols = segment[at + 17 : at + 17 + sum(counts)]
        if len(counts) < 16 or len(symbols) < sum(counts):
            raise Damaged("a Huffman table is cut short")
        table: HuffmanTable = []
        left = iter(symbols)
        for length, count in enumerate(counts, 1):
            for symbol in (next(left) for _ in range(count)):
                table += [(length + (symbol & 15)) << 8 | symbol] * (1 << _WINDOW - length)
        if len(table) > 1 << _WINDOW:
            raise Damaged("a Huffman table has too many codes")
        tables[segment[at]] = table + [0] * ((1 << _WINDOW) - len(table))
        at += 17 + len(symbols)


def whole_scan(
    scan: bytes, blocks: list[tuple[HuffmanTable, HuffmanTable]], units: int, restart: int
) -> bytes:
    """The scan without bytes behind its last block; raises ``Damaged`` if a block is not whole.

    ``scan``: from the header of the scan to the next marker that is not a restart. ``blocks``: the
    tables of each block of a unit, for the first coefficient and the others. ``restart``: units
    between two restarts, or 0.
    """
    parts = _RESTART.split(scan)
    whole = b""
    for number in range(-(-units // restart) if restart else 1):
        if number == len(parts):
            raise Damaged("Corrupt JPEG data: blocks are missing")
        here = min(restart or units, units - number * restart)
        part = parts[number].replace(b"\xff\x00", b"\xff")
        length = _length(part, blocks, here)
        last = number * restart + here == units
        if length < len(part) and not last:
            raise Damaged("Corrupt JPEG data: extraneous bytes before a restart")
        whole += part[:length].replace(b"\xff", b"\xff\x00")
        whole += b"" if last else bytes([0xFF, 0xD0 + number % 8])
    return whole


def _length(part: bytes, blocks: list[tuple[HuffmanTable, HuffmanTable]], units: int) -> int:
    """Bytes of this many units."""
    at, end = 0, 8 * len(part)
    part += bytes(4)
    for _ in range(units):
        for first, others in blocks:
            entry = first[_window(part, at)]
            if not entry or entry & 0xFF > _MOST_BITS:
                raise Damaged("Corrupt JPEG data: bad Huffman code")
            at += entry >> 8
            coefficient = 1
            while coefficient < 64:
                entry = others[_window(part, at)]
                if not entry:
                    raise Damaged("Corrupt JPEG data: bad Huffman code")
                at += entry >> 8
                run, bits = entry >> 4 & 15, entry & 15
                if not bits and run != 15:
                    break
                coefficient += run + 1
            if coefficient > 64:
                raise Damaged("Corrupt JPEG data: a block has too many coefficients")
        if at > end:
            raise Damaged("Corrupt JPEG data: premature end of data segment")
    return -(-at // 8)


def _window(part: bytes, at: int) -> int:
    found = int.from_bytes(part[at >> 3 : (at >> 3) + 4], "big")
    return found >> 16 - (at & 7) & 0xFFFF
