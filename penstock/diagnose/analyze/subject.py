"""Contracts of an analysis: the loader under analysis, and the device of the training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from penstock.diagnose.analyze.report import OperationTime, Setup
from penstock.diagnose.profile.result import StageCost

StartEpoch = Callable[[Any], Iterator[Any]]
"""The original ``__iter__`` of a loader class, which an analysis may have replaced."""

BATCHES = 24
"""Batches that are used over and over: enough that a sample was not read just before."""

SIZES = 256
"""Most sizes that represent those of all samples: enough to include a few large ones."""


class Subject(Protocol):
    """A loader under analysis. Its iterators are endless; ``close`` ends one."""

    @property
    def setup(self) -> Setup: ...

    notes: list[str]

    prep_includes_reading: bool
    """Whether preparing a cached sample includes reading it from the page cache."""

    sizes: tuple[float, ...]
    """Sizes of samples relative to their mean; empty if all are equal or unknown."""

    def choose_samples(self, seconds: float = math.inf) -> None:
        """Choose the samples for the rest of the analysis, and find out where they are stored.

        They are read for that; after ``seconds`` those that were read are enough. Further calls do
        nothing.
        """

    def cached(self, workers: int | None = None, delays: Sequence[float] = ()) -> Iterator[Any]:
        """Batches of samples in memory. ``workers``: number of workers, by default the script's.

        ``delays`` (with one worker): seconds that each sample of a batch is delayed, one value per
        batch, in turn; ``FROM_STORAGE`` reads them from storage, which works only if
        ``prep_includes_reading`` is false.
        """

    def cold(self) -> Iterator[Any] | None:
        """Batches of samples that must be read from storage; ``None`` if that is not possible."""

    def with_refurbish(self) -> tuple[Iterator[Any], int] | None:
        """Batches with refurbish at its best place; ``None`` if the pipeline has no place for it.

        The number is that of batches with fresh samples only; all batches after those have kept
        samples only.
        """

    def with_penstock(self) -> Iterator[Any] | None:
        """Batches of samples in memory, made by Penstock's loader with as many workers.

        ``None`` if the loader is Penstock's already or cannot be replaced.
        """

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        """Read samples without preparing them; yields the bytes of each read."""

    def operations(self) -> Sequence[OperationTime]: ...

    def batch_times(self) -> Sequence[float]: ...

    def waiting_places(self) -> Mapping[str, int]:
        """How often workers were seen waiting, by place in the user's code; empty if unknown."""

    def close(self) -> None: ...


class StepDevice(Protocol):
    """The device that runs the training step."""

    name: str

    def to_device(self, batch: Any) -> Any:
        """The batch in the memory of the device."""

    def replayed(self, batch: Any) -> Any:
        """The batch for one more step: itself, or a copy if the training loop writes into it."""

    def copy_seconds(self, batch: Any) -> float:
        """Seconds to move a batch to the device."""

    def sync(self) -> None:
        """Wait until the device has finished all queued work."""

    def agree(self, done: bool) -> bool:
        """Whether ``done`` is true on all ranks."""


class Host:
    """A training step on the CPU, in one process."""

    name = "cpu"

    def to_device(self, batch: Any) -> Any:
        return batch

    def replayed(self, batch: Any) -> Any:
        return batch

    def copy_seconds(self, batch: Any) -> float:
        return 0.0

    def sync(self) -> None:
        pass

    def agree(self, done: bool) -> bool:
        return done


def operation_times(rows: Sequence[StageCost]) -> list[OperationTime]:
    """The rows of a profile as operations of a report, each with its share of the total."""
    total = sum(row.ms for row in rows) or 1.0
    return [
        OperationTime(row.name, row.kind, row.ms, row.ms / total, row.random, row.nbytes)
        for row in rows
    ]


def relative_sizes(sizes: Sequence[int]) -> tuple[float, ...]:
    """Sizes relative to their mean, sorted, at most ``SIZES`` of them; empty if all are equal.

    >>> relative_sizes([150, 50, 100]), relative_sizes([100, 100])
    ((0.5, 1.0, 1.5), ())
    """
    ordered = sorted(sizes)
    if not ordered or ordered[0] == ordered[-1]:
        return ()
    count = min(len(ordered), SIZES)
    some = [ordered[(2 * at + 1) * len(ordered) // (2 * count)] for at in range(count)]
    mean = fmean(some)
    return tuple(round(size / mean, 6) for size in some)
