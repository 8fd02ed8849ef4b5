"""Measures a pipeline: samples in turn through the road as written and as it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock import config
from penstock.diagnose.profile.batching import Batching
from penstock.diagnose.profile.data import with_data
from penstock.diagnose.profile.hints import hint
from penstock.diagnose.profile.probes import Clocks, Drawn, Ended, Spent
from penstock.diagnose.profile.result import Profile, Row
from penstock.diagnose.profile.roads import Ledger, ProbedRoad, Round, pooled
from penstock.diagnose.profile.rows import rows_of
from penstock.engine.pools.choose import choose, gil_enabled
from penstock.engine.schedule import SMALL
from penstock.errors import PipelineError, SampleError
from penstock.keyed import Key, Keyed, preserved_globals, seed_globals
from penstock.order.shuffle import shuffled
from penstock.pipeline import Pipeline
from penstock.source.stream import StreamSource
from penstock.stats import LISTED_BAD_SAMPLES, BadSample
from penstock.stops.stop import StageFailure

WARM = 8
"""Samples that go through once before anything is timed: imports, tables, pages. What leaves each
stop is looked at here too, where holding on to it disturbs no timing."""

ROUNDS = 8
"""At least so many rounds, if there are samples enough: the median of fewer says little."""

SLOW_ROUND, FAST_ROUND = 16, 64
"""Samples a round. Those that take long are run one by one, as a loader does it (or nearly: where
decoding is fused, by four), and short ones in one go."""

MUCH = 1.25
"""Wall time over CPU time from which a remark is due."""

LITTLE = 0.02
"""A saving below this part is none."""

Told = Callable[[int, int], None]


def measure(
    pipeline: Pipeline,
    data: Any = None,
    *,
    samples: int = 256,
    seconds: float = 10.0,
    seed: int = 0,
    clocks: Clocks | None = None,
    told: Told | None = None,
) -> Profile:
    """Profile a pipeline; ``told`` hears of (samples done, samples in all)."""
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
            measurement.run(told)
    finally:
        measurement.close()
    return measurement.profile()


class _Measurement:
    """One profile in the making: two roads (one, where nothing is fused) and what they cost."""

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
        self.compiled = pipeline.road(seed)
        plans = [pipeline.stops]
        if [*map(id, self.compiled.stops)] != [*map(id, pipeline.stops)]:
            plans.append(self.compiled.stops)
        batch = pipeline.batching
        collate = None if batch is None else batch.collate
        self.cores = config.cores()
        self.choice = choose(self.compiled, collate, "auto", "auto", self.cores, gil_enabled())
        self.roads = [
            ProbedRoad(
                Drawn(source) if isinstance(source, StreamSource) else source,
                stops,
                seed,
                clocks,
                shared=self.choice.own_processes,
            )
            for stops in plans
        ]
        self.ledgers = [Ledger(len(road.names) + 1) for road in self.roads]
        self.batchings: list[Batching | None] = [None] * len(self.roads)
        if pipeline.batching is not None:
            self.batchings = [Batching(pipeline.batching, clocks) for _ in self.roads]
        self.left: list[list[list[Any]]] = [[[] for _ in road.names] for road in self.roads]
        self.reading: list[Round] = []
        self.bad: dict[int, BadSample] = {}
        self.good: set[int] = set()
        self.cost = 0.0
        self.group = self.chunk = 1
        self.ended = False

    def warm_up(self) -> None:
        """A few samples through every road, to load what is loaded once and to see their cost."""
        warm = self.indices[:WARM]
        started = self.clocks.wall()
        costs: list[list[float]] = [[] for _ in self.roads]
        seen = 0
        self._seed_stream()
        try:
            for index in warm:
                if seen and self.clocks.wall() - started > self.seconds / 4:
                    break
                seen += 1
                for number, road in enumerate(self.roads):
                    before = self.clocks.wall()
                    samples = self._get(number, [index], keep=True)
                    costs[number].append(self.clocks.wall() - before)
                    if samples:
                        road.hits([index])
                        if (batching := self.batchings[number]) is not None:
                            batching.put(samples)
                        for left, found in zip(self.left[number], road.book.left, strict=True):
                            left.extend(found)
                    road.book.clear()
        except Ended:
            pass
        for batching in self.batchings:
            if batching is not None:
                batching.end()
        for road in self.roads:
            road.restart(warm)
        # The first may have had to import something.
        least = [min(cost) for cost in costs if cost]
        self.cost = sum(least)
        slow = self.stream or max(least, default=1.0) > SMALL
        most = SLOW_ROUND if slow else FAST_ROUND
        if self.cost > 0:
            most = min(most, max(1, int(self.seconds / ROUNDS / self.cost)))
        self.chunk = max(1, min(most, len(self.indices) // ROUNDS))
        self.group = 1 if slow else self.chunk

    def run(self, told: Told | None) -> None:
        """Round after round, the roads in turn, until there is no sample or no time left."""
        started = self.clocks.wall()
        self._seed_stream()
        for turn, first in enumerate(range(0, len(self.indices), self.chunk)):
            chunk = self.indices[first : first + self.chunk]
            order = list(range(len(self.roads)))
            for place, number in enumerate(order if turn % 2 == 0 else order[::-1]):
                self._round(number, chunk, reads=place == 0)
            if told is not None:
                told(min(first + len(chunk), len(self.indices)), len(self.indices))
            if self.ended or (self.good and self.clocks.wall() - started >= self.seconds):
                break
        if not self.good:
            raise self._nothing()

    def _round(self, number: int, chunk: Sequence[int], *, reads: bool) -> None:
        ledger, road, batching = self.ledgers[number], self.roads[number], self.batchings[number]
        ledger.begin()
        done: list[int] = []
        try:
            for at in range(0, len(chunk), self.group):
                done += self._through(number, chunk[at : at + self.group])
        except Ended:
            self.ended = True
        if batching is not None:
            ledger.batched(batching.end())
        for at in range(0, len(done), self.group):
            some = done[at : at + self.group]
            for stage, spent in road.hits(some).items():
                ledger.hit(stage, spent, len(some))
        if done:
            ledger.end()
            self.good.update(done)
            if reads:
                self.reading.append(ledger.rounds[0][-1])
        road.tidy()

    def _through(self, number: int, indices: Sequence[int]) -> list[int]:
        """Samples through a road and into the ledger; those that worked."""
        samples = self._get(number, indices)
        if samples is not None:
            batching = self.batchings[number]
            spent = batching.put(samples) if batching is not None else Spent()
            self.ledgers[number].add(self.roads[number].book, len(samples), spent)
            return list(indices)
        if len(indices) == 1:
            return []
        return [good for index in indices for good in self._through(number, [index])]

    def _get(self, number: int, indices: Sequence[int], *, keep: bool = False) -> list[Any] | None:
        """The samples, or ``None`` where one is bad: it is written down if it is the only one."""
        road = self.roads[number]
        try:
            return road.get(indices, self.batchings[number], keep=keep)
        except StageFailure as failure:
            cause = failure.__cause__
            if isinstance(cause, Ended):
                raise cause from None
            if len(indices) == 1 and indices[0] not in self.bad:
                self.bad[indices[0]] = BadSample(
                    indices[0],
                    self._name(indices[0]),
                    failure.stage,
                    f"{type(cause).__name__}: {cause}",
                )
            return None

    def _name(self, index: int) -> str:
        try:
            return self.pipeline.source.name(index)
        except Exception:  # the name is for the message only, and must not hide the failure
            return f"sample {index}"

    def _nothing(self) -> SampleError | PipelineError:
        if not self.bad:
            return PipelineError("profile() found no samples: the stream is empty.")
        first = next(iter(self.bad.values()))
        return SampleError(
            f"profile() tried {len(self.bad)} samples, and none of them came through. The first, "
            f"{first.name} (index {first.index}), failed in {first.stage}: {first.error}\n"
            "The pipeline does not fit the data, or the data is broken.",
            index=first.index,
            name=first.name,
            stage=first.stage,
        )

    def _seed_stream(self) -> None:
        # A stream draws from the global generators as it likes; where it starts is keyed.
        if self.stream:
            seed_globals(Keyed(self.seed, "stream").at(Key(0, 0)))

    def profile(self) -> Profile:
        ledgers = pooled(self.roads, self.ledgers)
        made = [
            rows_of(self.pipeline, road, ledger, self.reading, left, batching, self.length)
            for road, ledger, left, batching in zip(
                self.roads, ledgers, self.left, self.batchings, strict=True
            )
        ]
        kind = type(self.pipeline.source).__name__
        many = "samples" if self.length is None else f"{self.length:,} samples"
        return Profile(
            source=f"{many} ({kind})",
            samples=len(self.good),
            rounds=len(self.reading),
            written=made[0],
            fused=made[-1],
            cores=self.cores,
            workers=str(self.choice),
            bad=len(self.bad),
            bad_samples=tuple(self.bad.values())[:LISTED_BAD_SAMPLES],
            hint=hint(self.pipeline, made[-1], self.length),
            notes=(*self._notes(), *_shared_core(made[-1]), *_fused_in_vain(*made)),
        )

    def _notes(self) -> Iterator[str]:
        trouble = next((b.trouble for b in self.batchings if b is not None and b.trouble), "")
        if trouble:
            yield trouble
        for stage, name in enumerate(self.roads[-1].names):
            stop = self.roads[-1].stops[stage - 1] if stage else None
            if stage not in self.roads[-1].stores:
                continue
            if not self.ledgers[-1].hits[stage]:
                yield f"{name}: hits were not measured, because nothing could be kept."
            elif getattr(stop, "where", "memory") != "memory":
                yield f"{name} was measured in memory; the pipeline's own is on disk."

    def close(self) -> None:
        for road in self.roads:
            road.close()


def _shared_core(rows: Sequence[Row]) -> list[str]:
    """Where much of the time was spent off the CPU, though nothing was read."""
    busy = [row for row in rows if row.kind in ("map", "fused")]
    wall, cpu = sum(row.ms for row in busy), sum(row.cpu_ms for row in busy)
    if wall <= MUCH * cpu or wall <= 0:
        return []
    worst = max(busy, key=lambda row: row.ms - row.cpu_ms)
    return [
        f"the maps took {wall:.3f} ms a sample and {cpu:.3f} ms of CPU (most apart: {worst.name}). "
        "Other programs had the core, or a map waits or has threads of its own. Where it is other "
        "programs, go by the CPU column."
    ]


def _fused_in_vain(written: Sequence[Row], fused: Sequence[Row] | None = None) -> list[str]:
    """Where one step costs what its operations cost apart."""
    if fused is None:
        return []
    before, after = sum(row.cpu_ms for row in written), sum(row.cpu_ms for row in fused)
    if before - after > LITTLE * before:
        return []
    return [
        "running operations in one step saved nothing here. It decodes no more of a JPEG than is "
        "wanted; other files go one by one, and crops of nearly the whole picture gain little."
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch on this thread, as workers do: more workers are the parallelism."""
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
