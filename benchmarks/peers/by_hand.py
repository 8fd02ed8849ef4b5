"""Hand-written decoding and augmentation of one photograph, for loaders without a decoder.

The choices follow the CPU time measured for 224 x 224 crops of photographs of 500 x 375.
Decoding: simplejpeg with its fast DCT and its fast upsampling takes 1.46 ms, without them 1.56,
OpenCV 1.62, PIL 2.01. Normalising: a table for each channel through OpenCV takes 0.09 ms,
multiplying and adding in NumPy 0.12 for each channel and 0.87 for all at once,
``cv2.dnn.blobFromImage`` 0.13, torch 0.15.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.workloads import MEAN, RAND_AUGMENT, STD, Photos
from benchmarks.peers.torchvision_pil import import_torchvision

ATTEMPTS = 10
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)


class Draws(Protocol):
    """The method that Python's ``random`` and NumPy's generators have in common."""

    def uniform(self, low: float, high: float, /) -> float: ...


class ByHand:
    """Turns the bytes of a JPEG into an image as the workload asks. Can be pickled and called from
    several threads.

    RandAugment is torchvision's, on a PIL image: these loaders have none.
    """

    def __init__(self, work: Photos) -> None:
        self._work = work
        self._augment: Any = None
        self._tables: list[Any] = []
        if work.form == "float32":
            values = np.arange(256) / 255
            tables = [(values - mean) / std for mean, std in zip(MEAN, STD, strict=True)]
            self._tables = [table.astype(np.float32) for table in tables]
        if work.augment:
            self._augment = import_torchvision().transforms.RandAugment(*RAND_AUGMENT)

    @property
    def shape(self) -> tuple[int, int, int]:
        side = self._work.side
        return (3, side, side) if self._tables else (side, side, 3)

    @property
    def dtype(self) -> Any:
        return np.dtype(self._work.form)

    def __call__(self, data: bytes, draws: Draws, into: Any = None) -> Any:
        """The image, written to the array ``into`` if given."""
        import cv2
        import simplejpeg

        # The loader's workers run in parallel already; OpenCV's threads would compete with them.
        cv2.setNumThreads(0)
        side = self._work.side
        image = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
        top, left, height, width = random_box(image.shape[0], image.shape[1], draws)
        image = image[top : top + height, left : left + width]
        image = cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR)
        if draws.uniform(0, 1) < 0.5:
            image = cv2.flip(image, 1)
        if self._augment is not None:
            from PIL import Image

            image = np.asarray(self._augment(Image.fromarray(image)))
        if not self._tables:
            if into is None:
                return image
            into[:] = image
            return into
        planes = np.empty(self.shape, self.dtype) if into is None else into
        for plane, channel, table in zip(planes, cv2.split(image), self._tables, strict=True):
            cv2.LUT(channel, table, dst=plane)
        return planes

    def __getstate__(self) -> Photos:
        return self._work

    def __setstate__(self, work: Photos) -> None:
        # A fresh process must call ``import_torchvision`` before it unpickles anything of
        # torchvision.
        self.__init__(work)  # type: ignore[misc]


def random_box(rows: int, columns: int, draws: Draws) -> tuple[int, int, int, int]:
    """Draw a box as torchvision's RandomResizedCrop does: top, left, height, width."""
    for _ in range(ATTEMPTS):
        area = rows * columns * draws.uniform(*SCALE)
        ratio = math.exp(draws.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= columns and 0 < height <= rows:
            return (
                int(draws.uniform(0, rows - height + 1)),
                int(draws.uniform(0, columns - width + 1)),
                height,
                width,
            )
    if columns / rows < RATIO[0]:
        width, height = columns, round(columns / RATIO[0])
    elif columns / rows > RATIO[1]:
        width, height = round(rows * RATIO[1]), rows
    else:
        width, height = columns, rows
    return (rows - height) // 2, (columns - width) // 2, height, width
