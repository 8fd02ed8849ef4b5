"""What the roads of the refurbish benchmark run, each in a process of its own."""

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
from benchmarks.reuse.roads import Reused

WARM_UP = 2
"""Epochs before the clock starts. The first fills the store; while the second is consumed the next
is begun early, as while any later one, so that what was begun before the clock starts is as much as
what is begun and left when it stops."""


@dataclass(frozen=True)
class Cycles:
    """Takes batches as fast as they come, for whole cycles of epochs: as many as ``seconds`` take,
    or, where that is given, ``samples``. Part of a cycle would be unfair, because epochs differ.

    ``rate`` is samples a second, ``cpu`` seconds of all processes for 1000 samples, ``fresh`` the
    share of samples that were prepared anew.
    """

    seconds: float
    samples: int | None = None

    def __call__(self, prepare: Prepare[Reused], work: Reused) -> Run:
        loader: Any = prepare(work)()
        seen = warmed(loader, work)
        before = prepared_anew(loader)
        samples, elapsed = 0, 0.0
        cpu = cpu_of_tree()
        started = time.perf_counter()
        while elapsed < self.seconds if self.samples is None else samples < self.samples:
            for batch in chain.from_iterable(loader for _ in range(work.cycle)):
                samples += _touched(batch)
                # Kept while the next is asked for, it would count as memory of the loader.
                del batch
            elapsed = time.perf_counter() - started
        cpu = cpu_of_tree() - cpu
        fresh = prepared_anew(loader) - before
        loader.close()
        values = {"rate": samples / elapsed, "cpu": 1000 * cpu / samples, "fresh": fresh / samples}
        return Run(values, seen)


@dataclass(frozen=True)
class BatchTimes:
    """The time of every batch of one cycle, without workers, so that nothing is prepared ahead.

    ``variation`` is the deviation of these times over their mean.
    """

    def __call__(self, prepare: Prepare[Reused], work: Reused) -> Run:
        loader: Any = prepare(replace(work, workers=0))()
        seen = warmed(loader, work)
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


def paced(
    pacemaker: Prepare[Reused], runners: Sequence[Prepare[Reused]], work: Reused
) -> list[Run]:
    """A cycle of each runner for an accelerator that takes as long for a batch as the pacemaker
    takes to prepare one, which is measured just before. Runs in its own process.

    ``busy`` is the share of time that the accelerator has work, ``pace`` its seconds for a batch.
    """
    loader: Any = pacemaker(work)()
    warmed(loader, work)
    pace = statistics.median(batch_times(loader, work.cycle))
    loader.close()
    runs = []
    for prepare in runners:
        loader = prepare(work)()
        seen = warmed(loader, work)
        batches = samples = 0
        started = time.perf_counter()
        for batch in chain.from_iterable(loader for _ in range(work.cycle)):
            samples += _touched(batch)
            batches += 1
            time.sleep(pace)
            del batch
        elapsed = time.perf_counter() - started
        loader.close()
        values = {"rate": samples / elapsed, "busy": batches * pace / elapsed, "pace": pace}
        runs.append(Run(values, seen))
    return runs


def warmed(loader: Any, work: Reused) -> Look:
    """The epochs before the clock starts; all of the first is looked at."""
    batches = chain.from_iterable(loader for _ in range(WARM_UP))
    seen = look(batches, len(loader) * work.batch)
    for batch in batches:
        del batch
    return seen


def batch_times(loader: Iterable[Any], epochs: int) -> list[float]:
    """Seconds from asking for a batch to having it, for all of some epochs."""
    found = []
    started = time.perf_counter()
    for batch in chain.from_iterable(loader for _ in range(epochs)):
        found.append(time.perf_counter() - started)
        _touched(batch)
        del batch
        started = time.perf_counter()
    return found


def prepared_anew(loader: Any) -> int:
    """Samples that went the whole road so far."""
    stats = loader.stats()
    keeping = stats.refurbish or stats.echo
    return int(stats.samples if keeping is None else keeping.fresh)


def _touched(batch: Any) -> int:
    leaf = first_leaf(batch)
    leaf[(0,) * leaf.ndim]
    return len(leaf)
