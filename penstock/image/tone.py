"""Changes by table: what becomes of each grey level, how such changes join, and how to apply them.

A table is joined with the next before either touches the image, and bits stay what they would be
one after the other. Looking levels up is not the fastest way through an image in OpenCV, though:
where a few passes of plain arithmetic give the same levels, a change names them too.
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
"""What becomes of each of 256 levels."""

LevelCounts = NDArray[np.float64]
"""How many pixels have each level: (channels, 256). Whole numbers, and exact: there are fewer than
2**53 of them, and NumPy is faster with floats."""

GREY = (0.2989, 0.587, 0.114)
"""What red, green and blue add to a pixel's grey."""

DOWN = -0.4999
"""OpenCV rounds to the nearest level and torchvision cuts: this shift makes one of the other. A
little short of a half, so that whole numbers stay what they are."""

_LEVELS = np.arange(256, dtype=np.uint8)
_SINGLES = _LEVELS.astype(np.float32)
_DOUBLES = _LEVELS.astype(np.float64)
_WHOLES = _LEVELS.astype(np.int64)

_MOST_PASSES = 2
"""Looking up takes 59 us at 224 x 224, a pass of arithmetic 5 to 34 us: two are not slower."""

_SAFE = 0.49995
"""A result this close to its level rounds to it, whatever single precision makes of it."""

PARTS = 1024
"""Factors in 1024ths: OpenCV's matrices count in those, so their result is exact."""

LEAN = 0.25
"""A quarter of a part more, so that no result lies halfway between two levels."""


@dataclass(frozen=True, slots=True, eq=False)
class Tone:
    """A change of levels; ``passes`` give the same as ``table``, and none of them is no change.

    ``passes`` is ``None`` where only the table gives it. ``rising`` says that no level is mapped
    below that of a darker one.
    """

    table: Table
    rising: bool
    passes: tuple[Callable[[Image], Any], ...] | None = None

    def apply(self, pixels: Image) -> Any:
        """An image or one of its channels, every level changed."""
        if self.passes is None:
            return load_cv2().LUT(pixels, self.table)
        for change in self.passes:
            pixels = change(pixels)
        return pixels

    def then(self, after: Tone) -> Tone:
        """This change and another after it, as one."""
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
        """A level that this change makes into ``level``, if there is one."""
        if self.table[level] == level:
            return level
        found = np.flatnonzero(self.table == level)
        return int(found[0]) if len(found) else None


Tones = tuple[Tone, ...]
"""One change for all channels, or one for each."""

SAME = Tone(_LEVELS, rising=True, passes=())
UNCHANGED: Tones = (SAME,)


def joined(first: Tones, after: Tones) -> Tones:
    """One change after another, as one."""
    if first is UNCHANGED or after is UNCHANGED:
        return after if first is UNCHANGED else first
    if len(first) == len(after):
        return tuple(map(Tone.then, first, after))
    if len(first) == 1:
        return tuple(first[0].then(one) for one in after)
    return tuple(one.then(after[0]) for one in first)


def apply(tones: Tones, image: Image, planes: Sequence[Image] | None) -> Image:
    """The image with every level changed; ``planes`` are its channels, if they are at hand."""
    if len(tones) == 1:
        return with_channels(tones[0].apply(image))
    cv2 = load_cv2()
    if planes is None:
        planes = cv2.split(image)
    # 66 us at 224 x 224, and 23 us to split: OpenCV's own way with a table for each takes 104 us.
    out: Image = cv2.merge([one.apply(plane) for one, plane in zip(tones, planes, strict=True)])
    return out


def through(tones: Tones, counts: LevelCounts) -> LevelCounts:
    """How many pixels have each level after a change."""
    each = tones if len(tones) == len(counts) else tones * len(counts)
    return np.array(
        [
            np.bincount(one.table, weights=row, minlength=256)
            for one, row in zip(each, counts, strict=True)
        ]
    )


@lru_cache(maxsize=256)
def brightness(factor: float) -> Tones:
    """All levels times ``factor``."""
    if factor == 1.0:
        return UNCHANGED
    table = _cut(_SINGLES * np.float32(factor))
    scale = _scale_to(table, factor)
    return (Tone(table, rising=True, passes=None if scale is None else (partial(_scale, scale),)),)


def contrast(factor: float, sums: Sequence[float], pixels: int) -> Tones:
    """Away from, or towards, the mean grey of an image, given the sum of each channel's levels."""
    if len(sums) == 1:
        middle = sums[0] / pixels
    else:
        # torchvision cuts every pixel's grey to a whole level before it takes the mean, which
        # lowers it by a half. That pass over the pixels would cost seven times as much.
        grey = GREY[0] * sums[0] + GREY[1] * sums[1] + GREY[2] * sums[2]
        middle = max(0.0, grey / pixels - 0.5)
    slope, start = round(factor * PARTS), round(middle * (1.0 - factor) * PARTS)
    table = _WHOLES * slope
    table += start
    table //= PARTS
    # Below 16 every number on the way is exact in single precision, and in OpenCV's 16 bits.
    passes = (partial(_line, slope, start),) if factor < 16.0 else None
    return (Tone(_cut(table), rising=True, passes=passes),)


@lru_cache(maxsize=9)
def posterize(bits: int) -> Tones:
    """Only the highest ``bits`` of every level."""
    if bits >= 8:
        return UNCHANGED
    mask = np.uint8((0xFF << (8 - bits)) & 0xFF)
    return (Tone(_LEVELS & mask, rising=True, passes=(partial(_mask, mask),)),)


@lru_cache(maxsize=256)
def solarize(threshold: float) -> Tones:
    """Levels from ``threshold`` upwards inverted."""
    last = math.ceil(threshold) - 1
    if last >= 255:
        return UNCHANGED
    table = np.where(last < _WHOLES, 255 - _LEVELS, _LEVELS)
    return (Tone(table, rising=False, passes=(partial(_invert_above, last),)),)


def invert() -> Tones:
    """Every level from the other end."""
    return solarize(0.0)


def autocontrast(ranges: Sequence[tuple[int, int]]) -> Tones:
    """Each channel stretched from its own range, darkest to brightest, to that of all levels."""
    return _alike(tuple(_stretched(low, high) for low, high in ranges))


@lru_cache(maxsize=4096)
def _stretched(low: int, high: int) -> Tone:
    if low == high or (low, high) == (0, 255):
        return SAME
    step = np.float32(high - low) * np.float32(1 / 255)
    table = _cut((_SINGLES - np.float32(low)) / step)
    scale = _scale_to(table[low:], float(1 / step))
    return Tone(table, rising=True, passes=None if scale is None else (partial(_lift, low, scale),))


def equalize(counts: LevelCounts) -> Tones:
    """Each channel's levels spread so that all are about as frequent."""
    up_to = counts.cumsum(axis=1)
    # The brightest level that occurs is where the running sum first reaches the whole.
    last = up_to.argmax(axis=1).tolist()
    steps = [
        (sums.item(-1) - row.item(at)) // 255.0
        for sums, row, at in zip(up_to, counts, last, strict=True)
    ]
    table = np.subtract(up_to, counts, out=up_to)
    table += [[step // 2.0] for step in steps]
    # A channel without steps stays as it is.
    table /= [[step or 1.0] for step in steps]
    np.minimum(table, 255.0, out=table)
    rows = zip(table.astype(np.uint8), steps, strict=True)
    return _alike(tuple(Tone(row, rising=True) if step else SAME for row, step in rows))


def _alike(tones: Tones) -> Tones:
    """One change for all channels where that of each is the same."""
    first = tones[0]
    if any(one is not first for one in tones):
        return tones
    return UNCHANGED if first is SAME else (first,)


def _scale_to(table: Table, factor: float) -> float | None:
    """A number by which to scale levels to get the table, with room for rounding errors.

    Results that should be whole may come out a little lower in torchvision's arithmetic, and are
    cut to the level below: then so must they here.
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
        # Four pixels in a column and four numbers are two images to OpenCV.
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
        # Too little to matter, and enough to keep OpenCV 4 from its slow way with a diagonal.
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


def _cut(table: NDArray[Any]) -> Table:
    # In place, and without np.clip, which takes longer to get going than for a table.
    np.minimum(table, 255, out=table)
    np.maximum(table, 0, out=table)
    return table.astype(np.uint8)
