"""Chooses the pool of a loader: kind and number of workers, and the reason in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from penstock.engine.pools.inline import InlinePool
from penstock.engine.pools.launch import ChooseStart
from penstock.engine.pools.pool import Pool
from penstock.engine.pools.processes import ProcessPool, crew_sizes
from penstock.engine.pools.runner import Work, WorkerInit
from penstock.engine.pools.threads import ThreadPool
from penstock.errors import PipelineError
from penstock.host.text import many
from penstock.options import Kind
from penstock.source.dataset import DatasetSource
from penstock.stops.batch import Collate, Pad
from penstock.stops.road import Road, draws_globally

PoolKind = Literal["none", "threads", "processes", "crew", "node"]

CREW_FROM = 9
"""Workers from which on a crew takes the place of threads beside a training loop. A launch-bound
loop takes 2.4 times its time beside 8 threads, and more than three times beside 16: they compete
with it for the GIL. A few threads cost it less than worker processes take to start."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind and number of workers, and why they were chosen."""

    kind: PoolKind
    workers: int
    why: str

    @property
    def own_processes(self) -> bool:
        """Whether the workers are processes, which see only memory that is shared with them."""
        return self.kind in ("processes", "crew")

    def __str__(self) -> str:
        if self.kind == "none":
            return f"in this process ({self.why})"
        if self.kind == "node":
            return f"in the node of this machine ({self.why})"
        if self.kind == "crew":
            processes = len(crew_sizes(self.workers))
            return (
                f"a crew of {many(self.workers, 'thread', 'threads')} in "
                f"{many(processes, 'process', 'processes')} ({self.why})"
            )
        one = {"threads": "thread", "processes": "process"}[self.kind]
        return f"{self.workers} {one if self.workers == 1 else self.kind} ({self.why})"


def choose(
    road: Road,
    collate: Collate | None,
    workers: int | Literal["auto"],
    kind: Kind,
    cores: int,
    gil: bool,
    beside_training: bool = False,
) -> Choice:
    """Choose threads if everything on the road releases the GIL, and processes if not.

    Where many threads would share the GIL with a training loop, choose a crew; where few do, they
    may move to a crew later: see ``GilWatch``.

    ``gil``: whether this Python has a GIL. ``beside_training``: a training loop may run in this
    process.
    """
    if workers == 0:
        return Choice("none", 0, "workers=0")
    stream = not road.source.indexed
    count = (1 if stream else cores) if workers == "auto" else workers
    drawer = _global_drawer(road)
    if stream:
        if kind in ("threads", "crew"):
            raise PipelineError(
                f'kind="{kind}" with a stream: each worker reads a copy of the stream of its own, '
                f'which takes processes. Leave out kind="{kind}", or give kind="processes".'
            )
        return Choice("processes", count, "every worker reads a stream of its own")
    if kind in ("threads", "crew"):
        if drawer:
            raise PipelineError(
                f'kind="{kind}", but {drawer} may draw from the global generators, which all '
                "threads share: its results would depend on timing. Give random=False if it draws "
                "no random numbers, give it a parameter rng for a generator of its own, or use "
                'kind="processes".'
            )
        return Choice(kind, count, f'kind="{kind}"')
    if kind == "processes":
        return Choice("processes", count, 'kind="processes"')
    if drawer:
        return Choice("processes", count, f"{drawer} may draw from the global generators")
    from penstock.engine.pools.native_road import can_be_native

    if can_be_native(road, stacked=collate is None):
        return Choice("threads", count, "the compiled kernel runs every stage, without the GIL")
    holder = _gil_holder(road, collate)
    if holder is None:
        if gil and beside_training and count >= CREW_FROM and fits_a_crew(road):
            return Choice("crew", count, f"{count} threads would slow down the training loop")
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


def fits_a_crew(road: Road) -> bool:
    """Whether a crew can do what threads can.

    Threads share a cache in the memory of this process, and samples that cannot be pickled.
    """
    return not any(stop.keeps for stop in road.stops) and not isinstance(road.source, DatasetSource)


def make_pool(
    choice: Choice, work: Work, seed: int, init: WorkerInit | None, start: ChooseStart
) -> Pool:
    """A pool of the chosen kind and size.

    ``seed``: for streams and the ``init`` hook; random choices on the road are keyed.
    """
    if choice.kind == "none":
        return InlinePool(work, seed)
    if choice.kind == "threads":
        from penstock.engine.pools.native_road import native_road

        road = native_road(work.road, stacked=work.collate is None)
        if road is not None:
            from penstock.engine.pools.native_threads import NativePool

            return NativePool(work, choice.workers, seed, road)
        return ThreadPool(work, choice.workers, seed)
    if choice.kind == "crew":
        return ProcessPool(work, choice.workers, seed, init, start, crew=True)
    return ProcessPool(work, choice.workers, seed, init, start)
