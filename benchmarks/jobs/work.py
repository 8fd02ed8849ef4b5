"""What several jobs ask for at once, and the ways of giving it to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Contestant
from benchmarks.harness.workloads import Photos


@dataclass(frozen=True)
class SharedPhotos(Photos):
    """Photographs for ``jobs`` that run together. ``share`` names them; ``ports`` are free, for
    loaders that need some."""

    jobs: int = 1
    share: str = "jobs"
    ports: tuple[int, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """For JSON: a pickle would have to be read by another version of Python."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "data": str(self.data),
        }

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> SharedPhotos:
        return cls(**{**plain, "data": Path(plain["data"]), "ports": tuple(plain["ports"])})


Serve = Callable[[SharedPhotos, Callable[[int], None]], None]
"""Prepares for all jobs, in a process of its own. It says how many samples each batch has, and
before the first one 0, as soon as jobs may come."""


@dataclass(frozen=True)
class Way:
    """How a contestant serves several jobs: each by itself, by a process that runs ``serve``, or by
    Penstock's node. ``stamped`` batches say in their last field when each sample was ready."""

    contestant: Contestant[Any]
    serve: Serve | None = None
    node: bool = False
    stamped: bool = False

    @property
    def title(self) -> str:
        return self.contestant.title

    @property
    def shares(self) -> bool:
        return self.node or self.serve is not None


def jobs_of(number: int) -> str:
    """So many of them, in words."""
    return "1 job" if number == 1 else f"{number} jobs"
