"""Notices a group that stands still although its workers are idle, and decides what to do.

Pure: observations and times in, decisions out. A stall is a defect of the node: members starve,
workers are idle, and no batch makes progress. Members must not wait for ever because of it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

STALL = 15.0
"""Seconds without progress after which the watchdog acts, and between two of its steps."""

RESTARTS = 3
"""Restarts in a row without progress after which the group is given up."""

HealingStep = Literal["nudge", "restart", "give up"]
"""``nudge``: count busy workers anew and wake everything that may have missed an event.
``restart``: end the workers, start others, and ask for all wanted batches again. ``give up``:
report an error to the members."""


class Observation(NamedTuple):
    """A group as the watchdog sees it.

    ``starving``: a member has no batch to take, and only workers are needed for its next one.
    ``busy``: workers have tasks of this group, or are starting, or all of the node's are busy for
    other groups. ``progress``: a number that changes whenever a task ends or a batch is ready.
    """

    starving: bool
    busy: bool
    progress: int


class Watchdog:
    """Watches one group.

    >>> watchdog = Watchdog(patience=10.0)
    >>> stalled = Observation(starving=True, busy=False, progress=7)
    >>> [watchdog.look(stalled, now) for now in (0.0, 9.0, 10.0, 19.0, 20.0)]
    [None, None, 'nudge', None, 'restart']
    >>> watchdog.look(Observation(starving=True, busy=True, progress=7), 31.0) is None
    True
    """

    def __init__(self, patience: float = STALL) -> None:
        self.patience = patience
        self.since: float | None = None
        """Since when the group has stood still; ``None`` if it does not."""
        self._steps = 0
        self._progress: int | None = None

    def look(self, seen: Observation, now: float) -> HealingStep | None:
        """The step to take now, if any."""
        if seen.progress != self._progress:
            self._progress, self._steps, self.since = seen.progress, 0, None
        if not seen.starving or seen.busy:
            self.since = None
            return None
        if self.since is None:
            self.since = now
        if now - self.since < self.patience:
            return None
        self.since = now
        self._steps += 1
        if self._steps == 1:
            return "nudge"
        return "restart" if self._steps <= 1 + RESTARTS else "give up"
