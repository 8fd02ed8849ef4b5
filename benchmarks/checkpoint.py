"""What checkpoints cost with many files: taking one, resuming, caches on disk, sharing."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.harness.alone import run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.processes import end_node
from benchmarks.harness.report import Result, Table

T = TypeVar("T")

IN_FOLDER = 1000
"""Files in each class folder."""

REPEATS = 100
"""Checkpoints whose median is shown."""


def make_files(root: Path, files: int) -> None:
    """Empty files in class folders: only their names, sizes and times matter here."""
    for number in range(files):
        folder = root / f"{number // IN_FOLDER:06}"
        if number % IN_FOLDER == 0:
            folder.mkdir(parents=True)
        os.close(os.open(folder / f"{number:09}.jpg", os.O_CREAT | os.O_WRONLY))


def measure(root: str, work: str) -> dict[str, float]:
    """Seconds of each step. Runs in a fresh process; ``work`` is for the store and the node."""
    import penstock as ps

    seconds: dict[str, float] = {}

    def timed(step: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        seconds[step] = time.perf_counter() - started
        return result

    def many(step: str, call: Callable[[], object]) -> None:
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        seconds[step], seconds[f"{step}, slowest"] = median(times), max(times)

    source = timed("from_folder()", lambda: ps.from_folder(root))
    pipeline = source.batch(4, collate=list)
    loader = timed("loader()", lambda: pipeline.loader(workers=1))
    epoch = iter(loader)
    timed("first batch", lambda: next(epoch))
    early = timed("first state_dict()", loader.state_dict)
    many("state_dict() while files are identified", loader.state_dict)
    timed("until all files are identified", loader._data.complete)
    many("state_dict() after that", loader.state_dict)
    late = loader.state_dict()
    loader.close()
    for name, state in (("an early", early), ("a late", late)):
        with pipeline.loader(workers=1) as resumed:
            timed(f"load_state_dict() of {name} checkpoint", lambda: resumed.load_state_dict(state))  # noqa: B023
    cached = source.cache("1MB", where=Path(work, "store")).batch(4, collate=list)
    timed("loader() with a cache on disk", lambda: cached.loader(workers=1)).close()
    with pipeline.loader(share="checkpoint") as shared:
        timed("first batch with share=", lambda: next(iter(shared)))
    return seconds


def run(options: Namespace) -> Result:
    parent = options.data or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    # The path of a socket must be short, so the node does not work in --data.
    work = tempfile.mkdtemp(prefix="penstock-bench-")
    root = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=parent))
    try:
        progress(f"checkpoint: making {options.files:,} files in {root}")
        make_files(root, options.files)
        progress("checkpoint: measuring")
        node = {**os.environ, "PENSTOCK_RUNTIME_DIR": work, "PENSTOCK_NODE_IDLE": "2"}
        measured = run_alone(measure, str(root), work, timeout=3600, environment=node)
        seconds: dict[str, float] = measured.value
    finally:
        end_node(Path(work))
        shutil.rmtree(root)
        shutil.rmtree(work, ignore_errors=True)
    rows = tuple((step, f"{1e3 * value:,.3f}") for step, value in seconds.items())
    title = f"checkpoint: milliseconds of each step with {options.files:,} files"
    return Result((Table(title, ("step", "ms"), rows),), data={"seconds": seconds})


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--files", type=count, default=1_000_000, help="number of files to make (1000000)"
    )


BENCHMARK = Benchmark(
    "checkpoint",
    "checkpoints, resume, disk caches and share= with a million files",
    run,
    _arguments,
    data="folder in which to make the files; by default the memory file system",
)
