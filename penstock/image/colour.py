"""Changes of tone and colour, each as torchvision defines it on uint8 images.

Where a grey level alone decides the result, it is looked up in a table of 256, and equals
torchvision's exactly: brightness, posterize, solarize, invert, autocontrast, equalize. The others
differ by one grey level at most for factors up to 2 (two levels at 2.5). All take (height, width,
1 or 3) and leave their input alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.image.native import Image, load_cv2, with_channels

_LEVELS = np.arange(256, dtype=np.float32)
_GREY = (0.2989, 0.587, 0.114)

_DOWN = -0.4999
"""OpenCV rounds to the nearest level and torchvision cuts: this shift makes one of the other. A
little short of a half, so that whole numbers stay what they are."""


def brightness(image: Image, factor: float) -> Image:
    """All levels times ``factor``."""
    return _look_up(image, _cut(_LEVELS * np.float32(factor)))


def contrast(image: Image, factor: float) -> Image:
    """Away from, or towards, the mean grey of the whole image."""
    means = load_cv2().mean(image)
    if image.shape[2] == 1:
        middle = means[0]
    else:
        # torchvision cuts every pixel's grey to a whole level before it takes the mean, which
        # lowers it by a half. That pass over the pixels would cost seven times as much.
        red, green, blue = _GREY
        middle = max(0.0, red * means[0] + green * means[1] + blue * means[2] - 0.5)
    table = _LEVELS * np.float32(factor) + np.float32(middle * (1.0 - factor))
    return _look_up(image, _cut(table))


def saturation(image: Image, factor: float) -> Image:
    """Away from, or towards, each pixel's grey; a grey image stays as it is."""
    if image.shape[2] == 1:
        return image
    matrix = np.empty((3, 4), dtype=np.float32)
    matrix[:, :3] = np.multiply(_GREY, 1.0 - factor)
    matrix[(0, 1, 2), (0, 1, 2)] += factor
    # torchvision cuts the grey to a whole level first, a half lower in the mean.
    matrix[:, 3] = _DOWN - 0.5 * (1.0 - factor)
    return with_channels(load_cv2().transform(image, matrix))


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
    part = (1.0 - factor) * 9.0 / 13.0
    out = with_channels(cv2.addWeighted(image, 1.0 - part, cv2.blur(image, (3, 3)), part, _DOWN))
    for edge in (0, -1):
        out[edge] = image[edge]
        out[:, edge] = image[:, edge]
    return out


def posterize(image: Image, bits: int) -> Image:
    """Only the highest ``bits`` of every level."""
    if bits >= 8:
        return image
    mask = (0xFF << (8 - bits)) & 0xFF
    return _look_up(image, np.arange(256, dtype=np.uint8) & np.uint8(mask))


def solarize(image: Image, threshold: float) -> Image:
    """Levels from ``threshold`` upwards inverted."""
    table = np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS)
    return _look_up(image, table.astype(np.uint8))


def invert(image: Image) -> Image:
    """Every level from the other end."""
    return with_channels(load_cv2().bitwise_not(image))


def autocontrast(image: Image) -> Image:
    """Each channel stretched to the whole range of levels."""
    # Two short reductions: one over both axes at once is fifty times slower in NumPy.
    darkest = image.min(axis=0).min(axis=0).astype(np.float32)
    brightest = image.max(axis=0).max(axis=0).astype(np.float32)
    flat = darkest == brightest
    step = np.where(flat, 1, (brightest - darkest) * np.float32(1 / 255)).astype(np.float32)
    table = (_LEVELS[:, np.newaxis] - np.where(flat, 0, darkest)) / step
    return _look_up(image, _cut(table))


def equalize(image: Image) -> Image:
    """Each channel's levels spread so that all are about as frequent."""
    channels = image.shape[2]
    tables = [_equalizing_table(image, channel) for channel in range(channels)]
    return _look_up(image, np.stack(tables, axis=1))


def _equalizing_table(image: Image, channel: int) -> NDArray[np.uint8]:
    counts = load_cv2().calcHist([image], [channel], None, [256], [0, 256])
    histogram = counts.ravel().astype(np.int64)
    last = int(np.flatnonzero(histogram)[-1])
    step = int(histogram.sum() - histogram[last]) // 255
    if step == 0:
        return np.arange(256, dtype=np.uint8)
    below = np.concatenate(([0], np.cumsum(histogram)[:-1]))
    table: NDArray[np.uint8] = np.minimum((below + step // 2) // step, 255).astype(np.uint8)
    return table


def _cut(table: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.clip(table, 0, 255).astype(np.uint8)


def _look_up(image: Image, table: NDArray[Any]) -> Image:
    """Every level replaced by its entry; a table of two dimensions has a column per channel."""
    if table.ndim == 2:
        table = table[np.newaxis] if image.shape[2] > 1 else np.ascontiguousarray(table[:, 0])
    return with_channels(load_cv2().LUT(image, table))
