"""A small CNN on CIFAR-10: what benchmarks that train have in common.

Which images, which network and how it learns; what comes to it is each benchmark's own.
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
"""Pixels of an image in either direction."""

CLASSES = 10

PADDING = 4
"""Pixels that an image may be shifted by; what everybody does with CIFAR-10."""

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
"""Of the levels of CIFAR-10, by channel."""

COLUMNS = ("image", "label")

TESTED = 500
"""Images that are tested at once."""

DATA = (
    "folder with CIFAR-10 as two Parquet files, one with train and one with test in its name, and "
    "columns image (JPEG or PNG bytes) and label; or the two files, training set first"
)

Row = tuple[bytes, int]


class Images(NamedTuple):
    """Images as a network takes them, and their classes."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: ``rate`` is the highest learning rate, ``width`` the channels of
    its first layer. Measured on a core of an EPYC, a sample takes 0.7 ms at a width of 20."""

    width: int = 20
    rate: float = 0.2
    momentum: float = 0.9
    decay: float = 5e-4


def find(data: Path, test: Path | None) -> tuple[Path, Path]:
    """The files of the training set and of the test set."""
    if data.is_file():
        if test is None or not test.is_file():
            raise SystemExit(
                f"{data} is one file; give that of the test set behind it, or the folder with both."
            )
        return data, test
    if test is not None:
        raise SystemExit(f"{data} is a folder, and {test} is given too; give one or the other.")
    return _named(data, "train"), _named(data, "test")


def _named(folder: Path, word: str) -> Path:
    found = [path for path in sorted(folder.glob("*.parquet")) if word in path.name]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise SystemExit(
            f"{folder} should have one Parquet file with {word!r} in its name, and has: {names}. "
            "Give the two files instead."
        )
    return found[0]


def rows(path: Path, most: int | None = None) -> list[Row]:
    """The images of a file as they are kept, with their classes: all, or the first ``most``."""
    import pyarrow.parquet

    found: list[Row] = []
    with pyarrow.parquet.ParquetFile(path) as file:
        for part in file.iter_batches(columns=list(COLUMNS)):
            images, labels = (part.column(name).to_pylist() for name in COLUMNS)
            found += zip(map(_bytes, images), labels, strict=True)
            if most is not None and len(found) >= most:
                break
    return found[:most]


def check(train: Path, test: Path, samples: int | None, batch: int) -> None:
    """Refuse files that lack what is needed, before anybody has trained for minutes."""
    import pyarrow.parquet

    for path in (train, test):
        with pyarrow.parquet.ParquetFile(path) as file:
            lacking = [name for name in COLUMNS if name not in file.schema_arrow.names]
            there = file.metadata.num_rows
        if lacking:
            raise SystemExit(f"{path} has no column {' and none '.join(lacking)}.")
        least = max(batch, samples or 0) if path == train else 1
        if there < least:
            raise SystemExit(
                f"{path} has {there} images, and at least {least} are needed; give another file, "
                "or fewer with --samples and --batch."
            )
    if samples is not None and samples < batch:
        raise SystemExit(
            f"--samples {samples} are fewer than a batch of {batch}; give a smaller --batch."
        )


def _bytes(value: Any) -> bytes:
    """Hugging Face keeps the bytes in a struct, beside a path."""
    found: bytes = value["bytes"] if isinstance(value, dict) else value
    return found


def as_images(path: Path, most: int | None = None) -> Images:
    """A file of images, ready for a network."""
    import penstock as ps

    road = ps.from_dataset(rows(path, most)).map(ps.image.decode()).map(normalized())
    with road.batch(TESTED).loader(workers=0, shuffle=False) as loader:
        parts = [(pixels.copy(), labels.copy()) for pixels, labels in loader]
    pixels, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Images(pixels, labels)


def normalized() -> Any:
    """The last map of every road. Channels last is how a CPU convolves fastest."""
    import penstock as ps

    return ps.image.normalize(MEAN, STD, layout="hwc")


def stamped(sample: Row, rng: np.random.Generator) -> tuple[bytes, int, int]:
    """A sample with a number that no other has: copies of it are known by that wherever they are
    made, so that what a network saw can be counted."""
    return (*sample, int(rng.integers(1 << 62)))


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def surroundings() -> dict[str, str]:
    """The environment of a process that trains beside workers: threads of torch that wait for each
    other would else spin, and keep the workers from the cores that they wait for."""
    return {**os.environ, "OMP_WAIT_POLICY": "passive"}


def cores() -> int:
    """How many threads train."""
    return len(os.sched_getaffinity(0))


def network(width: int) -> Any:
    """Four convolutions. Its parameters come from torch's global generator."""
    from torch import nn

    def layer(before: int, after: int, kernel: int, stride: int, pool: int) -> list[Any]:
        padding = (kernel - stride + 1) // 2
        convolution = nn.Conv2d(before, after, kernel, stride, padding, bias=False)
        made = [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return [*made, nn.MaxPool2d(pool)] if pool > 1 else made

    return nn.Sequential(
        # Half the pixels at once: at full size a CPU would spend most of its time here.
        *layer(3, width, 4, 2, 1),
        *layer(width, 2 * width, 3, 1, 2),
        *layer(2 * width, 4 * width, 3, 1, 2),
        *layer(4 * width, 4 * width, 3, 1, 1),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


@dataclass
class Student:
    """A network that learns. The same seed and batches make the same network, on one machine.

    With ``steps`` the learning rate goes up and down once (one-cycle); without it is constant
    after a short warm-up, and an average of the latest parameters is what is tested.
    """

    recipe: Recipe
    seed: int
    steps: int | None = None
    taken: int = field(default=0, init=False)

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
        """Learn from a batch."""
        import torch

        self._model.train()
        self._optimizer.zero_grad()
        logits = self._model(_as_input(pixels))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
        self._optimizer.step()
        self._schedule.step()
        if self._average is not None:
            self._average.update_parameters(self._model)
        self.taken += 1

    def accuracy(self, images: Images) -> float:
        """The share of images whose class it names."""
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
"""Steps in which a constant learning rate is reached."""

AVERAGED = 0.98
"""The weight of what was before in the average of parameters: about the latest 50 steps."""


def _as_input(pixels: NDArray[np.float32]) -> Any:
    """A view: torch names channels first wherever they lie."""
    import torch

    return torch.from_numpy(pixels).permute(0, 3, 1, 2)
