"""JPEGs of every kind, decoded by the kernel and by PIL."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import PIL.Image
import simplejpeg
from numpy.typing import NDArray

from penstock.image import kernel

KINDS = ("444", "422", "420", "440", "411", "gray", "progressive", "progressive gray")
Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """A picture with smooth areas, edges and texture, of at least one pixel."""
    rng = np.random.default_rng(seed)
    levels = np.full((height, width, 3), 120.0, np.float32)
    for step, strength in ((64, 60.0), (16, 25.0), (4, 12.0), (1, 3.0)):
        coarse = rng.normal(0, strength, (height // step + 2, width // step + 2, 3))
        levels += cv2.resize(coarse.astype(np.float32), (width, height)).reshape(levels.shape)
    levels[height // 3 : height // 2, width // 4 : width // 2] = (230, 20, 90)
    return np.clip(levels, 0, 255).astype(np.uint8)


def encode(pixels: Pixels, kind: str = "420", quality: int = 90) -> bytes:
    if kind in ("444", "422", "420", "440", "411"):
        data: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", kind)
        return data
    file = io.BytesIO()
    image = PIL.Image.fromarray(pixels)
    if kind == "cmyk":
        image = image.convert("CMYK")
    elif "gray" in kind:
        image = image.convert("L")
    image.save(file, "JPEG", quality=quality, progressive="progressive" in kind)
    return file.getvalue()


def by_kernel(data: Any, box: Box, size: tuple[int, int], flip: bool = False) -> NDArray[np.int64]:
    out = np.full((*size, 3), 7, np.uint8)
    kernel.region(data, box, out, flip=flip)
    return out.astype(int)


def by_pil(data: bytes, box: Box, size: tuple[int, int]) -> NDArray[np.int64]:
    top, left, height, width = box
    image = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop((left, top, left + width, top + height))
    return np.asarray(image.resize(size[::-1], PIL.Image.Resampling.BILINEAR)).astype(int)
