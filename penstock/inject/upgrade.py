"""The task of ``penstock run``: torch's DataLoader class stays, its iteration is replaced.

Libraries check for that class, subclass it, and create new loaders of it with other samplers. All
of them end up in ``DataLoader._get_iterator``, so only that method is replaced.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.inject.build import Builder, RunOptions, Upgraded, shuffles
from penstock.inject.messages import LoaderReporter


def install(settings: Mapping[str, Any], module: Any) -> None:
    """Upgrade the loaders of this process. ``module`` is ``torch.utils.data.dataloader``."""
    reporter = LoaderReporter(module.dist, settings.get("rank", 0), settings.get("reports"))
    upgrades = Upgrades(RunOptions.of(settings), module, reporter)
    cls = upgrades.cls
    cls._get_iterator = lambda loader: upgrades.iterator(loader)
    if upgrades.options.echo is not None:
        cls.__len__ = lambda loader: upgrades.length(loader)


def prepare() -> None:
    """Import what the first loop needs."""
    from penstock.torch import DataLoader  # noqa: F401


class Upgrades:
    """The torch loaders of this process, each with its replacement."""

    def __init__(self, options: RunOptions, module: Any, reporter: LoaderReporter) -> None:
        self.options = options
        self.cls = module.DataLoader
        self._iterator, self._length = self.cls._get_iterator, self.cls.__len__
        self._builder = Builder(options, module)
        self._reporter = reporter
        self._known: weakref.WeakKeyDictionary[Any, Upgraded | None] = weakref.WeakKeyDictionary()

    def iterator(self, loader: Any) -> Iterator[Any]:
        """The iterator for one loop over this loader."""
        upgraded = self._of(loader)
        if upgraded is None:
            return self._iterator(loader)  # type: ignore[no-any-return]
        from penstock.torch.iteration import Iteration

        known = weakref.ref(loader)  # a loader must not keep itself alive by its replacement
        upgraded.given_up = lambda error: self._give_up(known(), error)
        return Iteration(loader, upgraded)

    def length(self, loader: Any) -> int:
        """Number of batches; with echo it is larger than torch's."""
        upgraded = self._of(loader) if shuffles(loader) else None
        if upgraded is not None and upgraded.echoes:
            return len(upgraded.loader)
        return int(self._length(loader))

    def _of(self, loader: Any) -> Upgraded | None:
        if loader in self._known:
            upgraded = self._known[loader]
            # A forked process needs a replacement of its own.
            if upgraded is None or upgraded.pid == os.getpid():
                return upgraded
        try:
            upgraded = self._builder.build(loader)
        except (PenstockError, ImportError) as error:
            upgraded = None
            self._reporter.not_upgraded(loader, error)
        else:
            self._reporter.upgraded(loader, upgraded, self.options)
        self._known[loader] = upgraded
        return upgraded

    def _give_up(self, loader: Any, error: PenstockError) -> None:
        upgraded, self._known[loader] = self._known.get(loader), None
        self._reporter.not_upgraded(loader, error)
        if upgraded is not None:
            upgraded.loader.close()
