"""Echoing: how often each fresh group comes in an epoch, and in which sequence its copies do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.keyed import Key, Keyed
from penstock.order.order import whole

Numbers = NDArray[np.integer[Any]]
"""Whole numbers, in no more bytes than they need: there are ``factor`` times n of them."""

_KEPT = 2
"""Epochs whose sequence is remembered: the current one, and the next one if it is begun early."""

_COUNTS, _WINDOWS = 0, 1
"""What the random choices of an epoch are for; each has a stream of its own."""


@dataclass(frozen=True)
class Echo:
    """Every group ``factor`` times, its copies spread over windows of ``window`` places.

    A group is what is repeated as one: a sample of each rank, or a batch. Of a factor between two
    whole numbers the fraction is dealt by chance, group by group: at 1.25 one in four comes twice.
    The copies of a group follow each other, and then every run of ``window`` places is shuffled by
    itself. So a copy is delivered less than a window away from the others, or right after them with
    ``window=1``.

    ``factor`` may also be a function of the epoch, for a factor that is chosen as epochs begin. It
    must give the same answer whenever it is asked for the same epoch. What it answers above
    ``limit`` counts as ``limit``: measured ratios have no bound, and replica numbers need one.

    Two echoes on one road choose apart when they have different names for ``stage``.

    >>> echo = Echo(2, window=4, seed=0)
    >>> groups, copies = echo.sequence(4, epoch=0)
    >>> sorted(groups[:4].tolist()), sorted(groups[4:].tolist())
    ([0, 0, 1, 1], [2, 2, 3, 3])
    >>> Echo(1.5, window=1, seed=0).sequence(4, epoch=1)[0].tolist()
    [0, 0, 1, 1, 2, 3, 3]
    """

    factor: float | Callable[[int], float]
    window: int
    seed: int
    limit: int = 8
    stage: str = "order/echo"
    _kept: dict[tuple[int, int, float], tuple[Numbers, Numbers]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not callable(self.factor):
            object.__setattr__(self, "factor", _factor("The factor of echo()", self.factor))
        for name, least in (("window", 1), ("seed", None), ("limit", 1)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))

    @property
    def fixed(self) -> bool:
        """Whether the factor is known before an epoch begins."""
        return not callable(self.factor)

    @property
    def most(self) -> int:
        """How many copies a group can have in any epoch; copy numbers stay below it."""
        return self.limit if callable(self.factor) else math.ceil(self.factor)

    def factor_of(self, epoch: int) -> float:
        """The factor of one epoch."""
        if not callable(self.factor):
            return self.factor
        chosen = _factor(f"The factor that echo() was given for epoch {epoch}", self.factor(epoch))
        return min(chosen, float(self.limit))

    def counts(self, groups: int, epoch: int) -> NDArray[np.int64]:
        """How often each group comes in an epoch."""
        fraction, least = math.modf(self.factor_of(epoch))
        found = np.full(groups, int(least), dtype=np.int64)
        if fraction:
            found += self._generator(epoch, _COUNTS).random(groups) < fraction
        return found

    def total(self, groups: int, epoch: int) -> int:
        """How many copies of all groups an epoch has."""
        factor = self.factor_of(epoch)
        kept = self._kept.get((groups, epoch, factor))
        if kept is not None:
            return len(kept[0])
        if factor.is_integer():
            return groups * int(factor)
        return int(self.counts(groups, epoch).sum())

    def sequence(self, groups: int, epoch: int) -> tuple[Numbers, Numbers]:
        """The groups of an epoch as they are delivered, and which copy of its group each one is."""
        key = (groups, epoch, self.factor_of(epoch))
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        counts = self.counts(groups, epoch)
        ends = np.cumsum(counts)
        places = self._shuffled(int(ends[-1]) if groups else 0, epoch)
        numbers = np.repeat(np.arange(groups, dtype=_narrowest(groups)), counts)[places]
        copies = (places - (ends - counts)[numbers]).astype(_narrowest(self.most))
        for found in (numbers, copies):
            found.flags.writeable = False
        for old in list(self._kept)[: len(self._kept) - _KEPT + 1]:
            self._kept.pop(old, None)
        self._kept[key] = numbers, copies
        return numbers, copies

    def _shuffled(self, total: int, epoch: int) -> NDArray[np.int64]:
        """All places of an epoch, shuffled within their windows."""
        places = np.arange(total, dtype=np.int64)
        window = min(self.window, total)
        if window <= 1:
            return places
        # A random word for every place, with the place within its window in the lowest bits:
        # sorting the words shuffles the places, in a third of the time of an argsort. Words are
        # drawn place by place, so a window does not depend on how many others there are.
        within = places % window
        bits = (window - 1).bit_length()
        words = self._generator(epoch, _WINDOWS).integers(0, 2**64, size=total, dtype=np.uint64)
        words >>= np.uint64(bits)
        words <<= np.uint64(bits)
        words |= within.astype(np.uint64)
        full = total - total % window
        words[:full].reshape(-1, window).sort(axis=1)
        words[full:].sort()
        words &= np.uint64((1 << bits) - 1)
        places -= within
        places += words.astype(np.int64)
        return places

    def _generator(self, epoch: int, use: int) -> np.random.Generator:
        return Keyed(self.seed, self.stage).fresh(Key(index=0, epoch=epoch, replica=use))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}


def _factor(what: str, value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, Real)
    found = float(value) if number else math.nan
    if not (math.isfinite(found) and found >= 1):
        raise PipelineError(
            f"{what} is {value!r}; give how often each fresh output is used, a number of 1 or more "
            "such as 2 or 1.5. With 1 everything comes once."
        )
    return found


def _narrowest(end: int) -> type[np.integer[Any]]:
    """The smallest type for the numbers below ``end``."""
    return next((kind for kind in (np.uint8, np.int32) if end - 1 <= np.iinfo(kind).max), np.int64)
