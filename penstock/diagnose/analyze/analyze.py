"""``penstock.analyze``: the analysis of a loader, with a function as the training step."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import config
from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.machine import MachineWatch
from penstock.diagnose.analyze.phase_runner import Epochs, PhaseRunner
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.subject import Host, StepDevice, Subject
from penstock.errors import ReportError
from penstock.loader import Loader


def analyze(
    loader: Any,
    step: Callable[[Any], object],
    *,
    seconds: float = 60.0,
    cache: int | str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> AnalysisReport:
    """Find out why training waits: call ``step`` with replayed, cached and cold batches in turn.

    ``loader`` is a loader of Penstock or of torch. ``seconds`` is the time for all phases together.
    ``cache`` is the size of a cache that the cold phase assumes to be full. ``on_progress`` is
    called with a line about each measurement. Print the report to see the verdict and the remedies;
    save it with ``report.save(path)`` for ``penstock what-if``.

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
        runner = PhaseRunner(
            subject, device, seconds=seconds, on_progress=on_progress, machine=MachineWatch()
        )
        with contextlib.closing(runner.run(Epochs(iterate))) as batches:  # type: ignore[type-var]
            for batch in batches:
                step(batch)
    if runner.report is None:
        raise ReportError("the analysis ended without a report: the loader gave no batch.")
    # By name: this room may not import penstock.inject, which is below it.
    trials = importlib.import_module("penstock.inject.trials")
    module = sys.modules.get("torch.utils.data.dataloader")
    inner = getattr(loader, "_loader", None)
    own = inner if isinstance(inner, Loader) else loader
    return replace(runner.report, trials=trials.trials_of(own, runner.report, module))


def _subject(
    loader: Any, cache: int | None, place: Path
) -> tuple[Subject, StepDevice, Callable[[], Any]]:
    if isinstance(loader, Loader):
        return LoaderSubject(loader, cache), Host(), lambda: iter(loader)
    if "torch" in sys.modules:
        # Imported by name: this room may not import penstock.torch, which is above it.
        adapter = importlib.import_module("penstock.torch.analysis")
        adapted = adapter.subject_of(loader, cache, place)
        if adapted is not None:
            subject, device = adapted
            return subject, device, lambda: iter(loader)
    raise ReportError(
        f"analyze() got a {type(loader).__name__}; give a loader of Penstock or a torch DataLoader."
    )
