"""Cache-aware shuffle: every batch gets an equal share of the epoch's fresh samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order.generations import Generations, scaled
from penstock.order.shuffle import Permutation


@dataclass(frozen=True, slots=True)
class Balanced:
    """Revamper's cache-aware shuffle: every sample once, fresh ones spread evenly over the epoch.

    Preparing a fresh sample costs far more than reading a kept one. In every epoch the fresh and
    the kept samples are shuffled separately and then merged, so that exactly floor(s * m / n) of
    the epoch's m fresh samples are among the first s of all n samples. Any run of c samples
    therefore has floor(c * m / n) or ceil(c * m / n) fresh ones.

    >>> order = Balanced(Generations(n=8, reuse=4, kept=8, seed=0))
    >>> indices = order.indices(8, seed=0, epoch=3).tolist()
    >>> sorted(indices)
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> [order.generations.is_fresh(index, 3) for index in indices]
    [False, False, False, True, False, False, False, True]
    """

    generations: Generations

    blocks: ClassVar[bool] = True
    """Ranks are dealt contiguous runs, because only these have an equal share of fresh samples."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.at(n, seed, epoch, np.arange(n, dtype=np.int64))

    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        self._check(n)
        generations = self.generations
        start, stop = generations.span(epoch)
        renewed, fresh = stop - start, generations.fresh(epoch)
        fresh_before = scaled(places, fresh, n)
        is_fresh = scaled(places + 1, fresh, n) > fresh_before
        queue = np.empty(len(places), dtype=np.int64)
        # Fresh samples: first the kept ones renewed in this epoch, then those that are never kept.
        number = Permutation(fresh, seed, "order/fresh", epoch).samples(fresh_before[is_fresh])
        queue[is_fresh] = number + np.where(number < renewed, start, generations.kept - renewed)
        # The other samples are in the queue before and after the ones renewed in this epoch.
        number = Permutation(n - fresh, seed, "order/kept", epoch).samples(
            (places - fresh_before)[~is_fresh]
        )
        queue[~is_fresh] = number + np.where(number < start, 0, renewed)
        return generations.queued(queue)

    def length(self, n: int) -> int:
        self._check(n)
        return n

    def _check(self, n: int) -> None:
        if n != self.generations.n:
            raise PipelineError(
                f"Balanced was made for {self.generations.n} samples, but the source has {n}. Make "
                "its Generations with the number of samples of the source."
            )
