"""Datasets for the cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Made(Dataset[Any]):  # type: ignore[misc]
    """Calls a function for each sample."""

    def __init__(self, make: Callable[[int], Any] = float, n: int = 10) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):  # type: ignore[misc]
    """The numbers up to ``n``; divided over workers if ``split``."""

    def __init__(self, n: int = 7, split: bool = False) -> None:
        self.n = n
        self.split = split

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None or not self.split:
            return iter(range(self.n))
        return iter(range(info.id, self.n, info.num_workers))


class LongStream(Stream):
    """A stream with a length."""

    def __len__(self) -> int:
        return self.n


class OwnIterator(IterableDataset[int]):  # type: ignore[misc]
    """Returns itself from ``__iter__``, and keeps its position in itself."""

    def __init__(self, n: int = 5, restarts: bool = True) -> None:
        self.n, self.restarts, self.at = n, restarts, 0

    def __iter__(self) -> OwnIterator:
        if self.restarts:
            self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at


class Noise(IterableDataset[Any]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            yield torch.rand(1).item(), float(np.random.rand()), random.random()


def values(batches: Any) -> list[Any]:
    """Batches as plain values."""
    return [plain(batch) for batch in batches]


def samples(batches: Any) -> list[Any]:
    """The samples of batches that are tensors."""
    return [sample for batch in batches for sample in batch.tolist()]


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [type(batch).__name__, *(plain(value) for value in batch)]
    return batch
