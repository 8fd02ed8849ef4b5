"""The task of ``penstock run``: torch's DataLoader class stays, and how it iterates is ours.

Libraries check for that class, subclass it and make it anew with other samplers. All of them come
to ``DataLoader._get_iterator`` in the end, so that is what is replaced.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.inject.build import Builder, Upgraded
from penstock.inject.iteration import Iteration
from penstock.inject.messages import Told
from penstock.inject.wanted import Wanted, shuffles


def install(settings: Mapping[str, Any], module: Any) -> None:
    """Have the loaders of this process upgraded; ``module`` is torch's."""
    told = Told(module.dist, settings.get("rank", 0), settings.get("reports"))
    upgrades = Upgrades(Wanted.of(settings), module, told)
    kind = upgrades.kind
    kind._get_iterator = lambda loader: upgrades.iterator(loader)
    if upgrades.wanted.echo is not None:
        kind.__len__ = lambda loader: upgrades.length(loader)


class Upgrades:
    """The loaders of this process, and what became of them."""

    def __init__(self, wanted: Wanted, module: Any, told: Told) -> None:
        self.wanted = wanted
        self.kind = module.DataLoader
        self._torch = module.torch
        self._iterator, self._length = self.kind._get_iterator, self.kind.__len__
        self._builder = Builder(wanted, module)
        self._told = told
        self._found: weakref.WeakKeyDictionary[Any, Upgraded | None] = weakref.WeakKeyDictionary()

    def iterator(self, loader: Any) -> Iterator[Any]:
        """What one loop over this loader goes through."""
        made = self._of(loader)
        if made is None:
            return self._iterator(loader)  # type: ignore[no-any-return]
        return Iteration(loader, made, self._torch, self._iterator, self._give_up)

    def length(self, loader: Any) -> int:
        """Its batches: more than torch's where they are echoed."""
        made = self._of(loader) if shuffles(loader) else None
        return len(made.loader) if made is not None and made.echoes else int(self._length(loader))

    def _of(self, loader: Any) -> Upgraded | None:
        if loader in self._found:
            made = self._found[loader]
            # A fork has to have one of its own.
            if made is None or made.pid == os.getpid():
                return made
        try:
            made = self._builder.build(loader)
        except (PenstockError, ImportError) as error:
            made = None
            self._told.left(loader, error)
        else:
            self._told.upgraded(loader, made, self.wanted)
        self._found[loader] = made
        return made

    def _give_up(self, loader: Any, error: PenstockError) -> None:
        made, self._found[loader] = self._found.get(loader), None
        self._told.left(loader, error)
        if made is not None:
            made.loader.close()
