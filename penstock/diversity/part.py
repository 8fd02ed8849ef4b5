"""A part of a road, as far as diversity and its price are concerned: the source, or a map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The source or a map: how many ``outcomes`` it has for a sample, and what it costs.

    One that is not random has 1 outcome, and ``None`` is unknown. ``seconds`` are for one sample.
    """

    name: str
    outcomes: float | None = 1.0
    seconds: float = 0.0

    @property
    def random(self) -> bool:
        """Whether it may give more than one thing."""
        return self.outcomes != 1.0


def known(parts: Iterable[Part]) -> list[float]:
    """The outcomes of those that are random, as far as they are known."""
    return [part.outcomes for part in parts if part.outcomes is not None and part.random]


def listed(names: Sequence[str]) -> str:
    """Names as people say them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
