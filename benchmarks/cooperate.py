"""CPU workers and a device that prepare each mini-batch together, against other ways to split it.

Costs are real: this machine reads, decodes and augments the pictures of ``--data``, and its CPU
time is measured for each. The device is a fake one with stated times. Workers and device run on a
virtual clock, driven by these costs, with Penstock's own policy: two cores cannot show eight
workers and a device.
"""

from __future__ import annotations

import ctypes
import heapq
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import thread_time
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.device.cooperation import Cooperation, Sharing, Threshold
from penstock.device.fake import Times
from penstock.device.image_work import ImageOnDevice, image_work
from penstock.device.shared_schedule import cut, usual_tiny
from penstock.keyed import Keys
from penstock.pipeline import Pipeline

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Speed of the device relative to one CPU worker, for what it does of a sample."""

BATCHES, COUNTED = 60, 30
"""Mini-batches of a run, and how many at its end count: before them the threshold is learnt."""

TAIL = 1.0
"""Deviation of the logarithm of the factor that makes sizes heavy-tailed."""

TIMES = Times()
"""The constants of the fake device."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options of ``mallopt`` in glibc."""

LARGEST_KEPT, MOST_KEPT = 32 << 20, 1 << 30
"""Bytes of one allocation, the most that glibc accepts, and of all that is freed."""

PIXELS = 224 * 224 * 3
"""Bytes of a picture on its way to the device, where the CPU decodes."""

Way = Literal[
    "CPU alone",
    "device alone",
    "device decodes",
    "CPU decodes",
    "plain",
    "affinity",
    "with threshold",
    "all of it",
]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Costs:
    """What tiny-batches cost, one number for each: bytes of the files, CPU seconds of all of it, of
    the part until crops are resized, and of the CPU's part of a device task, bytes of that, and
    samples. ``rest``: the share of ``whole`` that is work for the device."""

    nbytes: NDArray[Any]
    whole: NDArray[Any]
    framed: NDArray[Any]
    host: NDArray[Any]
    packed: NDArray[Any]
    samples: NDArray[Any]
    rest: NDArray[Any]

    def pick(self, places: NDArray[Any]) -> Costs:
        return Costs(*(getattr(self, name)[places] for name in self.__dataclass_fields__))

    def scaled(self, factors: NDArray[Any]) -> Costs:
        names = [name for name in self.__dataclass_fields__ if name not in ("samples", "rest")]
        return replace(self, **{name: getattr(self, name) * factors for name in names})

    def device(self, speed: float, times: Times) -> NDArray[Any]:
        """Seconds of the device: two launches, the copy, and the rest of the work."""
        work = self.rest * self.whole / speed
        seconds: NDArray[Any] = 2 * times.launch + self.packed / times.bus + work
        return seconds


def pipelines(data: Path) -> dict[str, tuple[Pipeline, Pipeline]]:
    """By name: the pipeline, and the part of it until the crop is resized and flipped."""
    image = ps.image
    framed = ps.from_folder(data).map(image.decode()).map(image.random_resized_crop(224))
    framed = framed.map(image.random_flip())
    return {
        "default": (framed.map(image.normalize()), framed),
        "RandAugment": (framed.map(image.rand_augment(2, 9)).map(image.normalize()), framed),
    }


def measure(pipeline: Pipeline, framed: Pipeline, samples: int, tiny: int, rounds: int) -> Costs:
    """Measure tiny-batches of a pipeline in this thread; the least of all rounds counts."""
    road, part = pipeline.road(0).open(), framed.road(0).open()
    work = image_work(pipeline.road(0))
    if not isinstance(work, ImageOnDevice):
        raise ValueError(f"the device cannot prepare this pipeline: {work}")
    source = pipeline.source

    def host(keys: Keys) -> Any:
        contents = [source.file_samples().content(sample) for sample in source.read(keys.indices)]  # type: ignore[union-attr]
        return work.pack(keys, contents, lambda nbytes: np.empty(nbytes, np.uint8))

    indices = np.linspace(0, len(source) - 1, min(samples, len(source)), dtype=int).tolist()
    rows, turns = [], range(rounds)
    for first in range(0, len(indices) - tiny + 1, tiny):
        keys = Keys(0, indices[first : first + tiny])
        packed = host(keys)
        if packed is None:
            continue  # a file that the CPU has to decode
        # In turns, so that a busy machine disturbs all of them alike.
        taken = [
            [_thread_seconds(function, keys) for function in (road.get, part.get, host)]
            for _ in turns
        ]
        whole, until_framed, entropy = np.min(taken, axis=0)
        nbytes = sum(work.sizes(keys.indices))
        rows.append((nbytes, whole, until_framed, entropy, packed.buffer.nbytes, tiny, 0.0))
    if not rows:
        raise ValueError(f"{len(indices)} files, and none of them is a baseline JPEG")
    return Costs(*np.array(rows, float).T)


def _thread_seconds(function: Callable[[Keys], Any], keys: Keys) -> float:
    """CPU seconds of this thread for a call."""
    started = thread_time()
    function(keys)
    return thread_time() - started


@dataclass(frozen=True)
class Case:
    """A run: CPU workers, and the speed of the device relative to one of them."""

    way: Way
    workers: int
    speed: float
    times: Times = TIMES


class _Events:
    """A virtual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._number, act))
        self._number += 1

    def next(self) -> bool:
        if not self._events:
            return False
        self.now, _, act = heapq.heappop(self._events)
        act()
        return True


def cooperation_of(case: Case) -> Cooperation:
    """The policy for a way to split data."""
    made = Cooperation(
        case.workers,
        exact=True,
        device=case.way != "CPU alone",
        foresees=case.way == "all of it",
    )
    made.sharing = Sharing("spatial", decided=True)
    if case.way == "device alone":
        made.threshold = Threshold(1 << 30, frozen=True)
    elif case.way not in ("with threshold", "all of it"):
        made.threshold = Threshold(0, frozen=True)
    return made


def split_by_data(case: Case, batches: Sequence[Costs]) -> Iterator[float]:
    """The seconds of each mini-batch, one after the other, with tiny-batches dealt by policy."""
    policy, events = cooperation_of(case), _Events()
    idle, device_idle = case.workers, True
    for number, costs in enumerate(batches):
        # Without a device a loader deals tiny-batches in the order of their rows.
        unsorted = case.way in ("CPU alone", "plain")
        sizes = [1] * len(costs.nbytes) if unsorted else costs.nbytes.astype(int)
        device = costs.device(case.speed, case.times)
        started = events.now
        policy.open(number, list(sizes))

        def deal(costs: Costs = costs, device: NDArray[Any] = device) -> None:
            nonlocal idle, device_idle
            if device_idle and (task := policy.take_device(events.now)) is not None:
                device_idle = False

                def device_done(task: Any = task) -> None:
                    nonlocal device_idle
                    device_idle = True
                    policy.done(task, events.now)

                events.after(device[task.tiny], device_done)
            while idle and (task := policy.take_cpu(events.now)) is not None:
                idle -= 1
                of = costs.host if task.part == "decode" else costs.whole

                def cpu_done(task: Any = task) -> None:
                    nonlocal idle
                    idle += 1
                    policy.done(task, events.now)

                events.after(of[task.tiny], cpu_done)

        deal()
        while policy.left(number) and events.next():
            deal()
        yield events.now - started


def split_by_operator(case: Case, batches: Sequence[Costs]) -> Iterator[float]:
    """The same where each sample passes CPU and device; later steps of a sample come first."""
    for costs in batches:
        if case.way == "device decodes":
            work = (costs.framed - costs.host).clip(0) / case.speed
            device = 2 * case.times.launch + costs.packed / case.times.bus + work
            steps = [("cpu", costs.host), ("device", device), ("cpu", costs.whole - costs.framed)]
        else:
            work = (costs.whole - costs.framed).clip(0) / case.speed
            pixels = PIXELS * costs.samples
            device = 2 * case.times.launch + pixels / case.times.bus + work
            steps = [("cpu", costs.framed), ("device", device)]
        events = _Events()
        free = {"cpu": case.workers, "device": 1}
        ready: dict[str, list[tuple[int, int]]] = {"cpu": [], "device": []}
        left = len(costs.whole)
        ready["cpu"] = [(0, tiny) for tiny in range(left)]

        def deal(
            steps: list[tuple[str, Any]] = steps,
            events: _Events = events,
            free: dict[str, int] = free,
            ready: dict[str, list[tuple[int, int]]] = ready,
        ) -> None:
            for who in ("device", "cpu"):
                while free[who] and ready[who]:
                    step, tiny = heapq.heappop(ready[who])
                    free[who] -= 1

                    def done(who: str = who, step: int = step, tiny: int = tiny) -> None:
                        free[who] += 1
                        if -step + 1 < len(steps):
                            heapq.heappush(ready[steps[-step + 1][0]], (step - 1, tiny))

                    events.after(float(max(0.0, steps[-step][1][tiny])), done)

        deal()
        while events.next():
            deal()
        yield events.now


def best_possible(case: Case, costs: Costs) -> float:
    """A time that no schedule of these tiny-batches beats: they could be cut at will and nobody
    ever waited, but no two worked on the same tiny-batch at once."""
    device = costs.device(case.speed, case.times)
    saved = costs.whole - costs.host
    order = np.argsort(-saved / device)
    cpu = (costs.whole.sum() - np.concatenate([[0.0], saved[order].cumsum()])) / case.workers
    on_device = np.concatenate([[0.0], device[order].cumsum()])
    # Both are piecewise linear in the number of tiny-batches on the device, and cross once.
    places = np.linspace(0, len(order), 64 * len(order) + 1)
    numbers = np.arange(len(order) + 1)
    both = np.maximum(np.interp(places, numbers, cpu), np.interp(places, numbers, on_device))
    longest = np.minimum(costs.whole, costs.host + device).max()
    return max(float(both.min()), float(longest))


def mini_batches(
    costs: Mapping[int, Costs], rows: int, tiny: int, *, heavy: bool, seed: int = 0
) -> list[Costs]:
    """Mini-batches of ``rows`` samples, cut as a loader does, drawn from what was measured.

    ``costs``: of tiny-batches, by their number of samples.
    """
    rng = np.random.default_rng(seed)
    counts = [count for _, count in cut(0, rows, tiny)]
    made = []
    for _ in range(BATCHES):
        drawn = []
        for samples in counts:
            measured = costs[samples]
            one = measured.pick(rng.integers(0, len(measured.whole), 1))
            if heavy:
                # Each sample has a factor of its own.
                one = one.scaled(rng.lognormal(-(TAIL**2) / 2, TAIL, samples).mean(keepdims=True))
            drawn.append(one)
        names = Costs.__dataclass_fields__
        made.append(Costs(*(np.concatenate([getattr(o, name) for o in drawn]) for name in names)))
    return made


def seconds(case: Case, batches: Sequence[Costs]) -> float:
    """The mean time of the counted mini-batches."""
    by_operator = case.way in ("device decodes", "CPU decodes")
    ran = (split_by_operator if by_operator else split_by_data)(case, batches)
    return fmean(list(ran)[-COUNTED:])


def compare(
    name: str, batches: Sequence[Costs], workers: int
) -> tuple[Table, list[str], dict[str, Any]]:
    """All ways at all speeds, relative to the CPU alone."""
    rows, wrong = [], []
    data: dict[str, Any] = {}
    for speed in SPEEDS:
        case = Case("CPU alone", workers, speed)
        times = {way: seconds(replace(case, way=way), batches) for way in WAYS}
        alone = times["CPU alone"]
        best = fmean(best_possible(case, costs) for costs in batches[-COUNTED:])
        over = times["all of it"] / best - 1
        rows.append(
            (
                f"{speed:g}",
                *(f"{alone / times[way]:.2f}" for way in WAYS),
                f"{alone / best:.2f}",
                f"{over:+.1%}",
            )
        )
        data[f"{speed:g}"] = {**times, "best possible": best}
        if over > 0.05:
            wrong.append(f"{name}, speed {speed:g}: {over:.1%} above the best possible time")
        if times["all of it"] > alone * 1.001:
            wrong.append(f"{name}, speed {speed:g}: slower than the CPU alone")
    heads = ("speed of the device", *WAYS, "best possible", "all over best")
    title = f"cooperate: {name}, {workers} workers: speed relative to the CPU alone"
    return Table(title, heads, tuple(rows)), wrong, data


def _keep_memory() -> None:
    """Let the allocator keep memory that is freed, as a loader writes to memory that it has.

    Otherwise a large result of ``road.get`` costs the making of its pages each time.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(TRIM_THRESHOLD, MOST_KEPT)


def run(options: Namespace) -> Result:
    _keep_memory()
    tables, wrong, notes = [], [], []
    data: dict[str, Any] = {}
    tiny = options.tiny or usual_tiny(options.batch, options.cpus)
    for name, (pipeline, framed) in pipelines(options.data).items():
        progress(f"cooperate: measuring {options.measured} samples of {name}")
        sizes = {size for _, size in cut(0, options.batch, tiny)}
        measured = {
            size: measure(pipeline, framed, options.measured, size, options.rounds)
            for size in sizes
        }
        costs = measured[tiny]
        # The CPU's part has a cost for each call, which is no work that the device would do less.
        rest = max(0.0, 1.0 - float(costs.host.sum() / costs.whole.sum()))
        for size, one in measured.items():
            measured[size] = replace(one, rest=np.full(len(one.rest), rest))
        samples = int(costs.samples.sum())
        entropy = costs.host.sum() / costs.whole.sum()
        notes.append(
            f"cooperate: {name}: {1e3 * costs.whole.sum() / samples:.2f} ms of CPU time a sample; "
            f"the CPU's part of a device task is {entropy:.0%} of that; "
            f"{costs.packed.sum() / samples / 1e3:.0f} KB a sample to the device, files of "
            f"{costs.nbytes.sum() / samples / 1e3:.0f} KB ({samples} samples)"
        )
        for heavy in (False, True):
            sizes_are = "heavy-tailed sizes" if heavy else "sizes of the data"
            batches = mini_batches(measured, options.batch, tiny, heavy=heavy)
            table, found, values = compare(f"{name}, {sizes_are}", batches, options.cpus)
            tables.append(table)
            wrong += found
            data[f"{name}, {sizes_are}"] = values
    times = TIMES
    notes.append(
        f"cooperate: costs are CPU times of this machine; the device is a fake one: "
        f"{1e6 * times.launch:.0f} us a launch, {times.bus / 1e9:.0f} GB/s over the bus, and the "
        "stated speed for what it does of a sample. Mini-batches run one after the other on a "
        "virtual clock."
    )
    return Result(tuple(tables), tuple(notes), tuple(wrong), data)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--cpus", type=count, default=4, help="CPU workers of the simulation (4)")
    parser.add_argument(
        "--measured", type=count, default=200, help="samples whose costs are measured (200)"
    )
    parser.add_argument(
        "--tiny", type=count, help="samples of the largest tiny-batch (as a loader chooses)"
    )


BENCHMARK = Benchmark(
    "cooperate",
    "CPU and a fake device on each mini-batch, against other ways to split the work",
    run,
    _arguments,
    needs_data=True,
)
