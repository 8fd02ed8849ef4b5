"""CPU time that the thread of the training loop pays for a batch that is ready."""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.peers.penstock_device import to_fake_device

MOST = 100e-6
"""CPU seconds that a batch may cost the thread of the loop."""

NAP = 1e-3
"""Seconds that a sample takes: with it a batch of 256 has 64 pieces, as with photographs."""

SETTLE = 0.2
"""Seconds between the moment when a batch is ready and the moment when the loop takes it."""

PATIENCE = 60.0
"""Seconds to wait for a batch."""

LENGTH = 1_000_000


class Images:
    """Images with labels. Preparing one is a sleep, and a copy into the batch."""

    def __init__(self, dtype: str, side: int, nap: float) -> None:
        self._images = np.zeros((8, side, side, 3), dtype)
        self._nap = nap

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._nap:
            time.sleep(self._nap)
        return self._images[index % 8], index % 1000


@dataclass(frozen=True)
class Case:
    """A loader to measure. ``make`` gets the dataset, batch size and workers."""

    title: str
    make: Callable[[Images, int, int], Any]
    dtype: str = "uint8"


def _threads(data: Images, batch: int, workers: int) -> Any:
    import penstock as ps

    train = ps.from_dataset(data, random=False).batch(batch)
    return train.loader(workers=workers, kind="threads")


def _cached(data: Images, batch: int, workers: int) -> Any:
    import penstock as ps

    train = ps.from_dataset(data, random=False).cache("1GB").batch(batch)
    return train.loader(workers=workers, kind="threads")


def _processes(data: Images, batch: int, workers: int) -> Any:
    import penstock as ps

    train = ps.from_dataset(data, random=False).batch(batch)
    return train.loader(workers=workers, kind="processes")


def _tensors(data: Images, batch: int, workers: int) -> Any:
    import penstock as ps
    import penstock.torch

    train = ps.from_dataset(data, random=False).batch(batch)
    return penstock.torch.loader(train, workers=workers, kind="threads")


def _drop_in(data: Images, batch: int, workers: int) -> Any:
    from penstock.torch import DataLoader

    return DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers)


def _to_device(data: Images, batch: int, workers: int) -> Any:
    import penstock as ps

    return to_fake_device(ps.from_dataset(data, random=False).batch(batch), workers)


CASES: tuple[Case, ...] = (
    Case("threads, uint8", _threads),
    Case("threads, float32", _threads, "float32"),
    Case("threads, uint8, filling a cache", _cached),
    Case("threads, uint8, tensors", _tensors),
    Case("threads, uint8, to a fake device", _to_device),
    Case("processes, uint8", _processes),
    Case("processes, float32", _processes, "float32"),
    Case("drop-in, processes, uint8, tensors", _drop_in),
    Case("drop-in, processes, float32, tensors", _drop_in, "float32"),
)


def wait_until_ready(queue: Callable[[], Any], settle: float) -> None:
    """Wait until the next batch can be taken at once, and ``settle`` seconds more.

    The workers go on with the batches after it meanwhile, until these are ready or lack a slot.
    What is measured is the loop alone, not its contest with the workers for the GIL.
    """
    end = time.monotonic() + PATIENCE
    while not queue().ready:
        if time.monotonic() > end:
            raise TimeoutError(f"no batch was ready within {PATIENCE:g} s")
        time.sleep(2e-3)
    time.sleep(settle)


def costs(
    loader: Iterable[Any], queue: Callable[[], Any], batches: int, settle: float
) -> list[float]:
    """CPU seconds of this thread for each batch, the release of the batch before it included."""
    epoch = iter(loader)
    batch = next(epoch)
    seconds = []
    for _ in range(batches):
        wait_until_ready(queue, settle)
        started = time.thread_time()
        batch = next(epoch)
        seconds.append(time.thread_time() - started)
    del batch
    return seconds


def measure(
    number: int, batch: int, workers: int, batches: int, side: int, nap: float, settle: float
) -> Any:
    """The costs of one case. Runs in a fresh process."""
    case = CASES[number]
    with closing(case.make(Images(case.dtype, side, nap), batch, workers)) as loader:
        queue = getattr(loader, "_loader", loader).queue
        return costs(loader, queue, batches, settle)


def run(options: Namespace) -> Result:
    rows: list[tuple[str, ...]] = []
    wrong: list[str] = []
    data: dict[str, object] = {}
    for number, case in enumerate(CASES):
        progress(f"loop: {case.title}")
        arguments = (options.batch, options.workers, options.batches, options.side, NAP, SETTLE)
        measured: list[float] = []
        try:
            for _ in range(options.rounds):
                measured += run_alone(measure, number, *arguments, timeout=600).value
        except AloneError as error:
            progress(error.printed)
            wrong.append(f"loop: {case.title} failed: {error}")
            rows.append((case.title, "failed", "", "", ""))
            continue
        middle = statistics.median(measured)
        data[case.title] = measured
        figures = (middle, min(measured), max(measured))
        verdict = "yes" if middle <= MOST else "NO"
        rows.append((case.title, *(f"{1e6 * value:,.0f}" for value in figures), verdict))
    title = (
        f"loop: CPU us of the loop's thread for a batch that is ready: {options.batch} images of "
        f"{options.side}x{options.side} with labels, {options.workers} workers"
    )
    heads = ("loader", "median", "least", "most", f"at most {1e6 * MOST:.0f}")
    return Result((Table(title, heads, tuple(rows)),), (), tuple(wrong), data)


def _arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(batch=256, rounds=1)
    parser.add_argument(
        "--batches", type=count, default=20, help="batches measured in each round (20)"
    )
    parser.add_argument("--side", type=count, default=224, help="height and width of images (224)")


BENCHMARK = Benchmark(
    "loop", "CPU time of the training loop's thread for a batch that is ready", run, _arguments
)
