"""Trains a small model with PyTorch's DataLoader and with Penstock, and tells what was gained.

Run it with scripts/demo. The accelerator is simulated: a sleep that uses no CPU. All else is real:
JPEG files, decoding, augmentation, the model and its gradients.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import penstock as ps
import penstock.torch
from penstock.meter import Stats

WIDTH, HEIGHT = 500, 375
SIDE = 224
SHAPES = ("circles", "lines", "rectangles", "triangles")
Image = NDArray[np.uint8]
Batches = Iterable[tuple[Tensor, Tensor]]
console = Console()


# What both train on.


def photo(shape: str, seed: int) -> Image:
    """Sky, shapes, texture at several scales and noise: as hard to decode as a photograph."""
    rng = np.random.default_rng(seed)
    top, bottom = rng.uniform(40, 215, (2, 1, 1, 3))
    image = (top + (bottom - top) * np.linspace(0, 1, HEIGHT).reshape(-1, 1, 1)).astype(np.float32)
    image = np.broadcast_to(image, (HEIGHT, WIDTH, 3)).copy()
    for _ in range(6):
        colour = rng.uniform(0, 255, 3).tolist()
        x, y, size = (int(n) for n in rng.uniform((0, 0, 30), (WIDTH, HEIGHT, 90)))
        corners = np.array([(x, y - size), (x - size, y + size), (x + size, y + size)], np.int32)
        if shape == "circles":
            cv2.circle(image, (x, y), size, colour, -1)
        elif shape == "lines":
            cv2.line(image, (x - 2 * size, y), (x + 2 * size, y), colour, 9)
        elif shape == "rectangles":
            cv2.rectangle(image, corners[1].tolist(), (x + size, y - size), colour, -1)
        else:
            cv2.fillPoly(image, [corners], colour)
    for step, strength in ((40, 18), (8, 12), (3, 9)):
        rough = rng.standard_normal((HEIGHT // step, WIDTH // step, 3), np.float32) * strength
        image += cv2.resize(rough, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    image += rng.standard_normal(image.shape, np.float32) * 7
    levels: Image = np.clip(image, 0, 255).astype(np.uint8)
    return levels


def write_photos(folder: Path, count: int) -> None:
    """One folder for each class, as ImageNet has it."""

    def write(number: int) -> None:
        shape = SHAPES[number % len(SHAPES)]
        data = simplejpeg.encode_jpeg(photo(shape, number), quality=93, colorsubsampling="420")
        (folder / shape / f"{number:05}.jpg").write_bytes(data)

    for shape in SHAPES:
        (folder / shape).mkdir()
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(write, range(count))
        for _ in track(made, f"making {count:,} JPEG files", total=count, console=console):
            pass


@contextmanager
def photos(given: Path | None, count: int, keep: bool) -> Iterator[Path]:
    """The folder to train on: the user's, or one of our own that is removed at the end."""
    if given is not None:
        yield given
    elif keep:
        folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
        write_photos(folder, count)
        yield folder
        console.print(f"kept in {folder}")
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name:
            write_photos(Path(name), count)
            yield Path(name)


# The two contestants: both decode, take a random crop resized to 224 x 224, and flip by chance.


class Photos:
    """What an engineer who cares for speed writes by hand: libjpeg-turbo and OpenCV, no PIL."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, label) for label, place in enumerate(classes) for path in sorted(place.glob("*"))
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


def single_threaded(_worker: int) -> None:
    cv2.setNumThreads(0)  # the workers are the parallelism


def with_torch(folder: Path, batch: int, workers: int) -> DataLoader[tuple[Image, int]]:
    return DataLoader(
        Photos(folder),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        worker_init_fn=single_threaded,
    )


def with_penstock(folder: Path, batch: int, workers: int) -> ps.Loader:
    pipeline = (
        ps.from_folder(folder)
        .cache("1GB")
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(SIDE))
        .map(ps.image.random_flip())
        .batch(batch)
    )
    return penstock.torch.loader(pipeline, workers=workers, seed=0)


# The training script, which is the same for both.


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass: how long it took, and how much of that the training waited for data."""

    images: int
    seconds: float
    waited: float
    loss: float


def train(name: str, loader: Batches, batches: int, epochs: int, step: float) -> list[Epoch]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.LazyLinear(1000)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    clock = time.perf_counter
    passes = []
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        console=console,
    )
    with bars:
        for number in range(epochs):
            bar = bars.add_task(f"{name:>8}  epoch {number + 1}", total=batches, now="")
            images, waited, losses = 0, 0.0, []
            began = asked = clock()
            for pixels, labels in loader:
                waited += clock() - asked
                small = pixels[:, ::4, ::4].permute(0, 3, 1, 2).float() / 255
                loss = nn.functional.cross_entropy(model(small), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(step)
                images += len(labels)
                losses.append(loss.item())
                now = f"{images / (clock() - began):5,.0f} images/s, loss {loss.item():.2f}"
                bars.update(bar, advance=1, now=now)
                asked = clock()
            waited += clock() - asked
            passes.append(Epoch(images, clock() - began, waited, sum(losses) / len(losses)))
    return passes


# What came out.


def report(runs: dict[str, list[Epoch]], stats: Stats) -> None:
    table = Table("", "images/s", "first epoch", "later epochs", "waiting for data", "last loss")
    for column in table.columns[1:]:
        column.justify = "right"
    total = {name: sum(one.seconds for one in run) for name, run in runs.items()}
    stall = {name: sum(one.waited for one in run) / total[name] for name, run in runs.items()}
    for name, run in runs.items():
        later = [one.seconds for one in run[1:]] or [run[0].seconds]
        table.add_row(
            name,
            f"{sum(one.images for one in run) / total[name]:,.0f}",
            f"{run[0].seconds:.2f} s",
            f"{sum(later) / len(later):.2f} s",
            f"{stall[name]:.0%}",
            f"{run[-1].loss:.2f}",
        )
    console.print(table)
    work = Table("Penstock's workers", "ms per image", "share", title_justify="left")
    busy = sum(stage.seconds for stage in stats.stages)
    for stage in stats.stages:
        each = 1000 * stage.seconds / max(1, stats.samples)
        work.add_row(stage.name, f"{each:.3f}", f"{stage.seconds / busy:.0%}")
    console.print(work)
    torch_total, own_total = total["PyTorch"], total["Penstock"]
    verdict = "faster" if own_total < torch_total else "slower"
    factor = max(own_total, torch_total) / min(own_total, torch_total)
    console.print(
        f"With Penstock the same training took {own_total:.1f} s instead of {torch_total:.1f} s, "
        f"{factor:.2f} times {verdict}; it waited for data {stall['Penstock']:.0%} of the time "
        f"instead of {stall['PyTorch']:.0%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with PyTorch's DataLoader, then Penstock.")
    parser.add_argument("--data", type=Path, help="a folder with one folder of JPEGs per class")
    parser.add_argument("--keep", action="store_true", help="keep the files that were made")
    parser.add_argument("--images", type=int, default=1536)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step", type=float, default=40, help="simulated accelerator, ms a batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with photos(args.data, args.images, args.keep) as folder:
        runs = {}
        theirs = with_torch(folder, args.batch, args.workers)
        runs["PyTorch"] = train("PyTorch", theirs, len(theirs), args.epochs, args.step / 1000)
        del theirs
        with with_penstock(folder, args.batch, args.workers) as ours:
            runs["Penstock"] = train("Penstock", ours, len(ours), args.epochs, args.step / 1000)
            stats = ours.stats()
        report(runs, stats)


if __name__ == "__main__":
    main()
