"""Assembles what a pipeline needs to run: stores, workers, counters, engine."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock import config, native
from penstock.engine.engine import Engine
from penstock.engine.keepers import Keepers, Prepare
from penstock.engine.pools.choose import Choice, choose, fits_a_crew, gil_enabled, make_pool
from penstock.engine.pools.gil_watch import GilWatch
from penstock.engine.pools.launch import ChooseStart, as_program
from penstock.engine.pools.pool import Pool
from penstock.engine.pools.runner import Work, WorkerInit
from penstock.engine.schedule import Schedule
from penstock.engine.slots import Layout, Leaf, Register, Ring
from penstock.operation import ArraySpec
from penstock.options import Options
from penstock.order import Deal
from penstock.order.plan import BatchKeys
from penstock.pipeline import Pipeline, batching_of
from penstock.stats import DeviceStats, Meter
from penstock.stops.batch import Collate
from penstock.stops.stop import Fields, Stop
from penstock.store.shared import SharedStores


@dataclass(frozen=True)
class Recipe:
    """A pipeline and how to run it; sent to other processes by value.

    - ``fallback``: collates a batch whose samples do not share one layout.
    - ``init``: called in each worker before its first task.
    - ``start``: how worker processes are started.
    - ``kept``: how many samples refurbish keeps, if a checkpoint says so.
    - ``deal``: how the samples are dealt to the ranks of the job, if that runs no user code.
    """

    pipeline: Pipeline
    options: Options
    fallback: Collate
    init: WorkerInit | None = None
    start: ChooseStart = as_program
    kept: int | None = None
    deal: Deal | None = None

    def choice(self, cores: int | None = None) -> Choice:
        """The kind and number of workers; with ``share=``, the workers of the node."""
        batch, options = batching_of(self.pipeline), self.options
        if options.share is not None:
            return Choice("node", 0, f"share={options.share!r}")
        return choose(
            self.pipeline.road(options.seed),
            batch.collate,
            options.workers,
            options.kind,
            cores or config.cores(),
            gil_enabled(),
            beside_training="torch" in sys.modules,
        )

    def gil_watch(self, choice: Choice) -> GilWatch | None:
        """Watches whether these workers hold the GIL; ``None``: they need not move, or cannot."""
        watched = (
            choice.kind == "threads"
            and self.options.kind == "auto"
            and "torch" in sys.modules
            and gil_enabled()
            and native.kernel_available()
        )
        road = self.pipeline.road(self.options.seed)
        stacked = batching_of(self.pipeline).collate is None
        if not watched or not fits_a_crew(road):
            return None
        from penstock.engine.pools.native_road import can_be_native

        if can_be_native(road, stacked=stacked):
            return None
        return GilWatch()


MakeEngine = Callable[..., Engine]


class Together(Protocol):
    """A device that prepares its share of the batches of one engine."""

    @property
    def schedule(self) -> Schedule:
        """Deals tiny-batches to CPU workers and to the device."""

    def split(self, work: Work) -> Work:
        """The work of CPU workers, with their part of what the device prepares."""

    def join(self, pool: Pool) -> Pool:
        """A pool of these workers and the device."""

    def stats(self) -> DeviceStats:
        """What the device has prepared."""

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, for a checkpoint. It affects speed only."""


class DevicePlan(NamedTuple):
    """Whether a device prepares a share of each batch, and why.

    ``begin``: lets it take part in one engine, with what was learnt before; ``None``: it does not.
    """

    begin: Callable[[Mapping[str, Any] | None], Together] | None
    why: str


class Assembly:
    """A recipe with its stores, work and counters. Nothing runs until ``engine`` is called.

    ``meter``: counters that go on, of the same pipeline with other workers.
    """

    def __init__(
        self,
        recipe: Recipe,
        choice: Choice,
        shared_stores: SharedStores | None = None,
        meter: Meter | None = None,
    ) -> None:
        pipeline, options, batch = recipe.pipeline, recipe.options, batching_of(recipe.pipeline)
        self.recipe = recipe
        self.choice = choice
        self.keepers = Keepers(
            pipeline,
            options,
            recipe.kept,
            shared=choice.own_processes,
            in_node=choice.kind == "node",
            shared_stores=shared_stores,
            prepare_above=self._prepare_above if self._runs_processes() else None,
        )
        road = self.keepers.road
        self.work = Work(road, batch.collate, recipe.fallback, options.on_error, batch.size)
        self.meter = meter or Meter(road.stages, road.holds, time.perf_counter)

    def _runs_processes(self) -> bool:
        """Whether samples are prepared by worker processes, of this loader or of a node."""
        alone = replace(self.recipe, options=self.recipe.options.without_share())
        choice = alone.choice() if self.choice.kind == "node" else self.choice
        return choice.own_processes

    def _prepare_above(self, stops: tuple[Stop, ...]) -> Prepare:
        """Returns a function that prepares samples of these stops in a worker of its own.

        User code must not run in this process, which it could end.
        """
        pipeline = replace(self.recipe.pipeline, stops=stops, batching=None)
        recipe = replace(
            self.recipe,
            pipeline=pipeline.batch(1, collate=operator.itemgetter(0)),
            options=replace(self.recipe.options.without_share(), on_error="skip"),
            kept=None,
        )

        def prepare(indices: Sequence[int]) -> list[Any]:
            engine = Assembly(recipe, Choice("processes", 1, "samples are weighed")).engine()
            try:
                keys = (
                    BatchKeys(0, number, np.array([index]), None)
                    for number, index in enumerate(indices)
                )
                engine.start(keys)
                ready = iter(engine.next, None)
                return [batch.value for batch in ready if batch.rows]
            finally:
                engine.close()

        return prepare

    def engine(
        self,
        make: MakeEngine = Engine,
        *,
        staged: bool = False,
        join: Callable[[Pool], Pool] | None = None,
        register: Register | None = None,
        together: Together | None = None,
        **more: Any,
    ) -> Engine:
        """An engine with a pool of its own.

        ``staged``: other processes can map its batches. ``join``: joins the pool with workers of
        other machines. ``register``: registers the memory of batches with a device. ``together``:
        a device that takes part. ``more``: further arguments for ``make``.
        """
        recipe, options = self.recipe, self.recipe.options
        self.keepers.open()
        work = self.work if together is None else together.split(self.work)
        pool: Pool = make_pool(self.choice, work, options.seed, recipe.init, recipe.start)
        if join is not None:
            pool = join(pool)
        if together is not None:
            pool = together.join(pool)
            more["schedule"] = together.schedule
        batch = batching_of(recipe.pipeline)
        whole = not recipe.pipeline.source.indexed or self.work.collate is not None
        layout = None if whole else layout_of(recipe.pipeline.fields, batch.size)
        return make(
            work,
            pool,
            Ring(options.memory_budget, shared=staged or pool.own_process, register=register),
            self.meter,
            prefetch=options.prefetch or (max(4, 2 * self.choice.workers) if whole else None),
            tiny_batch=None if options.tiny_batch == "auto" else options.tiny_batch,
            layout=layout,
            timeout=options.timeout,
            keepers=self.keepers,
            **more,
        )


def layout_of(fields: Fields, rows: int) -> Layout | None:
    """The layout of batches of ``rows`` samples; ``None`` if a shape or type is not known yet."""
    by_name = fields if isinstance(fields, dict) else {0: fields}
    leaves = []
    for spec in by_name.values():
        if not isinstance(spec, ArraySpec) or not spec.known:
            return None
        shape = tuple(n for n in spec.shape if n is not None)
        leaves.append(Leaf(shape, spec.dtype))
    skeleton: Any = 0
    if isinstance(fields, dict):
        names = list(fields)
        if names == list(range(len(names))):
            skeleton = tuple(names)
        else:
            skeleton = {name: i for i, name in enumerate(names)}
    return Layout(skeleton, tuple(leaves), rows)
