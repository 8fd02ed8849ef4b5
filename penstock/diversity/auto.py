"""``refurbish("auto")``: measures the cost of each part of a road and chooses split and reuse."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from penstock.diversity.outcomes import count_outcomes
from penstock.diversity.propose import KeepingCost, propose
from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed, Keys
from penstock.pipeline import Pipeline
from penstock.stats import Clock, Tally
from penstock.stops.map import Map
from penstock.stops.refurbish import refurbish_in
from penstock.stops.road import OpenRoad, Road, scope_of
from penstock.stops.stop import StageFailure, Step, StepContext, Upstream
from penstock.store import SampleStore, memory_store
from penstock.store.encoding import Encoding

MEASURED, WARM = 24, 4
"""Samples that are timed, and samples before them whose first-time costs are not counted."""

EPOCHS = 90
"""Epochs over which different samples are counted: the usual length of an ImageNet training."""

ROOM = 256 << 20
"""Bytes of the store in which keeping is timed; it holds one sample at a time."""

_log = logging.getLogger("penstock.refurbish")


def settle(
    pipeline: Pipeline, seed: int, *, shared: bool, quiet: bool = False
) -> tuple[Pipeline, dict[str, Any] | None]:
    """Replace ``refurbish("auto")`` by a measured choice: the new pipeline, and the choice as data.

    A pipeline without ``refurbish("auto")`` is returned unchanged, with ``None``. ``shared``:
    samples will be kept in a store that several processes use. ``quiet``: do not log the choice.
    """
    stop = refurbish_in(pipeline.stops)
    if stop is None or stop.reuse != "auto":
        return pipeline, None
    bare = without(pipeline)
    counted = count_outcomes(bare)
    with _temporary_store(shared) as store:
        costs = _measure(bare, seed, store, Encoding(stop.encode), time.perf_counter)
    samples = len(bare.source)
    parts = [
        replace(part, seconds=cost) for part, cost in zip(counted.parts, costs.parts, strict=True)
    ]
    room = float("inf") if stop.budget is None else stop.budget / samples
    proposal = propose(parts, costs.keeping, EPOCHS, room=room, standard=costs.whole)
    place = None if proposal.split is None else counted.places[proposal.split - 1] + 1
    chosen = {"place": place, "reuse": proposal.reuse}
    if not quiet:
        # At WARNING level, because Python shows only those if the user has not set up logging.
        _log.warning("penstock: %s", proposal)
    return placed(pipeline, chosen), chosen


def placed(pipeline: Pipeline, chosen: Mapping[str, Any] | None) -> Pipeline:
    """The pipeline with a choice that ``settle`` has made before."""
    stop = refurbish_in(pipeline.stops)
    bare = without(pipeline)
    if stop is None or not isinstance(chosen, Mapping) or not {"place", "reuse"} <= set(chosen):
        raise StateError(
            'The checkpoint does not say what refurbish("auto") chose, so it was written by '
            "another pipeline. Load it with the pipeline that wrote it."
        )
    place, reuse = chosen["place"], chosen["reuse"]
    if place is None:
        return bare
    stops = list(bare.stops)
    stops.insert(int(place), replace(stop, reuse=int(reuse)))
    return replace(bare, stops=tuple(stops))


def without(pipeline: Pipeline) -> Pipeline:
    """The pipeline without its refurbish stop."""
    stops = [stop for stop in pipeline.stops if not stop.renews]
    return replace(pipeline, stops=tuple(stops))


@dataclass
class _MeasuredCosts:
    """Costs per sample, in seconds.

    ``parts``: the source and every map. ``keeping``: keeping the output of each of them. ``whole``:
    the whole road, which may cost less than its parts because several run fused.
    """

    parts: list[float] = field(default_factory=list)
    keeping: list[KeepingCost] = field(default_factory=list)
    whole: float = 0.0


def _measure(
    pipeline: Pipeline, seed: int, store: SampleStore, encoding: Encoding, clock: Clock
) -> _MeasuredCosts:
    """Time every part of the road, and keeping its output, on a few samples in this thread."""
    source = pipeline.source
    maps = [stop for stop in pipeline.stops if isinstance(stop, Map)]
    steps = [stop.step(StepContext(seed, Tally(1, 0))) for stop in maps]
    only_maps = replace(pipeline, stops=tuple(maps))
    reading, whole = Road(source, (), seed), only_maps.road(seed)
    part_times: list[list[float]] = [[] for _ in range(len(maps) + 1)]
    keeping_costs: list[list[KeepingCost]] = [[] for _ in range(len(maps) + 1)]
    whole_times: list[float] = []
    indices = Keyed(seed, "refurbish/auto").fresh(Key(0)).permutation(len(source))
    with scope_of(whole, own_process=False):
        open_source, open_whole = reading.open(), whole.open()
        for index in indices[: MEASURED + WARM].tolist():
            keys = Keys(0, [index])
            try:
                started = clock()
                open_whole.get(keys)
                whole_times.append(clock() - started)
                samples: list[Any] = []
                for part, step in enumerate([_source_step(open_source), *steps]):
                    started = clock()
                    samples = step(keys, _upstream_of(samples))
                    part_times[part].append(clock() - started)
                    keeping_costs[part].append(_time_keeping(samples[0], store, encoding, clock))
            except StageFailure:
                continue
    measured = len(whole_times)
    if measured <= WARM and measured < len(source):
        raise PipelineError(
            f'refurbish("auto") measures {MEASURED + WARM} samples, but all except {measured} of '
            "them failed. To see why, call next(iter(loader)) on the pipeline without refurbish."
        )
    warm = min(WARM, measured - 1)
    return _MeasuredCosts(
        [median(times[warm:]) for times in part_times],
        [
            KeepingCost(
                median(cost.store for cost in costs[warm:]),
                median(cost.fetch for cost in costs[warm:]),
                round(sum(cost.nbytes for cost in costs) / len(costs)),
            )
            for costs in keeping_costs
        ],
        median(whole_times[warm:]),
    )


def _source_step(road: OpenRoad) -> Step:
    return lambda keys, upstream: road.get(keys)


def _upstream_of(samples: list[Any]) -> Upstream:
    return lambda keys: samples


def _time_keeping(sample: Any, store: SampleStore, encoding: Encoding, clock: Clock) -> KeepingCost:
    started = clock()
    store.put_tagged([(0, 0, encoding.packed(sample))])
    stored = clock()
    (kept,) = store.get_tagged([0], [0])
    nbytes = 0 if kept is None else kept.nbytes
    if kept is not None:
        encoding.decode(kept)
    fetched = clock()
    store.delete_many([0])
    return KeepingCost(stored - started, fetched - stored, nbytes)


@contextmanager
def _temporary_store(shared: bool) -> Iterator[SampleStore]:
    store = memory_store(ROOM, shared=shared)
    try:
        yield store
    finally:
        store.destroy()
