"""Echoed batches on their way out: each is prepared once and handed out several times."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from penstock.job import Ready

Pull = Callable[[], Ready | None]


class Repeats:
    """Hands out what the engine prepared in the sequence that an echo of batches deals.

    A batch that will come again is handed out as a copy: whoever takes it may work in place.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.fresh = 0
        """Samples that the engine has prepared."""
        self.delivered = 0
        """Samples that were handed out, copies included."""
        self._order: Iterator[int] = iter(())
        self._left: Counter[int] = Counter()
        self._held: dict[int, Ready] = {}
        self._given: set[int] = set()

    def begin(self, epoch: int, deliveries: Sequence[int]) -> None:
        """From here on these, by the numbers of the batches they repeat."""
        self.epoch = epoch
        self._order = iter(deliveries)
        self._left = Counter(deliveries)
        self._held.clear()
        self._given.clear()

    def next(self, pull: Pull) -> tuple[Ready, bool] | None:
        """The next batch, and whether it came before; ``None`` after the last.

        ``pull`` gives the next that was prepared.
        """
        number = next(self._order, None)
        if number is None:
            return None
        while number not in self._held:
            ready = pull()
            if ready is None:
                return None
            self._held[ready.plan.number] = ready
            self.fresh += ready.rows
        self._left[number] -= 1
        ready = self._held[number]
        if self._left[number]:
            ready = ready._replace(value=copy.deepcopy(ready.value))
        else:
            del self._held[number]
        self.delivered += ready.rows
        again = number in self._given
        self._given.add(number)
        return ready, again
