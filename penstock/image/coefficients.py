"""Coefficients of JPEGs, packed: the CPU reads the entropy-coded bits, a device does the rest.

Reading entropy-coded bits is sequential. Everything after it (dequantization, inverse transform,
upsampling of chroma, conversion to RGB) is the same work for every block and pixel, so that a device
can do it: ``image/on_device/jpeg.py``. Only the blocks that a crop needs are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CoefficientLayout:
    """What the host knows of packed coefficients: enough to allocate the result on a device.

    - ``heights``, ``widths``: of the boxes, for each picture, in pixels.
    - ``tops``, ``lefts``: their first row and column in the whole picture.
    - ``blocks``: number of blocks of all pictures; ``samples``: bytes of their planes.
    - ``data``: bytes of coefficient values.
    """

    heights: NDArray[np.int64]
    widths: NDArray[np.int64]
    tops: NDArray[np.int64]
    lefts: NDArray[np.int64]
    blocks: int
    samples: int
    data: int


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Packed coefficients of a tiny-batch.

    - ``packed``: uint8, the one buffer that is copied to the device.
    - ``layout``: stays on the host and is given to ``on_device.jpeg.decode`` with the copy.
    - ``numbers``: for each packed picture, its position in the list of files.
    - ``errors``: for each file, ``None`` if it is packed. Otherwise ``kernel.Unsupported`` (decode
      it on the CPU: not a baseline JPEG, or one that the CPU path shrinks with libjpeg), or the
      error that decoding it on the CPU raises.
    """

    packed: NDArray[np.uint8]
    layout: CoefficientLayout
    numbers: list[int]
    errors: list[Exception | None]


def read_coefficients(
    files: Sequence[bytes | memoryview | str | Path],
    boxes: Sequence[tuple[int, int, int, int]],
    full: Sequence[tuple[int, int] | None] | None = None,
) -> Coefficients:
    """Read the entropy-coded bits of a box of each JPEG. Releases the GIL once for all files.

    ``files``: contents, or paths. ``boxes``: (top, left, height, width) in pixels of the whole
    picture. ``full``: the (height, width) to which the box is resized afterwards. The CPU path lets
    libjpeg begin a shrink by four or more, so such a picture has ``kernel.Unsupported`` as its
    error; ``None``: the box is not resized.
    """
    raise NotImplementedError


__all__ = ["Any", "CoefficientLayout", "Coefficients", "read_coefficients"]
