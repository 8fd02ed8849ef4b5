"""Training a small CNN on CIFAR-10, for the benchmarks that train: data, network and optimizer.

Each benchmark makes its own pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SIDE = 32
"""Width and height of an image in pixels."""

CLASSES = 10

PADDING = 4
"""Pixels by which an image may be shifted: the usual value for CIFAR-10."""

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
"""Mean and standard deviation of each channel of CIFAR-10."""

COLUMNS = ("image", "label")

TESTED = 500
"""Batch size for tests."""

DATA = (
    "folder with CIFAR-10 as two Parquet files, one with train and one with test in its name, and "
    "columns image (JPEG or PNG bytes) and label; or the two files, training set first"
)

Row = tuple[bytes, int]


class Images(NamedTuple):
    """Images as input of a network, and their classes."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters: ``rate`` is the highest learning rate, ``width`` the number of channels of
    the first layer. With a width of 20 a sample takes 0.7 ms, measured on one core of an EPYC."""

    width: int = 20
    rate: float = 0.2
    momentum: float = 0.9
    decay: float = 5e-4


def find_files(data: Path, test: Path | None) -> tuple[Path, Path]:
    """The Parquet files of the training set and of the test set."""
    if data.is_file():
        if test is None or not test.is_file():
            raise SystemExit(
                f"{data} is one file: give the file of the test set too, or the folder of both."
            )
        return data, test
    if test is not None:
        raise SystemExit(
            f"{data} is a folder, but the file {test} is given too: give one or the other."
        )
    return _find_file(data, "train"), _find_file(data, "test")


def _find_file(folder: Path, word: str) -> Path:
    files = [path for path in sorted(folder.glob("*.parquet")) if word in path.name]
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise SystemExit(
            f"{folder} must have one Parquet file with {word!r} in its name, but has: {names}. "
            "Give the two files instead."
        )
    return files[0]


def read_rows(path: Path, most: int | None = None) -> list[Row]:
    """The encoded images of a file with their classes: all, or the first ``most``."""
    import pyarrow.parquet

    rows: list[Row] = []
    with pyarrow.parquet.ParquetFile(path) as file:
        for part in file.iter_batches(columns=list(COLUMNS)):
            images, labels = (part.column(name).to_pylist() for name in COLUMNS)
            rows += zip(map(_image_bytes, images), labels, strict=True)
            if most is not None and len(rows) >= most:
                break
    return rows[:most]


def check_files(train: Path, test: Path, samples: int | None, batch: int) -> None:
    """Exit if a file lacks a column or has too few images, before minutes of training."""
    import pyarrow.parquet

    for path in (train, test):
        with pyarrow.parquet.ParquetFile(path) as file:
            lacking = [name for name in COLUMNS if name not in file.schema_arrow.names]
            there = file.metadata.num_rows
        if lacking:
            raise SystemExit(f"{path} has no column {' and no column '.join(lacking)}.")
        least = max(batch, samples or 0) if path == train else 1
        if there < least:
            raise SystemExit(
                f"{path} has {there} images, but at least {least} are needed: give another file, "
                "or a smaller --samples or --batch."
            )
    if samples is not None and samples < batch:
        raise SystemExit(
            f"--samples {samples} is less than one batch of {batch}: give a smaller --batch."
        )


def _image_bytes(value: Any) -> bytes:
    """The bytes of an image. Hugging Face stores them in a struct together with a path."""
    image: bytes = value["bytes"] if isinstance(value, dict) else value
    return image


def read_images(path: Path, most: int | None = None) -> Images:
    """Decode and normalise the images of a file: all, or the first ``most``."""
    import penstock as ps

    road = ps.from_dataset(read_rows(path, most)).map(ps.image.decode()).map(normalize())
    with road.batch(TESTED).loader(workers=0, shuffle=False) as loader:
        parts = [(pixels.copy(), labels.copy()) for pixels, labels in loader]
    pixels, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Images(pixels, labels)


def normalize() -> Any:
    """The last map of every pipeline. Convolutions on a CPU are fastest with channels last."""
    import penstock as ps

    return ps.image.normalize(MEAN, STD, layout="hwc")


def with_stamp(sample: Row, rng: np.random.Generator) -> tuple[bytes, int, int]:
    """Add a unique number to a sample. Copies share it, whichever stage makes them, so that the
    distinct samples a network saw can be counted."""
    return (*sample, int(rng.integers(1 << 62)))


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of all epochs, without end."""
    while True:
        yield from loader


def training_environment() -> dict[str, str]:
    """Environment variables for a process that trains beside workers. By default, waiting threads
    of torch spin, and take the cores that the workers need."""
    return {**os.environ, "OMP_WAIT_POLICY": "passive"}


def cores() -> int:
    """Number of threads for training."""
    return len(os.sched_getaffinity(0))


def network(width: int) -> Any:
    """Four convolutions, with parameters drawn from torch's global generator."""
    from torch import nn

    def layer(before: int, after: int, kernel: int, stride: int, pool: int) -> list[Any]:
        padding = (kernel - stride + 1) // 2
        convolution = nn.Conv2d(before, after, kernel, stride, padding, bias=False)
        layers = [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return [*layers, nn.MaxPool2d(pool)] if pool > 1 else layers

    return nn.Sequential(
        # Stride 2: at full resolution a CPU would spend most of its time in this layer.
        *layer(3, width, 4, 2, 1),
        *layer(width, 2 * width, 3, 1, 2),
        *layer(2 * width, 4 * width, 3, 1, 2),
        *layer(4 * width, 4 * width, 3, 1, 1),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


@dataclass
class Trainer:
    """Trains a network. On one machine, the same seed and batches give the same network.

    With ``steps`` the learning rate follows a one-cycle schedule. Without, it is constant after a
    short warm-up, and ``accuracy`` tests an average of the latest parameters.
    """

    recipe: Recipe
    seed: int
    steps: int | None = None
    steps_taken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        import torch
        from torch.optim import swa_utils

        recipe = self.recipe
        torch.set_num_threads(cores())
        torch.manual_seed(self.seed)
        self._model = network(recipe.width).to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(),
            recipe.rate,
            momentum=recipe.momentum,
            weight_decay=recipe.decay,
            nesterov=True,
        )
        schedules = torch.optim.lr_scheduler
        self._average = None
        if self.steps is not None:
            self._schedule = schedules.OneCycleLR(
                self._optimizer, recipe.rate, total_steps=self.steps, cycle_momentum=False
            )
        else:
            self._schedule = schedules.LinearLR(self._optimizer, 0.05, total_iters=WARM_UP)
            self._average = swa_utils.AveragedModel(
                self._model,
                multi_avg_fn=swa_utils.get_ema_multi_avg_fn(AVERAGED),
                use_buffers=True,
            )

    def step(self, pixels: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        """Train on one batch."""
        import torch

        self._model.train()
        self._optimizer.zero_grad()
        logits = self._model(_as_input(pixels))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
        self._optimizer.step()
        self._schedule.step()
        if self._average is not None:
            self._average.update_parameters(self._model)
        self.steps_taken += 1

    def accuracy(self, images: Images) -> float:
        """Share of the images that the network classifies correctly."""
        import torch

        model = self._model if self._average is None else self._average
        model.eval()
        right = 0
        with torch.inference_mode():
            for first in range(0, len(images.labels), TESTED):
                part = slice(first, first + TESTED)
                named = model(_as_input(images.pixels[part])).argmax(1).numpy()
                right += int((named == images.labels[part]).sum())
        return right / len(images.labels)


WARM_UP = 50
"""Steps until the constant learning rate is reached."""

AVERAGED = 0.98
"""Decay of the moving average of parameters: covers about the latest 50 steps."""


def _as_input(pixels: NDArray[np.float32]) -> Any:
    """A tensor of shape (batch, channels, height, width) over the same memory."""
    import torch

    return torch.from_numpy(pixels).permute(0, 3, 1, 2)
