"""CCITT compression, which TIFFs of scanned pages and faxes have: which pixels are black.

Libtiff, which decodes these TIFFs, fills damaged rows with anything and reports success. So every
row is read here first, as a list of the places where its colour changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from penstock.image.formats.damaged import Damaged

FaxKind = Literal["group 3, no ends", "group 3", "group 3, two-dimensional", "group 4"]
"""How rows are written: by run lengths, each row beginning at a byte; by run lengths, with a code
for the end of a row; by that or by differences from the row above, which a bit tells; by
differences only."""

Changes = list[int]
"""The columns at which a row changes its colour, from white at its beginning. Ends with the width,
perhaps more than once."""

_WHITE = """
    00110101 000111 0111 1000 1011 1100 1110 1111 10011 10100 00111 01000 001000 000011 110100
    110101 101010 101011 0100111 0001100 0001000 0010111 0000011 0000100 0101000 0101011 0010011
    0100100 0011000 00000010 00000011 00011010 00011011 00010010 00010011 00010100 00010101 00010110
    00010111 00101000 00101001 00101010 00101011 00101100 00101101 00000100 00000101 00001010
    00001011 01010010 01010011 01010100 01010101 00100100 00100101 01011000 01011001 01011010
    01011011 01001010 01001011 00110010 00110011 00110100

    11011 10010 010111 0110111 00110110 00110111 01100100 01100101 01101000 01100111 011001100
    011001101 011010010 011010011 011010100 011010101 011010110 011010111 011011000 011011001
    011011010 011011011 010011000 010011001 010011010 011000 010011011
"""
"""The codes for 0 to 63 white pixels, then those for 64, 128 and so on to 1,728."""

_BLACK = """
    0000110111 010 11 10 011 0011 0010 00011 000101 000100 0000100 0000101 0000111 00000100 00000111
    000011000 0000010111 0000011000 0000001000 00001100111 00001101000 00001101100 00000110111
    00000101000 00000010111 00000011000 000011001010 000011001011 000011001100 000011001101
    000001101000 000001101001 000001101010 000001101011 000011010010 000011010011 000011010100
    000011010101 000011010110 000011010111 000001101100 000001101101 000011011010 000011011011
    000001010100 000001010101 000001010110 000001010111 000001100100 000001100101 000001010010
    000001010011 000000100100 000000110111 000000111000 000000100111 000000101000 000001011000
    000001011001 000000101011 000000101100 000001011010 000001100110 000001100111

    0000001111 000011001000 000011001001 000001011011 000000110011 000000110100 000000110101
    0000001101100 0000001101101 0000001001010 0000001001011 0000001001100 0000001001101
    0000001110010 0000001110011 0000001110100 0000001110101 0000001110110 0000001110111
    0000001010010 0000001010011 0000001010100 0000001010101 0000001011010 0000001011011
    0000001100100 0000001100101
"""

_LONG = """
    00000001000 00000001100 00000001101 000000010010 000000010011 000000010100 000000010101
    000000010110 000000010111 000000011100 000000011101 000000011110 000000011111
"""
"""The codes for 1,792, 1,856 and so on to 2,560 pixels of either colour."""

_LONGEST = 13
_PASS, _RUNS = 8, 9
_MODES = {
    "1": 0,
    "011": 1,
    "000011": 2,
    "0000011": 3,
    "010": -1,
    "000010": -2,
    "0000010": -3,
    "0001": _PASS,
    "001": _RUNS,
}
"""Differences from the row above: the columns between two changes, or one of two other modes."""

_END_OF_ROW = 11
"""Zeros before the 1 that ends a row. No other code has as many."""


def _table(codes: dict[str, int]) -> list[tuple[int, int]]:
    """The length of the code that the next bits begin with, and its value; (0, 0) if none does."""
    table = [(0, 0)] * (1 << _LONGEST)
    for code, value in codes.items():
        free = _LONGEST - len(code)
        first = int(code, 2) << free
        table[first : first + (1 << free)] = [(len(code), value)] * (1 << free)
    return table


def _run_codes(text: str) -> dict[str, int]:
    lengths = (*range(64), *range(64, 2561, 64))
    return dict(zip((text + _LONG).split(), lengths, strict=True))


_RUN_TABLES = (_table(_run_codes(_WHITE)), _table(_run_codes(_BLACK)))
_MODE_TABLE = _table(_MODES)
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def rows(
    data: bytes, width: int, height: int, kind: FaxKind, *, low_first: bool = False
) -> Iterator[Changes]:
    """The rows of a strip or tile. ``low_first``: the first bit of a byte is its lowest.

    Raises ``Damaged`` at the first code that is not defined, and for a row that has not exactly
    ``width`` pixels. It reads more than a million changes of colour in a second.
    """
    bits = _Bits(data.translate(_REVERSED) if low_first else data)
    above = _ended([], width)
    for _ in range(height):
        if kind == "group 4":
            above = _differences(bits, width, above)
        elif kind == "group 3, no ends":
            bits.at += -bits.at % 8
            above = _runs(bits, width)
        else:
            bits.skip_end_of_row()
            by_runs = kind == "group 3" or bits.next(1)
            above = _runs(bits, width) if by_runs else _differences(bits, width, above)
        if bits.at > bits.count:
            raise Damaged("its pixels are cut short")
        yield above


class _Bits:
    """The bits of a strip, and how many of them were read. Zeros follow the last one."""

    def __init__(self, data: bytes) -> None:
        self.count = 8 * len(data)
        self.at = 0
        self._data = data

    def peek(self) -> int:
        """The next 13 bits."""
        first = self.at >> 3
        held = int.from_bytes(self._data[first : first + 3].ljust(3, b"\0"), "big")
        return held >> 11 - (self.at & 7) & 0x1FFF

    def next(self, count: int) -> int:
        found = self.peek() >> _LONGEST - count
        self.at += count
        return found

    def skip_end_of_row(self) -> None:
        """Skip the code for the end of the row above, before which there may be more zeros."""
        if self.peek() >> _LONGEST - _END_OF_ROW:
            raise Damaged("its pixels are damaged (a row does not end where it should)")
        self.at += _END_OF_ROW
        while self.at < self.count:
            if self.next(1):
                return
        raise Damaged("its pixels are cut short")


def _run(bits: _Bits, colour: int) -> int:
    """The pixels of the next run of a colour."""
    table, total = _RUN_TABLES[colour], 0
    while True:
        length, pixels = table[bits.peek()]
        if not length:
            raise Damaged("its pixels are damaged (an undefined run length)")
        bits.at += length
        total += pixels
        if pixels < 64:
            return total


def _runs(bits: _Bits, width: int) -> Changes:
    """A row of run lengths."""
    changes: Changes = []
    at = colour = 0
    while at < width:
        at += _run(bits, colour)
        changes.append(at)
        colour ^= 1
    return _ended(changes, width)


def _differences(bits: _Bits, width: int, above: Sequence[int]) -> Changes:
    """A row of differences from the row above."""
    changes: Changes = []
    at = colour = next_above = 0
    while at < width:
        length, mode = _MODE_TABLE[bits.peek()]
        if not length:
            raise Damaged("its pixels are damaged (an undefined code)")
        bits.at += length
        if mode == _RUNS:
            for each in (colour, 1 - colour):
                at += _run(bits, each)
                changes.append(at)
            continue
        # The next change above, to the right, from this colour to the other.
        if next_above & 1 != colour:
            next_above += 1 if next_above == 0 else -1
        while above[next_above] <= at and above[next_above] < width and (at or changes):
            next_above += 2
        if mode == _PASS:
            at = above[next_above + 1]
            continue
        change = above[next_above] + mode
        if change < at:
            raise Damaged("its pixels are damaged (a run of less than 0 pixels)")
        at = change
        changes.append(at)
        colour ^= 1
    return _ended(changes, width)


def _ended(changes: Changes, width: int) -> Changes:
    """The row with its width at the end often enough to look for any change in it."""
    if changes and changes[-1] > width:
        raise Damaged(f"its pixels are damaged (a row of {changes[-1]} pixels in place of {width})")
    return [*changes, width, width, width]
