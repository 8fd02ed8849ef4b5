"""``penstock.analyze``: an analysis of a loader, with a function as its training step."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import config
from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.probe import Epochs, Probe
from penstock.diagnose.analyze.report import Report
from penstock.diagnose.analyze.subject import Device, Host, Subject
from penstock.errors import ReportError
from penstock.loader import Loader


def analyze(
    loader: Any,
    step: Callable[[Any], object],
    *,
    seconds: float = 60.0,
    cache: int | str | None = None,
    told: Callable[[str], None] | None = None,
) -> Report:
    """Why does training wait? ``step`` is called with batches, replayed, cached and cold in turn.

    ``loader`` is Penstock's or torch's. ``seconds`` is the time for all phases together, ``cache``
    a budget to be taken as filled, ``told`` hears what is measured. Printing the report shows the
    verdict and what would help; ``report.save(path)`` is for ``penstock what-if``.

    >>> import numpy as np
    >>> import penstock as ps
    >>> loader = ps.from_dataset(np.zeros((64, 8))).batch(8).loader(workers=0)
    >>> report = ps.analyze(loader, lambda batch: batch.sum(), seconds=0.2)
    >>> report.setup.samples, report.setup.batch
    (64, 8)
    """
    if not seconds > 0:
        raise ReportError(f"seconds is {seconds!r}; give a number above 0.")
    budget = None if cache is None else config.size(cache, "cache")
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        subject, device, iterate = _subject(loader, budget, Path(place))
        probe = Probe(subject, device, seconds=seconds, told=told)
        with contextlib.closing(probe.run(Epochs(iterate))) as batches:  # type: ignore[type-var]
            for batch in batches:
                step(batch)
    if probe.report is None:
        raise ReportError("the loader gave no batch, so there is nothing to analyse.")
    return probe.report


def _subject(
    loader: Any, cache: int | None, place: Path
) -> tuple[Subject, Device, Callable[[], Any]]:
    if isinstance(loader, Loader):
        return LoaderSubject(loader, cache), Host(), lambda: iter(loader)
    if "torch" in sys.modules:
        # By name: what imports torch lies above this room.
        adapter = importlib.import_module("penstock.torch.analysis")
        found = adapter.subject_of(loader, cache, place)
        if found is not None:
            subject, device = found
            return subject, device, lambda: iter(loader)
    raise ReportError(
        f"analyze() got {type(loader).__name__}; give a loader of Penstock, or a torch DataLoader."
    )
