"""Changes of colour and sharpness, and statistics of levels: each is a pass over the pixels.

All functions take uint8 (height, width, 1 or 3) and do not modify it. Changes of colour are within
one grey level of torchvision's for factors up to 2 (two levels at 2.5).
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
    """Blend each pixel with its grey: ``factor`` 0 is grey, 1 unchanged. Grey images stay as is."""
    if image.shape[2] == 1:
        return image
    return with_channels(load_cv2().transform(image, _saturating(factor)))


@lru_cache(maxsize=256)
def _saturating(factor: float) -> NDArray[np.float32]:
    matrix = np.empty((3, 4), dtype=np.float32)
    matrix[:, :3] = np.multiply(GREY, 1.0 - factor)
    matrix[(0, 1, 2), (0, 1, 2)] += factor
    # torchvision first truncates the grey to a whole level, which lowers it by a half on average.
    matrix[:, 3] = DOWN - 0.5 * (1.0 - factor)
    # OpenCV's vector code works in these fixed-point units, its other code in floats.
    matrix *= np.float32(PARTS)
    np.rint(matrix, out=matrix)
    matrix[:, 3] += np.float32(LEAN)
    matrix /= np.float32(PARTS)
    return matrix


def hue(image: Image, turn: float) -> Image:
    """Rotate the hue by ``turn`` of the colour circle. Grey images stay as they are."""
    if image.shape[2] == 1:
        return image
    cv2 = load_cv2()
    # HSV in uint8 would be off by up to 8 levels, and no faster.
    pixels = image.astype(np.float32, order="C")
    pixels *= np.float32(1 / 255)
    cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV, dst=pixels)
    # OpenCV wraps angles above a full circle, but not negative ones.
    cv2.add(pixels, (turn % 1.0 * 360.0, 0.0, 0.0, 0.0), dst=pixels)
    cv2.cvtColor(pixels, cv2.COLOR_HSV2RGB, dst=pixels)
    pixels *= np.float32(255.999)
    return pixels.astype(np.uint8)


def sharpness(image: Image, factor: float) -> Image:
    """Blend with a slight blur: ``factor`` 0 is the blur, 1 unchanged. Border pixels stay as is."""
    if min(image.shape[:2]) <= 2:
        return image
    cv2 = load_cv2()
    # The blur's kernel is a 5 surrounded by 1s, over 13: nine parts of a box blur and four of the
    # image. With integer parts all intermediate numbers are exact on every processor.
    part = round((1.0 - factor) * 9.0 / 13.0 * PARTS) / PARTS
    down = LEAN / PARTS - 0.5
    out = with_channels(cv2.addWeighted(image, 1.0 - part, cv2.blur(image, (3, 3)), part, down))
    for edge in (0, -1):
        out[edge] = image[edge]
        out[:, edge] = image[:, edge]
    return out


def sums(image: Image) -> tuple[float, ...]:
    """The sum of all levels of each channel; an integer."""
    totals: tuple[float, ...] = load_cv2().sumElems(image)[: image.shape[2]]
    return totals


def sums_from_counts(counts: LevelCounts) -> tuple[float, ...]:
    """The sum of all levels of each channel, from level counts."""
    return tuple((counts @ _WEIGHTS).tolist())


def ranges(planes: Sequence[Image]) -> list[tuple[int, int]]:
    """The darkest and the brightest level of each channel."""
    cv2 = load_cv2()
    return [(int(low), int(high)) for low, high, *_ in map(cv2.minMaxLoc, planes)]


def ranges_from_counts(counts: LevelCounts) -> list[tuple[int, int]]:
    """The darkest and the brightest level of each channel, from level counts."""
    present = counts > 0
    darkest, brightest = present.argmax(axis=1), 255 - present[:, ::-1].argmax(axis=1)
    return list(zip(darkest.tolist(), brightest.tolist(), strict=True))


def count(planes: Sequence[Image]) -> LevelCounts:
    """The number of pixels with each level, by channel."""
    cv2 = load_cv2()
    histograms = [cv2.calcHist([plane], [0], None, [256], [0, 256]) for plane in planes]
    # Each is a column or a row, depending on OpenCV's version.
    return np.array(histograms, np.float64).reshape(len(histograms), 256)
