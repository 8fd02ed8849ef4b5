"""What tone and colour need to pass over the pixels for: blends with neighbours, and counting.

All take uint8 (height, width, 1 or 3) and leave it alone. Changes of colour are within one grey
level of torchvision's for factors up to 2 (two levels at 2.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.image.tone import DOWN, GREY, LEAN, PARTS, LevelCounts
from penstock.native import Image, load_cv2, with_channels

_WEIGHTS = np.arange(256, dtype=np.float64)


def saturation(image: Image, factor: float) -> Image:
    """Away from, or towards, each pixel's grey; a grey image stays as it is."""
    if image.shape[2] == 1:
        return image
    return with_channels(load_cv2().transform(image, _saturating(factor)))


@lru_cache(maxsize=256)
def _saturating(factor: float) -> NDArray[np.float32]:
    matrix = np.empty((3, 4), dtype=np.float32)
    matrix[:, :3] = np.multiply(GREY, 1.0 - factor)
    matrix[(0, 1, 2), (0, 1, 2)] += factor
    # torchvision cuts the grey to a whole level first, a half lower in the mean.
    matrix[:, 3] = DOWN - 0.5 * (1.0 - factor)
    # OpenCV counts in these parts where it has vectors for it, and in floats elsewhere.
    matrix *= np.float32(PARTS)
    np.rint(matrix, out=matrix)
    matrix[:, 3] += np.float32(LEAN)
    matrix /= np.float32(PARTS)
    return matrix


def hue(image: Image, turn: float) -> Image:
    """Every colour moved by ``turn`` of the colour circle; a grey image stays as it is."""
    if image.shape[2] == 1:
        return image
    cv2 = load_cv2()
    # uint8 HSV would be up to 8 levels off, and no faster.
    pixels = image.astype(np.float32, order="C")
    pixels *= np.float32(1 / 255)
    cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV, dst=pixels)
    # OpenCV wraps angles above a full circle, and not those below zero.
    cv2.add(pixels, (turn % 1.0 * 360.0, 0.0, 0.0, 0.0), dst=pixels)
    cv2.cvtColor(pixels, cv2.COLOR_HSV2RGB, dst=pixels)
    pixels *= np.float32(255.999)
    return pixels.astype(np.uint8)


def sharpness(image: Image, factor: float) -> Image:
    """Away from, or towards, a slight blur; the outermost pixels stay as they are."""
    if min(image.shape[:2]) <= 2:
        return image
    cv2 = load_cv2()
    # The blur's kernel is 1 around a 5, over 13: nine parts of a box and four of the image.
    # In whole parts every number on the way is exact, whatever a processor rounds and when.
    part = round((1.0 - factor) * 9.0 / 13.0 * PARTS) / PARTS
    down = LEAN / PARTS - 0.5
    out = with_channels(cv2.addWeighted(image, 1.0 - part, cv2.blur(image, (3, 3)), part, down))
    for edge in (0, -1):
        out[edge] = image[edge]
        out[:, edge] = image[:, edge]
    return out


def sums(image: Image) -> tuple[float, ...]:
    """All levels of each channel added up; a whole number."""
    found: tuple[float, ...] = load_cv2().sumElems(image)[: image.shape[2]]
    return found


def sums_of(counts: LevelCounts) -> tuple[float, ...]:
    """The same, where levels have been counted."""
    return tuple((counts @ _WEIGHTS).tolist())


def ranges(planes: Sequence[Image]) -> list[tuple[int, int]]:
    """The darkest and the brightest level of each channel."""
    cv2 = load_cv2()
    return [(int(low), int(high)) for low, high, *_ in map(cv2.minMaxLoc, planes)]


def ranges_of(counts: LevelCounts) -> list[tuple[int, int]]:
    """The same, where levels have been counted."""
    there = counts > 0
    darkest, brightest = there.argmax(axis=1), 255 - there[:, ::-1].argmax(axis=1)
    return list(zip(darkest.tolist(), brightest.tolist(), strict=True))


def count(planes: Sequence[Image]) -> LevelCounts:
    """How many pixels of each channel have each level."""
    cv2 = load_cv2()
    found = [cv2.calcHist([plane], [0], None, [256], [0, 256]) for plane in planes]
    # A column or a row, depending on OpenCV's version.
    return np.array(found, np.float64).reshape(len(found), 256)
