"""Watches whether worker threads take the GIL from the training loop, so that they should move out.

While the loop asks for its first batches, its thread looks a few times whether another thread holds
the GIL. The share of looks at which one does is the share of time for which workers hold it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock import native

LOOK_AT = (2, 4, 8, 16, 32)
"""Batches after which there is a look: not the first one, for which everything is imported."""

ENOUGH = 3
"""Looks before a decision."""

MOST = 0.1
"""The share of time for which workers may hold the GIL. It slows down a loop that launches many
small operations by about as much."""

LOOKS, NAP = 50, 200e-6
"""The GIL is wanted this many times, after naps of this many seconds: 15 ms in all."""


def measure() -> float:
    """The share of time for which other threads hold the GIL, 0 to 1."""
    held: int = native.kernel().gil_waits(LOOKS, NAP)
    return held / LOOKS


class GilWatch:
    """Decides whether workers should move to processes of their own.

    >>> shares = iter([0.4, 0.0, 0.3])
    >>> watch = GilWatch(lambda: next(shares))
    >>> [batch for batch in range(10) if watch.after(batch) is not None]
    [8]
    """

    def __init__(self, measure: Callable[[], float] = measure) -> None:
        self._measure = measure
        self._seen: list[float] = []
        self.over = False
        """Nothing is measured any more."""

    def after(self, batches: int) -> float | None:
        """Look, if it is time after this many batches.

        Returns the share of time for which workers hold the GIL if they should move out. The median
        of several looks counts: one alone may have met a pause, or a machine that was interrupted.
        """
        if self.over or batches not in LOOK_AT:
            return None
        self._seen.append(self._measure())
        self.over = batches == LOOK_AT[-1]
        if len(self._seen) < ENOUGH:
            return None
        # Imported here: most loaders never get this far, and it takes 2 ms.
        from statistics import median

        if median(self._seen) <= MOST:
            return None
        self.over = True
        return median(self._seen)
