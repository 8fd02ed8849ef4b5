"""Shuffling that knows what is kept: every batch has its share of fresh samples, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order.generations import Generations, part
from penstock.order.shuffle import Permutation


@dataclass(frozen=True, slots=True)
class Balanced:
    """Revamper's cache-aware shuffle: every sample once, fresh ones spread evenly over the epoch.

    Fresh samples cost far more than kept ones. Both are shuffled apart, each epoch anew, and
    merged so that after s of n samples exactly floor(s * m / n) of the epoch's m fresh ones have
    come. So any run of c samples has floor(c * m / n) or ceil(c * m / n) of them.

    >>> order = Balanced(Generations(n=8, reuse=4, kept=8, seed=0))
    >>> dealt = order.indices(8, seed=0, epoch=3).tolist()
    >>> sorted(dealt)
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> [order.renewal.is_fresh(index, 3) for index in dealt]
    [False, False, False, True, False, False, False, True]
    """

    renewal: Generations

    blocks: ClassVar[bool] = True
    """Ranks are dealt runs of the sequence, because only runs have their share of fresh samples."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.at(n, seed, epoch, np.arange(n, dtype=np.int64))

    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        self._check(n)
        renewal = self.renewal
        start, stop = renewal.span(epoch)
        renewed, fresh = stop - start, renewal.fresh(epoch)
        before = part(places, fresh, n)
        is_fresh = part(places + 1, fresh, n) > before
        queue = np.empty(len(places), dtype=np.int64)
        # The fresh ones are those renewed now, and then those behind all that are kept.
        number = Permutation(fresh, seed, "order/fresh", epoch).samples(before[is_fresh])
        queue[is_fresh] = number + np.where(number < renewed, start, renewal.kept - renewed)
        # The others stand on either side of those renewed now.
        number = Permutation(n - fresh, seed, "order/kept", epoch).samples(
            (places - before)[~is_fresh]
        )
        queue[~is_fresh] = number + np.where(number < start, 0, renewed)
        return renewal.queued(queue)

    def length(self, n: int) -> int:
        self._check(n)
        return n

    def _check(self, n: int) -> None:
        if n != self.renewal.n:
            raise PipelineError(
                f"Balanced was made for {self.renewal.n} samples, and the source has {n}. Make its "
                "Generations with the number of samples of the source."
            )
