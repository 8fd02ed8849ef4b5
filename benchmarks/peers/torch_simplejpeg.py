"""PyTorch's DataLoader over a dataset written by hand for speed: simplejpeg and OpenCV."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Make
from benchmarks.workloads import MEAN, STD, Photos, image_files, loader_options

ATTEMPTS = 10
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)


class FastPhotos:
    """Decode, crop, resize and flip with no step more than needed."""

    def __init__(self, work: Photos) -> None:
        import cv2

        # The workers are the parallelism; OpenCV's own threads would fight them for the cores.
        cv2.setNumThreads(0)
        self._paths, self._labels = image_files(work.data)
        self._side = work.side
        self._float = work.form == "float32"
        self._scale = (1 / (255 * np.array(STD))).astype(np.float32)
        self._shift = (-np.array(MEAN) / np.array(STD)).astype(np.float32)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import cv2
        import simplejpeg

        image = simplejpeg.decode_jpeg(Path(self._paths[index]).read_bytes(), "RGB")
        top, left, height, width = random_box(image.shape[0], image.shape[1])
        image = image[top : top + height, left : left + width]
        image = cv2.resize(image, (self._side, self._side), interpolation=cv2.INTER_LINEAR)
        if random.random() < 0.5:
            image = cv2.flip(image, 1)
        if self._float:
            image = image * self._scale
            image += self._shift
            image = np.ascontiguousarray(image.transpose(2, 0, 1))
        return image, self._labels[index]


def random_box(rows: int, columns: int) -> tuple[int, int, int, int]:
    """A box as torchvision's RandomResizedCrop draws it: top, left, height, width."""
    for _ in range(ATTEMPTS):
        area = rows * columns * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= columns and 0 < height <= rows:
            return (
                random.randint(0, rows - height),
                random.randint(0, columns - width),
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


def photos(work: Photos) -> Make:
    import simplejpeg  # noqa: F401
    from torch.utils.data import DataLoader

    data = FastPhotos(work)
    return lambda: DataLoader(data, **loader_options(work))
