"""Some samples of a source, as a source: kept in memory, or made cold before each reading."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from penstock.diagnose.analyze.delayed_reads import Late
from penstock.diagnose.analyze.reading import by_threads
from penstock.operation import Spec
from penstock.source.source import Source

TOGETHER = 64
"""Samples in memory that a thread takes at a time, where only reading is measured."""


class Chosen(Source):
    """The samples at ``indices``; those in ``kept`` are in memory already, and come ``late``."""

    def __init__(
        self,
        source: Source,
        indices: Sequence[int],
        kept: dict[int, Any],
        late: Late | None = None,
    ) -> None:
        self._source = source
        self._indices = list(indices)
        self._kept = kept
        self._late = late
        self.threadsafe = source.threadsafe  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Sequence[int]) -> list[Any]:
        fetch = self._late is not None and self._late.wait(len(indices))
        wanted = [self._indices[at] for at in indices]
        missing = [index for index in wanted if fetch or index not in self._kept]
        read = dict(zip(missing, self._source.read(missing), strict=True)) if missing else {}
        return [read[index] if index in read else self._kept[index] for index in wanted]

    def name(self, index: int) -> str:
        return self._source.name(self._indices[index])

    def identity(self) -> str:
        return f"{self._source.identity()} {self._indices}"

    def fields(self) -> dict[str | int, Spec] | Spec:
        return self._source.fields()

    def reading(self, threads: int) -> Iterator[int]:
        """Bytes as they are read by so many threads, without end."""

        # What comes from memory takes less time than handing it to a thread: several at a time.
        size = TOGETHER if self._kept else 1

        def some(first: int) -> int:
            samples = self.read(range(first, min(first + size, len(self))))
            return sum(nbytes_of(sample) for sample in samples)

        return by_threads(some, cycle(range(0, len(self), size)), threads)


def nbytes_of(sample: Any) -> int:
    """Bytes of what was read, as far as they can be seen."""
    if isinstance(sample, (bytes, bytearray, memoryview)):
        return len(sample)
    if isinstance(sample, np.ndarray):
        return int(sample.nbytes)
    if isinstance(sample, (tuple, list)):
        return sum(nbytes_of(one) for one in sample)
    if isinstance(sample, dict):
        return sum(nbytes_of(one) for one in sample.values())
    found = getattr(sample, "nbytes", 0)
    return int(found) if isinstance(found, int) else 0


def files_of(source: Source, indices: Sequence[int]) -> list[str]:
    """The files these samples lie in, where a sample is known by its file."""
    found = []
    for index in indices:
        name = source.name(index)
        if os.path.isabs(name) and os.path.isfile(name):
            found.append(name)
    return found
