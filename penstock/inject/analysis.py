"""The analysis inside a script: the loader of its training loop yields batches of the phases."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.inject.messages import CommandLog

if TYPE_CHECKING:
    from penstock.diagnose.analyze.phase_runner import PhaseRunner
    from penstock.diagnose.analyze.report import AnalysisReport
    from penstock.diagnose.analyze.subject import StartEpoch
    from penstock.torch.restoring import SavedTraining

EARLY = "early-"
"""Prefix of the files with the number of steps of a script that ended before the phases did."""

BEGUN = "begun-"
"""Prefix of the files that processes write when a training loop asks for its first batch."""

_log = CommandLog("penstock.analyze")


def install(settings: Mapping[str, Any], module: Any) -> None:
    """Watch the loaders of this process. ``module`` is ``torch.utils.data.dataloader``."""
    session = Session(settings)
    _watch(module.DataLoader, session)
    import penstock.loader

    _watch(penstock.loader.Loader, session)


def _watch(kind: Any, session: Session) -> None:
    iterate: StartEpoch = kind.__iter__

    def watched(loader: Any) -> Iterator[Any]:
        return _AnalysedEpoch(loader, iterate, session)

    kind.__iter__ = watched


class Session:
    """One analysis in one process, of the first loader that a loop with gradients uses."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._chosen: Any = None
        self._runner: PhaseRunner | None = None
        self._batches: Iterator[Any] | None = None
        self._saved: SavedTraining | None = None
        self._number = int(settings.get("loader") or 0)
        self._seen: list[Any] = []

    def takes(self, loader: Any, iterate: StartEpoch) -> bool:
        """Whether this loader, which is asked for a batch, is the one that is analysed."""
        if os.getpid() != self._pid:
            return False
        if self._chosen is None and self._wanted(loader):
            self._chosen = loader
            self._begin(loader, iterate)
        return self._chosen is loader and self._batches is not None

    def _wanted(self, loader: Any) -> bool:
        if not sys.modules["torch"].is_grad_enabled():
            return False  # a validation loop
        if not any(seen is loader for seen in self._seen):
            self._seen.append(loader)
        return not self._number or len(self._seen) == self._number

    def _begin(self, loader: Any, iterate: StartEpoch) -> None:
        from penstock import config
        from penstock.diagnose.analyze.machine import MachineWatch
        from penstock.diagnose.analyze.phase_runner import PhaseRunner
        from penstock.torch.analysis import subject_of
        from penstock.torch.restoring import SavedTraining

        given = self._settings.get("cache")
        cache = None if given is None else config.size(given, "cache")
        place = Path(self._settings["reports"]) / f"opened-{os.getpid()}"
        place.mkdir(exist_ok=True)
        adapted = subject_of(loader, cache, place, iterate)
        if adapted is None:
            raise TypeError(f"a {type(loader).__name__} is not a loader that can be analysed")
        subject, device = adapted
        if self._settings.get("continue"):
            self._saved = SavedTraining()
        seconds = float(self._settings.get("seconds", 60.0))
        self._runner = PhaseRunner(
            subject,
            device,
            seconds=seconds,
            on_progress=self._progress,
            machine=MachineWatch(self._settings.get("root")),
        )
        (Path(self._settings["reports"]) / f"{BEGUN}{os.getpid()}").touch()
        self._batches = self._measure(self._runner, loader, lambda: iterate(loader))
        atexit.register(self._script_ended)

    def _measure(
        self, runner: PhaseRunner, loader: Any, epoch: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        """Batches of the phases, and then of the remedies that are tried."""
        from dataclasses import replace

        from penstock.diagnose.analyze.judge import result_of
        from penstock.diagnose.analyze.phase_runner import Epochs
        from penstock.diagnose.analyze.remedies import remedies
        from penstock.inject import trials

        yield from runner.run(Epochs(epoch))
        if runner.report is None:
            return
        module: Any = sys.modules["torch.utils.data.dataloader"]
        inner = getattr(loader, "_loader", None)
        own = inner if isinstance(inner, sys.modules["penstock.loader"].Loader) else loader
        report = replace(runner.report, trials=trials.trials_of(own, runner.report, module))
        runner.report = report
        if not self._settings.get("try") or report.setup.world > 1:
            return
        found = remedies(report, result=result_of(report))
        tried = [remedy.options for remedy in found if remedy.tried]
        chosen = [options for options in tried if options is not None and not options.share]
        if chosen:
            runner.report = yield from trials.compare(
                report,
                epoch,
                chosen[: trials.BEST],
                lambda options: trials.build(own, options, module),
                seconds=float(self._settings["try"]),
                on_progress=self._progress,
            )

    def next(self) -> Any:
        """The next batch of the phases; raises ``StopIteration`` after the last phase."""
        try:
            return next(self._batches)  # type: ignore[arg-type]
        except StopIteration:
            self._batches = None
            self._finish()
            raise

    def _finish(self) -> None:
        if self._runner is None or self._runner.report is None:
            return
        self._save(self._runner.report)
        if self._saved is None:
            self._progress("done; the script ends here")
            raise SystemExit(0)
        self._saved.restore()
        self._saved = None
        self._progress("done; the script goes on, with its models restored")

    def _save(self, report: AnalysisReport) -> None:
        from dataclasses import replace

        rank = report.setup.rank or int(self._settings.get("rank", 0))
        report = replace(report, setup=replace(report.setup, rank=rank))
        place = Path(self._settings["reports"])
        part = place / f"part-{os.getpid()}"
        report.save(part)
        part.rename(place / f"report-{rank}-{os.getpid()}.json")

    def _script_ended(self) -> None:
        """Report what was measured, if the script ends or is interrupted before the phases do."""
        if self._batches is None or os.getpid() != self._pid or self._runner is None:
            return
        self._batches = None
        steps = self._runner.steps
        # An exception that ends the script is kept here; Ctrl-C is one.
        ending = getattr(sys, "last_type", None)
        interrupted = ending is not None and issubclass(ending, KeyboardInterrupt)
        with contextlib.suppress(Exception):
            (Path(self._settings["reports"]) / f"{EARLY}{os.getpid()}").write_text(str(steps))
            who = "it was interrupted" if interrupted else "the script ended"
            self._runner.stop(f"{who} after {steps} steps")
            report = self._runner.report
            if report is not None and any(phase.steps for phase in report.phases):
                self._save(report)

    def _progress(self, text: str) -> None:
        if int(self._settings.get("rank", 0)) == 0 and not self._settings.get("quiet"):
            _log.write(logging.INFO, text)


class _AnalysedEpoch:
    """An epoch of a loader, which yields the batches of the phases if the loader is analysed."""

    def __init__(self, loader: Any, iterate: StartEpoch, session: Session) -> None:
        self._loader = loader
        self._iterate = iterate
        self._session = session
        self._own: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._own is None:
            if self._session.takes(self._loader, self._iterate):
                try:
                    return self._session.next()
                except StopIteration:
                    pass  # the phases are done: continue with the loader's own epoch
            self._own = self._iterate(self._loader)
        return next(self._own)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Some libraries read attributes of torch's iterators.
        if name.startswith("__") or self.__dict__.get("_own") is None:
            raise AttributeError(name)
        return getattr(self._own, name)
