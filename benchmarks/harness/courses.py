"""What contestants run: each function here measures one loader, in a process of its own."""

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
    """Takes batches, touches one element of each, and drops them, for so many seconds (or, where
    that is given, samples). ``checked`` samples are looked at before the clock starts, and then
    ``warm_up`` seconds go by: workers may still be starting after the first batch.

    ``rate`` is samples a second, ``cpu`` seconds of all processes for 1000 samples, ``first`` the
    seconds from making the loader to its first batch.
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
    """Two epochs: ``first`` is the seconds from making the loader to its first batch, ``second``
    those from asking for the second epoch to its first batch."""

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
        started = time.perf_counter()
        epoch = iter(loader)
        _take(epoch)
        second = time.perf_counter() - started
        del epoch
        _close(loader)
        return Run({"first": first, "second": second}, seen)


def _take(batches: Any) -> int:
    """One batch, touched; nothing of it is kept, so loaders that use memory again can."""
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
