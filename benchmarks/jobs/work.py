"""The workload of several jobs, and the setups that serve it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Contestant
from benchmarks.harness.workloads import Photos


@dataclass(frozen=True)
class SharedPhotos(Photos):
    """Photographs for ``jobs`` jobs that run together. ``share`` names their group. ``ports`` are
    free ports, for loaders that need some."""

    jobs: int = 1
    share: str = "jobs"
    ports: tuple[int, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """The workload for JSON. A job may run another version of Python, so it is not pickled."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "data": str(self.data),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> SharedPhotos:
        return cls(**{**plain, "data": Path(plain["data"]), "ports": tuple(plain["ports"])})


ServeFunction = Callable[[SharedPhotos, Callable[[int], None]], None]
"""Prepares batches for all jobs, in a separate process. Calls its second argument with 0 when it
is ready for jobs, then with the number of samples of each batch."""


@dataclass(frozen=True)
class JobSetup:
    """How a contestant serves several jobs: each job loads for itself, or a process that runs
    ``serve`` loads for all, or Penstock's node does. With ``stamped``, the last field of a batch is
    the time at which each sample was ready."""

    contestant: Contestant[Any]
    serve: ServeFunction | None = None
    node: bool = False
    stamped: bool = False

    @property
    def title(self) -> str:
        return self.contestant.title

    @property
    def shares(self) -> bool:
        return self.node or self.serve is not None


def count_jobs(number: int) -> str:
    """The number of jobs in words: ``1 job``, ``2 jobs``."""
    return "1 job" if number == 1 else f"{number} jobs"
