"""Which samples refurbish() prepares anew in which epoch, and which version each epoch uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order.order import whole
from penstock.order.shuffle import Permutation


@dataclass(frozen=True)
class Generations:
    """Revamper's balanced eviction: every epoch renews an equal part of the kept samples.

    All samples are in one random queue, fixed by the seed; the first ``kept`` of the queue are
    kept. Epoch 0 prepares all samples. Every later epoch renews the next 1 / ``reuse`` of the kept
    samples, in turns. A first version therefore serves 1 to ``reuse`` epochs, and every later
    version exactly ``reuse``. Samples that are not kept are fresh in every epoch.

    The generation of a sample in an epoch is the number of the prepared version that the epoch
    uses. It is a pure function of the fields below, the index and the epoch, so it is not stored.

    >>> generations = Generations(n=7, reuse=3, kept=6, seed=0)
    >>> [generations.fresh(epoch) for epoch in range(5)]
    [7, 3, 3, 3, 3]
    >>> index = int(generations.queued(np.array([0]))[0])
    >>> [generations.generation(index, epoch) for epoch in range(8)]
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
                f"kept is {self.kept}, but the source has only {self.n} samples. Give {self.n} or "
                "less."
            )
        object.__setattr__(self, "_queue", Permutation(self.n, self.seed, "order/renew"))

    def generation(self, index: int, epoch: int) -> int:
        """The version of a sample that an epoch uses, counted from 0."""
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
        # Renewed before this epoch or in it: one more than those that are renewed after it.
        rounds, turn = divmod(epoch - 1, self.reuse)
        made = (places < (turn + 1) * self.kept // self.reuse) + np.int64(rounds)
        return made if self.kept == self.n else np.where(places < self.kept, made, epoch)

    def renewed(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Those of these samples that are kept, and that an epoch prepares anew."""
        start, stop = self.span(epoch)
        places = self._queue.places(indices)
        return indices[(places >= start) & (places < stop)]

    def first_epochs(
        self, indices: NDArray[np.int64], generations: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The epochs that prepare these versions of kept samples: the first that use them.

        >>> generations = Generations(n=7, reuse=3, kept=6, seed=0)
        >>> first = generations.queued(np.array([0, 0, 0, 5]))
        >>> generations.first_epochs(first, np.array([0, 1, 2, 1])).tolist()
        [0, 1, 4, 3]
        """
        ends = [(turn + 1) * self.kept // self.reuse for turn in range(self.reuse)]
        turns = np.searchsorted(np.array(ends), self._queue.places(indices), side="right")
        renewed: NDArray[np.int64] = (generations - 1) * self.reuse + 1 + turns
        return np.where(generations == 0, 0, renewed)

    def before_renewal(self, epoch: int) -> int:
        """The generation that all samples which an epoch renews had in the epoch before.

        >>> generations = Generations(6, 3, 6, seed=1)
        >>> renewed = generations.renewed(np.arange(6), 5)
        >>> generations.generations(renewed, 4).tolist(), generations.before_renewal(5)
        ([1, 1], 1)
        """
        return (epoch - 1) // self.reuse

    def fresh(self, epoch: int) -> int:
        """The number of samples that an epoch prepares anew."""
        start, stop = self.span(epoch)
        return stop - start + self.n - self.kept

    def is_fresh(self, index: int, epoch: int) -> bool:
        """Whether an epoch prepares this sample anew."""
        start, stop = self.span(epoch)
        place = self._queue.place(index)
        return start <= place < stop or place >= self.kept

    def keeps(self, index: int) -> bool:
        """Whether the prepared versions of this sample are kept at all."""
        return self.kept == self.n or self._queue.place(index) < self.kept

    def span(self, epoch: int) -> tuple[int, int]:
        """The places in the queue, as (start, stop), of the kept samples that an epoch renews."""
        if epoch == 0:
            return 0, self.kept
        turn = (epoch - 1) % self.reuse
        return turn * self.kept // self.reuse, (turn + 1) * self.kept // self.reuse

    def queued(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these places of the queue."""
        return self._queue.samples(places)


def scaled(values: NDArray[np.int64], numerator: int, denominator: int) -> NDArray[np.int64]:
    """``values * numerator // denominator`` without overflow, for values of 0 to ``denominator``.

    >>> scaled(np.array([3, 10**10]), 10**10, 10**10).tolist()
    [3, 10000000000]
    """
    if denominator * numerator < 1 << 63:
        return values * numerator // max(1, denominator)
    return np.array([value * numerator // denominator for value in values.tolist()], dtype=np.int64)
