"""Workloads of races, and the datasets that contestants share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
RAND_AUGMENT = (2, 9)
"""Number of operations per image, and their magnitude."""


@dataclass(frozen=True)
class Arrays:
    """Samples in memory: ``length`` views of ``kept`` arrays, shuffled.

    ``nap``: seconds for which the dataset sleeps for a sample, in place of native work.
    """

    shape: tuple[int, ...]
    length: int
    batch: int
    workers: int
    kept: int = 64
    nap: float = 0.0


@dataclass(frozen=True)
class Photos:
    """Folders of JPEGs: random crop resized to ``side``, random horizontal flip, shuffled.

    ``form`` is ``"uint8"`` (height, width, channels) or ``"float32"`` (channels first, normalised).
    ``augment`` adds RandAugment after the flip, before normalising.
    """

    data: Path
    form: Literal["uint8", "float32"]
    batch: int
    workers: int
    side: int = 224
    augment: bool = False


class Batched(Protocol):
    """A workload with a batch size and a number of workers."""

    @property
    def batch(self) -> int: ...

    @property
    def workers(self) -> int: ...


def loader_options(work: Batched) -> dict[str, Any]:
    """Arguments for every DataLoader, torch's or the drop-in: the same for a fair race."""
    return {
        "batch_size": work.batch,
        "shuffle": True,
        "num_workers": work.workers,
        "persistent_workers": work.workers > 0,
    }


class ArrayDataset:
    """A dataset with almost no cost, so that a benchmark measures the loader alone."""

    def __init__(self, work: Arrays) -> None:
        generator = np.random.default_rng(0)
        self._data = generator.random((work.kept, *work.shape), dtype=np.float32)
        self._kept = work.kept
        self._length = work.length
        self._nap = work.nap

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if self._nap:
            time.sleep(self._nap)
        return self._data[index % self._kept]


def image_files(folder: Path) -> tuple[list[str], list[int]]:
    """Paths of the JPEGs in class folders, and the class number of each."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    paths, labels = [], []
    for label, place in enumerate(classes):
        for path in sorted(place.iterdir()):
            if path.suffix.lower() in (".jpg", ".jpeg"):
                paths.append(str(path))
                labels.append(label)
    return paths, labels
