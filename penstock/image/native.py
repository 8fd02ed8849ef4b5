"""The native libraries behind images, loaded when an image is first worked on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError

Image = NDArray[Any]
"""Pixels as (height, width, channels); uint8 and RGB unless an operation says otherwise."""


@lru_cache(maxsize=1)
def load_cv2() -> Any:
    """OpenCV, told to stay on the thread that calls it: the workers are the parallelism."""
    try:
        import cv2
    except ImportError as error:
        raise MissingExtraError.of("penstock.image", "OpenCV", "image") from error
    cv2.setNumThreads(0)
    return cv2


@lru_cache(maxsize=1)
def load_simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as error:
        raise MissingExtraError.of("decode", "simplejpeg", "image") from error
    return simplejpeg


def with_channels(image: Image) -> Image:
    """The image as (height, width, channels): OpenCV drops the channel axis where it is 1."""
    return image if image.ndim == 3 else image[:, :, np.newaxis]
