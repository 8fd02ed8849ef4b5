"""``ReadAhead``: what is announced to a store of objects, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.engine.read_ahead import ReadAhead
from penstock.order.plan import BatchKeys


class Announced:
    """Stands for a store. ``calls``: what was announced, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.forgotten = 0

    def expect(self, indices: Iterable[int]) -> None:
        self.calls.append(list(indices))

    def hold(self, samples: int) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        self.forgotten += 1

    def stats(self) -> None:
        raise NotImplementedError


def keys(epoch: int, number: int, own: list[int], entering: list[int] | None = None) -> BatchKeys:
    window = None if entering is None else np.array(entering, np.int64)
    return BatchKeys(epoch, number, np.array(own, np.int64), None)._replace(entering=window)


def lacking(batch: BatchKeys) -> list[int]:
    """A cache has the sample 5."""
    return [index for index in batch.indices.tolist() if index != 5]


def test_batches_of_an_epoch_are_announced_in_order_and_those_of_the_next_when_it_begins() -> None:
    store = Announced()
    batches = [keys(0, 0, [3, 1]), keys(0, 1, [2, 5]), keys(1, 0, [1, 5]), keys(1, 1, [2, 3])]
    ahead = ReadAhead(iter(batches), store, lacking, far=True)
    assert store.forgotten == 1
    assert next(ahead) is batches[0]
    assert store.calls == [[3, 1, 2]]
    assert list(ahead) == batches[1:]
    assert store.calls == [[3, 1, 2], [1, 2, 3]]


def test_the_first_batch_comes_before_the_window_in_which_its_samples_lie() -> None:
    store = Announced()
    batches = [keys(0, 0, [7, 1], [0, 1, 2, 3]), keys(0, 1, [4, 0], [4, 5, 6, 7])]
    ahead = ReadAhead(iter(batches), store, lacking, far=True)
    assert list(ahead) == batches
    assert store.calls == [[7, 1], [0, 1, 2, 3, 7, 1, 4, 6, 7, 4, 0]]


def test_batches_that_may_not_be_asked_for_early_are_announced_when_they_are_taken() -> None:
    store = Announced()
    batches = [keys(0, 0, [3]), keys(0, 1, [2])]
    ahead = ReadAhead(iter(batches), store, lacking, far=False)
    next(ahead)
    assert store.calls == [[3]]
    next(ahead)
    assert store.calls == [[3], [2]]
