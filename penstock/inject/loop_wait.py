"""Waits for the first training loop of a command, says if none comes, and ends the command. Pure.

A script that never takes a batch from a loader would otherwise train to its end, with nobody told
that it is not analysed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

SAY_AFTER = 10.0
"""Seconds without a training loop after which that is said."""

LEAST = 60.0
"""Least seconds after which a command is ended: imports and datasets take their time. With 25, a
script that imported Lightning on a busy machine was ended before its first batch."""

KILL_AFTER = 15.0
"""Seconds after SIGTERM at which a command that did not end is killed."""


@dataclass
class LoopWait:
    """Call it about once a second; it returns a signal to send to the command, or ``None``.

    - ``reached``: whether a process of the command has imported torch's loader: then the time
      begins anew.
    - ``begun``: whether a training loop has asked for a batch.
    - ``say``: prints a line.
    - ``seconds``: seconds after which the command is ended if no loop has begun.
    """

    reached: Callable[[], bool]
    begun: Callable[[], bool]
    say: Callable[[str], None]
    seconds: float
    clock: Callable[[], float]
    ended: bool = False

    def __post_init__(self) -> None:
        self._start = self.clock()
        self._said = self._found = self._reached = False

    def __call__(self) -> signal.Signals | None:
        if self._found or (not self.ended and self.begun()):
            self._found = True
            return None
        if not self._reached and not self.ended and self.reached():
            self._reached, self._start = True, self.clock()
        waited, limit = self.clock() - self._start, max(self.seconds, LEAST)
        if self.ended:
            late = waited >= limit + KILL_AFTER
            return signal.SIGKILL if late else None
        if waited >= limit:
            self.ended = True
            self.say(
                f"no training loop took a batch from a loader in {waited:.0f} s; the command is "
                "ended. A loop counts as training if gradients are enabled. Give more --seconds if "
                "the script needs longer to begin."
            )
            return signal.SIGTERM
        if waited >= SAY_AFTER and not self._said:
            self._said = True
            self.say(
                f"no training loop has taken a batch from a loader yet, after {waited:.0f} s; "
                f"waiting until {limit:.0f} s."
            )
        return None
