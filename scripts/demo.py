"""Trains a small model with PyTorch's DataLoader and with Penstock, and compares their speed.

The accelerator is simulated: a sleep that uses no CPU. Files, augmentation and model are real.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, track
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

import penstock as ps
import penstock.torch
from penstock.config import cores, show_size
from penstock.stats import Stats

Image = NDArray[np.uint8]
EXTENSIONS = (".jpg", ".jpeg")
WIDTH, HEIGHT, SIDE = 500, 375, 224
COLOURS = {"circles": (220, 70, 50), "frames": (240, 220, 60), "squares": (60, 90, 220)}
console = Console()
cv2.setNumThreads(0)  # the workers are the parallelism


def photo(shape: str, seed: int) -> Image:
    """Sky, shapes, texture at several scales and noise: as costly to decode as a photograph."""
    rng = np.random.default_rng(seed)
    top, bottom = rng.uniform(40, 215, (2, 1, 1, 3))
    sky = top + (bottom - top) * np.linspace(0, 1, HEIGHT).reshape(-1, 1, 1)
    image = np.repeat(sky.astype(np.float32), WIDTH, axis=1)
    for _ in range(8):
        colour = (COLOURS[shape] + rng.normal(0, 30, 3)).tolist()
        x, y, size = (int(n) for n in rng.uniform((0, 0, 30), (WIDTH, HEIGHT, 80)))
        if shape == "circles":
            cv2.circle(image, (x, y), size, colour, -1)
        else:
            thickness = 20 if shape == "frames" else -1
            cv2.rectangle(image, (x - size, y - size), (x + size, y + size), colour, thickness)
    for step, strength in ((40, 18), (8, 12), (3, 9)):
        rough = rng.standard_normal((HEIGHT // step, WIDTH // step, 3), np.float32) * strength
        image += cv2.resize(rough, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    image += rng.standard_normal((HEIGHT, WIDTH, 1), np.float32) * 9
    return np.asarray(np.clip(image, 0, 255), np.uint8)


def write_photos(folder: Path, count: int) -> None:
    """Write JPEG files in one folder for each class, like ImageNet."""
    shapes = list(COLOURS)

    def write(number: int) -> None:
        shape = shapes[number % len(shapes)]
        data = simplejpeg.encode_jpeg(photo(shape, number), quality=91, colorsubsampling="420")
        (folder / shape / f"{number:05}.jpg").write_bytes(data)

    for shape in shapes:
        (folder / shape).mkdir()
    with ThreadPoolExecutor(cores()) as threads:
        made = threads.map(write, range(count))
        for _ in track(made, f"generating {count:,} JPEG files", total=count, console=console):
            pass


@contextmanager
def photos(given: Path | None, count: int, keep: bool) -> Iterator[Path]:
    """The folder to train on: the user's, or a temporary one that is removed at the end."""
    if given is not None:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        write_photos(folder, count)
        yield folder
    finally:
        if keep:
            console.print(f"The files are in {folder}.")
        else:
            shutil.rmtree(folder)


class Photos:
    """A dataset written for speed by hand: libjpeg-turbo and OpenCV instead of PIL."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path for path in folder.glob("*") if path.is_dir())
        self.files = [
            (path, label)
            for label, place in enumerate(self.classes)
            for path in sorted(place.rglob("*"))
            if path.suffix.lower() in EXTENSIONS
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        path, label = self.files[index]
        image = simplejpeg.decode_jpeg(path.read_bytes(), "RGB")
        rows, columns = image.shape[:2]
        area = rows * columns * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width = min(columns, round(math.sqrt(area * ratio)))
        height = min(rows, round(math.sqrt(area / ratio)))
        top, left = random.randint(0, rows - height), random.randint(0, columns - width)
        crop = image[top : top + height, left : left + width]
        crop = cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
        return (cv2.flip(crop, 1) if random.random() < 0.5 else crop), label


def with_torch(data: Photos, batch: int, workers: int) -> Any:
    return DataLoader(data, batch, shuffle=True, num_workers=workers, persistent_workers=True)


def with_penstock(folder: Path, batch: int, workers: int) -> ps.Loader:
    pipeline = (
        ps.from_folder(folder, extensions=EXTENSIONS)
        .cache("1GB")
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(SIDE))
        .map(ps.image.random_flip())
        .batch(batch)
    )
    return penstock.torch.loader(pipeline, workers=workers, seed=0)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: images, duration, and the part of it that training waited for data."""

    images: int
    seconds: float
    waited: float


def train(name: str, loader: Any, classes: int, epochs: int, step: float) -> list[Epoch]:
    """Train with a loader; the training loop is the same for both loaders."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    clock, passes = time.perf_counter, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=console) as bars:
        for number in range(epochs):
            bar = bars.add_task(f"{name:>8}, epoch {number + 1}", total=len(loader), now="")
            images, waited, total = 0, 0.0, 0.0
            began = asked = clock()
            for pixels, labels in loader:
                waited += clock() - asked
                small = pixels[:, ::7, ::7].permute(0, 3, 1, 2).float() / 255
                loss = nn.functional.cross_entropy(model(small), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(step)
                images += len(labels)
                total += loss.item() * len(labels)
                now = f"{images / (clock() - began):5,.0f} images/s, loss {total / images:.2f}"
                bars.update(bar, advance=1, now=now)
                asked = clock()
            waited += clock() - asked
            passes.append(Epoch(images, clock() - began, waited))
    return passes


def report(theirs: list[Epoch], ours: list[Epoch], stats: Stats) -> None:
    table = Table("", "images/s", "first epoch", "later epochs", "waiting for data")
    took, stall = [], []
    for name, run in (("PyTorch", theirs), ("Penstock", ours)):
        took.append(sum(epoch.seconds for epoch in run))
        stall.append(f"{sum(epoch.waited for epoch in run) / took[-1]:.0%}")
        speed = f"{sum(epoch.images for epoch in run) / took[-1]:,.0f}"
        first = run[0].seconds
        later = f"{(took[-1] - first) / (len(run) - 1):.2f} s" if len(run) > 1 else "-"
        table.add_row(name, speed, f"{first:.2f} s", later, stall[-1])
    work = Table("Penstock's workers", "ms an image", "share")
    busy = sum(stage.seconds for stage in stats.stages)
    for stage in stats.stages:
        each, share = 1000 * stage.seconds / stats.samples, stage.seconds / busy
        work.add_row(stage.name, f"{each:.2f}", f"{share:.0%}")
    for column in (*table.columns[1:], *work.columns[1:]):
        column.justify = "right"
    console.print(table, work)
    cache = stats.caches[0]
    console.print(
        f"The cache ({show_size(cache.used)}) served {cache.hits / stats.samples:.0%} of reads.\n"
        f"With PyTorch's DataLoader training took {took[0]:.1f} s and waited {stall[0]} of it for "
        f"data; with Penstock it took {took[1]:.1f} s and waited {stall[1]}: "
        f"{took[0] / took[1]:.2f} times as fast."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="your own images, in one folder for each class")
    parser.add_argument("--keep", action="store_true", help="do not delete the generated files")
    parser.add_argument("--images", type=int, default=1280, help="number of files to generate")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="workers of each loader")
    parser.add_argument(
        "--step", type=float, default=40, help="simulated accelerator, ms per batch"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # leaves the cores to the loaders
    with photos(args.data, args.images, args.keep) as folder:
        data = Photos(folder)
        if not data.files:
            parser.error(
                f"{folder} has no JPEG files. Give a folder with one folder for each class."
            )
        # Read all files once, so that both loaders find them in the page cache.
        size = sum(len(path.read_bytes()) for path, _ in data.files) / len(data)
        console.print(
            f"Training twice on {len(data):,} JPEG files ({show_size(size)} each), in batches of "
            f"{args.batch}, with {args.workers} workers on {cores()} cores. The accelerator is "
            f"simulated: a sleep of {args.step:g} ms per batch; the model is real and tiny. Each "
            "loader draws its own order and crops, so the losses differ."
        )
        how = (len(data.classes), args.epochs, args.step / 1000)
        theirs = train("PyTorch", with_torch(data, args.batch, args.workers), *how)
        with with_penstock(folder, args.batch, args.workers) as loader:
            ours = train("Penstock", loader, *how)
            stats = loader.stats()
    report(theirs, ours, stats)
    if os.getloadavg()[0] > 2 * cores():
        console.print("Other programs keep this machine busy, so the figures are unreliable.")


if __name__ == "__main__":
    main()
