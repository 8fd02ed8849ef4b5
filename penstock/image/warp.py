"""Shears, shifts and turns of an image within its frame, as torchvision defines them.

Each states where an output pixel (x, y) is taken from. Nearest sampling takes the same pixels as
torchvision; what lies outside the image is ``fill``.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.image.native import Image, load_cv2, with_channels


def shear_x(image: Image, slope: float, fill: tuple[float, ...], smooth: bool) -> Image:
    """Rows moved sideways, the more the lower they are: the top edge stays."""
    return _warp(image, ((1.0, slope, 0.5 * slope), (0.0, 1.0, 0.0)), fill, smooth)


def shear_y(image: Image, slope: float, fill: tuple[float, ...], smooth: bool) -> Image:
    """Columns moved up or down, the more the further right they are: the left edge stays."""
    return _warp(image, ((1.0, 0.0, 0.0), (slope, 1.0, 0.5 * slope)), fill, smooth)


def rotate(image: Image, degrees: float, fill: tuple[float, ...], smooth: bool) -> Image:
    """Turned about the middle, against the clock."""
    degrees %= 360.0
    if degrees == 0.0:
        return image
    angle = math.radians(degrees)
    # A right angle must land on whole pixels, and cos(pi / 2) is not zero.
    cos, sin = round(math.cos(angle), 12), round(math.sin(angle), 12)
    x, y = (image.shape[1] - 1) / 2, (image.shape[0] - 1) / 2
    matrix = ((cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))
    return _warp(image, matrix, fill, smooth)


def shift(image: Image, down: int, right: int, fill: tuple[float, ...]) -> Image:
    """Moved by whole pixels."""
    rows, columns = image.shape[:2]
    out = np.empty(image.shape, image.dtype)
    out[:] = fill[: image.shape[2]]
    to_rows, from_rows = _overlap(rows, down)
    to_columns, from_columns = _overlap(columns, right)
    out[to_rows, to_columns] = image[from_rows, from_columns]
    return out


def _overlap(length: int, by: int) -> tuple[slice, slice]:
    by = max(-length, min(length, by))
    if by >= 0:
        return slice(by, length), slice(0, length - by)
    return slice(0, length + by), slice(-by, length)


def _warp(
    image: Image, matrix: tuple[tuple[float, ...], ...], fill: tuple[float, ...], smooth: bool
) -> Image:
    cv2 = load_cv2()
    sampling = cv2.INTER_LINEAR if smooth else cv2.INTER_NEAREST
    return with_channels(
        cv2.warpAffine(
            image,
            np.array(matrix),
            (image.shape[1], image.shape[0]),
            flags=sampling | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=fill * 4 if len(fill) == 1 else fill,
        )
    )
