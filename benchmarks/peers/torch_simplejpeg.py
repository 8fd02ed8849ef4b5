"""PyTorch's DataLoader over a dataset hand-written for speed, with simplejpeg and OpenCV.

Workers are persistent, as PyTorch's performance tuning guide advises.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import Photos, image_files, loader_options
from benchmarks.peers.by_hand import ByHand


class FastPhotos:
    """A dataset of arrays of JPEG files."""

    def __init__(self, work: Photos) -> None:
        self._paths, self._labels = image_files(work.data)
        self._image = ByHand(work)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        data = Path(self._paths[index]).read_bytes()
        return self._image(data, random), self._labels[index]


def photos(work: Photos) -> Make:
    import cv2  # noqa: F401
    import simplejpeg  # noqa: F401
    from torch.utils.data import DataLoader

    data = FastPhotos(work)
    return lambda: DataLoader(data, **loader_options(work))
