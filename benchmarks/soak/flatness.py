"""Whether a measured quantity grows: its course over the second half of a soak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOWS = 4
"""Windows of the second half, of which the first and the last are compared."""

FEWEST = 40
"""Measurements in the second half, at least: fewer say nothing."""


@dataclass(frozen=True)
class Flatness:
    """A quantity over the second half of its measurements.

    ``begin`` and ``end``: medians of the first and of the last window. ``fitted``: growth of the
    straight line through all of them. ``bound``: growth that is allowed.
    """

    begin: float
    end: float
    fitted: float
    bound: float

    @property
    def grows(self) -> bool:
        """Both must exceed the bound: a peak at the end moves the window, but not the line."""
        return min(self.end - self.begin, self.fitted) > self.bound


def flatness(values: Sequence[float] | NDArray[np.float64], bound: float) -> Flatness | None:
    """Judge a series of measurements; ``None`` if it is too short."""
    second = np.asarray(values[len(values) // 2 :], float)
    if len(second) < FEWEST:
        return None
    windows = np.array_split(second, WINDOWS)
    slope = np.polyfit(np.arange(len(second)), second, 1)[0]
    return Flatness(
        float(np.median(windows[0])),
        float(np.median(windows[-1])),
        float(slope * (len(second) - 1)),
        bound,
    )
