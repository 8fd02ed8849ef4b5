"""A pipeline's road with probes on it: runs samples and records what each stage costs.

A probe is a stop that passes samples on. It works in the same road, with the same steps, as
all other stops, so the measured code is the code that a loader runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.keyed import Keys
from penstock.source.dataset import DatasetSource
from penstock.source.source import Source
from penstock.source.stream import StreamSource
from penstock.stats import Clock, Tally
from penstock.stops.hold import keeps_samples
from penstock.stops.map import Map, name_of
from penstock.stops.road import SOURCE, Road
from penstock.stops.stop import Step, StepContext, Stop, Upstream, names_of
from penstock.store import SampleStore, memory_store

if TYPE_CHECKING:
    from penstock.diagnose.profile.batching import Batching

STORE_LIMIT = 256 << 20
"""Bytes that the store of a cache may hold during a profile before it is emptied."""


# Time


class Spent(NamedTuple):
    """Seconds of the wall clock, and seconds of this thread's CPU time."""

    wall: float = 0.0
    cpu: float = 0.0

    def plus(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def minus(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


class Clocks(NamedTuple):
    """The wall clock and the CPU clock; tests pass their own."""

    wall: Clock = time.perf_counter
    cpu: Clock = time.thread_time

    def now(self) -> Spent:
        return Spent(self.wall(), self.cpu())


class Recorder:
    """Records what the probes of one road measure, until it is cleared.

    ``spent[i]`` is the time in stage i *and all stages above it*. ``parts`` maps (stage, part) to
    (time, number of calls). ``outputs[i]`` holds the samples that left stage i, if ``keep`` is set.
    """

    def __init__(self, stages: int, clocks: Clocks) -> None:
        self.clocks = clocks
        self.keep = False
        self.spent = [Spent()] * stages
        self.outputs: list[list[Any]] = [[] for _ in range(stages)]
        self.parts: dict[tuple[int, str], tuple[Spent, int]] = {}

    def clear(self) -> None:
        self.spent = [Spent()] * len(self.spent)
        self.outputs = [[] for _ in self.outputs]
        self.parts = {}

    def record(self, stage: int, spent: Spent, samples: list[Any]) -> None:
        self.spent[stage] = self.spent[stage].plus(spent)
        if self.keep:
            self.outputs[stage].extend(samples)

    def time_part(self, stage: int, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function and record its time as a part of a stage."""
        started = self.clocks.now()
        value = function(*inputs)
        took = self.clocks.now().minus(started)
        spent, calls = self.parts.get((stage, name), (Spent(), 0))
        self.parts[stage, name] = (spent.plus(took), calls + 1)
        return value


# Probes


@dataclass(frozen=True)
class TimingStop(Stop):
    """A stop that stands below a stage and times everything above itself."""

    stage: int
    recorder: Recorder

    @property
    def name(self) -> str:
        return "probe"

    def fingerprint(self) -> str | None:
        return None

    def step(self, context: StepContext) -> Step:
        recorder, stage, now = self.recorder, self.stage, self.recorder.clocks.now

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            started = now()
            samples = upstream(keys)
            recorder.record(stage, now().minus(started), samples)
            return samples

        return step


class StreamExhausted(Exception):
    """A stream has no more samples."""


class StreamAsSource(Source):
    """A stream as the source of a road: each read takes the next samples, whatever their index."""

    def __init__(self, stream: StreamSource) -> None:
        self.stream = stream
        self._samples: Iterator[Any] | None = None

    def __len__(self) -> int:
        return 0

    def read(self, indices: Sequence[int]) -> list[Any]:
        if self._samples is None:
            self._samples = self.stream.open()
        try:
            return [next(self._samples) for _ in indices]
        except StopIteration:
            raise StreamExhausted from None

    def restart(self) -> None:
        """Close the stream; the next read opens it again at its first sample."""
        close = getattr(self._samples, "close", None)
        self._samples = None
        if close is not None:
            close()

    def name(self, index: int) -> str:
        return self.stream.name(index)


class TimedCompose:
    """A torchvision Compose that times each of its transforms.

    It calls the transforms in the same order as the original, so they draw the same random numbers.
    """

    def __init__(self, compose: Any, stage: int, recorder: Recorder) -> None:
        self._compose = compose
        self._stage = stage
        self._recorder = recorder
        self._names = number_duplicates([name_of(part) for part in compose.transforms])

    def __call__(self, *inputs: Any) -> Any:
        # The transforms of v2 take several inputs side by side, such as an image and its boxes.
        several = len(inputs) > 1
        value: Any = inputs if several else inputs[0]
        for name, part in zip(self._names, self._compose.transforms, strict=True):
            arguments = value if several else (value,)
            value = self._recorder.time_part(self._stage, name, part, *arguments)
        return value

    def __getattr__(self, name: str) -> Any:
        # A dataset may use other attributes of its transform.
        if name.startswith("__") or "_compose" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._compose, name)


def number_duplicates(names: Sequence[str]) -> list[str]:
    """The names, with a number added to the second and later uses of one.

    >>> number_duplicates(["flip", "crop", "flip"])
    ['flip', 'crop', 'flip#2']
    """
    uses: dict[str, int] = {}
    unique = []
    for name in names:
        uses[name] = uses.get(name, 0) + 1
        unique.append(name if uses[name] == 1 else f"{name}#{uses[name]}")
    return unique


def timed_source(source: Source, recorder: Recorder) -> Source:
    """The source; if its dataset's ``transform`` is a Compose, a copy that times the transforms."""
    if not isinstance(source, DatasetSource):
        return source
    transform = getattr(source.dataset, "transform", None)
    if not _is_compose(transform):
        return source
    try:
        dataset = copy.copy(source.dataset)
        dataset.transform = TimedCompose(transform, 0, recorder)
        timed = copy.copy(source)
        timed.dataset = dataset
    except Exception:  # a dataset that cannot be copied is measured as a whole
        return source
    return timed


def timed_stop(stop: Stop, stage: int, recorder: Recorder) -> Stop:
    """The stop; if it maps a Compose, one that times the transforms."""
    if not isinstance(stop, Map):
        return stop
    function = stop.function
    if _is_compose(function):
        return replace(stop, function=TimedCompose(function, stage, recorder), label=stop.name)
    return stop


def _is_compose(function: Any) -> bool:
    """Whether this is torchvision's own Compose; a subclass may do more than call in turn."""
    kind = type(function)
    return kind.__name__ == "Compose" and (kind.__module__ or "").startswith(
        "torchvision.transforms"
    )


# The road


class _CacheMiss(Exception):
    """A cache does not hold a sample that it should hold."""


def _raise_cache_miss(keys: Keys) -> list[Any]:
    raise _CacheMiss


class ProbedRoad:
    """A source and stops with a probe below each, run in this thread.

    Stops that keep samples get temporary stores in memory, so the user's own caches are neither
    filled nor read. With ``shared``, these are the stores that worker processes would share.
    """

    def __init__(
        self,
        source: Source,
        stops: Sequence[Stop],
        seed: int,
        clocks: Clocks,
        *,
        shared: bool,
    ) -> None:
        self.stops = tuple(stops)
        self.names = [SOURCE, *names_of(self.stops)]
        self.recorder = Recorder(len(self.names), clocks)
        self.stores: dict[int, SampleStore] = {}
        self.bytes_per_sample: dict[int, float] = {}
        """Mean size of a sample in the store of each stage."""
        self._source = source
        opened: list[Stop] = []
        self._hold_steps: dict[int, Step] = {}
        for stage, stop in enumerate(self.stops, start=1):
            if keeps_samples(stop):
                self.stores[stage] = memory_store(2 * STORE_LIMIT, shared=shared)
                number = len(self.stores) - 1
                stop = stop.for_trial(self.stores[stage], number, len(source), seed)
                self._hold_steps[stage] = stop.step(StepContext(seed, Tally(1, stop.number + 1)))
            # The last stop has no probe below it, because it may write straight into the batch.
            # ``get`` times it.
            opened += [TimingStop(stage - 1, self.recorder), timed_stop(stop, stage, self.recorder)]
        self._road = Road(timed_source(source, self.recorder), tuple(opened), seed).open(
            clocks.wall
        )

    def get(
        self, indices: Sequence[int], batching: Batching | None = None, *, keep: bool = False
    ) -> list[Any]:
        """Prepare samples, in the rows of a batch if there is one; the recorder has their cost.

        Raises StageFailure.
        """
        self.recorder.clear()
        self.recorder.keep = keep
        self._road.begin()
        if batching is not None:
            batching.aim(self._road.rows, len(indices))
        keys = Keys(0, list(indices))
        started = self.recorder.clocks.now()
        samples = self._road.get(keys)
        self.recorder.record(len(self.stops), self.recorder.clocks.now().minus(started), samples)
        return samples

    def time_hits(self, indices: Sequence[int]) -> dict[int, Spent]:
        """Ask each cache for these samples again; the time by stage, for those that hold all."""
        now = self.recorder.clocks.now
        keys = Keys(0, list(indices))
        times = {}
        for stage, step in self._hold_steps.items():
            started = now()
            try:
                step(keys, _raise_cache_miss)
            except _CacheMiss:
                continue
            times[stage] = now().minus(started)
        return times

    def restart(self, indices: Sequence[int]) -> None:
        """Remove these samples from the stores, and start a stream again."""
        for stage, store in self.stores.items():
            stop = self.stops[stage - 1]
            by_index = keeps_samples(stop) and stop.by_index
            store.delete_many(list(indices) if by_index else store.keys())
        if isinstance(self._source, StreamAsSource):
            self._source.restart()

    def trim_stores(self) -> None:
        """Note the size of a sample in each store, and empty the stores that are too large."""
        for stage, store in self.stores.items():
            used, held = store.used, len(store)
            if held:
                self.bytes_per_sample[stage] = used / held
            if used > STORE_LIMIT:
                store.delete_many(store.keys())

    def close(self) -> None:
        for store in self.stores.values():
            store.destroy()
        if isinstance(self._source, StreamAsSource):
            self._source.restart()


# Rounds

Round = tuple[Spent, int]
"""The time that a stage took in one round, and the number of samples."""


class RoundTimes:
    """What the rounds of one road cost, by stage; the last stage is the batch.

    ``parts`` maps (stage, part) to (time, number of calls), over all rounds.
    """

    def __init__(self, stages: int) -> None:
        self.rounds: list[list[Round]] = [[] for _ in range(stages)]
        self.hits: list[list[Round]] = [[] for _ in range(stages)]
        self.parts: dict[tuple[int, str], Round] = {}
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._samples = 0
        self._spent = [Spent()] * len(self.rounds)
        self._hits: dict[int, Round] = {}

    def add(self, recorder: Recorder, samples: int, batching: Spent) -> None:
        """Add the cost of a few samples to this round."""
        above = Spent()
        for stage, spent in enumerate(recorder.spent):
            self._spent[stage] = self._spent[stage].plus(spent.minus(above))
            above = spent
        self.add_batching(batching)
        for name, part in recorder.parts.items():
            self.parts[name] = _sum(self.parts.get(name), part)
        self._samples += samples

    def add_batching(self, spent: Spent) -> None:
        self._spent[-1] = self._spent[-1].plus(spent)

    def add_hits(self, stage: int, spent: Spent, samples: int) -> None:
        self._hits[stage] = _sum(self._hits.get(stage), (spent, samples))

    def end(self) -> None:
        """End the round; a round without samples does not count."""
        if not self._samples:
            return
        for stage, spent in enumerate(self._spent):
            self.rounds[stage].append((spent, self._samples))
        for stage, hit in self._hits.items():
            self.hits[stage].append(hit)

    def add_stage(self, stage: int, other: RoundTimes, other_stage: int) -> None:
        """Add what another road measured of the same stop."""
        self.rounds[stage] += other.rounds[other_stage]
        self.hits[stage] += other.hits[other_stage]
        for (at, name), part in other.parts.items():
            if at == other_stage:
                self.parts[stage, name] = _sum(self.parts.get((stage, name)), part)


def pool_times(roads: Sequence[ProbedRoad], times: Sequence[RoundTimes]) -> list[RoundTimes]:
    """The times of each road, with one figure for a stop that stands on several roads.

    Such a stop does the same work on each road; a difference comes from other programs on the
    machine, and must not look like a difference between the roads.

    The source is an exception. The second road to read a sample finds it in the page cache, so the
    caller uses the first reading only.
    """
    pooled = []
    for road in roads:
        total = RoundTimes(len(road.names) + 1)
        for other, measured in zip(roads, times, strict=True):
            stages = {id(stop): stage for stage, stop in enumerate(other.stops, start=1)}
            for stage, stop in enumerate(road.stops, start=1):
                if id(stop) in stages:
                    total.add_stage(stage, measured, stages[id(stop)])
            total.add_stage(0, measured, 0)
            total.add_stage(len(road.stops) + 1, measured, len(other.stops) + 1)
        pooled.append(total)
    return pooled


def median_cost(rounds: Sequence[Round]) -> Spent:
    """Seconds per sample in the median round, which a short disturbance does not change."""
    if not rounds:
        return Spent()
    return Spent(
        max(0.0, median(spent.wall / samples for spent, samples in rounds)),
        max(0.0, median(spent.cpu / samples for spent, samples in rounds)),
    )


def _sum(total: Round | None, more: Round) -> Round:
    return more if total is None else (total[0].plus(more[0]), total[1] + more[1])
