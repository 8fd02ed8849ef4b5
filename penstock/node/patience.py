"""How long a member waits for the node before it asks, complains and gives up.

Pure: times in, decisions out.
"""

from __future__ import annotations

from typing import Literal

SILENT = 30.0
"""Seconds that a member waits without a word. Then it asks the node, and logs the answer."""

ANSWER = 10.0
"""Seconds that the node has for that answer."""

Due = Literal["ask", "unanswered", "timeout"]


class Patience:
    """One wait for ``what`` that began at ``started``. ``timeout``: seconds until it is an error.

    >>> patience = Patience("batch 3", started=100.0, timeout=60.0)
    >>> [patience.due(now) for now in (129.0, 130.0, 131.0, 140.0, 150.0, 160.0)]
    [None, 'ask', None, 'unanswered', None, 'timeout']
    """

    def __init__(self, what: str, started: float, timeout: float | None = None) -> None:
        self.what = what
        self._deadline = None if timeout is None else started + timeout
        self._ask_at: float | None = started + SILENT
        self._answer_by: float | None = None

    def extend(self, now: float, timeout: float | None) -> None:
        """The node has sent something: the time for the error begins anew."""
        self._deadline = None if timeout is None else now + timeout

    def answered(self) -> bool:
        """The node has answered. Returns whether this wait had asked, and not an earlier one."""
        asked, self._answer_by = self._answer_by is not None, None
        return asked

    def due(self, now: float) -> Due | None:
        """What is to be done now; each thing once."""
        if self._deadline is not None and now >= self._deadline:
            return "timeout"
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at, self._answer_by = None, now + ANSWER
            return "ask"
        if self._answer_by is not None and now >= self._answer_by:
            self._answer_by = None
            return "unanswered"
        return None

    def seconds(self, now: float) -> float | None:
        """Seconds until something is due; ``None`` if nothing will be."""
        times = [t for t in (self._deadline, self._ask_at, self._answer_by) if t is not None]
        return max(0.0, min(times) - now) if times else None
