"""Encodings of kept samples, and alternatives that Penstock does not use: size, and time to encode
and decode. Measures the CPU time of one thread."""

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

HEADS = ("encoding", "KB", "size / raw", "encode ms", "decode ms", "mean error", "worst error")
NOT_KEPT = "not kept: prepared again"


@dataclass(frozen=True)
class Codec:
    """An encoding of an image. ``decode`` also gets the shape, which a store keeps separately."""

    title: str
    encode: Callable[[Image], Any]
    decode: Callable[[Any, tuple[int, ...]], Image]
    exact: bool = True


@dataclass(frozen=True)
class Cost:
    """Mean costs of a codec for an image. Errors are in levels from 0 to 255."""

    nbytes: float
    encode: float
    decode: float
    mean: float
    worst: int


def penstock_codec(name: str) -> Codec:
    """One of Penstock's encodings."""
    from penstock.store.encoding import Encoding

    encoding = Encoding(name)
    return Codec(name, encoding.encode, lambda data, _: encoding.decode(data), not encoding.lossy)


def opencv_codec(title: str, suffix: str, *options: int) -> Codec:
    import cv2

    def decode(data: Any, _: tuple[int, ...]) -> Image:
        image: Any = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
        return image  # type: ignore[no-any-return]

    return Codec(title, lambda image: cv2.imencode(suffix, image, options)[1], decode)


def row_difference_codec(title: str, level: int) -> Codec:
    """Differences between rows by NumPy, compressed with zlib."""

    def encode(image: Image) -> bytes:
        rows = image.copy()
        np.subtract(image[1:], image[:-1], out=rows[1:])
        return zlib.compress(rows, level)

    def decode(data: bytes, shape: tuple[int, ...]) -> Image:
        rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)
        return np.add.accumulate(rows, axis=0, dtype=np.uint8)

    return Codec(title, encode, decode)


def subsampled_jpeg_codec(title: str, quality: int) -> Codec:
    import simplejpeg

    return Codec(
        title,
        lambda image: simplejpeg.encode_jpeg(image, quality, "RGB", "420"),
        lambda data, _: simplejpeg.decode_jpeg(data, "RGB"),
        exact=False,
    )


def codecs() -> list[Codec]:
    import cv2

    level, strategy = (cv2.IMWRITE_PNG_COMPRESSION, 1), cv2.IMWRITE_PNG_STRATEGY
    return [
        *map(penstock_codec, ("raw", "lossless", "jpeg:100", "jpeg", "jpeg:90")),
        opencv_codec("PNG, level 1, RLE", ".png", *level, strategy, cv2.IMWRITE_PNG_STRATEGY_RLE),
        opencv_codec(
            "PNG, Huffman", ".png", *level, strategy, cv2.IMWRITE_PNG_STRATEGY_HUFFMAN_ONLY
        ),
        opencv_codec("WebP, lossless", ".webp", cv2.IMWRITE_WEBP_QUALITY, 101),
        row_difference_codec("rows by NumPy, zlib level 1", 1),
        subsampled_jpeg_codec("JPEG 4:2:0, quality 95", 95),
    ]


def measure(images: Sequence[Image], tried: Sequence[Codec], rounds: int) -> dict[str, Cost]:
    """Encode and decode each image with all codecs in turn, so that a disturbance affects all.

    The shortest time of all rounds counts, for each image.
    """
    costs: dict[str, list[Cost]] = {codec.title: [] for codec in tried}
    for image in images:
        for codec in tried:
            encoding, decoding = [], []
            for _ in range(rounds):
                started = time.thread_time()
                kept = codec.encode(image)
                encoding.append(time.thread_time() - started)
                started = time.thread_time()
                again = codec.decode(kept, image.shape)
                decoding.append(time.thread_time() - started)
            off = np.abs(again.astype(np.int16) - image)
            nbytes = memoryview(kept).nbytes
            cost = Cost(nbytes, min(encoding), min(decoding), float(off.mean()), int(off.max()))
            costs[codec.title].append(cost)
    return {title: _average(codec_costs) for title, codec_costs in costs.items()}


def _average(costs: Sequence[Cost]) -> Cost:
    nbytes, encode, decode, mean = (
        float(np.mean([getattr(cost, name) for cost in costs]))
        for name in ("nbytes", "encode", "decode", "mean")
    )
    return Cost(nbytes, encode, decode, mean, max(cost.worst for cost in costs))


@dataclass(frozen=True)
class ImageSet:
    """Images to encode. ``anew``: mean seconds to prepare one."""

    name: str
    images: list[Image]
    anew: float


def image_sets(paths: Sequence[str], rounds: int) -> list[ImageSet]:
    """Decoded photographs, and photographs that are also cropped and augmented."""
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

    sets = []
    for name, operations in (
        ("decoded", first),
        (f"decoded, cropped to {SIDE}x{SIDE}, RandAugment", first + last),
    ):
        timed_images = [prepared(path, operations, number) for number, path in enumerate(paths)]
        images = [image for image, _ in timed_images]
        sets.append(
            ImageSet(name, images, float(np.mean([seconds for _, seconds in timed_images])))
        )
    return sets


def run(options: Namespace) -> Result:
    paths = image_files(options.data)[0]
    wanted = min(options.samples or IMAGES, len(paths))
    # Spread evenly over all classes.
    chosen = [paths[number * len(paths) // wanted] for number in range(wanted)]
    tables, data, wrong = [], {}, []
    for work in image_sets(chosen, options.rounds):
        progress(f"encode: {len(work.images)} photographs, {work.name}")
        tried = codecs()
        costs = measure(work.images, tried, options.rounds)
        wrong += [
            f"encode: {codec.title} changed pixels, but claims to be exact"
            for codec in tried
            if codec.exact and costs[codec.title].worst
        ]
        raw = costs["raw"].nbytes
        rows = [(NOT_KEPT, "", "", "", f"{work.anew * 1e3:.2f}", "", "")]
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
    "size and time of the encodings of kept samples, and of alternatives",
    run,
    needs_data=True,
)
