"""LZW, the compression of GIF and of some TIFF files: how many bytes a stream unpacks to.

Only lengths are followed, not contents: a code is one byte longer than the code that it extends.
"""

from __future__ import annotations

from collections.abc import Generator

from penstock import native
from penstock.image.formats.damaged import Damaged

_LONGEST = 12


def unpacked_length(data: bytes, bits: int, enough: int, *, tiff: bool = False) -> int:
    """The number of bytes that ``data`` unpacks to; stops when it has ``enough``.

    ``bits``: size of the uncompressed values, 2 to 8. TIFF stores the high bits of a code first,
    and makes codes longer one code earlier than GIF. Raises ``Damaged`` for a code that is not
    defined. Without the compiled kernel it takes a second for two million codes.
    """
    kernel = native.kernel()
    if kernel is None:
        return _unpacked_length(data, bits, enough, tiff)
    try:
        length: int = kernel.lzw_length(data, bits, enough, tiff)
    except kernel.Damaged as error:
        raise Damaged(f"its pixels are damaged ({error})") from None
    return length


def _unpacked_length(data: bytes, bits: int, enough: int, tiff: bool) -> int:
    clear = 1 << bits
    lengths = [1] * (clear + 2)
    width = bits + 1
    total, before = 0, 0
    codes = _high_first(data) if tiff else _low_first(data)
    early = int(tiff)
    next(codes)
    while total < enough:
        try:
            code = codes.send(width)
        except StopIteration:
            return total
        if code == clear:
            del lengths[clear + 2 :]
            width, before = bits + 1, 0
            continue
        if code == clear + 1:
            return total
        known = len(lengths)
        if code > known or (code == known and not before) or (not before and code > clear):
            raise Damaged("its pixels are damaged (an undefined code)")
        length = before + 1 if code == known else lengths[code]
        total += length
        if before and known < 1 << _LONGEST:
            lengths.append(before + 1)
            if len(lengths) + early >= 1 << width and width < _LONGEST:
                width += 1
        before = length
    return total


def _low_first(data: bytes) -> Generator[int, int, None]:
    held = count = at = 0
    width = yield 0
    while True:
        while count < width:
            if at == len(data):
                return
            held |= data[at] << count
            at += 1
            count += 8
        code = held & (1 << width) - 1
        held >>= width
        count -= width
        width = yield code


def _high_first(data: bytes) -> Generator[int, int, None]:
    held = count = at = 0
    width = yield 0
    while True:
        while count < width:
            if at == len(data):
                return
            held = held << 8 | data[at]
            at += 1
            count += 8
        count -= width
        code = held >> count
        held &= (1 << count) - 1
        width = yield code
