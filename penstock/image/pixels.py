"""Checks of the images that operations get, when a pipeline is built and when it runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import PipelineError
from penstock.native import Image
from penstock.operation import ArraySpec, Spec, need_array

UINT8 = np.dtype(np.uint8)
FLOAT32 = np.dtype(np.float32)

COLOUR_DTYPES = (UINT8,)
"""Operations on colour work on levels from 0 to 255."""

GEOMETRY_DTYPES = (UINT8, np.dtype(np.uint16), FLOAT32)
"""Operations that only move pixels accept more types."""

COLOUR_CHANNELS = (1, 3)
GEOMETRY_CHANNELS = (1, 2, 3, 4)


def need_image(name: str, spec: Spec, *, any_dtype: bool = False) -> ArraySpec | None:
    """Check the spec of an image; returns it, or ``None`` if nothing is known of it.

    ``any_dtype``: for operations that only move pixels.
    """
    array = need_array(name, spec)
    if array is None:
        return None
    dtypes = GEOMETRY_DTYPES if any_dtype else COLOUR_DTYPES
    channels = GEOMETRY_CHANNELS if any_dtype else COLOUR_CHANNELS
    count = array.shape[2]
    planes_first = array.shape[0] in COLOUR_CHANNELS
    if count not in (None, *channels) or (count is None and planes_first):
        if planes_first:
            raise PipelineError(
                f"{name} got an array of shape {array.shape}, which looks like (channels, height, "
                "width); it needs (height, width, channels). Put it above normalize(), or "
                'give normalize(layout="hwc").'
            )
        raise PipelineError(
            f"{name} got an image of {count} channels (shape {array.shape}); it needs "
            f"{_listed(channels)}. Choose channels with a map above it."
        )
    if array.dtype not in dtypes:
        hint = (
            "Put it above normalize(), and normalize once."
            if array.dtype == FLOAT32
            else "Convert the pixels with a map above it."
        )
        raise PipelineError(
            f"{name} got an image of {array.dtype}; it needs {_listed(dtypes)}. {hint}"
        )
    if 0 in array.shape:
        raise PipelineError(
            f"{name} got an image of shape {array.shape}, which has no pixels. Check the stage "
            "above it."
        )
    return array


def check_image(name: str, value: Any, *, any_dtype: bool = False) -> Image:
    """Check an image by the rules of ``need_image``; 0.5 us for a correct one."""
    if (
        isinstance(value, np.ndarray)
        and value.ndim == 3
        and value.dtype == UINT8
        and value.shape[2] in COLOUR_CHANNELS
        and value.size
    ):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise PipelineError(
            f"{name} got encoded bytes; it needs decoded images. Put decode() above it."
        )
    if not isinstance(value, np.ndarray):
        raise PipelineError(
            f"{name} got {type(value).__name__}; it needs a NumPy array (height, width, "
            "channels). Convert it with a map above it."
        )
    need_image(name, ArraySpec.of(value.shape, value.dtype), any_dtype=any_dtype)
    return value


def _listed(things: tuple[Any, ...]) -> str:
    words = [str(thing) for thing in things]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
