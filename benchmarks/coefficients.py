"""The CPU part of decoding JPEGs on a device: its time against all of decoding, and the bytes of
packed coefficients against those of pixels."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table

SIDE = 224
"""Height and width of a sample, as `random_resized_crop(224)` makes it."""

PHOTOS = 256
"""Photographs that are read, if --samples does not say otherwise."""

TINY = 8
"""Photographs of a call, as in a tiny-batch."""

EPOCHS = 2
"""Crops of each photograph. The JPEG index knows the file from the second on."""


def run(options: Namespace) -> Result:
    from penstock.image import kernel
    from penstock.image.coefficients import read_coefficients
    from penstock.image.geometry import RandomResizedCrop
    from penstock.image.jpeg_index import regions
    from penstock.keyed import Key, Keyed

    limit = options.samples or PHOTOS
    files = [path.read_bytes() for path in _photos(options.data)[:limit]]
    if not files:
        raise SystemExit(f"{options.data} has no JPEGs: give a folder of folders of JPEGs")
    crop, keyed = RandomResizedCrop(SIDE), Keyed(seed=0, stage="crop")
    sizes = [kernel.size(data) for data in files]

    boxes: list[list[Any]] = [
        [tuple(crop.draw(keyed.at(Key(index=n, epoch=epoch)), sizes[n])) for n in range(len(files))]
        for epoch in range(EPOCHS)
    ]
    # Pictures that the CPU lets libjpeg shrink are no part of the comparison.
    full = [(SIDE, SIDE)] * len(files)
    kept = sorted(
        set.intersection(*(set(read_coefficients(files, at, full).numbers) for at in boxes))
    )
    if not kept:
        raise SystemExit(f"{options.data} has no baseline JPEGs that libjpeg does not shrink")
    progress(f"coefficients: {len(kept)} of {len(files)} photographs")
    outs = np.empty((TINY, SIDE, SIDE, 3), np.uint8)

    def whole(numbers: list[int], at: list[Any]) -> None:
        requests = [
            kernel.RegionRequest(files[n], at[n], out)
            for n, out in zip(numbers, outs, strict=False)
        ]
        regions(requests)

    def pixels(numbers: list[int], at: list[Any]) -> None:
        regions(
            [
                kernel.RegionRequest(files[n], at[n], np.empty((*at[n][2:], 3), np.uint8))
                for n in numbers
            ]
        )

    def entropy(numbers: list[int], at: list[Any]) -> None:
        read_coefficients([files[n] for n in numbers], [at[n] for n in numbers])

    ways: dict[str, Callable[[list[int], list[Any]], None]] = {
        "decode, crop, resize to 224": whole,
        "decode and crop": pixels,
        "read coefficients": entropy,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    calls = [kept[i : i + TINY] for i in range(0, len(kept), TINY)]
    for _ in range(options.rounds):
        spent = dict.fromkeys(ways, 0.0)
        for at in boxes:
            for numbers in calls:
                # Turn by turn, so that all ways meet the same noise of the machine.
                for name, way in ways.items():
                    start = time.thread_time()
                    way(numbers, at)
                    spent[name] += time.thread_time() - start
        for name in ways:
            times[name].append(spent[name] / (EPOCHS * len(kept)))
    packed = pixel_bytes = file_bytes = blocks = 0
    for at in boxes:
        read = read_coefficients([files[n] for n in kept], [at[n] for n in kept])
        packed += len(read.packed)
        pixel_bytes += read.pixel_bytes
        blocks += read.blocks
        file_bytes += sum(len(files[n]) for n in kept)
    crops = EPOCHS * len(kept)
    base = float(np.median(times["decode, crop, resize to 224"]))
    medians = {name: float(np.median(some)) for name, some in times.items()}
    time_rows = tuple(
        (name, f"{1e3 * median:.3f}", f"{median / base:.2f}") for name, median in medians.items()
    )
    byte_rows = tuple(
        (name, f"{size / crops / 1e3:,.1f}", f"{size / pixel_bytes:.2f}")
        for name, size in (
            ("pixels of the crop", pixel_bytes),
            ("packed coefficients", packed),
            ("whole files", file_bytes),
            ("pixels of the sample, 224 x 224", crops * SIDE * SIDE * 3),
        )
    )
    note = (
        f"coefficients: {len(kept)} of {len(files)} photographs, {EPOCHS} crops each; others are "
        f"no baseline JPEGs, or libjpeg shrinks them; {blocks / crops:,.0f} blocks a crop, "
        f"{packed / blocks:.1f} bytes a block"
    )
    return Result(
        (
            Table("coefficients: CPU time of one crop", ("", "ms", "share"), time_rows),
            Table("coefficients: bytes of one crop", ("", "KB", "of pixels"), byte_rows),
        ),
        (note,),
        (),
        {
            "seconds": medians,
            "bytes": {"packed": packed / crops, "pixels": pixel_bytes / crops},
            "photographs": len(kept),
        },
    )


def _photos(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


BENCHMARK = Benchmark(
    "coefficients",
    "CPU time and bytes of JPEGs whose decoding a device finishes",
    run,
    needs_data=True,
)
