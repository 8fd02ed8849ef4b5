"""Which samples are prepared anew in which epoch when what was prepared is used several times."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order.order import whole
from penstock.order.shuffle import Permutation


@dataclass(frozen=True)
class Generations:
    """Revamper's balanced eviction: every epoch renews an equal part of what is kept.

    All samples stand in one queue, fixed by the seed; the first ``kept`` of them are kept. Epoch 0
    prepares everything. From then on the kept ones are renewed by turns, a part of 1 / ``reuse``
    each epoch: what was prepared first serves 1 to ``reuse`` epochs, all later ones exactly
    ``reuse``. Samples that are not kept are fresh every time.

    A sample's generation is which of its prepared versions an epoch uses. It depends on nothing
    but these numbers, so nobody has to remember it.

    >>> renewal = Generations(n=7, reuse=3, kept=6, seed=0)
    >>> [renewal.fresh(epoch) for epoch in range(5)]
    [7, 3, 3, 3, 3]
    >>> index = int(renewal.queued(np.array([0]))[0])
    >>> [renewal.generation(index, epoch) for epoch in range(8)]
    [0, 1, 1, 1, 2, 2, 2, 3]
    """

    n: int
    reuse: int
    kept: int
    seed: int
    _queue: Permutation = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("n", 0), ("reuse", 1), ("kept", 0), ("seed", None)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        if self.kept > self.n:
            raise PipelineError(
                f"{self.kept} samples are to be kept, and the source has {self.n}. Give {self.n} "
                "or fewer."
            )
        object.__setattr__(self, "_queue", Permutation(self.n, self.seed, "order/renew"))

    def generation(self, index: int, epoch: int) -> int:
        """Which version of a sample an epoch uses, counted from 0."""
        reuse, kept = self.reuse, self.kept
        if reuse == 1:
            return epoch
        place = self._queue.place(index)
        if place >= kept:
            return epoch
        turn = reuse - 1 - (kept - 1 - place) * reuse // kept
        return (epoch - 1 - turn) // reuse + 1

    def generations(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """``generation`` of many samples."""
        places = self._queue.places(indices)
        # Counted from the end, because there rounding down gives the turn that rounds parts down.
        behind = np.maximum(self.kept - 1 - places, 0)
        turns = self.reuse - 1 - part(behind, self.reuse, self.kept)
        return np.where(places < self.kept, (epoch - 1 - turns) // self.reuse + 1, epoch)

    def fresh(self, epoch: int) -> int:
        """How many samples an epoch prepares anew."""
        start, stop = self.span(epoch)
        return stop - start + self.n - self.kept

    def is_fresh(self, index: int, epoch: int) -> bool:
        """Whether an epoch prepares this sample anew."""
        start, stop = self.span(epoch)
        place = self._queue.place(index)
        return start <= place < stop or place >= self.kept

    def keeps(self, index: int) -> bool:
        """Whether what was prepared of this sample is kept at all."""
        return self.kept == self.n or self._queue.place(index) < self.kept

    def span(self, epoch: int) -> tuple[int, int]:
        """From where to where in the queue the kept samples stand that an epoch renews."""
        if epoch == 0:
            return 0, self.kept
        turn = (epoch - 1) % self.reuse
        return turn * self.kept // self.reuse, (turn + 1) * self.kept // self.reuse

    def queued(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which samples stand at these places of the queue."""
        return self._queue.samples(places)


def part(values: NDArray[np.int64], times: int, of: int) -> NDArray[np.int64]:
    """``values * times // of``, for values of 0 to ``of``, whatever their size.

    >>> part(np.array([3, 10**10]), 10**10, of=10**10).tolist()
    [3, 10000000000]
    """
    if of * times < 1 << 63:
        return values * times // max(1, of)
    return np.array([value * times // of for value in values.tolist()], dtype=np.int64)
