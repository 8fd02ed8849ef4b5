"""Races: contestants take turns in fresh processes, so that a disturbance affects all of them."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.harness.alone import AloneError, Watched, run_alone
from benchmarks.harness.environments import interpreter, process_environment
from benchmarks.harness.sameness import Look

W = TypeVar("W")

Make = Callable[[], Iterable[Any]]
"""Makes the loader. Imports and the dataset are ready before, so only the loader is timed."""

Prepare = Callable[[W], Make]
"""Imports modules, makes the dataset of a workload, and returns the function that makes the
loader."""

CONVERSION_TIMEOUT = 3600.0
"""Seconds that converting the data may take."""


@dataclass(frozen=True)
class Contestant(Generic[W]):
    """A loader in a race. ``needs``: the modules it imports. ``ours``: Penstock, not a peer.

    ``env`` names its environment in ``.bench``; ``environment`` are variables set for its process.
    ``convert`` is for loaders with their own file format: it writes the data in that format under
    the temporary directory, once before the first round. The time is reported but not raced.
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
    """One run of one contestant: measured values by name, and a summary of its batches."""

    values: dict[str, float]
    look: Look


Course = Callable[[Prepare[Any], Any], Run]
"""Measures one contestant, in a fresh process; see ``courses``."""


@dataclass(frozen=True)
class Spread:
    """Median, least and most of several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("a spread needs at least one value")
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Conversion:
    """Cost of converting the data: seconds, and bytes on disk."""

    seconds: float
    bytes: int


@dataclass
class Lane:
    """The runs of one contestant by round. ``why_not``: why some or all runs are missing.

    ``python`` is its interpreter, of the environment ``env``.
    """

    title: str
    ours: bool
    runs: dict[int, Run] = field(default_factory=dict)
    why_not: str = ""
    env: str = ""
    python: str = ""
    conversion: Conversion | None = None
    failed: bool = False

    def fail(self, error: object) -> None:
        """Record an error of this contestant: it makes the whole race invalid."""
        self.failed = True
        self.why_not = f"failed: {error}"

    def spread(self, what: str) -> Spread:
        return Spread.of([run.values[what] for run in self.runs.values()])


def turns(count: int, rounds: int) -> Iterator[tuple[int, list[int]]]:
    """The order of contestants in each round: all run once, and the first one rotates."""
    for number in range(rounds):
        yield number, [(number + place) % count for place in range(count)]


def peer_names(contestants: Iterable[Contestant[Any]]) -> tuple[str, ...]:
    """The distinct environment names of the peers among the contestants."""
    return tuple(dict.fromkeys(contestant.env for contestant in contestants if not contestant.ours))


def select(contestants: Iterable[Contestant[W]], peers: Sequence[str]) -> tuple[Contestant[W], ...]:
    """Penstock's own contestants, and the peers whose environment is in ``peers``."""
    return tuple(
        contestant for contestant in contestants if contestant.ours or contestant.env in peers
    )


def race(
    name: str,
    contestants: Sequence[Contestant[W]],
    workload: W,
    course: Course,
    *,
    rounds: int,
    timeout: float,
) -> list[Lane]:
    """Run every contestant on the same workload and course, in turns.

    A contestant that fails is left out of the later rounds.
    """
    # Kept for all rounds, because converted data are in it.
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
    chosen = interpreter(contestant.env, contestant.needs)
    return Lane(
        contestant.title,
        contestant.ours,
        why_not=chosen.why_not,
        env=contestant.env,
        python=chosen.python,
    )


@dataclass(frozen=True)
class _Entry(Generic[W]):
    """A contestant in a race. ``place``: its temporary directory."""

    contestant: Contestant[W]
    lane: Lane
    place: Path

    def convert(self, name: str, workload: W) -> None:
        if self.contestant.convert is None:
            return
        progress(f"{name}: converting the data: {self.lane.title}")
        watched = self._run_alone(
            timed, self.contestant.convert, workload, timeout=CONVERSION_TIMEOUT
        )
        if watched is not None:
            size = sum(file.stat().st_size for file in self.place.rglob("*") if file.is_file())
            self.lane.conversion = Conversion(watched.value, size)
            progress(f"  {watched.value:.1f} s, {size / 1e6:.1f} MB")

    def run(self, number: int, course: Course, workload: W, timeout: float) -> None:
        watched = self._run_alone(course, self.contestant.prepare, workload, timeout=timeout)
        if watched is not None:
            run: Run = watched.value
            run = replace(run, values={**run.values, "memory": float(watched.peak)})
            self.lane.runs[number] = run
            progress("  " + ", ".join(f"{key} {value:.4g}" for key, value in run.values.items()))

    def _run_alone(
        self, function: Callable[..., Any], *args: Any, timeout: float
    ) -> Watched | None:
        """Run with the contestant's interpreter and directory. Errors are recorded in its lane."""
        python = self.lane.python
        environment = process_environment(python, self.place, dict(self.contestant.environment))
        try:
            return run_alone(
                function, *args, timeout=timeout, python=python, environment=environment
            )
        except AloneError as error:
            self.lane.fail(error)
            progress(error.printed or f"  {error}")
            return None


def timed(function: Callable[[W], None], workload: W) -> float:
    """Seconds that a function takes. Runs in a fresh process."""
    started = time.perf_counter()
    function(workload)
    return time.perf_counter() - started


def ratios(
    lane: Lane, peers: Sequence[Lane], what: str, best: Callable[[list[float]], float]
) -> list[float]:
    """Ratios of a lane's value ``what`` to the best peer's in the same round, for each round with
    both."""
    quotients = []
    for number, run in lane.runs.items():
        others = [peer.runs[number].values[what] for peer in peers if number in peer.runs]
        # Memory is 0 if the process ended before the first measurement: no ratio then.
        if others and best(others) > 0:
            quotients.append(run.values[what] / best(others))
    return quotients


def progress(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)
