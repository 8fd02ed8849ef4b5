"""How many different boxes can be drawn when a box has a random area and a random ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Every size that can be drawn and has room: for each height, from and to which width.

    ``outside`` says that others can be drawn too, which have no room or no pixels.
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
        """Sizes of 1 to ``room``, whose real ``area`` and ``ratio`` (width over height) are in
        these ranges before their sides are rounded.

        In logarithms the real sizes are a rectangle standing on a corner, so those that round to
        one height are one run of widths, and its ends have a formula: no loop over all sizes.
        """
        (least, most), (narrow, wide) = area, ratio
        low, high = math.sqrt(least / wide), math.sqrt(most / narrow)
        first, last = (int(end) for end in _rounded(np.float64(low), np.float64(high)))
        heights = np.arange(max(1, first), min(room[0], last) + 1, dtype=np.float64)
        # The real heights that round to each, and of those the ones with the extreme widths.
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
        """Whether this size is among them."""
        here = self.heights == height
        return bool((here & (self.narrowest <= width) & (width <= self.widest)).any())

    def places(self, rows: int, columns: int) -> int:
        """In how many places all boxes of these sizes can lie in an image."""
        many = np.maximum(self.widest - self.narrowest + 1, 0)
        across = many * (columns + 1) - many * (self.narrowest + self.widest) / 2
        return int(((rows - self.heights + 1) * across).sum())


def _rounded(low: Any, high: Any) -> tuple[Any, Any]:
    """The least and the largest whole numbers that real ones between these round to.

    The ends themselves are never drawn, so one halfway between two counts inwards; unless there is
    nothing between them, and it is all that is drawn.
    """
    first, last = np.floor(low + 0.5), np.ceil(high - 0.5)
    alone = first > last
    return np.where(alone, np.rint(low), first), np.where(alone, np.rint(low), last)
