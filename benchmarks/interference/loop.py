"""A training loop that launches many small operations from Python, on a core of its own."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Prepare, Run
from benchmarks.harness.sameness import Look, first_leaf

OPERATIONS = 400
"""Small torch operations in a step: about 1 ms, as many as a small model launches on a GPU."""

Step = Callable[[], None]


def make_step() -> Step:
    """A step that spends its time in calls, not in arithmetic: 64 numbers at a time."""
    import torch

    torch.set_num_threads(1)
    values, factors = torch.ones(64), torch.full((64,), 0.999)

    def step() -> None:
        value = values
        for _ in range(OPERATIONS // 4):
            value = torch.add(value, factors)
            value = torch.mul(value, factors)
            value = torch.relu(value)
            value = torch.sub(value, factors)

    return step


def split_cores(cores: Iterable[int]) -> tuple[set[int], set[int]]:
    """The core of the loop, and the cores of everything else."""
    first, *others = sorted(cores)
    if not others:
        raise SystemExit("interference needs at least 2 cores: one is for the training loop alone.")
    return {first}, set(others)


@dataclass
class Paced:
    """When the next batch is due, at ``rate`` samples a second. Pure: times are given."""

    rate: float
    now: float

    def __post_init__(self) -> None:
        self._due = self.now

    def due(self, now: float) -> bool:
        return now >= self._due

    def taken(self, samples: int, now: float) -> None:
        # A loader that is too slow is not asked to catch up afterwards.
        self._due = max(self._due, now - samples / self.rate) + samples / self.rate


@dataclass(frozen=True)
class Interference:
    """Runs steps for ``seconds``, and takes batches at ``rate`` samples a second.

    Measures ``step``, the mean seconds of a step, without time in which another process had the
    core; ``median``, the median with it; ``take``, CPU seconds of the loop's thread per batch
    taken; ``rate``, samples a second.
    """

    rate: float
    seconds: float
    warm_up: float

    def __call__(self, prepare: Prepare[Any], workload: Any) -> Run:
        loop, others = split_cores(os.sched_getaffinity(0))
        # Threads and processes inherit these cores from the thread that starts them.
        os.sched_setaffinity(0, others)
        loader = prepare(workload)()
        batches = _endless(loader)
        first_leaf(next(batches))
        os.sched_setaffinity(0, loop)
        step = make_step()
        self._run(step, batches, self.warm_up)
        seen = self._run(step, batches, self.seconds)
        batches.close()
        close = getattr(loader, "close", None)
        if close is not None:
            close()
        values = {
            "step": (sum(seen.steps) - seen.displaced) / len(seen.steps),
            "median": statistics.median(seen.steps),
            "take": statistics.fmean(seen.takes) if seen.takes else 0.0,
            "rate": seen.samples / seen.passed,
        }
        return Run(values, Look((), "", 0.0, 0.0))

    def _run(self, step: Step, batches: Any, seconds: float) -> _Seen:
        clock = time.perf_counter
        seen = _Seen()
        started, displaced = clock(), run_delay()
        pace = Paced(self.rate, started)
        while (now := clock()) < started + seconds:
            step()
            seen.steps.append(clock() - now)
            if pace.due(clock()):
                seen.displaced += run_delay() - displaced
                cpu = time.thread_time()
                taken = len(first_leaf(next(batches)))
                seen.takes.append(time.thread_time() - cpu)
                seen.samples += taken
                pace.taken(taken, clock())
                displaced = run_delay()
        seen.displaced += run_delay() - displaced
        seen.passed = clock() - started
        return seen


@dataclass
class _Seen:
    """What was measured: seconds of each step, seconds in which steps were displaced by other
    processes, CPU seconds of each take."""

    steps: list[float] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)
    displaced: float = 0.0
    samples: int = 0
    passed: float = 0.0


def run_delay() -> float:
    """Seconds for which this thread could have run, but another one had its core.

    Waiting for the GIL is not part of it: a thread that waits for a lock is not ready to run.
    """
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _endless(loader: Iterable[Any]) -> Any:
    while True:
        yield from loader
