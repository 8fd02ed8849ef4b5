"""Races: contestants take turns in fresh processes, so that what disturbs one disturbs all."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from benchmarks.alone import AloneError, alone, cpu_of_tree
from benchmarks.sameness import Look, first_leaf, look

W = TypeVar("W")

Make = Callable[[], Iterable[Any]]
"""Makes the loader; everything that is not the loader's own was done before."""

WARM_UP = 0.5
"""Seconds before the clock starts: queues fill, caches of the CPU and allocator settle."""


@dataclass(frozen=True)
class Contestant(Generic[W]):
    """``prepare`` imports, makes the dataset of a workload, and returns what makes the loader."""

    title: str
    prepare: Callable[[W], Make]
    needs: tuple[str, ...]
    ours: bool = False

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class Length:
    """How long each contestant runs: seconds, or a number of samples if that is given."""

    seconds: float
    samples: int | None = None

    def over(self, elapsed: float, samples: int) -> bool:
        return elapsed >= self.seconds if self.samples is None else samples >= self.samples


@dataclass(frozen=True)
class Run:
    """One contestant, once. ``cpu`` is seconds per 1000 samples, ``memory`` bytes at the peak."""

    rate: float
    cpu: float
    first: float
    look: Look
    memory: int = 0


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, and the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("a spread of nothing")
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Lane:
    """All runs of one contestant; ``why_not`` says why there are none, or not enough."""

    title: str
    ours: bool
    runs: dict[int, Run] = field(default_factory=dict)
    why_not: str = ""

    def spread(self, what: str) -> Spread:
        return Spread.of([float(getattr(run, what)) for run in self.runs.values()])


def turns(count: int, rounds: int) -> Iterator[tuple[int, list[int]]]:
    """Who runs when: everybody once a round, and each round begins with the next one."""
    for number in range(rounds):
        yield number, [(number + place) % count for place in range(count)]


def race(
    name: str,
    contestants: Sequence[Contestant[W]],
    workload: W,
    *,
    rounds: int,
    length: Length,
    checked: int,
) -> list[Lane]:
    """Every contestant on the same workload, interleaved. ``checked`` samples are looked at."""
    lanes = [Lane(contestant.title, contestant.ours) for contestant in contestants]
    for lane, contestant in zip(lanes, contestants, strict=True):
        if contestant.missing:
            lane.why_not = f"not installed: {', '.join(contestant.missing)}"
    for number, order in turns(len(contestants), rounds):
        for place in order:
            lane = lanes[place]
            if lane.why_not:
                continue
            progress(f"{name}: round {number + 1}/{rounds}: {lane.title}")
            try:
                watched = alone(
                    throughput,
                    contestants[place].prepare,
                    workload,
                    length,
                    checked,
                    timeout=120 + 10 * length.seconds,
                )
            except AloneError as error:
                lane.why_not = f"failed: {error}"
                progress(f"  {lane.why_not}")
                continue
            run: Run = watched.value
            lane.runs[number] = Run(run.rate, run.cpu, run.first, run.look, watched.peak)
            progress(f"  {run.rate:,.0f} samples/s, first batch after {run.first * 1e3:.1f} ms")
    return lanes


def throughput(prepare: Callable[[W], Make], workload: W, length: Length, checked: int) -> Run:
    """Takes batches, touches one element of each, and drops them. Runs in its own process."""
    make = prepare(workload)
    started = time.perf_counter()
    loader = make()
    batches = _endless(loader)
    leaf = first_leaf(next(batches))
    _touch(leaf)
    first = time.perf_counter() - started

    seen = look(batches, checked)
    warm = time.perf_counter()
    while time.perf_counter() - warm < WARM_UP:
        _touch(first_leaf(next(batches)))

    # Nothing of the last batch is kept, or loaders that use memory again could not.
    del leaf
    samples, elapsed = 0, 0.0
    cpu = cpu_of_tree()
    started = time.perf_counter()
    while not length.over(elapsed, samples):
        leaf = first_leaf(next(batches))
        _touch(leaf)
        samples += len(leaf)
        elapsed = time.perf_counter() - started
    cpu = cpu_of_tree() - cpu
    batches.close()
    close = getattr(loader, "close", None)
    if close is not None:
        close()
    return Run(samples / elapsed, 1000 * cpu / samples, first, seen)


def ratios(lane: Lane, peers: Sequence[Lane], what: str, best: Callable[..., float]) -> list[float]:
    """This lane over the best peer of the same round, for each round that has both."""
    found = []
    for number, run in lane.runs.items():
        others = [float(getattr(peer.runs[number], what)) for peer in peers if number in peer.runs]
        if others:
            found.append(float(getattr(run, what)) / best(others))
    return found


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _endless(loader: Iterable[Any]) -> Any:
    while True:
        yield from loader


def _touch(leaf: Any) -> None:
    leaf[(0,) * leaf.ndim]
