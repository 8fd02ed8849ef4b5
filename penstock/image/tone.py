"""Changes of levels by a lookup table: how to make, join and apply them.

Tables join before they touch the image; the result has the bits of applying them one after the
other. A lookup is not the fastest operation in OpenCV, though. If one or two passes of plain
arithmetic give the same levels as the table, a change has these passes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.native import Image, load_cv2, with_channels

Table = NDArray[np.uint8]
"""The new value of each of the 256 levels."""

LevelCounts = NDArray[np.float64]
"""The number of pixels with each level, as (channels, 256). Floats, because NumPy is faster with
them; exact, because an image has fewer than 2**53 pixels."""

GREY = (0.2989, 0.587, 0.114)
"""The weights of red, green and blue in the grey of a pixel."""

DOWN = -0.4999
"""Added before OpenCV rounds to the nearest level, because torchvision truncates instead. A little
less than a half, so that whole numbers stay what they are."""

_LEVELS = np.arange(256, dtype=np.uint8)
_SINGLES = _LEVELS.astype(np.float32)
_DOUBLES = _LEVELS.astype(np.float64)
_WHOLES = _LEVELS.astype(np.int64)

_MOST_PASSES = 2
"""A lookup takes 59 us at 224 x 224, a pass of arithmetic 5 to 34 us: two passes are not slower."""

_SAFE = 0.49995
"""A result this close to its level rounds to it, despite errors of single precision."""

PARTS = 1024
"""Factors are multiples of 1/1024, the unit of OpenCV's matrix code, so its results are exact."""

LEAN = 0.25
"""A quarter of a unit is added, so that no result lies halfway between two levels."""


@dataclass(frozen=True, slots=True, eq=False)
class Tone:
    """A change of levels.

    ``passes``: functions that together give the same result as ``table``. An empty tuple means no
    change, ``None`` that only the table gives the result. ``rising``: the table never decreases.
    """

    table: Table
    rising: bool
    passes: tuple[Callable[[Image], Any], ...] | None = None

    def apply(self, pixels: Image) -> Any:
        """Change the levels of an image or of one of its channels."""
        if self.passes is None:
            return load_cv2().LUT(pixels, self.table)
        for change in self.passes:
            pixels = change(pixels)
        return pixels

    def then(self, after: Tone) -> Tone:
        """This change followed by ``after``, as one change."""
        if after.passes == ():
            return self
        if self.passes == ():
            return after
        both = None
        if self.passes is not None and after.passes is not None:
            both = self.passes + after.passes
        return Tone(
            after.table[self.table],
            self.rising and after.rising,
            None if both is None or len(both) > _MOST_PASSES else both,
        )

    def source(self, level: int) -> int | None:
        """A level that this change maps to ``level``, or ``None``."""
        if self.table[level] == level:
            return level
        sources = np.flatnonzero(self.table == level)
        return int(sources[0]) if len(sources) else None


Tones = tuple[Tone, ...]
"""One change for all channels, or one for each channel."""

SAME = Tone(_LEVELS, rising=True, passes=())
UNCHANGED: Tones = (SAME,)


def join(first: Tones, after: Tones) -> Tones:
    """``first`` followed by ``after``, as one change."""
    if first is UNCHANGED or after is UNCHANGED:
        return after if first is UNCHANGED else first
    if len(first) == len(after):
        return tuple(map(Tone.then, first, after))
    if len(first) == 1:
        return tuple(first[0].then(tone) for tone in after)
    return tuple(tone.then(after[0]) for tone in first)


def apply(tones: Tones, image: Image, planes: Sequence[Image] | None) -> Image:
    """Change the levels of an image. ``planes``: its channels, if the caller has them."""
    if len(tones) == 1:
        return with_channels(tones[0].apply(image))
    cv2 = load_cv2()
    if planes is None:
        planes = cv2.split(image)
    # 66 us at 224 x 224, and 23 us to split. One LUT call with a table per channel takes 104 us.
    out: Image = cv2.merge([tone.apply(plane) for tone, plane in zip(tones, planes, strict=True)])
    return out


def counts_after(tones: Tones, counts: LevelCounts) -> LevelCounts:
    """The level counts of an image after a change, from those before it."""
    each = tones if len(tones) == len(counts) else tones * len(counts)
    return np.array(
        [
            np.bincount(tone.table, weights=row, minlength=256)
            for tone, row in zip(each, counts, strict=True)
        ]
    )


@lru_cache(maxsize=256)
def brightness(factor: float) -> Tones:
    """Multiply all levels by ``factor``."""
    if factor == 1.0:
        return UNCHANGED
    table = _clip(_SINGLES * np.float32(factor))
    scale = _scale_to(table, factor)
    return (Tone(table, rising=True, passes=None if scale is None else (partial(_scale, scale),)),)


def contrast(factor: float, sums: Sequence[float], pixels: int) -> Tones:
    """Move levels towards the mean grey of an image (``factor`` below 1) or away from it.

    ``sums``: the sum of the levels of each channel.
    """
    if len(sums) == 1:
        middle = sums[0] / pixels
    else:
        # torchvision truncates the grey of every pixel before it takes the mean, which lowers the
        # mean by a half. Doing the same in a pass over the pixels would take seven times as long.
        grey = GREY[0] * sums[0] + GREY[1] * sums[1] + GREY[2] * sums[2]
        middle = max(0.0, grey / pixels - 0.5)
    slope, start = round(factor * PARTS), round(middle * (1.0 - factor) * PARTS)
    table = _WHOLES * slope
    table += start
    table //= PARTS
    # Below 16 all intermediate numbers are exact, in single precision and in OpenCV's 16 bits.
    passes = (partial(_line, slope, start),) if factor < 16.0 else None
    return (Tone(_clip(table), rising=True, passes=passes),)


@lru_cache(maxsize=9)
def posterize(bits: int) -> Tones:
    """Keep only the highest ``bits`` bits of every level."""
    if bits >= 8:
        return UNCHANGED
    mask = np.uint8((0xFF << (8 - bits)) & 0xFF)
    return (Tone(_LEVELS & mask, rising=True, passes=(partial(_mask, mask),)),)


@lru_cache(maxsize=256)
def solarize(threshold: float) -> Tones:
    """Invert levels from ``threshold`` upwards."""
    last = math.ceil(threshold) - 1
    if last >= 255:
        return UNCHANGED
    table = np.where(last < _WHOLES, 255 - _LEVELS, _LEVELS)
    return (Tone(table, rising=False, passes=(partial(_invert_above, last),)),)


def invert() -> Tones:
    """Replace every level by 255 minus it."""
    return solarize(0.0)


def autocontrast(ranges: Sequence[tuple[int, int]]) -> Tones:
    """Stretch each channel from its own range, (darkest, brightest), to all levels."""
    return _share_channels(tuple(_stretched(low, high) for low, high in ranges))


@lru_cache(maxsize=4096)
def _stretched(low: int, high: int) -> Tone:
    if low == high or (low, high) == (0, 255):
        return SAME
    step = np.float32(high - low) * np.float32(1 / 255)
    table = _clip((_SINGLES - np.float32(low)) / step)
    scale = _scale_to(table[low:], float(1 / step))
    return Tone(table, rising=True, passes=None if scale is None else (partial(_lift, low, scale),))


def equalize(counts: LevelCounts) -> Tones:
    """Spread the levels of each channel so that all are about equally frequent."""
    up_to = counts.cumsum(axis=1)
    # The brightest level that occurs is the first whose running sum is the total.
    last = up_to.argmax(axis=1).tolist()
    steps = [
        (sums.item(-1) - row.item(at)) // 255.0
        for sums, row, at in zip(up_to, counts, last, strict=True)
    ]
    table = np.subtract(up_to, counts, out=up_to)
    table += [[step // 2.0] for step in steps]
    # A channel with a step of 0 stays as it is.
    table /= [[step or 1.0] for step in steps]
    np.minimum(table, 255.0, out=table)
    rows = zip(table.astype(np.uint8), steps, strict=True)
    return _share_channels(tuple(Tone(row, rising=True) if step else SAME for row, step in rows))


def _share_channels(tones: Tones) -> Tones:
    """One change for all channels if every channel has the same."""
    first = tones[0]
    if any(tone is not first for tone in tones):
        return tones
    return UNCHANGED if first is SAME else (first,)


def _scale_to(table: Table, factor: float) -> float | None:
    """A factor that gives the table by scaling levels, with a margin for rounding errors.

    ``None`` if there is none. In torchvision's arithmetic a result that should be a whole number
    may be slightly lower, so that it is truncated to the level below. A slightly smaller factor
    does the same here.
    """
    for lower in (0.0, 1e-6, 3e-6, 1e-5, 1e-4):
        scale = float(np.float32(factor * (1.0 - lower)))
        scaled = _DOUBLES[: len(table)] * scale
        np.minimum(scaled, 255.0, out=scaled)
        scaled -= table
        if scaled.max() + DOWN < _SAFE and scaled.min() + DOWN > -_SAFE:
            return scale
    return None


def _scale(factor: float, pixels: Image) -> Any:
    return load_cv2().convertScaleAbs(pixels, None, factor, DOWN)


def _lift(low: int, factor: float, pixels: Image) -> Any:
    cv2 = load_cv2()
    if low and pixels.size == 4:
        # OpenCV would take the four numbers for a second image of four pixels.
        pixels = np.maximum(pixels, np.uint8(low)) - np.uint8(low)
    elif low:
        pixels = cv2.subtract(pixels, (low, low, low, 0))
    return cv2.convertScaleAbs(pixels, None, factor, DOWN)


def _line(slope: int, start: int, pixels: Image) -> Any:
    scale = slope / PARTS
    shift = (start + LEAN) / PARTS - 0.5
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        rows: tuple[tuple[float, ...], ...] = ((scale, shift),)
    else:
        # Too small to matter, but OpenCV 4 has a slow path for diagonal matrices.
        off = 2e-7
        rows = ((scale, off, off, shift), (off, scale, off, shift), (off, off, scale, shift))
    return load_cv2().transform(pixels, np.array(rows, np.float32))


def _mask(mask: np.uint8, pixels: Image) -> Any:
    return np.bitwise_and(pixels, mask, order="C")


def _invert_above(last: int, pixels: Image) -> Any:
    cv2 = load_cv2()
    if last < 0:
        return cv2.bitwise_not(pixels)
    return cv2.bitwise_xor(pixels, cv2.threshold(pixels, last, 255, cv2.THRESH_BINARY)[1])


def _clip(table: NDArray[Any]) -> Table:
    # In place, and without np.clip, whose overhead is more than the work on a table.
    np.minimum(table, 255, out=table)
    np.maximum(table, 0, out=table)
    return table.astype(np.uint8)
