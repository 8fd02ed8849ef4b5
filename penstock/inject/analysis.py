"""The analysis inside a script: the loader of its training loop gives what the phases ask for."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.diagnose.analyze.probe import Probe
    from penstock.torch.restoring import Before

EARLY = "early-"
"""How the files begin that say after how many steps a script was over before the phases were."""

Iterate = Callable[[Any], Iterator[Any]]


def install(settings: Mapping[str, Any], module: Any) -> None:
    """Watch the loaders of this process. ``module`` is torch's, just imported."""
    session = Session(settings)
    _watch(module.DataLoader, session)
    import penstock.loader

    _watch(penstock.loader.Loader, session)


def _watch(kind: Any, session: Session) -> None:
    iterate: Iterate = kind.__iter__

    def watched(loader: Any) -> Iterator[Any]:
        return _Watched(loader, iterate, session)

    kind.__iter__ = watched


class Session:
    """One analysis in one process: of the first loader that a loop with gradients asks."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._chosen: Any = None
        self._probe: Probe | None = None
        self._batches: Iterator[Any] | None = None
        self._before: Before | None = None
        self._skipped = int(settings.get("loader") or 0)
        self._seen: list[Any] = []
        self._steps = 0

    def takes(self, loader: Any, iterate: Iterate) -> bool:
        """Whether this loader is the one that is analysed, now that it is asked for a batch."""
        if os.getpid() != self._pid:
            return False
        if self._chosen is None and self._wanted(loader):
            self._chosen = loader
            self._begin(loader, iterate)
        return self._chosen is loader and self._batches is not None

    def _wanted(self, loader: Any) -> bool:
        if not sys.modules["torch"].is_grad_enabled():
            return False  # a validation loop
        if not any(one is loader for one in self._seen):
            self._seen.append(loader)
        return not self._skipped or len(self._seen) == self._skipped

    def _begin(self, loader: Any, iterate: Iterate) -> None:
        from penstock import config
        from penstock.diagnose.analyze.probe import Epochs, Probe
        from penstock.torch.analysis import subject_of
        from penstock.torch.restoring import Before

        given = self._settings.get("cache")
        cache = None if given is None else config.size(given, "cache")
        place = Path(self._settings["reports"]) / f"opened-{os.getpid()}"
        place.mkdir(exist_ok=True)
        found = subject_of(loader, cache, place, iterate)
        if found is None:
            raise TypeError(f"{type(loader).__name__} is not a loader that is watched")
        subject, device = found
        if self._settings.get("continue"):
            self._before = Before()
        seconds = float(self._settings.get("seconds", 60.0))
        self._probe = Probe(subject, device, seconds=seconds, told=self._tell)
        self._batches = self._probe.run(Epochs(lambda: iterate(loader)))
        atexit.register(self._ended)

    def next(self) -> Any:
        """The next batch of the phases; raises ``StopIteration`` when they are over."""
        try:
            batch = next(self._batches)  # type: ignore[arg-type]
            self._steps += 1
            return batch
        except StopIteration:
            self._batches = None
            self._finish()
            raise

    def _finish(self) -> None:
        from dataclasses import replace

        if self._probe is None or self._probe.report is None:
            return
        report = self._probe.report
        rank = report.setup.rank or int(self._settings.get("rank", 0))
        report = replace(report, setup=replace(report.setup, rank=rank))
        place = Path(self._settings["reports"])
        part = place / f"part-{os.getpid()}"
        report.save(part)
        part.rename(place / f"report-{rank}-{os.getpid()}.json")
        if self._before is None:
            self._tell("done; the script ends here")
            raise SystemExit(0)
        self._before.restore()
        self._before = None
        self._tell("done; the script goes on, and its models are as they were")

    def _ended(self) -> None:
        """The script is over, and the phases are not."""
        if self._batches is not None and os.getpid() == self._pid:
            self._batches = None
            with contextlib.suppress(OSError):
                place = Path(self._settings["reports"])
                (place / f"{EARLY}{os.getpid()}").write_text(str(self._steps))

    def _tell(self, text: str) -> None:
        if int(self._settings.get("rank", 0)) == 0 and not self._settings.get("quiet"):
            sys.stderr.write(f"penstock: {text}\n")
            sys.stderr.flush()


class _Watched:
    """An epoch of a loader, which may be asked for other batches than its own."""

    def __init__(self, loader: Any, iterate: Iterate, session: Session) -> None:
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
                    pass  # from here on it is the script's own epoch
            self._own = self._iterate(self._loader)
        return next(self._own)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Libraries look at torch's iterators from without.
        if name.startswith("__") or self.__dict__.get("_own") is None:
            raise AttributeError(name)
        return getattr(self._own, name)
