"""Streams in turn: which worker's stream gives the next batch, until all have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.order.deal import BatchKeys


class Rotation:
    """Deals batches to the streams of ``workers`` workers in turn, leaving out ended ones.

    ``taken`` is how many batches each stream has given already. A batch's number counts the
    batches of its own stream; its first index tells which stream that is.
    """

    def __init__(self, taken: Sequence[int], rows: int, epoch: int, turn: int = 0) -> None:
        self._next = list(taken)
        self._rows = rows
        self._epoch = epoch
        self._ended: set[int] = set()
        self._turn = turn

    def __iter__(self) -> Iterator[BatchKeys]:
        workers = len(self._next)
        while len(self._ended) < workers:
            worker = self._turn % workers
            self._turn += 1
            if worker in self._ended:
                continue
            number = self._next[worker]
            self._next[worker] += 1
            yield BatchKeys(self._epoch, number, np.full(self._rows, worker, dtype=np.int64), None)

    @staticmethod
    def worker(plan: BatchKeys) -> int:
        return int(plan.indices[0])

    def ended(self, plan: BatchKeys) -> None:
        """The stream that was to give this batch had no more samples."""
        self._ended.add(self.worker(plan))
