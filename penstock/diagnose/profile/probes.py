"""Probes: what is put on a road, and around parts of its operations, to see where time goes.

A probe is a stop that passes samples on. It works in the same road, with the same steps, as
everything else, so what is measured is what runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.keyed import Keys
from penstock.source.dataset import DatasetSource
from penstock.source.source import Source
from penstock.source.stream import StreamSource
from penstock.stats import Clock
from penstock.stops.map import Map, name_of
from penstock.stops.stop import Site, Step, Stop, Upstream


class Spent(NamedTuple):
    """Seconds: of the wall clock, and of this thread's CPU time."""

    wall: float = 0.0
    cpu: float = 0.0

    def plus(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def minus(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


class Clocks(NamedTuple):
    """Both clocks; tests give their own."""

    wall: Clock = time.perf_counter
    cpu: Clock = time.thread_time

    def now(self) -> Spent:
        return Spent(self.wall(), self.cpu())


class Book:
    """What the probes of one road have seen since it was last cleared.

    ``spent[i]`` is the time in stage i *and everything above it*. ``parts`` has (time, how often)
    by (stage, part). ``left[i]`` holds what left stage i, where that was asked for.
    """

    def __init__(self, stages: int, clocks: Clocks) -> None:
        self.clocks = clocks
        self.keep = False
        self.spent = [Spent()] * stages
        self.left: list[list[Any]] = [[] for _ in range(stages)]
        self.parts: dict[tuple[int, str], tuple[Spent, int]] = {}

    def clear(self) -> None:
        self.spent = [Spent()] * len(self.spent)
        self.left = [[] for _ in self.left]
        self.parts = {}

    def saw(self, stage: int, spent: Spent, samples: list[Any]) -> None:
        self.spent[stage] = self.spent[stage].plus(spent)
        if self.keep:
            self.left[stage].extend(samples)

    def part(self, stage: int, name: str, do: Callable[..., Any], *given: Any) -> Any:
        """Do it, as a part of a stage."""
        started = self.clocks.now()
        value = do(*given)
        took = self.clocks.now().minus(started)
        spent, times = self.parts.get((stage, name), (Spent(), 0))
        self.parts[stage, name] = (spent.plus(took), times + 1)
        return value


@dataclass(frozen=True)
class Probe(Stop):
    """Stands below a stage and times all above."""

    stage: int
    book: Book

    @property
    def name(self) -> str:
        return "probe"

    def fingerprint(self) -> str | None:
        return None

    def step(self, site: Site) -> Step:
        book, stage, now = self.book, self.stage, self.book.clocks.now

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            started = now()
            samples = upstream(keys)
            book.saw(stage, now().minus(started), samples)
            return samples

        return step


class Ended(Exception):
    """A stream has no more samples."""


class Drawn(Source):
    """A stream as the source of a road: each reading takes the next sample."""

    def __init__(self, stream: StreamSource) -> None:
        self.stream = stream
        self._samples: Iterator[Any] | None = None

    def __len__(self) -> int:
        return 0

    def read(self, indices: Sequence[int]) -> list[Any]:
        if self._samples is None:
            self._samples = self.stream.open()
        try:
            return [next(self._samples) for _ in indices]
        except StopIteration:
            raise Ended from None

    def restart(self) -> None:
        """Begin with the first sample again."""
        close = getattr(self._samples, "close", None)
        self._samples = None
        if close is not None:
            close()

    def name(self, index: int) -> str:
        return self.stream.name(index)


class Composed:
    """torchvision's Compose, its transforms timed apart. Its transforms are called as it calls
    them, one after the other, so they draw the same."""

    def __init__(self, whole: Any, stage: int, book: Book) -> None:
        self._whole = whole
        self._stage = stage
        self._book = book
        self._names = numbered([name_of(part) for part in whole.transforms])

    def __call__(self, *inputs: Any) -> Any:
        # Several inputs (an image and its boxes) go through the transforms of v2 side by side.
        several = len(inputs) > 1
        value: Any = inputs if several else inputs[0]
        for name, part in zip(self._names, self._whole.transforms, strict=True):
            given = value if several else (value,)
            value = self._book.part(self._stage, name, part, *given)
        return value

    def __getattr__(self, name: str) -> Any:
        # A dataset may ask its transform for more than to be called.
        if name.startswith("__") or "_whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._whole, name)


def numbered(names: Sequence[str]) -> list[str]:
    """The names, numbered where one comes twice."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return out


def timed_source(source: Source, book: Book) -> Source:
    """A dataset whose ``transform`` is a Compose, with a copy of it that times the parts."""
    if not isinstance(source, DatasetSource):
        return source
    transform = getattr(source.dataset, "transform", None)
    if not _composes(transform):
        return source
    try:
        dataset = copy.copy(source.dataset)
        dataset.transform = Composed(transform, 0, book)
        timed = copy.copy(source)
        timed.dataset = dataset
    except Exception:  # a dataset that cannot be copied is measured whole
        return source
    return timed


def timed_stop(stop: Stop, stage: int, book: Book) -> Stop:
    """A map with its parts timed, where it has any that can be told apart."""
    if not isinstance(stop, Map):
        return stop
    whole = stop.function
    if _composes(whole):
        return replace(stop, function=Composed(whole, stage, book), label=stop.name)
    return stop


def _composes(function: Any) -> bool:
    """A Compose of torchvision's own; a user's may do more than call one after the other."""
    kind = type(function)
    return kind.__name__ == "Compose" and (kind.__module__ or "").startswith(
        "torchvision.transforms"
    )
