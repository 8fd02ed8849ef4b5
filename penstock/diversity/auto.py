"""``refurbish("auto")``: measures what each part of a road costs, and settles place and number."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from penstock.diversity.counting import count
from penstock.diversity.propose import Keeping, propose
from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed, Keys
from penstock.pipeline import Pipeline
from penstock.source.source import Source
from penstock.stats import Clock, Tally
from penstock.stops.map import Map
from penstock.stops.refurbish import Refurbish
from penstock.stops.road import OpenRoad, Road, scope_of
from penstock.stops.stop import Hold, Site, StageFailure, Step, Stop, Upstream
from penstock.store import SampleStore, memory_store
from penstock.store.encoding import Encoding

MEASURED, WARM = 24, 4
"""Samples that are timed, and that go before them to load and fill whatever is needed once."""

EPOCHS = 90
"""Over so many epochs different samples are counted: what ImageNet is usually trained for."""

ROOM = 256 << 20
"""Bytes of the store that keeping is tried on; one sample is in it at a time."""


def settle(
    pipeline: Pipeline, seed: int, tell: Callable[[str], None] | None = None, *, shared: bool
) -> tuple[Pipeline, dict[str, Any] | None]:
    """The pipeline with what ``refurbish("auto")`` came to, and that as plain data.

    Any other pipeline is returned as it is, with ``None``. ``shared`` says that samples will be
    kept where several processes see them.
    """
    stop = next((s for s in pipeline.stops if isinstance(s, Refurbish)), None)
    if stop is None or stop.reuse != "auto":
        return pipeline, None
    bare = without(pipeline)
    counted = count(bare)
    with _scratch(shared) as store:
        costs = _measure(bare, seed, store, Encoding(stop.encode), time.perf_counter)
    samples = len(bare.source)  # type: ignore[arg-type]
    parts = [
        replace(part, seconds=cost) for part, cost in zip(counted.parts, costs.parts, strict=True)
    ]
    room = float("inf") if stop.budget is None else stop.budget / samples
    found = propose(parts, costs.keeping, EPOCHS, room=room, standard=costs.whole)
    place = None if found.split is None else counted.places[found.split - 1] + 1
    chosen = {"place": place, "reuse": found.reuse}
    (tell or _print)(f"penstock: {found}")
    return placed(pipeline, chosen), chosen


def placed(pipeline: Pipeline, chosen: Mapping[str, Any] | None) -> Pipeline:
    """The pipeline with what was chosen for it before."""
    stop = next((s for s in pipeline.stops if isinstance(s, Refurbish)), None)
    bare = without(pipeline)
    if stop is None or not isinstance(chosen, Mapping) or not {"place", "reuse"} <= set(chosen):
        raise StateError(
            'the checkpoint does not say what refurbish("auto") chose: it was taken from another '
            "pipeline."
        )
    place, reuse = chosen["place"], chosen["reuse"]
    if place is None:
        return bare
    stops = list(bare.stops)
    stops.insert(int(place), replace(stop, reuse=int(reuse)))
    return replace(bare, stops=_numbered(stops))


def without(pipeline: Pipeline) -> Pipeline:
    """The pipeline without its refurbish."""
    stops = [stop for stop in pipeline.stops if not isinstance(stop, Refurbish)]
    return replace(pipeline, stops=_numbered(stops))


def _numbered(stops: Sequence[Stop]) -> tuple[Stop, ...]:
    out: list[Stop] = []
    number = 0
    for stop in stops:
        if isinstance(stop, Hold):
            stop = replace(stop, number=number)  # type: ignore[type-var]
            number += 1
        out.append(stop)
    return tuple(out)


@dataclass
class _Costs:
    """Seconds a sample: of the source and every map, of keeping what leaves each, and of all."""

    parts: list[float] = field(default_factory=list)
    keeping: list[Keeping] = field(default_factory=list)
    whole: float = 0.0


def _measure(
    pipeline: Pipeline, seed: int, store: SampleStore, encoding: Encoding, clock: Clock
) -> _Costs:
    """What a few samples cost, step by step in this thread, and what keeping them would."""
    source: Source = pipeline.source  # type: ignore[assignment]
    maps = [stop for stop in pipeline.stops if isinstance(stop, Map)]
    steps = [stop.step(Site(seed, Tally(1, 0))) for stop in maps]
    bare = replace(pipeline, stops=tuple(maps))
    road, whole = Road(source, (), seed), bare.road(seed)
    times: list[list[float]] = [[] for _ in range(len(maps) + 1)]
    keeps: list[list[Keeping]] = [[] for _ in range(len(maps) + 1)]
    in_all: list[float] = []
    indices = Keyed(seed, "refurbish/auto").fresh(Key(0)).permutation(len(source))
    with scope_of(whole, own_process=False):
        first, last = road.open(), whole.open()
        for index in indices[: MEASURED + WARM].tolist():
            keys = Keys(0, [index])
            try:
                started = clock()
                last.get(keys)
                in_all.append(clock() - started)
                samples: list[Any] = []
                for at, step in enumerate([_asking(first), *steps]):
                    started = clock()
                    samples = step(keys, _giving(samples))
                    times[at].append(clock() - started)
                    keeps[at].append(_keep(samples[0], store, encoding, clock))
            except StageFailure:
                continue
    if len(in_all) <= WARM and len(in_all) < len(source):
        raise PipelineError(
            f'refurbish("auto") measures a few samples, and all but {len(in_all)} of '
            f"{MEASURED + WARM} failed. Look at one of them: next(iter(loader)) without refurbish "
            "says what is wrong."
        )
    warm = min(WARM, len(in_all) - 1)
    return _Costs(
        [median(one[warm:]) for one in times],
        [
            Keeping(
                median(keep.store for keep in one[warm:]),
                median(keep.fetch for keep in one[warm:]),
                round(sum(keep.nbytes for keep in one) / len(one)),
            )
            for one in keeps
        ],
        median(in_all[warm:]),
    )


def _asking(road: OpenRoad) -> Step:
    return lambda keys, upstream: road.get(keys)


def _giving(samples: list[Any]) -> Upstream:
    return lambda keys: samples


def _keep(sample: Any, store: SampleStore, encoding: Encoding, clock: Clock) -> Keeping:
    started = clock()
    store.put_tagged([(0, 0, encoding.packed(sample))])
    put = clock()
    (kept,) = store.get_tagged([0], [0])
    nbytes = 0 if kept is None else kept.nbytes
    if kept is not None:
        encoding.decode(kept)
    got = clock()
    store.delete_many([0])
    return Keeping(put - started, got - put, nbytes)


@contextmanager
def _scratch(shared: bool) -> Iterator[SampleStore]:
    store = memory_store(ROOM, shared=shared)
    try:
        yield store
    finally:
        store.destroy()


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
