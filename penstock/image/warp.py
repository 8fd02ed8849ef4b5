"""Shears, shifts and rotations of an image, as torchvision defines them. The size stays the same.

Nearest sampling takes the same source pixels as torchvision. Pixels from outside the image get
``fill``, one level for each channel.
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
    """Move each row sideways in proportion to its distance from the top edge."""
    if smooth:
        return _warp(image, np.array(((1.0, slope, 0.5 * slope), (0.0, 1.0, 0.0))), fill, smooth)
    return _slide(image, slope, fill)


def shear_y(image: Image, slope: float, fill: Fill, smooth: bool) -> Image:
    """Move each column up or down in proportion to its distance from the left edge."""
    if smooth:
        return _warp(image, np.array(((1.0, 0.0, 0.0), (slope, 1.0, 0.5 * slope))), fill, smooth)
    # Copying rows is so much faster than copying pixels that transposing twice pays off.
    cv2 = load_cv2()
    transposed = _slide(with_channels(cv2.transpose(image)), slope, fill)
    return with_channels(cv2.transpose(transposed))


def rotate(image: Image, degrees: float, fill: Fill, smooth: bool) -> Image:
    """Rotate about the centre, counter-clockwise."""
    degrees %= 360.0
    if degrees == 0.0:
        return image
    return _warp(image, _rotation(degrees, image.shape[0], image.shape[1]), fill, smooth)


@lru_cache(maxsize=64)
def _rotation(degrees: float, rows: int, columns: int) -> NDArray[np.float64]:
    angle = math.radians(degrees)
    # Right angles must map pixels to whole pixels, but math.cos(pi / 2) is not exactly 0.
    cos, sin = round(math.cos(angle), 12), round(math.sin(angle), 12)
    x, y = (columns - 1) / 2, (rows - 1) / 2
    return np.array(((cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y)))


class Shift(NamedTuple):
    """The sum of any number of shifts by whole pixels.

    The image is moved by ``down`` and ``across``, and visible from row ``top`` to ``bottom`` and
    from column ``left`` to ``right``. Pixels that one shift moves out do not come back.
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
        """Shift the image, with ``fill`` around it."""
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
    """Move every row by its own whole number of pixels, all in one indexed copy."""
    rows, columns, channels = image.shape
    left, right, starts, run = _runs(slope, rows, columns, channels)
    framed = _framed(image, (0, 0, left, right), fill)
    # A view with one item for each byte offset: the row-length run of bytes that begins there.
    runs: NDArray[Any] = np.ndarray(framed.size - run.itemsize + 1, run, framed, 0, (1,))
    return runs[starts].view(np.uint8).reshape(image.shape)


@lru_cache(maxsize=64)
def _runs(
    slope: float, rows: int, columns: int, channels: int
) -> tuple[int, int, NDArray[np.intp], np.dtype[np.void]]:
    """Columns of fill at the left and right, the byte offset of each row, and a row as a dtype."""
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
