"""Encodings of kept samples: the room that images take, and the time to make them and to get them
back, beside what was tried and left out. One thread, and only its own processor time counts."""

from __future__ import annotations

import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.harness.workloads import RAND_AUGMENT, image_files

IMAGES = 200
SIDE = 224
SEED = 0

Image = NDArray[np.uint8]

HEADS = ("kept as", "KB", "of raw", "to keep ms", "to get back ms", "mean error", "worst error")
ANEW = "not at all: prepared anew"


@dataclass(frozen=True)
class Way:
    """A way to keep an image. ``decode`` is given the shape, which others keep beside it."""

    title: str
    encode: Callable[[Image], Any]
    decode: Callable[[Any, tuple[int, ...]], Image]
    exact: bool = True


@dataclass(frozen=True)
class Cost:
    """What a way costs for an image, on average; errors are in levels of 0 to 255."""

    nbytes: float
    encode: float
    decode: float
    mean: float
    worst: int


def penstock(name: str) -> Way:
    """One of Penstock's own."""
    from penstock.store.encoding import Encoding

    encoding = Encoding(name)
    return Way(name, encoding.encode, lambda data, _: encoding.decode(data), not encoding.lossy)


def opencv(title: str, suffix: str, *options: int) -> Way:
    import cv2

    def decode(data: Any, _: tuple[int, ...]) -> Image:
        image: Any = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
        return image  # type: ignore[no-any-return]

    return Way(title, lambda image: cv2.imencode(suffix, image, options)[1], decode)


def predicted(title: str, level: int) -> Way:
    """Each row as what it has more than the one above, by NumPy; then zlib."""

    def encode(image: Image) -> bytes:
        rows = image.copy()
        np.subtract(image[1:], image[:-1], out=rows[1:])
        return zlib.compress(rows, level)

    def decode(data: bytes, shape: tuple[int, ...]) -> Image:
        rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)
        return np.add.accumulate(rows, axis=0, dtype=np.uint8)

    return Way(title, encode, decode)


def subsampled(title: str, quality: int) -> Way:
    import simplejpeg

    return Way(
        title,
        lambda image: simplejpeg.encode_jpeg(image, quality, "RGB", "420"),
        lambda data, _: simplejpeg.decode_jpeg(data, "RGB"),
        exact=False,
    )


def ways() -> list[Way]:
    import cv2

    level, strategy = (cv2.IMWRITE_PNG_COMPRESSION, 1), cv2.IMWRITE_PNG_STRATEGY
    return [
        *map(penstock, ("raw", "lossless", "jpeg:100", "jpeg", "jpeg:90")),
        opencv("PNG, level 1, RLE", ".png", *level, strategy, cv2.IMWRITE_PNG_STRATEGY_RLE),
        opencv("PNG, Huffman", ".png", *level, strategy, cv2.IMWRITE_PNG_STRATEGY_HUFFMAN_ONLY),
        opencv("WebP, lossless", ".webp", cv2.IMWRITE_WEBP_QUALITY, 101),
        predicted("rows by NumPy, zlib level 1", 1),
        subsampled("JPEG 4:2:0, quality 95", 95),
    ]


def measure(images: Sequence[Image], tried: Sequence[Way], rounds: int) -> dict[str, Cost]:
    """Each image in every way in turn, so that what disturbs one disturbs all.

    Of the rounds, the shortest time of each image counts.
    """
    found: dict[str, list[Cost]] = {way.title: [] for way in tried}
    for image in images:
        for way in tried:
            encoding, decoding = [], []
            for _ in range(rounds):
                started = time.thread_time()
                kept = way.encode(image)
                encoding.append(time.thread_time() - started)
                started = time.thread_time()
                again = way.decode(kept, image.shape)
                decoding.append(time.thread_time() - started)
            off = np.abs(again.astype(np.int16) - image)
            nbytes = memoryview(kept).nbytes
            cost = Cost(nbytes, min(encoding), min(decoding), float(off.mean()), int(off.max()))
            found[way.title].append(cost)
    return {title: _average(costs) for title, costs in found.items()}


def _average(costs: Sequence[Cost]) -> Cost:
    nbytes, encode, decode, mean = (
        float(np.mean([getattr(cost, name) for cost in costs]))
        for name in ("nbytes", "encode", "decode", "mean")
    )
    return Cost(nbytes, encode, decode, mean, max(cost.worst for cost in costs))


@dataclass(frozen=True)
class Work:
    """Images to keep, and the time it took to prepare each."""

    name: str
    images: list[Image]
    anew: float


def works(paths: Sequence[str], rounds: int) -> list[Work]:
    """Photographs as they are decoded, and small ones that are augmented already."""
    from penstock.image import decode, rand_augment, random_resized_crop
    from penstock.keyed import Key, Keyed

    first, last = [decode()], [random_resized_crop(SIDE), rand_augment(*RAND_AUGMENT)]
    keyed = Keyed(SEED, "encode")

    def prepared(path: str, operations: Sequence[Any], number: int) -> tuple[Image, float]:
        value: Any = Path(path).read_bytes()
        times = []
        for _ in range(rounds):
            image, rng = value, keyed.at(Key(number))
            started = time.thread_time()
            for operation in operations:
                params = operation.draw(rng, image.shape) if operation.random else None
                image = operation.apply(image, params)
            times.append(time.thread_time() - started)
        return np.ascontiguousarray(image), min(times)

    found = []
    for name, operations in (
        ("decoded", first),
        (f"decoded, cropped to {SIDE}x{SIDE}, RandAugment", first + last),
    ):
        made = [prepared(path, operations, number) for number, path in enumerate(paths)]
        images = [image for image, _ in made]
        found.append(Work(name, images, float(np.mean([seconds for _, seconds in made]))))
    return found


def run(options: Namespace) -> Result:
    paths = image_files(options.data)[0]
    wanted = min(options.samples or IMAGES, len(paths))
    # Evenly over all classes.
    chosen = [paths[number * len(paths) // wanted] for number in range(wanted)]
    tables, data, wrong = [], {}, []
    for work in works(chosen, options.rounds):
        progress(f"encode: {len(work.images)} photographs, {work.name}")
        tried = ways()
        costs = measure(work.images, tried, options.rounds)
        wrong += [
            f"encode: {way.title} gave back other pixels"
            for way in tried
            if way.exact and costs[way.title].worst
        ]
        raw = costs["raw"].nbytes
        rows = [(ANEW, "", "", "", f"{work.anew * 1e3:.2f}", "", "")]
        for title, cost in costs.items():
            times = (f"{cost.encode * 1e3:.2f}", f"{cost.decode * 1e3:.2f}")
            errors = (f"{cost.mean:.2f}", str(cost.worst)) if cost.worst else ("", "")
            share = f"{cost.nbytes / raw:.3f}"
            rows.append((title, f"{cost.nbytes / 1e3:.1f}", share, *times, *errors))
        title = f"encode: {len(work.images)} photographs, {work.name}; means, one thread"
        tables.append(Table(title, HEADS, tuple(rows)))
        data[work.name] = {
            "images": len(work.images),
            "anew": work.anew,
            "ways": {title: asdict(cost) for title, cost in costs.items()},
        }
    return Result(tuple(tables), wrong=tuple(wrong), data=data)


BENCHMARK = Benchmark(
    "encode",
    "room and time of the encodings of kept samples, and of others",
    run,
    needs_data=True,
)
