"""Measures a pipeline: runs samples through it as written and as a loader runs it, in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from penstock import config
from penstock.diagnose.profile.batching import Batching
from penstock.diagnose.profile.data import with_data
from penstock.diagnose.profile.describing import describe
from penstock.diagnose.profile.hints import hint
from penstock.diagnose.profile.probes import (
    Clocks,
    ProbedRoad,
    Round,
    RoundTimes,
    Spent,
    StreamAsSource,
    StreamExhausted,
    median_cost,
    pool_times,
)
from penstock.diagnose.profile.result import Profile, StageCost, StageKind
from penstock.engine.pools.choose import choose, gil_enabled
from penstock.engine.schedule import SMALL
from penstock.errors import PipelineError, SampleError
from penstock.keyed import Key, Keyed, preserved_globals, seed_globals
from penstock.order.shuffle import shuffled
from penstock.pipeline import Pipeline
from penstock.source.stream import StreamSource
from penstock.stats import LISTED_BAD_SAMPLES, BadSample
from penstock.stops.hold import keeps_samples
from penstock.stops.map import Map
from penstock.stops.road import draws_globally
from penstock.stops.stop import StageFailure, Stop

WARM_UP = 8
"""Samples that run once before anything is timed: imports, tables, page faults. The output of each
stage is described from these samples too, because keeping it would disturb the timing later."""

MIN_ROUNDS = 8
"""The number of rounds, if there are enough samples: the median of fewer says little."""

SLOW_ROUND, FAST_ROUND = 16, 64
"""Samples per round. Slow samples run one by one, as in a loader (nearly: a loader runs fused
decoding in groups of four). Fast samples of a round run in one group."""

WAITING_RATIO = 1.25
"""A note is added if the wall time of the maps is more than this multiple of their CPU time."""

MIN_SAVING = 0.02
"""A saving below this share counts as no saving."""

GLOBAL_RANDOM = "may draw from the global generators"
HOLDS_GIL = "may hold the GIL"

OnProgress = Callable[[int, int], None]
"""Called with (samples done, samples in total)."""


def measure(
    pipeline: Pipeline,
    data: Any = None,
    *,
    samples: int = 256,
    seconds: float = 10.0,
    seed: int = 0,
    clocks: Clocks | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """Profile a pipeline, on its own source or on other ``data``."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise PipelineError(f"profile() got samples={samples!r}; give a whole number from 1 on.")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise PipelineError(f"profile() got seconds={seconds!r}; give a number above 0.")
    measurement = _Measurement(
        with_data(pipeline, data), samples, seconds, seed, clocks or Clocks()
    )
    try:
        with preserved_globals(), _one_thread():
            measurement.warm_up()
            measurement.run(on_progress)
    finally:
        measurement.close()
    return measurement.profile()


class _Measurement:
    """A profile in progress.

    There are two roads, one with the stops as written and one with the stops as a loader runs them;
    only one if nothing is fused. ``times``, ``batchings`` and ``outputs`` have an entry per road.
    """

    def __init__(
        self, pipeline: Pipeline, samples: int, seconds: float, seed: int, clocks: Clocks
    ) -> None:
        self.pipeline = pipeline
        self.seconds = seconds
        self.seed = seed
        self.clocks = clocks
        source = pipeline.source
        self.stream = isinstance(source, StreamSource)
        if isinstance(source, StreamSource):
            self.length = source.length()
            self.indices = list(range(samples))
        else:
            self.length = len(source)
            places = np.arange(min(samples, len(source)), dtype=np.int64)
            self.indices = shuffled(len(source), seed, 0, places).tolist()
        compiled = pipeline.road(seed)
        plans = [pipeline.stops]
        if [*map(id, compiled.stops)] != [*map(id, pipeline.stops)]:
            plans.append(compiled.stops)
        batch = pipeline.batching
        collate = None if batch is None else batch.collate
        self.cores = config.cores()
        self.choice = choose(compiled, collate, "auto", "auto", self.cores, gil_enabled())
        self.roads = [
            ProbedRoad(
                StreamAsSource(source) if isinstance(source, StreamSource) else source,
                stops,
                seed,
                clocks,
                shared=self.choice.own_processes,
            )
            for stops in plans
        ]
        self.times = [RoundTimes(len(road.names) + 1) for road in self.roads]
        self.batchings: list[Batching | None] = [None] * len(self.roads)
        if batch is not None:
            self.batchings = [Batching(batch, clocks) for _ in self.roads]
        self.outputs: list[list[list[Any]]] = [[[] for _ in road.names] for road in self.roads]
        self.source_rounds: list[Round] = []
        self.bad: dict[int, BadSample] = {}
        self.measured: set[int] = set()
        self.round_size = self.group_size = 1
        self.exhausted = False

    def warm_up(self) -> None:
        """Run a few samples through every road, and choose the round size by their cost."""
        indices = self.indices[:WARM_UP]
        started = self.clocks.wall()
        costs: list[list[float]] = [[] for _ in self.roads]
        self._seed_stream()
        try:
            for place, index in enumerate(indices):
                if place and self.clocks.wall() - started > self.seconds / 4:
                    break
                for number, road in enumerate(self.roads):
                    before = self.clocks.wall()
                    samples = self._get(number, [index], keep=True)
                    costs[number].append(self.clocks.wall() - before)
                    if samples:
                        road.time_hits([index])
                        if (batching := self.batchings[number]) is not None:
                            batching.put(samples)
                        outputs = zip(self.outputs[number], road.recorder.outputs, strict=True)
                        for known, new in outputs:
                            known.extend(new)
                    road.recorder.clear()
        except StreamExhausted:
            pass
        for batching in self.batchings:
            if batching is not None:
                batching.end()
        for road in self.roads:
            road.restart(indices)
        # The minimum, because the first sample may have had to import something.
        least = [min(cost) for cost in costs if cost]
        cost_of_all = sum(least)
        slow = self.stream or max(least, default=1.0) > SMALL
        size = SLOW_ROUND if slow else FAST_ROUND
        if cost_of_all > 0:
            size = min(size, max(1, int(self.seconds / MIN_ROUNDS / cost_of_all)))
        self.round_size = max(1, min(size, len(self.indices) // MIN_ROUNDS))
        self.group_size = 1 if slow else self.round_size

    def run(self, on_progress: OnProgress | None) -> None:
        """Run round after round, alternating the roads, until samples or time run out."""
        started = self.clocks.wall()
        self._seed_stream()
        for turn, first in enumerate(range(0, len(self.indices), self.round_size)):
            indices = self.indices[first : first + self.round_size]
            order = list(range(len(self.roads)))
            for place, number in enumerate(order if turn % 2 == 0 else order[::-1]):
                self._round(number, indices, first_read=place == 0)
            if on_progress is not None:
                on_progress(min(first + len(indices), len(self.indices)), len(self.indices))
            if self.exhausted or (self.measured and self._is_over(started)):
                break
        if not self.measured:
            raise self._no_samples_error()

    def _is_over(self, started: float) -> bool:
        return self.clocks.wall() - started >= self.seconds

    def _round(self, number: int, indices: Sequence[int], *, first_read: bool) -> None:
        """Run samples through one road. ``first_read``: no other road has read them before."""
        times, road, batching = self.times[number], self.roads[number], self.batchings[number]
        times.begin()
        done: list[int] = []
        try:
            for at in range(0, len(indices), self.group_size):
                done += self._run_group(number, indices[at : at + self.group_size])
        except StreamExhausted:
            self.exhausted = True
        if batching is not None:
            times.add_batching(batching.end())
        for at in range(0, len(done), self.group_size):
            group = done[at : at + self.group_size]
            for stage, spent in road.time_hits(group).items():
                times.add_hits(stage, spent, len(group))
        if done:
            times.end()
            self.measured.update(done)
            if first_read:
                self.source_rounds.append(times.rounds[0][-1])
        road.trim_stores()

    def _run_group(self, number: int, indices: Sequence[int]) -> list[int]:
        """Run and time samples together; if one is bad, one by one. Return the good ones."""
        samples = self._get(number, indices)
        if samples is not None:
            batching = self.batchings[number]
            spent = batching.put(samples) if batching is not None else Spent()
            self.times[number].add(self.roads[number].recorder, len(samples), spent)
            return list(indices)
        if len(indices) == 1:
            return []
        return [good for index in indices for good in self._run_group(number, [index])]

    def _get(self, number: int, indices: Sequence[int], *, keep: bool = False) -> list[Any] | None:
        """The samples, or ``None`` if one is bad. A bad sample that runs alone is recorded."""
        road = self.roads[number]
        try:
            return road.get(indices, self.batchings[number], keep=keep)
        except StageFailure as failure:
            cause = failure.__cause__
            if isinstance(cause, StreamExhausted):
                raise cause from None
            if len(indices) == 1 and indices[0] not in self.bad:
                self.bad[indices[0]] = BadSample(
                    indices[0],
                    self._name_of(indices[0]),
                    failure.stage,
                    f"{type(cause).__name__}: {cause}",
                )
            return None

    def _name_of(self, index: int) -> str:
        try:
            return self.pipeline.source.name(index)
        except Exception:  # the name is for the message only, and must not hide the failure
            return f"sample {index}"

    def _no_samples_error(self) -> SampleError | PipelineError:
        if not self.bad:
            return PipelineError("profile() found no samples: the stream is empty.")
        first = next(iter(self.bad.values()))
        return SampleError(
            f"profile() tried {len(self.bad)} samples, and all of them failed. The first, "
            f"{first.name} (index {first.index}), failed in {first.stage}: {first.error}\n"
            "The pipeline does not fit the data, or the data is damaged.",
            index=first.index,
            name=first.name,
            stage=first.stage,
        )

    def _seed_stream(self) -> None:
        # A stream may draw from the global generators; seeding makes its start reproducible.
        if self.stream:
            seed_globals(Keyed(self.seed, "stream").at(Key(0, 0)))

    def profile(self) -> Profile:
        pooled = pool_times(self.roads, self.times)
        plans = [self._rows(number, times) for number, times in enumerate(pooled)]
        kind = type(self.pipeline.source).__name__
        count = "samples" if self.length is None else f"{self.length:,} samples"
        return Profile(
            source=f"{count} ({kind})",
            samples=len(self.measured),
            rounds=len(self.source_rounds),
            written=plans[0],
            fused=plans[-1],
            cores=self.cores,
            workers=str(self.choice),
            bad=len(self.bad),
            bad_samples=tuple(self.bad.values())[:LISTED_BAD_SAMPLES],
            hint=hint(self.pipeline, plans[-1], self.length),
            notes=(*self._notes(), *_waiting_note(plans[-1]), *_fusion_note(*plans)),
        )

    def _rows(self, number: int, times: RoundTimes) -> tuple[StageCost, ...]:
        """A row for every stage of a road, and one for the batch."""
        road, batching = self.roads[number], self.batchings[number]
        rows = []
        for stage, name in enumerate(road.names):
            rounds = self.source_rounds if stage == 0 else times.rounds[stage]
            row = _row(name, rounds, describe(self.outputs[number][stage]))
            if stage == 0:
                row = _source_row(row, self.pipeline)
            else:
                row = _stop_row(row, road.stops[stage - 1])
            if stage in road.stores:
                row = _hold_row(row, stage, road, times, self.length)
            rows.append(replace(row, parts=_parts(row, stage, times)))
        if batching is not None and not batching.trouble:
            row = _row("batch", times.rounds[len(road.names)], batching.output())
            rows.append(replace(row, kind="batch", needs_process=batching.needs_process))
        total = sum(row.ms for row in rows)
        return tuple(_with_share(row, total) for row in rows)

    def _notes(self) -> Iterator[str]:
        trouble = next((b.trouble for b in self.batchings if b is not None and b.trouble), "")
        if trouble:
            yield trouble
        for stage, name in enumerate(self.roads[-1].names):
            stop = self.roads[-1].stops[stage - 1] if stage else None
            if stage not in self.roads[-1].stores:
                continue
            if not self.times[-1].hits[stage]:
                yield f"{name}: hits were not measured, because no sample could be stored."
            elif getattr(stop, "where", "memory") != "memory":
                yield f"{name} was measured in memory; the pipeline's own store is on disk."

    def close(self) -> None:
        for road in self.roads:
            road.close()


# Rows


def _row(name: str, rounds: Sequence[Round], output: tuple[str, int]) -> StageCost:
    """A row of the kind ``source``; the caller fills in what other kinds have."""
    spent = median_cost(rounds)
    leaves, nbytes = output
    return StageCost(
        name=name,
        kind="source",
        ms=spent.wall * 1e3,
        cpu_ms=spent.cpu * 1e3,
        share=0.0,
        samples=sum(samples for _, samples in rounds),
        leaves=leaves,
        nbytes=nbytes,
    )


def _source_row(row: StageCost, pipeline: Pipeline) -> StageCost:
    source = pipeline.source
    if isinstance(source, StreamSource):
        return replace(row, needs_process="is a stream, which every worker reads for itself")
    if draws_globally(source):
        return replace(row, random=True, needs_process=GLOBAL_RANDOM)
    return replace(row, needs_process="" if source.threadsafe else HOLDS_GIL)


def _stop_row(row: StageCost, stop: Stop) -> StageCost:
    kind: StageKind = "fused"
    random = any(operation.random for operation in getattr(stop, "operations", ()))
    if isinstance(stop, Map):
        kind, random = "map", stop.random
    elif stop.keeps:
        kind, random = stop.name, False  # type: ignore[assignment]
    reason = GLOBAL_RANDOM if stop.global_random else "" if stop.threadsafe else HOLDS_GIL
    return replace(row, kind=kind, random=random, needs_process=reason)


def _hold_row(
    row: StageCost, stage: int, road: ProbedRoad, times: RoundTimes, length: int | None
) -> StageCost:
    stop = road.stops[stage - 1]
    size = road.bytes_per_sample.get(stage)
    if not times.hits[stage] or size is None or length is None:
        return row
    hit = median_cost(times.hits[stage])
    budget = getattr(stop, "budget", None)
    fits = min(1.0, budget / (size * length)) if size > 0 and budget is not None else 1.0
    holds = stop.hit_share(fits) if keeps_samples(stop) else None
    return replace(row, hit_ms=hit.wall * 1e3, hit_cpu_ms=hit.cpu * 1e3, holds=holds)


def _parts(row: StageCost, stage: int, times: RoundTimes) -> tuple[StageCost, ...]:
    """The parts of a row, in proportion to their total time over all rounds."""
    wall = sum(spent.wall for spent, _ in times.rounds[stage])
    cpu = sum(spent.cpu for spent, _ in times.rounds[stage])
    return tuple(
        StageCost(
            name=name,
            kind="part",
            ms=row.ms * spent.wall / wall if wall > 0 else 0.0,
            cpu_ms=row.cpu_ms * spent.cpu / cpu if cpu > 0 else 0.0,
            share=0.0,
            samples=calls,
        )
        for (at, name), (spent, calls) in times.parts.items()
        if at == stage
    )


def _with_share(row: StageCost, total: float) -> StageCost:
    def share(ms: float) -> float:
        return ms / total if total > 0 else 0.0

    parts = tuple(replace(part, share=share(part.ms)) for part in row.parts)
    return replace(row, share=share(row.ms), parts=parts)


# Notes


def _waiting_note(rows: Sequence[StageCost]) -> list[str]:
    """A note if the maps spent much of their time off the CPU; maps do not read."""
    maps = [row for row in rows if row.kind in ("map", "fused")]
    wall, cpu = sum(row.ms for row in maps), sum(row.cpu_ms for row in maps)
    if wall <= WAITING_RATIO * cpu or wall <= 0:
        return []
    worst = max(maps, key=lambda row: row.ms - row.cpu_ms)
    return [
        f"the maps took {wall:.3f} ms a sample and {cpu:.3f} ms of CPU; {worst.name} has the "
        "largest difference. Other programs used the core, or the map waits or has threads of its "
        "own. If other programs used the core, rely on the CPU column."
    ]


def _fusion_note(
    written: Sequence[StageCost], fused: Sequence[StageCost] | None = None
) -> list[str]:
    """A note if a fused step costs as much as its operations apart."""
    if fused is None:
        return []
    before, after = sum(row.cpu_ms for row in written), sum(row.cpu_ms for row in fused)
    if before - after > MIN_SAVING * before:
        return []
    return [
        "running operations in one step saved nothing here. The step decodes only the needed part "
        "of a JPEG. For files of other formats the operations run one by one, and crops of nearly "
        "the whole image gain little."
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in a loader, where workers are the parallelism."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
