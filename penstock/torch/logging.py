"""Loader statistics for the log of a training run: TensorBoard, and Lightning's loggers."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import PipelineError
from penstock.stats import Stats
from penstock.watch.rates import Rates, between, distinct

if TYPE_CHECKING:
    from penstock.torch.lightning import LightningCallback

__all__ = ["LightningCallback", "TensorBoard"]

EVERY = 50
"""Default number of steps between two entries: a few entries a minute, like the loss."""


class LoaderWithStats(Protocol):
    """A loader with statistics: ``penstock.Loader`` or ``penstock.torch.DataLoader``."""

    def stats(self) -> Stats: ...

    def __iter__(self) -> Iterator[Any]: ...


class ScalarWriter(Protocol):
    """The part of torch's ``SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class IntervalScalars:
    """Rates of a loader since the last call of ``next``, as names and numbers."""

    def __init__(self, loader: LoaderWithStats, prefix: str = "penstock") -> None:
        if not callable(getattr(loader, "stats", None)):
            raise PipelineError(
                f"{type(loader).__name__} has no stats(): give a Penstock loader, such as "
                "penstock.torch.DataLoader."
            )
        self.loader = loader
        self._prefix = prefix
        self._before = loader.stats()

    def next(self) -> dict[str, float]:
        """Scalars of the interval that ends now. The next interval begins."""
        before, self._before = self._before, self.loader.stats()
        return scalars(between(before, self._before), self._before, self._prefix)


def scalars(rates: Rates, stats: Stats, prefix: str = "penstock") -> dict[str, float]:
    """Rates under the names used in logs. Stages and caches without samples are left out."""
    if not rates.seconds > 0:
        return {}
    values: dict[str, float] = {
        "stall": rates.stall,
        "samples_per_second": rates.samples_per_second,
        "batches_per_second": rates.batches_per_second,
        "bytes_read_per_second": rates.bytes_read_per_second,
        "utilisation": rates.utilisation,
        "bad_samples": float(stats.bad),
    }
    names = distinct([stop.name for stop in rates.stops])
    for name, stop in zip(names, rates.stops, strict=True):
        if stop.seconds_per_sample is not None:
            values[f"seconds_per_sample/{name}"] = stop.seconds_per_sample
    for number, share in enumerate(rates.hits):
        if share is not None:
            values[f"cache_hits/{number}"] = share
    return {f"{prefix}/{name}": value for name, value in values.items()}


class TensorBoard:
    """Writes the statistics of a loader to a ``SummaryWriter``.

    Call ``log(step)`` where you log the loss, or iterate ``wrap()`` instead of the loader, which
    logs every ``every`` batches.

    >>> import penstock as ps
    >>> from penstock.torch.logging import TensorBoard
    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step):
    ...         if tag == "penstock/bad_samples":
    ...             print(tag, scalar_value, global_step)
    >>> with ps.from_dataset(range(8)).batch(2).loader(workers=0) as loader:
    ...     for batch in TensorBoard(Printer(), loader, every=2).wrap():
    ...         pass
    penstock/bad_samples 0.0 2
    penstock/bad_samples 0.0 4
    """

    def __init__(
        self,
        writer: ScalarWriter,
        loader: LoaderWithStats,
        *,
        prefix: str = "penstock",
        every: int = EVERY,
    ) -> None:
        if every < 1:
            raise PipelineError(f"every is {every}; give a number of batches, at least 1.")
        self._writer = writer
        self._loader = loader
        self._scalars = IntervalScalars(loader, prefix)
        self._every = every
        self._steps = itertools.count(1)

    def log(self, step: int) -> dict[str, float]:
        """Write the rates since the last call, and return them."""
        values = self._scalars.next()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        return values

    def wrap(self) -> Iterator[Any]:
        """Iterate one epoch of the loader. The step count goes on from epoch to epoch."""
        for batch in self._loader:
            yield batch
            step = next(self._steps)
            if step % self._every == 0:
                self.log(step)


def __getattr__(name: str) -> Any:
    # Imported on first use, because Lightning is optional.
    if name != "LightningCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("penstock.torch.lightning").LightningCallback
