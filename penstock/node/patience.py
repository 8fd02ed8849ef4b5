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
    """One wait for ``what`` that began at ``started``.

    ``timeout``: seconds without a message after which the node is asked as well. If it answers, it
    is at work, and the wait goes on: the node itself applies the timeout to its workers. If it
    answers neither within ``ANSWER`` nor within ``timeout``, that is an error.

    >>> patience = Patience("batch 3", started=100.0)
    >>> [patience.due(now) for now in (129.0, 130.0, 131.0, 140.0, 150.0)]
    [None, 'ask', None, 'unanswered', None]
    >>> patience = Patience("batch 3", started=100.0, timeout=6.0)
    >>> patience.due(106.0), patience.answered(107.0), patience.due(112.0), patience.due(113.0)
    ('ask', False, None, 'ask')
    >>> patience.due(123.0)
    'timeout'
    """

    def __init__(self, what: str, started: float, timeout: float | None = None) -> None:
        self.what = what
        self._started = started
        self._timeout = timeout
        self._complained = False
        self._answer_by: float | None = None
        self._ask_at: float | None = None
        self._ask_again(started)

    def _ask_again(self, now: float) -> None:
        pauses = [] if self._complained else [max(0.0, self._started + SILENT - now)]
        if self._timeout is not None:
            pauses.append(self._timeout)
        self._ask_at = now + min(pauses) if pauses else None

    def heard(self, now: float) -> None:
        """The node has sent something else than an answer."""
        self._answer_by = None
        self._ask_again(now)

    def answered(self, now: float) -> bool:
        """The node has answered. Returns whether to say so: once, after a long wait."""
        asked, self._answer_by = self._answer_by is not None, None
        complain = asked and not self._complained and now >= self._started + SILENT
        self._complained |= complain
        self._ask_again(now)
        return complain

    def due(self, now: float) -> Due | None:
        """What is to be done now."""
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at, self._answer_by = None, now + max(ANSWER, self._timeout or 0.0)
            return "ask"
        if self._answer_by is not None and now >= self._answer_by:
            self._answer_by, self._complained = None, True
            return "unanswered" if self._timeout is None else "timeout"
        return None

    def seconds(self, now: float) -> float | None:
        """Seconds until something is due; ``None`` if nothing will be."""
        times = [time for time in (self._ask_at, self._answer_by) if time is not None]
        return max(0.0, min(times) - now) if times else None
