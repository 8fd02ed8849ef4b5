"""Decides whether a process that ended before it was ready is started again, and when. Pure.

It is a worker, a node, or the process that loads a pipeline on trial.
"""

from __future__ import annotations

import signal

MOST_KILLED = 8
"""Starts of one worker that may be ended from outside, one after the other. With the pauses below,
the last one is at least 11 s after the first: the OOM killer is done by then, or will not stop."""

MOST_FAILED = 2
"""Starts of one worker that may fail for a reason of its own: the next one would fail as well."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a start, from the third on: the pause doubles each time up to the longest."""

_CRASHES = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals that a process causes itself."""


def killed_from_outside(code: int | None) -> bool:
    """Whether a process with this exit code was ended by a signal that another process sent.

    >>> killed_from_outside(-9), killed_from_outside(-11), killed_from_outside(1)
    (True, False, False)
    """
    return code is not None and code < 0 and -code not in _CRASHES


class FailedStarts:
    """Counts, for each worker, the starts in a row after which it was not ready.

    >>> starts = FailedStarts()
    >>> [starts.pause(0, outside=True) for _ in range(4)]
    [0.0, 0.1, 0.2, 0.4]
    >>> [starts.pause(1, outside=False) for _ in range(2)]
    [0.0, None]
    """

    def __init__(self) -> None:
        self._killed: dict[int, int] = {}
        self._failed: dict[int, int] = {}

    def count(self, worker: int) -> int:
        """How many starts of this worker have failed in a row."""
        return self._killed.get(worker, 0) + self._failed.get(worker, 0)

    def pause(self, worker: int, *, outside: bool) -> float | None:
        """Record a failed start. Returns the seconds until the next; ``None``: give up.

        ``outside``: the reason was not in the worker, which was killed or could not be created.
        """
        counts, most = (self._killed, MOST_KILLED) if outside else (self._failed, MOST_FAILED)
        counts[worker] = counts.get(worker, 0) + 1
        if counts[worker] >= most:
            return None
        if not outside or counts[worker] == 1:
            return 0.0
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (counts[worker] - 2))

    def ready(self, worker: int) -> None:
        """Record that a worker has started."""
        self._killed.pop(worker, None)
        self._failed.pop(worker, None)
