"""What a profile is: rows for the road as written and as it runs, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from penstock.stats import BadSample

Kind = Literal["source", "map", "cache", "refurbish", "echo", "fused", "batch", "part"]

HOLDS = ("cache", "refurbish", "echo")
"""Stops that keep samples."""


@dataclass(frozen=True, slots=True)
class Row:
    """One stop, or one ``part`` of it: what a sample costs there, and what leaves it.

    ``ms`` is wall time and ``cpu_ms`` the CPU time of the thread, both a sample, in this stop
    alone; ``share`` is its part of the road's ``ms``. ``samples`` is how many were measured.
    ``nbytes`` is the size of a sample that leaves it, of a batch for ``batch``. ``needs_process``
    says why it cannot run in threads; it is empty if it can. Where samples are kept, ``ms`` is that
    of a miss: look up, find nothing, put in. ``hit_ms`` is that of a hit, and ``holds`` the share
    of samples that will be found: in a cache, what its budget has room for.
    """

    name: str
    kind: Kind
    ms: float
    cpu_ms: float
    share: float
    samples: int
    leaves: str = ""
    nbytes: int = 0
    random: bool = False
    needs_process: str = ""
    hit_ms: float | None = None
    hit_cpu_ms: float | None = None
    holds: float | None = None
    parts: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What a pipeline costs, stop by stop. ``print`` shows it as a table.

    ``written`` has a row for every stop and operation apart, as the pipeline was written;
    ``fused`` those of the road as it runs, and is the same where nothing is fused. ``cores`` is
    what this machine offers, ``workers`` what a loader would start, and why. ``hint`` says what
    could be done about the slowest stop.
    """

    source: str
    samples: int
    rounds: int
    written: tuple[Row, ...]
    fused: tuple[Row, ...]
    cores: int
    workers: str
    bad: int = 0
    bad_samples: tuple[BadSample, ...] = ()
    hint: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The road as it runs."""
        return self.fused

    @property
    def total_written(self) -> float:
        """Milliseconds a sample, every operation apart, every cache missed."""
        return sum(row.ms for row in self.written)

    @property
    def total_fused(self) -> float:
        """Milliseconds a sample as it runs, every cache missed."""
        return sum(row.ms for row in self.fused)

    @property
    def saved(self) -> float:
        """Milliseconds a sample that fusing saves; below zero where it costs."""
        return self.total_written - self.total_fused

    @property
    def total_cached(self) -> float | None:
        """Milliseconds a sample in later epochs, with what the caches have room for in them.

        ``None`` without caches, or where their hits could not be measured.
        """
        return later(self.fused)

    @property
    def slowest(self) -> Row:
        return max(self.fused, key=lambda row: row.ms)

    @property
    def per_second(self) -> float:
        """Samples a second on one core, with cold caches."""
        return 1e3 / self.total_fused if self.total_fused > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        per_second = self.per_second
        return {
            **asdict(self),
            "total_written": self.total_written,
            "total_fused": self.total_fused,
            "total_cached": self.total_cached,
            "saved": self.saved,
            "slowest": self.slowest.name,
            "per_second": per_second if per_second != float("inf") else None,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        from penstock.diagnose.profile.table import show

        return show(self)


def later(rows: Sequence[Row]) -> float | None:
    """What a sample costs once the caches hold what they have room for.

    Caches admit in one order and never evict, so the smaller one holds part of what the larger
    one holds: the data falls into spans, and each is served by the lowest cache that has it.
    """
    caches = [(at, row.holds, row.hit_ms) for at, row in enumerate(rows) if row.kind in HOLDS]
    if not caches:
        return None
    edges = {0.0, 1.0}
    for _, holds, hit in caches:
        if holds is None or hit is None:
            return None
        edges.add(holds)
    ordered = sorted(edges)
    total = 0.0
    for start, end in pairwise(ordered):
        cost = sum(row.ms for row in rows)
        for at, holds, hit in caches:
            if (holds or 0.0) > start:
                cost = (hit or 0.0) + sum(row.ms for row in rows[at + 1 :])
        total += (end - start) * cost
    return total
