"""Races: contestants take turns in fresh processes, so that what disturbs one disturbs all."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from benchmarks.alone import AloneError, alone
from benchmarks.sameness import Look

W = TypeVar("W")

Make = Callable[[], Iterable[Any]]
"""Makes the loader; everything that is not the loader's own was done before."""

Prepare = Callable[[W], Make]
"""Imports what is needed, makes the dataset of a workload, and returns what makes the loader."""


@dataclass(frozen=True)
class Contestant(Generic[W]):
    """Who runs. ``needs`` are the modules it imports, ``ours`` tells Penstock from its peers."""

    title: str
    prepare: Prepare[W]
    needs: tuple[str, ...]
    ours: bool = False

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class Run:
    """One contestant, once: what was measured, by name, and what its batches looked like."""

    values: dict[str, float]
    look: Look


Course = Callable[[Prepare[Any], Any], Run]
"""What every contestant of a race has to run, in its own process; see ``courses``."""


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
    """The runs of one contestant by round; ``why_not`` says why some, or all, are missing."""

    title: str
    ours: bool
    runs: dict[int, Run] = field(default_factory=dict)
    why_not: str = ""

    def spread(self, what: str) -> Spread:
        return Spread.of([run.values[what] for run in self.runs.values()])


def turns(count: int, rounds: int) -> Iterator[tuple[int, list[int]]]:
    """Who runs when: everybody once a round, and each round begins with the next one."""
    for number in range(rounds):
        yield number, [(number + place) % count for place in range(count)]


def race(
    name: str,
    contestants: Sequence[Contestant[W]],
    workload: W,
    course: Course,
    *,
    rounds: int,
    timeout: float,
) -> list[Lane]:
    """Every contestant on the same workload and course, interleaved."""
    lanes = [Lane(contestant.title, contestant.ours) for contestant in contestants]
    for lane, contestant in zip(lanes, contestants, strict=True):
        if contestant.missing:
            lane.why_not = f"not installed: {', '.join(contestant.missing)}"
    for number, order in turns(len(contestants), rounds):
        for place in order:
            lane = lanes[place]
            if lane.why_not:
                continue
            progress(f"{name}: round {number + 1} of {rounds}: {lane.title}")
            try:
                watched = alone(course, contestants[place].prepare, workload, timeout=timeout)
            except AloneError as error:
                lane.why_not = f"failed: {error}"
                progress(error.printed or f"  {error}")
                continue
            run: Run = watched.value
            run = replace(run, values={**run.values, "memory": float(watched.peak)})
            lane.runs[number] = run
            progress("  " + ", ".join(f"{key} {value:.4g}" for key, value in run.values.items()))
    return lanes


def ratios(
    lane: Lane, peers: Sequence[Lane], what: str, best: Callable[[list[float]], float]
) -> list[float]:
    """This lane over the best peer of the same round, for each round that has both."""
    found = []
    for number, run in lane.runs.items():
        others = [peer.runs[number].values[what] for peer in peers if number in peer.runs]
        if others:
            found.append(run.values[what] / best(others))
    return found


def progress(line: str) -> None:
    """Say on stderr how far it is."""
    print(line, file=sys.stderr, flush=True)
