"""An image in the making: changes are noted, joined with their neighbours, and done in few passes.

Two kinds of change wait. Changes by table become one table, and what the next of them asks of the
image (how frequent each level is, the darkest and the brightest) follows from what was counted
before. Shifts become one shift. Everything else is done at once, after what waits. The result has
the same bits as applying the changes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.image import colour, tone, warp
from penstock.image.tone import UNCHANGED, LevelCounts, Table, Tones
from penstock.native import Image, load_cv2


class LazyImage:
    """What an image will be: a shift and then a change of levels away from the pixels held here.

    ``fill`` is what comes in from outside, ``smooth`` is whether shears and turns interpolate.
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
        """The image, with everything done."""
        image = self._pixels()
        if self._tones is not UNCHANGED:
            image = tone.apply(self._tones, image, self._planes)
            self._tones = UNCHANGED
            self._replace(image)
        return image

    def handed_on(self) -> tuple[Image, Table | None]:
        """The image but for a last table (channels, 256), for someone who looks levels up anyway.

        The table is ``None`` where nothing is left to do.
        """
        image = self._pixels()
        if self._tones is UNCHANGED:
            return image, None
        tables = [one.table for one in self._tones]
        return image, np.array(tables if len(tables) > 1 else tables * image.shape[2])

    def brightness(self, factor: float) -> None:
        """All levels times ``factor``."""
        self._change(tone.brightness(factor))

    def posterize(self, bits: int) -> None:
        """Only the highest ``bits`` of every level."""
        self._change(tone.posterize(bits))

    def solarize(self, threshold: float) -> None:
        """Levels from ``threshold`` upwards inverted."""
        self._change(tone.solarize(threshold))

    def invert(self) -> None:
        """Every level from the other end."""
        self._change(tone.invert())

    def contrast(self, factor: float) -> None:
        """Away from, or towards, the mean grey of the whole image."""
        if factor == 1.0:
            return
        if self._counts is not None:
            sums = colour.sums_of(self._seen(self._counts))
        else:
            # Counting levels costs more than applying what waits.
            sums = colour.sums(self.settle())
        rows, columns = self._image.shape[:2]
        self._change(tone.contrast(factor, sums, rows * columns))

    def autocontrast(self) -> None:
        """Each channel stretched to the whole range of levels."""
        if self._counts is not None:
            ranges = colour.ranges_of(self._seen(self._counts))
        else:
            if not all(one.rising for one in self._tones):
                self.settle()
            ranges = colour.ranges(self._apart())
            if self._tones is not UNCHANGED:
                each = self._tones if len(self._tones) > 1 else self._tones * len(ranges)
                ranges = [
                    (int(one.table[low]), int(one.table[high]))
                    for one, (low, high) in zip(each, ranges, strict=True)
                ]
        self._change(tone.autocontrast(ranges))

    def equalize(self) -> None:
        """Each channel's levels spread so that all are about as frequent."""
        if self._counts is None:
            self._counts = colour.count(self._apart())
        self._change(tone.equalize(self._seen(self._counts)))

    def saturation(self, factor: float) -> None:
        """Away from, or towards, each pixel's grey."""
        if factor != 1.0:
            self._replace(colour.saturation(self.settle(), factor))

    def hue(self, turn: float) -> None:
        """Every colour moved by ``turn`` of the colour circle."""
        self._replace(colour.hue(self.settle(), turn))

    def sharpness(self, factor: float) -> None:
        """Away from, or towards, a slight blur."""
        if factor != 1.0:
            self._replace(colour.sharpness(self.settle(), factor))

    def shift(self, down: int, right: int) -> None:
        """Moved by whole pixels."""
        if down == 0 and right == 0:
            return
        border = self._border_below_tone()
        if self._shift is None or self._border != border:
            rows, columns = self._pixels().shape[:2]
            self._shift = warp.Shift(0, rows, 0, columns)
            self._border = border
        self._shift = self._shift.moved(self._image, down, right)
        self._replace(self._image)

    def shear_x(self, slope: float) -> None:
        """Rows moved sideways, the more the lower they are."""
        self._bend(warp.shear_x, slope)

    def shear_y(self, slope: float) -> None:
        """Columns moved up or down, the more the further right they are."""
        self._bend(warp.shear_y, slope)

    def rotate(self, degrees: float) -> None:
        """MidEpoch about the middle, against the clock."""
        self._bend(warp.rotate, degrees)

    def _bend(self, function: warp.Warp, by: float) -> None:
        if by == 0.0:
            return
        # A mean of changed levels is not the change of their mean.
        border = self._after_settling() if self._smooth else self._border_below_tone()
        self._replace(function(self._pixels(), by, border, self._smooth))

    def _border_below_tone(self) -> tuple[int, ...]:
        """What to fill with so that the table that waits makes ``fill`` of it.

        Moving pixels and changing their levels may then trade places; if there is no such level,
        the table is applied now.
        """
        if self._tones is UNCHANGED:
            return self._fill
        each = self._tones if len(self._tones) > 1 else self._tones * len(self._fill)
        border = []
        for one, level in zip(each, self._fill, strict=True):
            below = one.source(level)
            if below is None:
                return self._after_settling()
            border.append(below)
        return tuple(border)

    def _after_settling(self) -> tuple[int, ...]:
        self.settle()
        return self._fill

    def _change(self, after: Tones) -> None:
        self._tones = tone.joined(self._tones, after)

    def _seen(self, counts: LevelCounts) -> LevelCounts:
        return counts if self._tones is UNCHANGED else tone.through(self._tones, counts)

    def _pixels(self) -> Image:
        """The image but for the table that waits."""
        if self._shift is not None:
            self._image = self._shift.fill(self._image, self._border)
            self._shift = None
        return self._image

    def _apart(self) -> Sequence[Image]:
        """The same, channel by channel."""
        image = self._pixels()
        planes: Sequence[Image] = self._planes or load_cv2().split(image)
        self._planes = planes
        return planes

    def _replace(self, image: Image) -> None:
        self._image = image
        self._planes = self._counts = None
