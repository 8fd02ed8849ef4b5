"""Counts the different boxes that random areas and random aspect ratios can give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """All box sizes that can be drawn and fit: for each height, a range of widths.

    ``outside``: sizes that do not fit, or have no pixels, can be drawn too.
    """

    heights: NDArray[Any]
    narrowest: NDArray[Any]
    widest: NDArray[Any]
    outside: bool

    @classmethod
    def within(
        cls,
        room: tuple[int, int],
        area: tuple[float, float],
        ratio: tuple[float, float],
    ) -> Sizes:
        """Sizes from 1 to ``room`` (height, width) for the given ranges of area and aspect ratio.

        The ranges hold for the real size, before its sides are rounded. ``ratio`` is width over
        height. On logarithmic axes the real sizes form a rectangle that stands on a corner. So the
        sizes that round to one height are one range of widths, whose ends have a formula: no loop
        over all sizes.
        """
        (least, most), (narrow, wide) = area, ratio
        low, high = math.sqrt(least / wide), math.sqrt(most / narrow)
        first, last = (int(end) for end in _rounded(np.float64(low), np.float64(high)))
        heights = np.arange(max(1, first), min(room[0], last) + 1, dtype=np.float64)
        # The real heights that round to each height; ``at``: the one with the extreme width.
        begin, end = np.maximum(heights - 0.5, low), np.minimum(heights + 0.5, high)
        at = np.clip(math.sqrt(least / narrow), begin, end)
        shortest = np.maximum(least / at, narrow * at)
        at = np.clip(math.sqrt(most / wide), begin, end)
        narrowest, widest = _rounded(shortest, np.minimum(most / at, wide * at))
        outside = bool(
            first < 1 or last > room[0] or (narrowest < 1).any() or (widest > room[1]).any()
        )
        return cls(heights, np.maximum(narrowest, 1), np.minimum(widest, room[1]), outside)

    def holds(self, height: int, width: int) -> bool:
        """Whether this size can be drawn and fits."""
        rows = self.heights == height
        return bool((rows & (self.narrowest <= width) & (width <= self.widest)).any())

    def places(self, rows: int, columns: int) -> int:
        """The number of positions in an image, summed over all sizes."""
        widths = np.maximum(self.widest - self.narrowest + 1, 0)
        across = widths * (columns + 1) - widths * (self.narrowest + self.widest) / 2
        return int(((rows - self.heights + 1) * across).sum())


def _rounded(low: Any, high: Any) -> tuple[Any, Any]:
    """The smallest and largest integers that real numbers between ``low`` and ``high`` round to.

    The ends themselves are drawn with probability 0. So an end halfway between two integers rounds
    inwards, unless ``low`` and ``high`` are equal and it is the only number drawn.
    """
    first, last = np.floor(low + 0.5), np.ceil(high - 0.5)
    alone = first > last
    return np.where(alone, np.rint(low), first), np.where(alone, np.rint(low), last)
