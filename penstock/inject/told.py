"""What ``penstock run`` tells about a script's loaders, on the stream of errors."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from penstock.inject.wanted import shuffles

if TYPE_CHECKING:
    from penstock.inject.build import Upgraded
    from penstock.inject.wanted import Wanted

_INSTEAD = {
    "cache() stands below a dataset that may be random": (
        "the dataset may be random, and a cached sample would never change again. If the datasets "
        "of this script draw nothing, say so with --no-random."
    ),
    "echo() above batch() with a sampler": (
        "its sampler decides how often a sample comes, and so would echo. Give --echo-at batch."
    ),
}
"""What a loader says of arguments that a user of the command cannot give, by how it begins."""


class Told:
    """Tells each thing once, in the first of several ranks only."""

    def __init__(self, dist: Any, rank: int) -> None:
        self._dist = dist
        self._rank = rank
        self._pid = os.getpid()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._upgraded: set[int] = set()
        self._left: set[int] = set()
        atexit.register(self.summary)

    def upgraded(self, loader: Any, made: Upgraded, wanted: Wanted) -> None:
        number = self._number(loader)
        self._upgraded.add(number)
        changes = [str(made.loader._loader.choice), *wanted.show(made.extras)]
        if made.dealt is None and not made.stream:
            changes.append("its shuffle is Penstock's own")
        self._say(f"{self._name(loader)} is upgraded: {'; '.join(changes)}.")
        for name, why in made.missing.items():
            self._say(f"DataLoader {number} does without --{name}: {_plain(why)}")

    def left(self, loader: Any, why: str) -> None:
        self._upgraded.discard(self._number(loader))
        self._left.add(self._number(loader))
        self._say(f"{self._name(loader)} stays as it is: {_plain(why)}")

    def summary(self) -> None:
        """What became of all of them, as the script ends."""
        if os.getpid() != self._pid:
            return
        if not self._upgraded and not self._left:
            self._say("no DataLoader was iterated.")
            return
        total = len(self._upgraded) + len(self._left)
        stay = ""
        if self._left:
            listed = ", ".join(map(str, sorted(self._left)))
            stay = f" As they were: {listed}, for the reasons above."
        self._say(f"{len(self._upgraded)} of {total} DataLoaders upgraded.{stay}")

    def _name(self, loader: Any) -> str:
        try:
            samples = f"{len(loader.dataset)} samples"
        except (TypeError, NotImplementedError):
            samples = "a stream"
        order = "shuffled" if shuffles(loader) else "in order"
        kind = type(loader.dataset).__name__
        return f"DataLoader {self._number(loader)} ({kind}, {samples}, {order})"

    def _number(self, loader: Any) -> int:
        return self._numbers.setdefault(loader, len(self._upgraded | self._left) + 1)

    def _say(self, text: str) -> None:
        # Remembered, because a script may have left its group when it ends.
        if self._dist.is_available() and self._dist.is_initialized():
            self._rank = int(self._dist.get_rank())
        if self._rank == 0:
            sys.stderr.write(f"penstock: {text}\n")
            sys.stderr.flush()


def _plain(why: str) -> str:
    for begin, instead in _INSTEAD.items():
        if begin in why:
            return instead
    return why.removeprefix("DataLoader: ")
