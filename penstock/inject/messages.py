"""What ``penstock run`` tells about a script's loaders: as they are met, and when it ends."""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ErrorCode, PipelineError
from penstock.inject.wanted import shuffles

if TYPE_CHECKING:
    from penstock.inject.build import Upgraded
    from penstock.inject.wanted import Wanted

FILE = "loaders"

_INSTEAD: dict[ErrorCode, str] = {
    "random-above-cache": (
        "the dataset may be random, and a cached sample would never change again. If the datasets "
        "of this script draw nothing, say so with --no-random."
    ),
    "echo-with-sampler": (
        "its sampler decides how often a sample comes, and so would echo. Give --echo-at batch."
    ),
    "nothing-random-below-refurbish": (
        "none of the transforms that are done every time is random, so the very same sample would "
        "come several times. Give a larger --split."
    ),
    "no-transforms": (
        "its dataset has no transforms in an attribute 'transform' that it could stand between."
    ),
    "iterable-dataset": "its dataset can only be iterated, and samples have no index.",
}
"""Texts for errors whose own message names arguments that the command does not have."""


@dataclass(frozen=True)
class Loaded:
    """One loader of a script; ``why`` is empty if it was upgraded."""

    pid: int
    number: int
    name: str
    changes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.name} stays as it is: {self.why}"
        without = "".join(f"\n  without {one}" for one in self.missing)
        return f"{self.name} is upgraded: {'; '.join(self.changes)}.{without}"


class Told:
    """Tells of each loader once, and in the first of several ranks only."""

    def __init__(self, dist: Any, rank: int, reports: str | None) -> None:
        self._dist = dist
        self._rank = rank
        self._reports = reports
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def upgraded(self, loader: Any, made: Upgraded, wanted: Wanted) -> None:
        changes = [str(made.loader._loader.choice), *wanted.show(made.extras)]
        if made.dealt is None and not made.stream:
            changes.append("its shuffle is Penstock's own")
        missing = tuple(f"--{name}: {_plain(why)}" for name, why in made.missing.items())
        self._tell(loader, changes=tuple(changes), missing=missing)

    def left(self, loader: Any, why: Exception) -> None:
        self._tell(loader, why=_plain(why))

    def _tell(self, loader: Any, **what: Any) -> None:
        if loader not in self._numbers:
            self._count += 1
            self._numbers[loader] = self._count
        number = self._numbers[loader]
        told = Loaded(os.getpid(), number, _name(loader, number), **what)
        if self._dist.is_available() and self._dist.is_initialized():
            self._rank = int(self._dist.get_rank())
        if self._rank:
            return
        sys.stderr.write(f"penstock: {told}\n")
        sys.stderr.flush()
        if self._reports is not None:
            with open(Path(self._reports) / FILE, "ab", 0) as file:
                file.write(json.dumps(asdict(told)).encode() + b"\n")


def loaders(reports: Path) -> list[Loaded]:
    """The loaders that were told of there, each as it was in the end."""
    try:
        lines = (reports / FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    found: dict[tuple[int, int], Loaded] = {}
    for line in lines:
        told = json.loads(line)
        told |= {name: tuple(told[name]) for name in ("changes", "missing")}
        found[told["pid"], told["number"]] = Loaded(**told)
    return list(found.values())


def summary(found: Sequence[Loaded]) -> str:
    """What became of a script's loaders.

    >>> print(summary([Loaded(7, 1, "DataLoader 1", ("2 threads",))]))
    1 of 1 DataLoaders upgraded.
    """
    if not found:
        return "the script iterated no torch DataLoader, so nothing was changed."
    whole = [one for one in found if not one.why]
    without = [one for one in whole if one.missing]
    text = f"{len(whole)} of {len(found)} DataLoaders upgraded"
    if without:
        text += f", {len(without)} of them without some of what was asked for"
    return (
        f"{text}{'.' if len(whole) == len(found) and not without else '; the reasons are above.'}"
    )


def _name(loader: Any, number: int) -> str:
    try:
        samples = f"{len(loader.dataset)} samples"
    except (TypeError, NotImplementedError):
        samples = "a stream"
    order = "shuffled" if shuffles(loader) else "in order"
    return f"DataLoader {number} ({type(loader.dataset).__name__}, {samples}, {order})"


def _plain(why: Exception) -> str:
    """The reason in terms of the command's own options."""
    code = why.code if isinstance(why, PipelineError) else None
    return str(why).removeprefix("DataLoader: ") if code is None else _INSTEAD[code]
