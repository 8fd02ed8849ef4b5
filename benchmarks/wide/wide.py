"""Penstock with many workers on simulated cores: what Python costs, and when it becomes the limit.

The compiled kernel's work is replaced by a sleep of the time that it takes, so a machine of a few
cores can run 64 workers. What is left is Python under one GIL, which 2 real cores hide.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.audio.recordings import as_folder
from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import Spread, progress
from benchmarks.harness.report import Result, Table
from benchmarks.harness.workloads import Photos
from benchmarks.wide.roads import ASLEEP_SECONDS, ROADS

WORKERS = (1, 2, 4, 8, 16, 32, 64)

PR_SET_TIMERSLACK = 29
"""The constant of the kernel's headers."""

GOALS = {2: 0.97, 32: 0.85, 64: 0.7}
"""By number of workers: the share of ideal to reach on native roads."""

MOST_CPU = 10e-6
"""Seconds of CPU for an image, beside the kernel's work, that native roads may take."""

START_SECONDS = 0.5
"""Time for a worker process to start, one after the other on two busy cores."""


@dataclass(frozen=True)
class WideRun:
    """One run of one road with one number of workers.

    ``ideal``: images/s of bare threads that only sleep, as often and as long as the workers did.
    ``cpu``: seconds of CPU of all processes for an image, less those of the bare threads. ``loop``:
    seconds of CPU of the thread that iterates the loader for an image.
    """

    rate: float
    ideal: float
    cpu: float
    loop: float

    @property
    def share(self) -> float:
        return self.rate / self.ideal


def wake_on_time() -> None:
    """Let threads that this thread starts wake up within a microsecond, instead of 50."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def time_kernel(road: str, work: Photos) -> float:
    """CPU seconds of the kernel for an image, measured with one worker. Runs in its own process.

    CPU time: other processes on this core do not count. The few microseconds of Python that a batch
    costs the worker are part of it.
    """
    loader: Any = ROADS[road].make(work)()
    for _ in loader:
        pass
    images = 0
    loop, cpu = time.thread_time(), time.process_time()
    for _ in range(ROADS[road].epochs):
        for batch in loader:
            images += _rows(batch)
    return (time.process_time() - cpu - (time.thread_time() - loop)) / images


def run_wide(road: str, work: Photos, cost: float, seconds: float, warm_up: float) -> WideRun:
    """Measure a road whose images take the kernel ``cost`` seconds. Runs in its own process."""
    from penstock import native

    wake_on_time()
    plan, kernel = ROADS[road], native.kernel()
    nap, sleep, starting = ASLEEP_SECONDS, sleep_in_python, START_SECONDS * work.workers
    if plan.native:
        kernel.nap(cost)
        nap, sleep, starting = cost, kernel.count_naps, 0.0
    batches = _forever((plan.simulated or plan.make)(work)())
    next(batches)
    until = time.perf_counter() + starting + warm_up
    while time.perf_counter() < until:
        next(batches)
    images = 0
    cpu, loop, started = _cpu(), time.thread_time(), time.perf_counter()
    while time.perf_counter() < started + seconds:
        images += _rows(next(batches))
    passed = time.perf_counter() - started
    loop, cpu = time.thread_time() - loop, _cpu() - cpu
    batches.close()
    ideal, bare_cpu = bare_threads(work.workers, nap, seconds, sleep)
    return WideRun(images / passed, ideal, max(0.0, cpu / images - bare_cpu), loop / images)


CountNaps = Callable[[float, float], int]
"""Sleeps for (first argument) again and again for (second argument) seconds; returns how often."""


def sleep_in_python(nap: float, seconds: float) -> int:
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(nap)
        count += 1
    return count


def bare_threads(
    count: int, nap: float, seconds: float, sleep: CountNaps = sleep_in_python
) -> tuple[float, float]:
    """Sleeps a second of threads that do nothing else, and the CPU seconds of a sleep.

    ``sleep``: as the workers slept, in Python or in the kernel.
    """
    done = [0] * count

    def sleep_often(number: int) -> None:
        done[number] = sleep(nap, seconds)

    threads = [threading.Thread(target=sleep_often, args=(number,)) for number in range(count)]
    cpu, started = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return sum(done) / passed, cpu / max(1, sum(done))


def _forever(loader: Any) -> Generator[Any, None, None]:
    """Batches of one epoch after the other; closing the iterator closes the loader."""
    try:
        while True:
            yield from loader
    finally:
        close = getattr(loader, "close", None)
        if close is not None:
            close()


def _rows(batch: Any) -> int:
    return len(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _cpu() -> float:
    """CPU seconds of this process, and of its children that run."""
    import psutil

    total = time.process_time()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


def run(options: Namespace) -> Result:
    from penstock import native

    if not native.kernel_available():
        raise SystemExit(f"wide needs the compiled kernel: {native.why_no_kernel()}")
    with as_folder(options.data) as folder:
        return _run(folder, options)


def _run(data: Path, options: Namespace) -> Result:
    runs: dict[str, dict[int, list[WideRun]]] = {}
    wrong: list[str] = []
    costs = {road: _cost(road, data, options) for road in options.roads}
    for number in range(options.rounds):
        for road in options.roads:
            for workers in options.widths:
                progress(f"wide: round {number + 1} of {options.rounds}: {road}, {workers} workers")
                work = _work(data, options.batch, workers)
                try:
                    made: WideRun = run_alone(
                        run_wide,
                        road,
                        work,
                        costs[road],
                        options.seconds,
                        options.warm_up,
                        timeout=120 + options.warm_up + workers + 4 * options.seconds,
                    ).value
                except AloneError as error:
                    wrong.append(f"wide: {road} with {workers} workers: {error}")
                    progress(error.printed or f"  {error}")
                    continue
                runs.setdefault(road, {}).setdefault(workers, []).append(made)
                progress(f"  {made.rate:,.0f} images/s, {made.share:.2f} of ideal")
    return make_result(runs, costs, wrong, options.rounds)


def _cost(road: str, data: Path, options: Namespace) -> float:
    if not ROADS[road].native:
        return 0.0
    if options.cost is not None:
        return 1e-6 * float(options.cost)
    progress(f"wide: timing the kernel: {road}")
    found: float = run_alone(time_kernel, road, _work(data, options.batch, 1), timeout=180).value
    progress(f"  {1e6 * found:.0f} us for an image")
    return found


def _work(data: Path, batch: int, workers: int) -> Photos:
    return Photos(data, "uint8", batch, workers)


def make_result(
    runs: Mapping[str, Mapping[int, Sequence[WideRun]]],
    costs: Mapping[str, float],
    wrong: Sequence[str],
    rounds: int,
) -> Result:
    """A table for each road, one row for each number of workers."""
    tables, notes = [], []
    for road, by_workers in runs.items():
        rows = []
        for workers, made in sorted(by_workers.items()):
            share = Spread.of([one.share for one in made])
            rows.append(
                (
                    str(workers),
                    f"{statistics.median(one.rate for one in made):,.0f}",
                    f"{statistics.median(one.ideal for one in made):,.0f}",
                    f"{share.median:.2f} ({share.low:.2f} to {share.high:.2f})",
                    _goal(road, workers, share.median),
                    f"{1e6 * statistics.median(one.cpu for one in made):.1f}",
                    f"{1e6 * statistics.median(one.loop for one in made):.1f}",
                )
            )
        title = f"wide, {road}: {ROADS[road].title}; rounds: {rounds}"
        columns = COLUMNS
        if ROADS[road].native:
            columns = (*COLUMNS[:-2], f"CPU us per image (goal {1e6 * MOST_CPU:g})", COLUMNS[-1])
        tables.append(Table(title, columns, tuple(rows)))
        if costs[road]:
            notes.append(
                f"wide, {road}: the kernel sleeps for an image: {1e6 * costs[road]:.0f} us"
            )
    notes.append(
        "wide: ideal is the rate of bare threads that sleep as often and as long as the workers; "
        "CPU is that of all processes less what the sleeps of bare threads take"
    )
    data = {
        road: {str(workers): [asdict(one) for one in made] for workers, made in by_workers.items()}
        for road, by_workers in runs.items()
    }
    return Result(tuple(tables), tuple(notes), tuple(wrong), {"wide": data})


COLUMNS = (
    "workers",
    "images/s",
    "ideal",
    "share of ideal",
    "goal",
    "CPU us per image",
    "loop us per image",
)


def _goal(road: str, workers: int, share: float) -> str:
    if not ROADS[road].native or workers not in GOALS:
        return ""
    return f"{GOALS[workers]:g}: {'reached' if share >= GOALS[workers] else 'missed'}"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ROADS:
            raise ArgumentTypeError(f"there is no road {name!r}; there are: {', '.join(ROADS)}")
    return names


def _widths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 1,8,64")
    return tuple(int(part) for part in parts)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--roads",
        type=_names,
        default=tuple(name for name, plan in ROADS.items() if not plan.sounds),
        metavar="LIST",
        help=f"run only these, of: {', '.join(ROADS)}; audio needs other --data than the rest",
    )
    parser.add_argument(
        "--cost",
        type=float,
        metavar="US",
        help="microseconds that the kernel sleeps for a sample, instead of the time it takes",
    )
    parser.add_argument(
        "--widths",
        type=_widths,
        default=WORKERS,
        metavar="LIST",
        help=f"numbers of workers ({','.join(map(str, WORKERS))})",
    )


BENCHMARK = Benchmark(
    "wide",
    "1 to 64 workers on simulated cores: the kernel sleeps, so only Python limits",
    run,
    _arguments,
    needs_data=True,
    data="folder of classes, each a folder of JPEGs; for the road audio one of WAV files, or a "
    "Parquet file as for the benchmark audio",
    files=(".parquet",),
)
