"""Courses of the benchmark ``refurbish``: each measures a pipeline in a fresh process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from benchmarks.harness.alone import cpu_of_tree
from benchmarks.harness.measure import Prepare, Run
from benchmarks.harness.sameness import Look, first_leaf, look
from benchmarks.reuse.roads import ReuseWorkload

WARM_UP = 2
"""Epochs before the measurement. The first fills the store. From the second on, the loader begins
the next epoch early: so as many samples are prepared ahead at the start of the measurement as at
its end."""


@dataclass(frozen=True)
class Cycles:
    """Takes batches as fast as possible for whole cycles of epochs: for at least ``seconds``, or at
    least ``samples`` if given. Part of a cycle would be unfair, because its epochs differ.

    Measures ``rate``, samples per second; ``cpu``, CPU seconds of all processes per 1000 samples;
    ``fresh``, the share of samples that were not reused.
    """

    seconds: float
    samples: int | None = None

    def __call__(self, prepare: Prepare[ReuseWorkload], work: ReuseWorkload) -> Run:
        loader: Any = prepare(work)()
        seen = run_warm_up(loader, work)
        before = fresh_samples(loader)
        samples, elapsed = 0, 0.0
        cpu = cpu_of_tree()
        started = time.perf_counter()
        while elapsed < self.seconds if self.samples is None else samples < self.samples:
            for batch in chain.from_iterable(loader for _ in range(work.cycle)):
                samples += _touch(batch)
                # A batch kept while the next is requested would count as memory of the loader.
                del batch
            elapsed = time.perf_counter() - started
        cpu = cpu_of_tree() - cpu
        fresh = fresh_samples(loader) - before
        loader.close()
        values = {"rate": samples / elapsed, "cpu": 1000 * cpu / samples, "fresh": fresh / samples}
        return Run(values, seen)


@dataclass(frozen=True)
class BatchTimes:
    """Times every batch of one cycle, without workers, so that nothing is prepared ahead.

    Measures ``median`` and ``slowest`` batch in seconds, and ``variation``, the standard deviation
    of the times over their mean.
    """

    def __call__(self, prepare: Prepare[ReuseWorkload], work: ReuseWorkload) -> Run:
        loader: Any = prepare(replace(work, workers=0))()
        seen = run_warm_up(loader, work)
        times = batch_times(loader, work.cycle)
        loader.close()
        return Run(
            {
                "variation": statistics.pstdev(times) / statistics.fmean(times),
                "median": statistics.median(times),
                "slowest": max(times),
            },
            seen,
        )


def run_at_pace(
    pacemaker: Prepare[ReuseWorkload],
    runners: Sequence[Prepare[ReuseWorkload]],
    work: ReuseWorkload,
    ratio: float | None = None,
) -> list[Run]:
    """Run one cycle of each runner with a simulated accelerator. Its step takes as long as the
    pacemaker takes to prepare a batch (median), measured just before; with ``ratio`` the mean over
    it. Runs in a fresh process.

    Measures ``rate``, samples per second; ``busy``, the share of time that the accelerator works;
    ``pace``, its seconds per batch.
    """
    loader: Any = pacemaker(work)()
    run_warm_up(loader, work)
    times = batch_times(loader, work.cycle)
    pace = statistics.median(times) if ratio is None else statistics.fmean(times) / ratio
    loader.close()
    runs = []
    for prepare in runners:
        loader = prepare(work)()
        seen = run_warm_up(loader, work)
        batches = samples = 0
        started = time.perf_counter()
        for batch in chain.from_iterable(loader for _ in range(work.cycle)):
            samples += _touch(batch)
            batches += 1
            time.sleep(pace)
            del batch
        elapsed = time.perf_counter() - started
        loader.close()
        values = {"rate": samples / elapsed, "busy": batches * pace / elapsed, "pace": pace}
        runs.append(Run(values, seen))
    return runs


def run_warm_up(loader: Any, work: ReuseWorkload) -> Look:
    """Run the epochs before the measurement. Returns a summary of the first one."""
    batches = chain.from_iterable(loader for _ in range(WARM_UP))
    seen = look(batches, len(loader) * work.batch)
    for batch in batches:
        del batch
    return seen


def batch_times(loader: Iterable[Any], epochs: int) -> list[float]:
    """Seconds from requesting a batch to receiving it, for all batches of some epochs."""
    times = []
    started = time.perf_counter()
    for batch in chain.from_iterable(loader for _ in range(epochs)):
        times.append(time.perf_counter() - started)
        _touch(batch)
        del batch
        started = time.perf_counter()
    return times


def fresh_samples(loader: Any) -> int:
    """Number of samples prepared from the file so far, not reused."""
    stats = loader.stats()
    reuse = stats.refurbish or stats.echo
    return int(stats.samples if reuse is None else reuse.fresh)


def _touch(batch: Any) -> int:
    leaf = first_leaf(batch)
    leaf[(0,) * leaf.ndim]
    return len(leaf)
