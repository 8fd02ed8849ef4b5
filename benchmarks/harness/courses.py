"""Courses of races: each class here measures one loader, in a fresh process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.alone import cpu_of_tree
from benchmarks.harness.measure import Prepare, Run
from benchmarks.harness.sameness import first_leaf, look


@dataclass(frozen=True)
class Throughput:
    """Takes batches for ``seconds``, or for ``samples`` samples if given, touching one element of
    each batch before dropping it. Before the clock starts, ``checked`` samples are inspected, and
    then batches are taken for ``warm_up`` seconds: workers may still be starting after the first
    batch.

    Measures ``rate``, samples per second; ``cpu``, CPU seconds of all processes per 1000 samples;
    ``first``, seconds from making the loader to its first batch.
    """

    seconds: float
    checked: int
    samples: int | None = None
    warm_up: float = 0.0

    def __call__(self, prepare: Prepare[Any], workload: Any) -> Run:
        make = prepare(workload)
        started = time.perf_counter()
        loader = make()
        batches = _endless(loader)
        _take(batches)
        first = time.perf_counter() - started

        seen = look(batches, self.checked)
        warm = time.perf_counter()
        while time.perf_counter() - warm < self.warm_up:
            _take(batches)

        samples, elapsed = 0, 0.0
        cpu = cpu_of_tree()
        started = time.perf_counter()
        while not self._over(elapsed, samples):
            samples += _take(batches)
            elapsed = time.perf_counter() - started
        cpu = cpu_of_tree() - cpu
        batches.close()
        _close(loader)
        return Run({"rate": samples / elapsed, "cpu": 1000 * cpu / samples, "first": first}, seen)

    def _over(self, elapsed: float, samples: int) -> bool:
        return elapsed >= self.seconds if self.samples is None else samples >= self.samples


@dataclass(frozen=True)
class Starts:
    """Runs two epochs. Measures ``first``, seconds from making the loader to its first batch,
    ``epoch``, seconds from making it to the end of the first epoch, and ``second``, seconds from
    starting the second epoch to its first batch."""

    checked: int

    def __call__(self, prepare: Prepare[Any], workload: Any) -> Run:
        make = prepare(workload)
        started = time.perf_counter()
        loader = make()
        epoch = iter(loader)
        _take(epoch)
        first = time.perf_counter() - started
        seen = look(epoch, self.checked)
        for batch in epoch:
            del batch
        whole = time.perf_counter() - started
        started = time.perf_counter()
        epoch = iter(loader)
        _take(epoch)
        second = time.perf_counter() - started
        del epoch
        _close(loader)
        return Run({"first": first, "epoch": whole, "second": second}, seen)


def _take(batches: Any) -> int:
    """Take one batch, touch one element and return its length. Keeps no reference to the batch, so
    that a loader can reuse its memory."""
    leaf = first_leaf(next(batches))
    leaf[(0,) * leaf.ndim]
    return len(leaf)


def _endless(loader: Iterable[Any]) -> Any:
    while True:
        yield from loader


def _close(loader: Any) -> None:
    close = getattr(loader, "close", None)
    if close is not None:
        close()
