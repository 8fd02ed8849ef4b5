"""When it is time to say how things are: decided by the clock alone."""

from __future__ import annotations

import math

from penstock.stats import Clock

EVERY = 0.5
"""Seconds between two reports: often enough for people, too seldom to be felt by training."""

LIVELY = 2.0
"""Seconds after which a view seems to stand still. Only really slow reports are rarer."""

WANTED, MOST = 1 / 2000, 1 / 100
"""The part of the time that reports should take, and that they may take to remain lively."""


class Pulse:
    """Due at once, and then every ``every`` seconds, or less often where a report takes long."""

    __slots__ = ("_began", "_clock", "_every", "_next")

    def __init__(self, clock: Clock, every: float = EVERY) -> None:
        self._clock = clock
        self._every = every
        self._next = self._began = -math.inf

    def due(self) -> bool:
        return self._clock() >= self._next

    def begin(self) -> None:
        """A report is being made."""
        self._began = self._clock()

    def end(self) -> None:
        """It is done: what it took says when the next may come."""
        took = self._clock() - self._began
        pause = min(took / WANTED, max(LIVELY, took / MOST))
        self._next = self._began + max(self._every, pause)

    def stop(self) -> None:
        """Never again."""
        self._next = math.inf

    @property
    def stopped(self) -> bool:
        return self._next == math.inf
