"""Races: contestants take turns in fresh processes, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.harness.alone import AloneError, Watched, alone
from benchmarks.harness.environments import interpreter, surroundings
from benchmarks.harness.sameness import Look

W = TypeVar("W")

Make = Callable[[], Iterable[Any]]
"""Makes the loader; everything that is not the loader's own was done before."""

Prepare = Callable[[W], Make]
"""Imports what is needed, makes the dataset of a workload, and returns what makes the loader."""


CONVERTING = 3600.0
"""Seconds that writing the data anew may take."""


@dataclass(frozen=True)
class Contestant(Generic[W]):
    """Who runs. ``needs`` are the modules it imports, ``ours`` tells Penstock from its peers.

    ``env`` names the environment in ``.bench`` that it runs in; ``environment`` are variables set
    for its process. ``convert`` writes the data anew under the temporary directory, for loaders
    that read a format of their own: once, before the first round, off the clock.
    """

    title: str
    prepare: Prepare[W]
    needs: tuple[str, ...]
    ours: bool = False
    env: str = ""
    convert: Callable[[W], None] | None = None
    environment: tuple[tuple[str, str], ...] = ()


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


@dataclass(frozen=True)
class Conversion:
    """What writing the data anew cost: seconds, and bytes on disk."""

    seconds: float
    bytes: int


@dataclass
class Lane:
    """The runs of one contestant by round; ``why_not`` says why some, or all, are missing.

    ``python`` is the interpreter that ran it, in the environment ``env``.
    """

    title: str
    ours: bool
    runs: dict[int, Run] = field(default_factory=dict)
    why_not: str = ""
    env: str = ""
    python: str = ""
    conversion: Conversion | None = None

    def spread(self, what: str) -> Spread:
        return Spread.of([run.values[what] for run in self.runs.values()])


def turns(count: int, rounds: int) -> Iterator[tuple[int, list[int]]]:
    """Who runs when: everybody once a round, and each round begins with the next one."""
    for number in range(rounds):
        yield number, [(number + place) % count for place in range(count)]


def peer_names(contestants: Iterable[Contestant[Any]]) -> tuple[str, ...]:
    """The environments of the peers among them, each once."""
    return tuple(dict.fromkeys(one.env for one in contestants if not one.ours))


def chosen(contestants: Iterable[Contestant[W]], peers: Sequence[str]) -> tuple[Contestant[W], ...]:
    """Ours, and the peers of these environments."""
    return tuple(one for one in contestants if one.ours or one.env in peers)


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
    # Made for the race and kept between rounds: converted data are there.
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as top:
        entries = [
            _Entry(contestant, _lane(contestant), Path(top) / str(number))
            for number, contestant in enumerate(contestants)
        ]
        for entry in entries:
            entry.place.mkdir()
            if not entry.lane.why_not:
                entry.convert(name, workload)
        for number, order in turns(len(entries), rounds):
            for entry in (entries[place] for place in order):
                if not entry.lane.why_not:
                    progress(f"{name}: round {number + 1} of {rounds}: {entry.lane.title}")
                    entry.run(number, course, workload, timeout)
    return [entry.lane for entry in entries]


def _lane(contestant: Contestant[Any]) -> Lane:
    found = interpreter(contestant.env, contestant.needs)
    return Lane(
        contestant.title,
        contestant.ours,
        why_not=found.why_not,
        env=contestant.env,
        python=found.python,
    )


@dataclass(frozen=True)
class _Entry(Generic[W]):
    """A contestant in a race; ``place`` is its temporary directory."""

    contestant: Contestant[W]
    lane: Lane
    place: Path

    def convert(self, name: str, workload: W) -> None:
        if self.contestant.convert is None:
            return
        progress(f"{name}: converting the data: {self.lane.title}")
        watched = self._alone(timed, self.contestant.convert, workload, timeout=CONVERTING)
        if watched is not None:
            size = sum(file.stat().st_size for file in self.place.rglob("*") if file.is_file())
            self.lane.conversion = Conversion(watched.value, size)
            progress(f"  {watched.value:.1f} s, {size / 1e6:.1f} MB")

    def run(self, number: int, course: Course, workload: W, timeout: float) -> None:
        watched = self._alone(course, self.contestant.prepare, workload, timeout=timeout)
        if watched is not None:
            run: Run = watched.value
            run = replace(run, values={**run.values, "memory": float(watched.peak)})
            self.lane.runs[number] = run
            progress("  " + ", ".join(f"{key} {value:.4g}" for key, value in run.values.items()))

    def _alone(self, function: Callable[..., Any], *args: Any, timeout: float) -> Watched | None:
        """In the contestant's own interpreter and place. What goes wrong is noted in its lane."""
        python = self.lane.python
        environment = surroundings(python, self.place, dict(self.contestant.environment))
        try:
            return alone(function, *args, timeout=timeout, python=python, environment=environment)
        except AloneError as error:
            self.lane.why_not = f"failed: {error}"
            progress(error.printed or f"  {error}")
            return None


def timed(function: Callable[[W], None], workload: W) -> float:
    """Seconds that a function takes. Runs in its own process."""
    started = time.perf_counter()
    function(workload)
    return time.perf_counter() - started


def ratios(
    lane: Lane, peers: Sequence[Lane], what: str, best: Callable[[list[float]], float]
) -> list[float]:
    """This lane over the best peer of the same round, for each round that has both."""
    found = []
    for number, run in lane.runs.items():
        others = [peer.runs[number].values[what] for peer in peers if number in peer.runs]
        # Memory of a process that was over before anybody looked is 0, and compares with nothing.
        if others and best(others) > 0:
            found.append(run.values[what] / best(others))
    return found


def progress(line: str) -> None:
    """Say on stderr how far it is."""
    print(line, file=sys.stderr, flush=True)
