"""What a loader is doing, into the log of a training run: TensorBoard, and Lightning's loggers."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import PipelineError
from penstock.stats import Stats
from penstock.watch.exposition import distinct
from penstock.watch.rates import Rates, between

if TYPE_CHECKING:
    from penstock.torch.lightning import LightningCallback

__all__ = ["LightningCallback", "TensorBoard"]

EVERY = 50
"""Steps between two entries: a few each minute at most, like the loss beside them."""


class Counted(Protocol):
    """A loader that counts: Penstock's own, or the drop-in."""

    def stats(self) -> Stats: ...

    def __iter__(self) -> Iterator[Any]: ...


class Writer(Protocol):
    """What writes scalars: torch's ``SummaryWriter``, or one that looks like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class Since:
    """What happened since it was last asked, as names and numbers."""

    def __init__(self, loader: Counted, prefix: str = "penstock") -> None:
        if not callable(getattr(loader, "stats", None)):
            raise PipelineError(
                f"{type(loader).__name__} has no stats(): give a loader of Penstock's, such as "
                "penstock.torch.DataLoader."
            )
        self.loader = loader
        self._prefix = prefix
        self._before = loader.stats()

    def scalars(self) -> dict[str, float]:
        before, self._before = self._before, self.loader.stats()
        return scalars(between(before, self._before), self._before, self._prefix)


def scalars(found: Rates, stats: Stats, prefix: str = "penstock") -> dict[str, float]:
    """Rates under the names that logs have them by. Nothing is said of what did not happen."""
    if not found.seconds > 0:
        return {}
    told: dict[str, float] = {
        "stall": found.stall,
        "samples_per_second": found.samples_per_second,
        "batches_per_second": found.batches_per_second,
        "bytes_read_per_second": found.bytes_read_per_second,
        "utilisation": found.utilisation,
        "bad_samples": float(stats.bad),
    }
    names = distinct([stop.name for stop in found.stops])
    for name, stop in zip(names, found.stops, strict=True):
        if stop.seconds_per_sample is not None:
            told[f"seconds_per_sample/{name}"] = stop.seconds_per_sample
    for number, share in enumerate(found.hits):
        if share is not None:
            told[f"cache_hits/{number}"] = share
    return {f"{prefix}/{name}": value for name, value in told.items()}


class TensorBoard:
    """Writes what a loader does to a ``SummaryWriter``.

    Call ``log(step)`` whenever you log, or iterate ``wrap()`` in place of the loader, which logs
    every ``every`` batches.

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
        self, writer: Writer, loader: Counted, *, prefix: str = "penstock", every: int = EVERY
    ) -> None:
        if every < 1:
            raise PipelineError(f"every is {every}; give a number of batches from 1 on.")
        self._writer = writer
        self._loader = loader
        self._since = Since(loader, prefix)
        self._every = every
        self._steps = itertools.count(1)

    def log(self, step: int) -> dict[str, float]:
        """Write what happened since the last time, and return it."""
        found = self._since.scalars()
        for name, value in found.items():
            self._writer.add_scalar(name, value, step)
        return found

    def wrap(self) -> Iterator[Any]:
        """An epoch of the loader. Steps are counted on from one epoch to the next."""
        for batch in self._loader:
            yield batch
            step = next(self._steps)
            if step % self._every == 0:
                self.log(step)


def __getattr__(name: str) -> Any:
    # Lightning is not needed by those who do not use it.
    if name != "LightningCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("penstock.torch.lightning").LightningCallback
