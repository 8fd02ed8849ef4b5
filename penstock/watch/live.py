"""The loaders that run now, and how they did in the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from penstock.watch.place import LivePlace
from penstock.watch.rates import Rates, between, rates
from penstock.watch.snapshot import Snapshot

KEPT = 300.0
"""Seconds that a history goes back."""


def loaders(place: LivePlace | None = None) -> list[Snapshot]:
    """How every loader of this user on this machine is."""
    return (place or LivePlace()).snapshots()


class Point(NamedTuple):
    """What is drawn of one moment."""

    time: float
    stall: float
    samples_per_second: float


@dataclass(slots=True)
class Course:
    """One loader as it was seen so far: the last two different snapshots, and points to draw."""

    last: Snapshot
    before: Snapshot | None = None
    seen: float = 0.0
    points: deque[Point] = field(default_factory=deque)

    @property
    def now(self) -> Rates:
        """What happened lately."""
        return rates(self.before, self.last, self.seen)

    @property
    def overall(self) -> Rates:
        """What happened since it began."""
        return between(None, self.last.stats)

    def add(self, snapshot: Snapshot, now: float) -> None:
        """It was looked at again."""
        new = snapshot.written != self.last.written
        if new:
            self.before, self.last = self.last, snapshot
        self.seen = now
        # A loop that is busy with one step says nothing, and there is nothing to draw.
        if (new and self.now.seconds > 0) or snapshot.waiting is not None:
            found = self.now
            self.points.append(Point(now, found.stall, found.samples_per_second))
        while self.points and self.points[0].time < now - KEPT:
            self.points.popleft()

    def plain(self) -> dict[str, Any]:
        """As what JSON has."""
        last = self.last
        return {
            **last.plain(),
            "age": max(0.0, self.seen - last.written),
            "rates": asdict(self.now),
            "overall": asdict(self.overall),
            "points": [list(point) for point in self.points],
        }


class History:
    """All loaders that were seen, for as long as they run."""

    def __init__(self) -> None:
        self.courses: dict[object, Course] = {}

    def add(self, found: Iterable[Snapshot], now: float) -> list[Course]:
        """What was found this time; those that are gone are forgotten."""
        courses: dict[object, Course] = {}
        for snapshot in found:
            course = self.courses.get(snapshot.key) or Course(snapshot)
            course.add(snapshot, now)
            courses[snapshot.key] = course
        self.courses = courses
        return list(courses.values())
