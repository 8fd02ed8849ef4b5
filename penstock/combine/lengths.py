"""The lengths of all samples of a pipeline: evaluated once, and kept on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.errors import FingerprintError, PenstockError, PipelineError
from penstock.fingerprint import fingerprint
from penstock.host.private_dir import own_directory, replacing
from penstock.pipeline import By, Pipeline
from penstock.stops.road import draws_globally
from penstock.store.ledger import Ledger, Provenance

_log = logging.getLogger("penstock.lengths")

_TOGETHER = 64
"""Samples that a worker measures at a time."""


def lengths_by(pipeline: Pipeline, by: By) -> NDArray[Any]:
    """The length of each sample at the end of a pipeline, as ``Pipeline.batch`` explains ``by``."""
    if not callable(by) and not isinstance(by, (str, int)):
        return np.asarray(by)
    random = next((stop.name for stop in pipeline.stops if stop.random), None)
    if random is None and draws_globally(pipeline.source):
        random = "the dataset"
    if random is not None:
        raise PipelineError(
            f"batch(by={_shown(by)}) below {random}, which is random: the length of a sample might "
            "differ from epoch to epoch. Give an array with the length of each sample, or, if it "
            "is not random, say so: map(..., random=False), from_dataset(..., random=False)."
        )
    place, started = _place(pipeline, by), time.perf_counter()
    lengths = None if place is None else _read(place, len(pipeline.source))
    if lengths is None:
        lengths = _measure(pipeline, by)
        if place is not None:
            _keep(place, lengths)
    if place is not None and place.exists():
        Ledger().note(_provenance(pipeline, by, place), time.perf_counter() - started)
    return lengths


def _provenance(pipeline: Pipeline, by: By, place: Path) -> Provenance:
    calls = [stop.full_call for stop in pipeline.stops if not stop.transparent]
    return Provenance(
        kind="lengths",
        identity=place.stem,
        place=str(place.parent),
        files=(place.name,),
        origin=pipeline.source.origin(),
        data=pipeline.source.identity(),
        made_by=(type(pipeline.source).__name__, *calls, f"lengths by {_shown(by)}"),
    )


@dataclass(frozen=True)
class _MeasuredLengths:
    """A collate function that returns the lengths of samples."""

    by: str | int | Callable[[Any], float]

    def __call__(self, samples: list[Any]) -> list[float]:
        return [self._length(sample) for sample in samples]

    def _length(self, sample: Any) -> float:
        found = self.by(sample) if callable(self.by) else sample[self.by]
        if not callable(self.by) and hasattr(found, "__len__"):
            found = len(found)
        value = np.asarray(found)
        if value.ndim or value.dtype.kind not in "iuf":
            raise PipelineError(
                f"batch(by={_shown(self.by)}) gave {found!r} for a sample, which is not a number. "
                "Give a function that returns the length of a sample."
            )
        length: float = value.item()
        return length


def _measure(pipeline: Pipeline, by: Any) -> NDArray[Any]:
    samples = len(pipeline.source)
    _log.info("penstock: measuring the lengths of %s samples", f"{samples:,}")
    measured = pipeline.batch(_TOGETHER, collate=_MeasuredLengths(by))
    found: list[float] = []
    with measured.loader(shuffle=False) as loader:
        for lengths in loader:
            found += lengths
    return np.array(found)


def _place(pipeline: Pipeline, by: Any) -> Path | None:
    """The file in which the lengths are kept; ``None`` if they have no stable name."""
    try:
        above = [stop.fingerprint() for stop in pipeline.stops if not stop.transparent]
        name = fingerprint(("lengths", pipeline.source.identity(), above, by))
    except (FingerprintError, NotImplementedError):
        return None
    return config.disk_dir() / "lengths" / f"{name}.npy"


def _read(place: Path, samples: int) -> NDArray[Any] | None:
    try:
        lengths: NDArray[Any] = np.load(place, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return lengths if lengths.shape == (samples,) else None


def _keep(place: Path, lengths: NDArray[Any]) -> None:
    """Keep the lengths for the next run. A directory that cannot be written to is not an error."""
    try:
        own_directory(place.parent)
        with replacing(place) as file:
            np.save(file, lengths)
    except (OSError, PenstockError) as error:
        _log.warning(
            "penstock: the lengths of samples cannot be kept in %s (%s); they are measured again "
            "in the next run. PENSTOCK_CACHE_DIR names another directory.",
            place.parent,
            error,
        )


def _shown(by: Any) -> str:
    return repr(by) if isinstance(by, (str, int)) else getattr(by, "__name__", type(by).__name__)
