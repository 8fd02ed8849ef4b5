"""Shears, shifts and turns of an image within its frame, as torchvision defines them.

Each states where an output pixel (x, y) is taken from. Nearest sampling takes the same pixels as
torchvision; what lies outside the image is ``fill``, one level for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.native import Image, load_cv2, with_channels

Fill = tuple[int, ...]
Warp = Callable[[Image, float, Fill, bool], Image]


def shear_x(image: Image, slope: float, fill: Fill, smooth: bool) -> Image:
    """Rows moved sideways, the more the lower they are: the top edge stays."""
    if smooth:
        return _warp(image, np.array(((1.0, slope, 0.5 * slope), (0.0, 1.0, 0.0))), fill, smooth)
    return _slide(image, slope, fill)


def shear_y(image: Image, slope: float, fill: Fill, smooth: bool) -> Image:
    """Columns moved up or down, the more the further right they are: the left edge stays."""
    if smooth:
        return _warp(image, np.array(((1.0, 0.0, 0.0), (slope, 1.0, 0.5 * slope))), fill, smooth)
    # Copying rows is so much faster than copying pixels that it pays to make them of columns.
    cv2 = load_cv2()
    across = _slide(with_channels(cv2.transpose(image)), slope, fill)
    return with_channels(cv2.transpose(across))


def rotate(image: Image, degrees: float, fill: Fill, smooth: bool) -> Image:
    """MidEpoch about the middle, against the clock."""
    degrees %= 360.0
    if degrees == 0.0:
        return image
    return _warp(image, _turn(degrees, image.shape[0], image.shape[1]), fill, smooth)


@lru_cache(maxsize=64)
def _turn(degrees: float, rows: int, columns: int) -> NDArray[np.float64]:
    angle = math.radians(degrees)
    # A right angle must land on whole pixels, and cos(pi / 2) is not zero.
    cos, sin = round(math.cos(angle), 12), round(math.sin(angle), 12)
    x, y = (columns - 1) / 2, (rows - 1) / 2
    return np.array(((cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y)))


class Shift(NamedTuple):
    """Where an image stands in its frame after any number of shifts by whole pixels.

    It is seen from row ``top`` to ``bottom`` and from column ``left`` to ``right``, moved by
    ``down`` and ``across``. What one shift moves out of the frame, no other brings back.
    """

    top: int
    bottom: int
    left: int
    right: int
    down: int = 0
    across: int = 0

    def moved(self, image: Image, down: int, across: int) -> Shift:
        rows, columns = image.shape[:2]
        top, bottom, left, right, before_down, before_across = self
        return Shift(
            min(max(top + down, 0), rows),
            min(max(bottom + down, 0), rows),
            min(max(left + across, 0), columns),
            min(max(right + across, 0), columns),
            before_down + down,
            before_across + across,
        )

    def fill(self, image: Image, fill: Fill) -> Image:
        """The image in its place, and ``fill`` around it."""
        rows, columns = image.shape[:2]
        top, bottom, left, right, down, across = self
        if top == bottom or left == right:
            out = np.empty_like(image, order="C")
            out[:] = fill
            return out
        part = image[top - down : bottom - down, left - across : right - across]
        return _framed(part, (top, rows - bottom, left, columns - right), fill)


def _framed(image: Image, sides: tuple[int, int, int, int], fill: Fill) -> Image:
    cv2 = load_cv2()
    return with_channels(cv2.copyMakeBorder(image, *sides, cv2.BORDER_CONSTANT, value=fill))


def _slide(image: Image, slope: float, fill: Fill) -> Image:
    """Every row moved by its own whole number of pixels, in one copy of as many runs of bytes."""
    rows, columns, channels = image.shape
    left, right, starts, run = _runs(slope, rows, columns, channels)
    framed = _framed(image, (0, 0, left, right), fill)
    # Every run of a row's length that there is in memory, one at each byte.
    runs: NDArray[Any] = np.ndarray(framed.size - run.itemsize + 1, run, framed, 0, (1,))
    return runs[starts].view(np.uint8).reshape(image.shape)


@lru_cache(maxsize=64)
def _runs(
    slope: float, rows: int, columns: int, channels: int
) -> tuple[int, int, NDArray[np.intp], np.dtype[np.void]]:
    """How many columns of fill each side needs, where in memory each row starts, and its bytes."""
    by = np.rint(slope * (np.arange(rows) + 0.5)).clip(-columns, columns).astype(np.intp)
    left, right = max(0, -int(by.min())), max(0, int(by.max()))
    starts = np.arange(rows) * (left + columns + right) + left + by
    return left, right, starts * channels, np.dtype((np.void, columns * channels))


def _warp(image: Image, matrix: NDArray[np.float64], fill: Fill, smooth: bool) -> Image:
    cv2 = load_cv2()
    sampling = cv2.INTER_LINEAR if smooth else cv2.INTER_NEAREST
    return with_channels(
        cv2.warpAffine(
            image,
            matrix,
            (image.shape[1], image.shape[0]),
            flags=sampling | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=fill,
        )
    )
