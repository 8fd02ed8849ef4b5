"""A lazy image: collects changes, joins them, and applies them in few passes over the pixels.

Two kinds of change are pending until the pixels are needed. Changes by a lookup table join into one
table. If such a change needs statistics of the image (the count of each level, the darkest, the
brightest), they are derived from those of the pixels and the pending table. Shifts join into one
shift. All other changes first apply what is pending, and then run at once. The result has the same
bits as applying the changes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.image import colour, tone, warp
from penstock.image.tone import UNCHANGED, LevelCounts, Table, Tones
from penstock.native import Image, load_cv2


class LazyImage:
    """An image with pending changes: first a shift, then a lookup table of levels.

    ``fill``: the level of pixels from outside the image. ``smooth``: shears and rotations
    interpolate.
    """

    __slots__ = ("_border", "_counts", "_fill", "_image", "_planes", "_shift", "_smooth", "_tones")

    def __init__(self, image: Image, fill: tuple[float, ...] = (0,), smooth: bool = False) -> None:
        channels = image.shape[2]
        levels = tuple(map(round, fill))
        self._fill = levels * channels if len(levels) == 1 else levels[:channels]
        self._smooth = smooth
        self._tones = UNCHANGED
        self._shift: warp.Shift | None = None
        self._border = self._fill
        self._image = image
        self._planes: Sequence[Image] | None = None
        self._counts: LevelCounts | None = None

    def settle(self) -> Image:
        """Apply all pending changes and return the image."""
        image = self._pixels()
        if self._tones is not UNCHANGED:
            image = tone.apply(self._tones, image, self._planes)
            self._tones = UNCHANGED
            self._replace(image)
        return image

    def pixels_and_table(self) -> tuple[Image, Table | None]:
        """The image without the pending table, and that table (channels, 256).

        For callers that look up every level anyway. The table is ``None`` if none is pending.
        """
        image = self._pixels()
        if self._tones is UNCHANGED:
            return image, None
        tables = [change.table for change in self._tones]
        return image, np.array(tables if len(tables) > 1 else tables * image.shape[2])

    def brightness(self, factor: float) -> None:
        """Multiply all levels by ``factor``."""
        self._change(tone.brightness(factor))

    def posterize(self, bits: int) -> None:
        """Keep only the highest ``bits`` bits of every level."""
        self._change(tone.posterize(bits))

    def solarize(self, threshold: float) -> None:
        """Invert levels from ``threshold`` upwards."""
        self._change(tone.solarize(threshold))

    def invert(self) -> None:
        """Replace every level by 255 minus it."""
        self._change(tone.invert())

    def contrast(self, factor: float) -> None:
        """Move levels towards the mean grey of the image (``factor`` below 1) or away from it."""
        if factor == 1.0:
            return
        if self._counts is not None:
            sums = colour.sums_from_counts(self._counts_after_table(self._counts))
        else:
            # Counting levels costs more than applying the pending changes.
            sums = colour.sums(self.settle())
        rows, columns = self._image.shape[:2]
        self._change(tone.contrast(factor, sums, rows * columns))

    def autocontrast(self) -> None:
        """Stretch each channel to the whole range of levels."""
        if self._counts is not None:
            ranges = colour.ranges_from_counts(self._counts_after_table(self._counts))
        else:
            if not all(change.rising for change in self._tones):
                self.settle()
            ranges = colour.ranges(self._split_channels())
            if self._tones is not UNCHANGED:
                each = self._tones if len(self._tones) > 1 else self._tones * len(ranges)
                ranges = [
                    (int(change.table[low]), int(change.table[high]))
                    for change, (low, high) in zip(each, ranges, strict=True)
                ]
        self._change(tone.autocontrast(ranges))

    def equalize(self) -> None:
        """Spread the levels of each channel so that all are about equally frequent."""
        if self._counts is None:
            self._counts = colour.count(self._split_channels())
        self._change(tone.equalize(self._counts_after_table(self._counts)))

    def saturation(self, factor: float) -> None:
        """Move pixels towards their grey (``factor`` below 1) or away from it."""
        if factor != 1.0:
            self._replace(colour.saturation(self.settle(), factor))

    def hue(self, turn: float) -> None:
        """Rotate the hue by ``turn`` of the colour circle."""
        self._replace(colour.hue(self.settle(), turn))

    def sharpness(self, factor: float) -> None:
        """Blend with a slight blur (``factor`` below 1) or move away from it."""
        if factor != 1.0:
            self._replace(colour.sharpness(self.settle(), factor))

    def shift(self, down: int, right: int) -> None:
        """Move the image by whole pixels."""
        if down == 0 and right == 0:
            return
        border = self._border_before_table()
        if self._shift is None or self._border != border:
            rows, columns = self._pixels().shape[:2]
            self._shift = warp.Shift(0, rows, 0, columns)
            self._border = border
        self._shift = self._shift.moved(self._image, down, right)
        self._replace(self._image)

    def shear_x(self, slope: float) -> None:
        """Move each row sideways in proportion to its distance from the top."""
        self._warp(warp.shear_x, slope)

    def shear_y(self, slope: float) -> None:
        """Move each column up or down in proportion to its distance from the left edge."""
        self._warp(warp.shear_y, slope)

    def rotate(self, degrees: float) -> None:
        """Rotate about the centre, counter-clockwise."""
        self._warp(warp.rotate, degrees)

    def _warp(self, function: warp.Warp, by: float) -> None:
        if by == 0.0:
            return
        # Interpolation does not commute with a table, so apply the table first.
        border = self._after_settling() if self._smooth else self._border_before_table()
        self._replace(function(self._pixels(), by, border, self._smooth))

    def _border_before_table(self) -> tuple[int, ...]:
        """The level that the pending table maps to ``fill``, by channel.

        Filling with it allows pixels to move before the table applies. If there is no such level,
        applies the table now and returns ``fill``.
        """
        if self._tones is UNCHANGED:
            return self._fill
        each = self._tones if len(self._tones) > 1 else self._tones * len(self._fill)
        border = []
        for change, level in zip(each, self._fill, strict=True):
            source = change.source(level)
            if source is None:
                return self._after_settling()
            border.append(source)
        return tuple(border)

    def _after_settling(self) -> tuple[int, ...]:
        self.settle()
        return self._fill

    def _change(self, after: Tones) -> None:
        self._tones = tone.join(self._tones, after)

    def _counts_after_table(self, counts: LevelCounts) -> LevelCounts:
        return counts if self._tones is UNCHANGED else tone.counts_after(self._tones, counts)

    def _pixels(self) -> Image:
        """The image without the pending table."""
        if self._shift is not None:
            self._image = self._shift.fill(self._image, self._border)
            self._shift = None
        return self._image

    def _split_channels(self) -> Sequence[Image]:
        """The channels of the image without the pending table."""
        image = self._pixels()
        planes: Sequence[Image] = self._planes or load_cv2().split(image)
        self._planes = planes
        return planes

    def _replace(self, image: Image) -> None:
        self._image = image
        self._planes = self._counts = None
