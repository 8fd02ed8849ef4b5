"""Chooses the pool of a loader: kind and number of workers, and the reason in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from penstock.engine.pools.inline import InlinePool
from penstock.engine.pools.launch import ChooseStart
from penstock.engine.pools.pool import Pool
from penstock.engine.pools.processes import ProcessPool
from penstock.engine.pools.runner import Work, WorkerInit
from penstock.engine.pools.threads import ThreadPool
from penstock.errors import PipelineError
from penstock.stops.batch import Collate, Pad
from penstock.stops.road import Road, draws_globally

PoolKind = Literal["none", "threads", "processes", "node"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind and number of workers, and why they were chosen."""

    kind: PoolKind
    workers: int
    why: str

    @property
    def own_processes(self) -> bool:
        """Whether the workers are processes, which see only memory that is shared with them."""
        return self.kind == "processes"

    def __str__(self) -> str:
        if self.kind == "none":
            return f"in this process ({self.why})"
        if self.kind == "node":
            return f"in the node of this machine ({self.why})"
        one = {"threads": "thread", "processes": "process"}[self.kind]
        return f"{self.workers} {one if self.workers == 1 else self.kind} ({self.why})"


def choose(
    road: Road,
    collate: Collate | None,
    workers: int | Literal["auto"],
    kind: Literal["auto", "threads", "processes"],
    cores: int,
    gil: bool,
) -> Choice:
    """Choose threads if everything on the road releases the GIL, and processes if not.

    ``gil``: whether this Python has a GIL.
    """
    if workers == 0:
        return Choice("none", 0, "workers=0")
    stream = not road.source.indexed
    count = (1 if stream else cores) if workers == "auto" else workers
    drawer = _global_drawer(road)
    if stream:
        if kind == "threads":
            raise PipelineError(
                'kind="threads" with a stream: each worker reads a copy of the stream of its own, '
                'which takes processes. Leave out kind="threads", or give kind="processes".'
            )
        return Choice("processes", count, "every worker reads a stream of its own")
    if kind == "threads":
        if drawer:
            raise PipelineError(
                f'kind="threads", but {drawer} may draw from the global generators, which all '
                "threads share: its results would depend on timing. Give random=False if it draws "
                "no random numbers, give it a parameter rng for a generator of its own, or use "
                'kind="processes".'
            )
        return Choice("threads", count, 'kind="threads"')
    if kind == "processes":
        return Choice("processes", count, 'kind="processes"')
    if drawer:
        return Choice("processes", count, f"{drawer} may draw from the global generators")
    holder = _gil_holder(road, collate)
    if holder is None:
        return Choice("threads", count, "every operation releases the GIL")
    if not gil:
        return Choice("threads", count, "this Python has no GIL")
    return Choice("processes", count, f"{holder} may hold the GIL")


def gil_enabled() -> bool:
    """False on a free-threaded Python."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return True if enabled is None else bool(enabled())


def _global_drawer(road: Road) -> str | None:
    if draws_globally(road.source):
        return "the dataset"
    return next((stop.name for stop in road.stops if stop.global_random), None)


def _gil_holder(road: Road, collate: Collate | None) -> str | None:
    if not road.source.threadsafe:
        return "the dataset"
    if collate is not None and not isinstance(collate, Pad):
        return "collate"
    return next((stop.name for stop in road.stops if not stop.threadsafe), None)


def make_pool(
    choice: Choice, work: Work, seed: int, init: WorkerInit | None, start: ChooseStart
) -> Pool:
    """A pool of the chosen kind and size.

    ``seed``: for streams and the ``init`` hook; random choices on the road are keyed.
    """
    if choice.kind == "none":
        return InlinePool(work, seed)
    if choice.kind == "threads":
        return ThreadPool(work, choice.workers, seed)
    return ProcessPool(work, choice.workers, seed, init, start)
