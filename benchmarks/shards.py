"""Photographs as files, in tar shards, and packed after decoding: CPU time of each, and the cost
of packing."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

import penstock as ps
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.loader import Loader
from penstock.pack.pack import PackReport

SIDE = 224
SHORT = 256
"""The short side of packed pictures: random crops are taken of them."""


def cropped(pipeline: ps.Pipeline, batch: int) -> ps.Pipeline:
    random = pipeline.map(ps.image.random_resized_crop(SIDE)).map(ps.image.random_flip())
    return random.batch(batch)


def cpu_per_sample(loader: Loader) -> float:
    """Milliseconds of CPU time for a sample of one epoch, threads of this process included."""
    started, samples = time.process_time(), 0
    for batch in loader:
        samples += len(batch[0])
    return 1e3 * (time.process_time() - started) / samples


def run(options: Namespace) -> Result:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        # Indexes of shards are kept there too, and removed with it.
        before = os.environ.get("PENSTOCK_CACHE_DIR")
        os.environ["PENSTOCK_CACHE_DIR"] = f"{scratch}/cache"
        try:
            return measured(options, Path(scratch))
        finally:
            if before is None:
                del os.environ["PENSTOCK_CACHE_DIR"]
            else:
                os.environ["PENSTOCK_CACHE_DIR"] = before


def measured(options: Namespace, scratch: Path) -> Result:
    files = ps.from_folder(options.data)
    small = files.map(ps.image.decode()).map(ps.image.resize(SHORT))
    progress("packing the files")
    raw = files.pack(scratch / "raw")
    progress("packing decoded and resized pictures")
    decoded = small.pack(scratch / "decoded")
    batch = options.batch
    makes: dict[str, Callable[[], ps.Pipeline]] = {
        "files": lambda: cropped(files.map(ps.image.decode()), batch),
        "tar": lambda: cropped(ps.from_tar(scratch / "raw").map(ps.image.decode()), batch),
        "files, resized first": lambda: cropped(small, batch),
        "packed after resizing": lambda: cropped(ps.from_tar(scratch / "decoded"), batch),
    }
    loaders = {name: make().loader(workers=options.workers) for name, make in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    try:
        for loader in loaders.values():
            cpu_per_sample(loader)  # the first epoch starts workers
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            for name, loader in loaders.items():
                times[name].append(cpu_per_sample(loader))
    finally:
        for loader in loaders.values():
            loader.close()
    best = {name: median(values) for name, values in times.items()}
    rows = tuple(
        (name, f"{best[name]:.3f}", f"{best[name] / best['files']:.2f}") for name in loaders
    )
    title = f"CPU time of an image, median of {options.rounds} epochs"
    tables = (
        Table(title, ("data", "ms", "of files"), rows),
        Table("packing", COLUMNS, (cost("files", raw), cost("resized", decoded))),
    )
    return Result(tables, data={"ms": times})


COLUMNS = (
    "what",
    "samples",
    "MB",
    "seconds",
    "busy seconds",
    "ms before",
    "ms packed",
    "pays after",
)


def cost(name: str, report: PackReport) -> tuple[str, ...]:
    epochs = report.pays_after
    return (
        name,
        f"{report.samples:,}",
        f"{report.nbytes / 1e6:.0f}",
        f"{report.seconds:.1f}",
        f"{report.cost:.1f}",
        f"{1e3 * (report.before or 0):.2f}",
        f"{1e3 * (report.after or 0):.2f}",
        "never, by CPU" if epochs is None else f"{epochs:.1f} epochs",
    )


BENCHMARK = Benchmark(
    "shards",
    "photographs as files, in tar shards and packed after resizing, and the cost of packing",
    run,
    needs_data=True,
)
