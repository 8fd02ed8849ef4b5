"""Tables 2 and 3 of the OneAccess paper in shape: files at random against packed shards with a
reservoir, on storage with stated rates, and two jobs apart and with shared batches."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from benchmarks.harness.arguments import positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.storage.server import Conditions, ObjectServer
from penstock.operation import Spec
from penstock.source.source import Source

MB = 1_000_000
SIDE = 224
WINDOW = 256

EPOCHS = 3
"""Epochs of two jobs. What is fetched ahead for the epoch after them is counted too."""


@dataclass(frozen=True)
class Device:
    """A device: seconds to find data that does not follow the last read, bytes a second, and how
    many reads it serves side by side."""

    name: str
    seek: float
    rate: float
    side_by_side: int = 1


DEVICES = (
    Device("hard disk: 10 ms a seek, 150 MB/s", 0.010, 150 * MB),
    Device("SATA SSD: 0.1 ms, 500 MB/s", 0.0001, 500 * MB),
    Device("network storage: 10 ms, 100 MB/s, 64 reads side by side", 0.010, 100 * MB, 64),
)


class SlowDevice:
    """Serves reads one after the other, in the order in which they are asked for.

    What was asked for ahead arrives meanwhile, as with the page cache. ``busy``: seconds of work.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = device
        self.busy = 0.0
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free = clock()
        self._last = -2
        self._arrives: dict[int, float] = {}

    def ask(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Read these samples: pairs of index and bytes."""
        with self._lock:
            for index, size in sizes:
                if index in self._arrives:
                    continue
                far = index != self._last + 1
                work = size / self.device.rate
                wait = self.device.seek if far else 0.0
                # Devices that serve reads side by side find data for some while others transfer.
                work = max(work, wait / self.device.side_by_side) if far else work
                work += wait if self.device.side_by_side == 1 else 0.0
                self._free = max(self._free, self._clock()) + work
                self.busy += work
                late = wait if self.device.side_by_side > 1 else 0.0
                self._arrives[index] = self._free + late
                self._last = index

    def take(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Wait until these samples were read. They are not kept."""
        self.ask(sizes)
        with self._lock:
            due = max(self._arrives.pop(index, 0.0) for index, _ in sizes)
        left = due - self._clock()
        if left > 0:
            self._sleep(left)


class OnDevice(Source):
    """A source whose samples seem to come from a slow device. For threads of one process only."""

    threadsafe: ClassVar[bool] = True

    def __init__(self, source: Source, device: SlowDevice, sizes: Sequence[int]) -> None:
        self._source, self._device, self._sizes = source, device, sizes

    def __len__(self) -> int:
        return len(self._source)

    def _with_sizes(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        return [(int(index), self._sizes[int(index)]) for index in indices]

    def read(self, indices: Sequence[int]) -> list[Any]:
        self._device.take(self._with_sizes(indices))
        return self._source.read(indices)

    def will_need(self, indices: NDArray[np.int64]) -> None:
        self._device.ask(self._with_sizes(indices.tolist()))

    @property
    def shards(self) -> NDArray[np.int64] | None:
        return self._source.shards

    def identity(self) -> str:
        return self._source.identity()

    def fields(self) -> dict[str | int, Spec] | Spec:
        return self._source.fields()


def epoch_seconds(
    source: Source, device: Device, sizes: Sequence[int], options: Namespace, order: Any
) -> tuple[float, float]:
    """Seconds of one epoch of training batches, and those that the device was busy."""
    slow = SlowDevice(device)
    pipeline = (
        ps.Pipeline(OnDevice(source, slow, sizes))
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(SIDE))
        .map(ps.image.random_flip())
        .batch(options.batch)
    )
    more = {} if order is None else {"order": order}
    with pipeline.loader(workers=options.workers, kind="threads", seed=0, **more) as loader:
        started = time.perf_counter()
        for _ in loader:
            pass
        return time.perf_counter() - started, slow.busy


def table_2(options: Namespace, scratch: Path) -> tuple[Table, dict[str, Any]]:
    """One epoch from random files, and from packed shards through a window."""
    files = ps.from_folder(options.data)
    progress("packing")
    report = files.pack(scratch / "packed", per_shard=64)
    sizes = [
        len(sample[0]) for sample in (files.source.read([i])[0] for i in range(len(files.source)))
    ]
    packed = ps.from_tar(scratch / "packed")
    rows, data = [], {}
    for device in DEVICES:
        at_random, in_sequence = [], []
        for number in range(options.rounds):
            progress(f"{device.name}: round {number + 1} of {options.rounds}")
            at_random.append(epoch_seconds(files.source, device, sizes, options, None)[0])
            order = ps.Reservoir(window=WINDOW)
            in_sequence.append(epoch_seconds(packed.source, device, sizes, options, order)[0])
        before, after = median(at_random), median(in_sequence)
        # Packing reads all files once, at random or in any order, and writes them in sequence.
        reading = SlowDevice(device, clock=lambda: 0.0)
        # Files lie apart on the device: no read follows the last one.
        reading.ask([(2 * index, size) for index, size in enumerate(sizes)])
        cost = reading.busy + report.nbytes / device.rate
        pays = cost / (before - after) if before > 1.02 * after else None
        rows.append(
            (
                device.name,
                f"{before:.2f}",
                f"{after:.2f}",
                f"{before / after:.2f}",
                f"{cost:.2f}",
                "never" if pays is None else f"{pays:.1f} epochs",
            )
        )
        data[device.name] = {"files": at_random, "packed": in_sequence, "cost": cost}
    columns = (
        "storage",
        "files at random, s",
        "packed, reservoir, s",
        "times as fast",
        "packing once, s",
        "pays after",
    )
    title = f"one epoch of {len(sizes):,} photographs, {sum(sizes) / MB:.0f} MB, nothing cached"
    return Table(title, columns, tuple(rows)), data


def table_3(options: Namespace, scratch: Path) -> tuple[Table, dict[str, Any]]:
    """Two jobs that read the same objects, apart and with shared batches."""
    with ObjectServer(options.data, Conditions()) as server:
        rows, data = [], {}
        for name, share in (("apart", None), ("shared", f"oneaccess-{os.getpid()}")):
            progress(f"two jobs, {name}")
            server.requests.clear()
            begun = time.perf_counter()
            samples = _two_jobs(server, share, options)
            took = time.perf_counter() - begun
            found = server.gets()
            top = f"/{server.bucket}/"
            size = sum((options.data / path.removeprefix(top)).stat().st_size for path in found)
            data[name] = {"requests": len(found), "bytes": size, "samples": samples}
            rows.append(
                (
                    f"two jobs, {name}",
                    f"{samples:,}",
                    f"{len(found):,}",
                    f"{size / MB:.1f}",
                    f"{size / options.link / MB:.2f}",
                    f"{took:.1f}",
                )
            )
    saved = 1 - data["shared"]["bytes"] / data["apart"]["bytes"]
    rows.append(("saved by sharing", "", "", "", f"{saved:.1%}", ""))
    columns = ("", "samples", "requests", "MB", f"I/O time at {options.link:g} MB/s, s", "wall, s")
    return Table(f"{EPOCHS} epochs of two jobs, no cache", columns, tuple(rows)), data


def _two_jobs(server: ObjectServer, share: str | None, options: Namespace) -> int:
    """Run two jobs side by side. Returns the samples that both got."""
    counts = [0, 0]
    together = threading.Barrier(2)

    def job(number: int) -> None:
        storage = server.storage
        if share is None:
            # Jobs are processes. In one process they would share requests, unless the settings of
            # their stores differ.
            storage = {**storage, "region": f"job-{number}"}
        pipeline = (
            ps.from_folder(server.url(), storage=storage)
            .map(ps.image.decode())
            .map(ps.image.random_resized_crop(SIDE))
            .batch(options.batch)
        )
        more: dict[str, Any] = {} if share is None else {"share": share}
        with pipeline.loader(workers=options.workers, seed=0, **more) as loader:
            together.wait()
            for _ in range(EPOCHS):
                for images, _ in loader:
                    counts[number] += len(images)
            together.wait()

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def run(options: Namespace) -> Result:
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        before = os.environ.get("PENSTOCK_CACHE_DIR")
        os.environ["PENSTOCK_CACHE_DIR"] = f"{scratch}/kept"
        try:
            second, times = table_2(options, Path(scratch))
            third, requests = table_3(options, Path(scratch))
        finally:
            if before is None:
                del os.environ["PENSTOCK_CACHE_DIR"]
            else:
                os.environ["PENSTOCK_CACHE_DIR"] = before
    return Result((second, third), data={"epochs": times, "jobs": requests})


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--link", type=positive, default=100.0, help="MB/s for the I/O time of two jobs (100)"
    )


BENCHMARK = Benchmark(
    "oneaccess",
    "random files against packed shards with a reservoir on slow storage, and two jobs",
    run,
    arguments,
    needs_data=True,
)
