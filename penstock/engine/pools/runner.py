"""The runner: what a task is, and how one worker runs it, in a pool of any kind."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.schedule import RECENT, TaskKind, group_size
from penstock.engine.slots import Layout, Slot
from penstock.errors import SampleError, ShapeError
from penstock.keyed import (
    GlobalStates,
    Key,
    Keyed,
    Keys,
    SpareGenerators,
    plain_states,
    preserved_globals,
    restore_plain_states,
    seed_globals,
)
from penstock.serialize import pack, unpack
from penstock.source.stream import StreamSource
from penstock.stats import Tally
from penstock.stops.batch import Collate, Misfit
from penstock.stops.echo import stream_copies_of
from penstock.stops.field import Field, On
from penstock.stops.road import OpenRoad, Road, scope_of
from penstock.stops.stop import Offer, Rows, StageFailure
from penstock.tree import as_array, flatten, leaves_like

OnError = Literal["raise", "skip", "substitute"]

_END = object()
"""After the last sample of a stream."""

STACKED = 1 << 15
"""Bytes up to which tensors are written into rows by one call of torch. Numpy takes 1 us longer for
each, and torch may use several threads for larger ones."""

SUBSTITUTES = 10
"""Samples that are tried in place of a bad one before the loader gives up."""


class HostSplit(Protocol):
    """What CPU workers do of the tiny-batches that a device prepares.

    They run the first ``above`` stops of the road. ``on`` and ``field`` say which field of a sample
    the device then makes (see ``Field``); workers write the other fields into their rows.
    """

    @property
    def above(self) -> int: ...

    @property
    def on(self) -> On: ...

    @property
    def field(self) -> str: ...

    def host_part(self, keys: Keys, values: Sequence[Any]) -> Any:
        """What the device needs of these values of the field; ``None``: the CPU has to prepare
        these samples. Called by several workers at once."""


@dataclass(frozen=True)
class Work:
    """Everything that a worker needs to run tasks, sent to it once.

    ``fallback``: collates a batch whose samples do not share one layout. ``rows``: batch size.
    ``split``: given where a device takes part.
    """

    road: Road
    collate: Collate | None
    fallback: Collate
    on_error: OnError
    rows: int
    split: HostSplit | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """Which worker this is, for the ``init`` hook and for streams.

    ``count``: number of workers. ``process``: the worker is a process of its own.
    """

    id: int
    count: int
    seed: int
    process: bool


WorkerInit = Callable[[WorkerInfo, Work], None]
"""Called in each worker where it starts, also if it never gets a task."""


@dataclass(slots=True)
class Task:
    """Work for one worker: samples to prepare, and where their rows go.

    ``first``: the row of the first sample in ``columns``. ``number``: of the batch in its epoch or
    stream. ``struck``: a worker died while it worked on it. ``part``: what CPU workers have done of
    a task for the device. ``resumed``: see ``BatchKeys``.
    """

    id: int
    kind: TaskKind
    keys: Keys
    first: int
    slot: Slot | None
    layout: Layout | None
    columns: Sequence[Any]
    number: int = 0
    struck: bool = False
    part: Any = None
    resumed: tuple[int, bytes] | None = None


@dataclass(frozen=True, slots=True)
class InSlot:
    """A collated batch that a worker process packed into the batch's slot."""

    nbytes: int


@dataclass(slots=True)
class TaskReport:
    """The facts about a finished task; the samples themselves are in the slot or the outcome.

    - ``rows``: rows that were written.
    - ``taken``: samples that a stream gave, including bad ones; 0: the stream has ended. Of a
      probe: 1, or 0 if every sample failed.
    - ``busy``: seconds of work.
    - ``tally``: the counters of the stops, as ``Tally.as_list`` returns them.
    - ``offers``: samples that were put into stores.
    - ``bad``: the arguments of a ``BadSample`` for each bad sample.
    - ``missing``: positions in the task of skipped samples.
    - ``objects``: values of the fields that are text or bytes, by the number of the field. Of a
      probe: of all fields.
    - ``machine``: the other machine that has prepared the samples; empty for this one.
    - ``reached``: see ``BatchKeys``.
    """

    rows: int = 0
    taken: int = 0
    busy: float = 0.0
    tally: list[Any] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    bad: list[tuple[int, str, str, str]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    objects: dict[int, list[Any]] = field(default_factory=dict)
    machine: str = ""
    reached: bytes | None = None


@dataclass(slots=True)
class Outcome:
    """The result of a task: ``error``, ``changed``, or neither.

    ``value``: the collated batch of a task of kind ``"whole"`` or ``"pull"``. ``layout``: the
    result of a ``"probe"``. ``changed``: a sample did not have the layout of the batch. ``part``:
    of a ``"host"`` task, what the device needs; ``None``: the worker has prepared the rows itself.
    """

    report: TaskReport
    value: Any = None
    layout: Layout | None = None
    error: BaseException | None = None
    changed: bool = False
    part: Any = None


class LayoutChanged(Exception):
    """A sample does not have the layout of the batch, which must be collated as a whole."""


class Runner:
    """Runs tasks on an open road. One for every worker; not shared between threads."""

    def __init__(
        self,
        work: Work,
        info: WorkerInfo,
        init: WorkerInit | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not work.road.source.indexed:
            # A stream's samples pass through its source object, so each runner has one of its own.
            source = copy.copy(work.road.source)
            work = replace(work, road=replace(work.road, source=source))
        self.work = work
        self.info = info
        self._init = init
        self._init_error: Exception | None = None
        self._clock = clock
        self._road = work.road.open(clock)
        self._head: OpenRoad | None = None
        self._preferred_group = work.road.preferred_group
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Seconds a sample of recent tasks, and of these spent reading."""
        self._tasks = 0
        self._began = clock()
        self._stream: Iterator[tuple[int, int, Any]] | None = None
        self._streamed: tuple[int, int] | None = None
        self._stream_states: GlobalStates | None = None
        self._seeded: Any = None
        """The states of the global generators where the stream was opened."""
        self._spare: SpareGenerators | None = None
        self._kept: tuple[Keys, list[Any]] | None = None
        """Samples that a task has prepared and not used."""
        self._copies = stream_copies_of(work.road.stops, info.seed)
        self._stops_draw = any(stop.global_random for stop in work.road.stops)

    def set_up(self) -> None:
        """Call the ``init`` hook, once. Its exception becomes that of the first task."""
        init, self._init = self._init, None
        if init is not None:
            try:
                init(self.info, self.work)
            except Exception as error:
                self._init_error = error

    def run(self, task: Task) -> Outcome:
        """Run a task in this thread. Exceptions become part of the outcome."""
        try:
            if task.kind == "rows":
                if task.layout is None:
                    raise TypeError("rows without a layout")
                return Outcome(self.rows(task.keys, task.columns, task.layout, task.first))
            if task.kind == "host":
                return self.host(task)
            if task.kind == "whole":
                value, report = self.whole(task.keys)
                return Outcome(report, value)
            if task.kind == "pull":
                number, rows = task.number, len(task.keys)
                value, report = self.pull(number, rows, task.keys.epoch, task.resumed)
                return Outcome(report, value)
            layout, report = self.probe(task.keys, task.first)
            return Outcome(report, layout=layout)
        except LayoutChanged:
            return Outcome(self.unfinished(), changed=True)
        except Exception as error:
            return Outcome(self.unfinished(), error=error)

    def rows(
        self, keys: Keys, columns: Sequence[NDArray[Any] | None], layout: Layout, first: int
    ) -> TaskReport:
        """Prepare these samples in rows ``first`` and following. Raises LayoutChanged."""
        report = self._begin()
        started = self._clock()
        with scope_of(self.work.road, own_process=self.info.process):
            row, at = first, 0
            cost, reading = min(self._recent, default=(0.0, 0.0))
            trial = self._tasks % RECENT == 1
            self._tasks += 1
            kept = self._kept_samples(keys)
            while at < len(keys):
                group = group_size(
                    cost, reading, self._preferred_group, len(keys) - at, trial=trial
                )
                group = len(keys) if kept else group
                self._road.rows.aim(columns, layout.skeleton, row)
                samples = kept or self._samples(keys.cut(at, group), report, at)
                try:
                    _write(samples, columns, layout, row, report, self._road.rows.given)
                except LayoutChanged:
                    # Samples in their rows would change with the next batch that gets the slot.
                    if len(samples) == len(keys) and not self._road.rows.given:
                        self._keep(keys, samples)
                    raise
                self._road.rows.clear()
                row += len(samples)
                at += group
        return self._end(report, row - first, len(keys), started)

    def host(self, task: Task) -> Outcome:
        """Do the CPU's part of a task for the device, or the whole task if that cannot be split."""
        split, layout = self.work.split, task.layout
        if split is None or layout is None:
            raise TypeError("a task for a device, and no device takes part")
        self._begin()
        if self._head is None:
            road = self.work.road
            self._head = replace(road, stops=road.stops[: split.above]).open(self._clock)
        head, started = self._head, self._clock()
        head.begin()
        report, part = TaskReport(), None
        with contextlib.suppress(StageFailure):  # the whole task finds the bad sample
            part = self._host_part(head, split, task, layout, report)
        if part is None:
            report = self.rows(task.keys, task.columns, layout, task.first)
            report.offers[:0] = head.context.offers
            return Outcome(report)
        report.busy, report.rows = self._clock() - started, len(task.keys)
        report.tally = _longer(head.context.tally, len(self.work.road.stages), report)
        report.offers = list(head.context.offers)
        return Outcome(report, part=part)

    def _host_part(
        self, head: OpenRoad, split: HostSplit, task: Task, layout: Layout, report: TaskReport
    ) -> Any:
        rows, keys, columns = Rows(), task.keys, task.columns
        rows.aim(columns, layout.skeleton, task.first)
        place = Field("device", split.on, split.field).replace
        values: list[Any] = []

        def take(value: Any, key: Key) -> Any:
            values.append(value)
            return rows.next(split.on, split.field)

        with scope_of(self.work.road, own_process=self.info.process):
            samples = head.get(keys)
        samples = [place(sample, take, key) for sample, key in zip(samples, keys, strict=True)]
        if len(rows.given) != len(keys):
            return None  # the field is no column of its own
        part = split.host_part(keys, values)
        if part is not None:
            _write(samples, columns, layout, task.first, report, rows.given)
        return part

    def whole(self, keys: Keys) -> tuple[Any, TaskReport]:
        """Prepare and collate a whole batch."""
        report = self._begin()
        started = self._clock()
        with scope_of(self.work.road, own_process=self.info.process):
            if self.work.road.source.together:
                batch = self._collate(self._together(keys), keys, report)
                return batch, self._end(report, len(keys), len(keys), started)
            samples = self._kept_samples(keys) or []
            for at in range(len(samples), len(keys)):
                samples.extend(self._samples(keys.cut(at, 1), report, at))
            batch = self._collate(samples, keys, report) if samples else None
        return batch, self._end(report, len(samples), len(keys), started)

    def _together(self, keys: Keys) -> Any:
        """What the source returns for all samples of a batch."""
        try:
            return self._road.read_together(keys)
        except StageFailure as failure:
            cause, index = failure.__cause__, keys.indices[0]
            raise SampleError(
                f"the batch that begins with {self._name(index)} (index {index}) failed in "
                f"{failure.stage}: {type(cause).__name__}: {cause}. Its {len(keys)} samples were "
                "read by one call of __getitems__.",
                index=index,
                name=self._name(index),
                stage=failure.stage,
                details="".join(traceback.format_exception(cause)) if cause is not None else "",
            ) from cause

    def probe(self, keys: Keys, first: int = 0) -> tuple[Layout | None, TaskReport]:
        """Prepare the first sample that works, to learn the layout of batches.

        If that is the first sample of its batch, it becomes a row of it: the report then has one
        row, and its values as ``objects``. Any other is prepared again with its batch, and so is
        that of a batch of one sample, which needs a task in any case: it gets the batch a slot.
        ``first``: the place of the first key in the batch.
        """
        becomes_row = first == 0 and len(keys) > 1
        report = self._begin(trial=not becomes_row)
        started = self._clock()
        layout, put = None, list[Offer]()
        with scope_of(self.work.road, own_process=self.info.process):
            for place in range(len(keys)):
                if place == 1:
                    put += self._road.context.offers  # by the sample that failed
                    self._road.begin(trial=True)
                # A bad sample is reported when it is prepared again with its batch.
                trial = TaskReport()
                samples = self._samples(keys.cut(place, 1), trial, place)
                if samples:
                    layout = Layout.of(samples[0], self.work.rows)
                    report.taken = 1
                    if becomes_row and place == 0 and layout is not None and not trial.bad:
                        report.objects = _leaves(samples[0])
                    elif len(keys) == 1 and not trial.bad:
                        self._keep(keys, samples)
                    break
        self._end(report, 1 if report.objects else 0, 0, started)
        report.offers += put
        return layout, report

    def pull(
        self, number: int, rows: int, epoch: int, resumed: tuple[int, bytes] | None = None
    ) -> tuple[Any, TaskReport]:
        """The next batch of the worker's own stream; no rows when the stream has ended.

        ``number``: of the batch in this stream. A worker that replaces a dead one skips the
        batches before it. ``resumed``: a state of the stream to begin with.
        """
        report = self._begin()
        started = self._clock()
        source = self.work.road.source
        if not isinstance(source, StreamSource):
            raise TypeError("only a stream can be pulled from")
        samples: list[Any] = []
        taken = 0
        with nullcontext() if self.info.process else preserved_globals():
            stream = self._open_stream(source, number, rows, epoch, resumed)
            while taken < rows and (delivery := next(stream, None)) is not None:
                position, copy_number, source.value = delivery
                place = position * self.info.count + self.info.id
                keys = Keys(epoch, [place], [copy_number] if copy_number else None)
                with self._stream_kept_apart(self._stops_draw):
                    samples.extend(self._samples(keys, report, taken))
                taken += 1
            self._streamed = (epoch, number + 1)
            report.reached = b"" if taken < rows else self._stream_state(source)
            if not self.info.process:
                self._stream_states = GlobalStates()
            keys = Keys(epoch, list(range(taken)))
            with self._stream_kept_apart(self.work.collate is not None):
                batch = self._collate(samples, keys, report) if samples else None
        self._end(report, len(samples), taken, started)
        report.taken = taken
        return batch, report

    def _keep(self, keys: Keys, samples: list[Any]) -> None:
        """Keep samples for the next task, which is likely to need them again.

        Not where stages keep samples: they would miss these.
        """
        if not self.work.road.holds:
            self._kept = keys, samples

    def _kept_samples(self, keys: Keys) -> list[Any] | None:
        """The samples that were kept, if they are those of these keys."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and list(kept[0]) == list(keys) else None

    def _stream_state(self, source: StreamSource) -> bytes | None:
        """The packed state of the stream, and of the global generators if it has drawn.

        ``None`` if it has none, or is inside a block of samples that are repeated: a resume then
        skips what was delivered.
        """
        state = source.state() if self._copies is None else None
        if state is None:
            return None
        drawn = plain_states()
        if drawn != self._seeded:
            state["random"] = drawn
        return bytes(pack(state).tobytes())

    def _open_stream(
        self,
        source: StreamSource,
        number: int,
        rows: int,
        epoch: int,
        resumed: tuple[int, bytes] | None,
    ) -> Iterator[tuple[int, int, Any]]:
        """The worker's stream at this batch, with the global generators as they are there.

        A stream may draw from the global generators. They are seeded once, where it starts. In
        the user's process the stream has states of its own, which are put back for each batch.
        """
        if self._stream is None or self._streamed != (epoch, number):
            seed_globals(Keyed(self.info.seed, "stream").at(Key(self.info.id, epoch)))
            self._seeded = plain_states()
            samples = None
            if resumed is not None and self._copies is None:
                first, state = resumed[0], unpack(resumed[1])
                samples = source.resume((number - first) * rows, state)
                if samples is not None and "random" in state:
                    restore_plain_states(state["random"])
            self._stream = self._deliveries(source, number * rows, epoch, samples)
        elif self._stream_states is not None:
            self._stream_states.restore()
        # After an error the stream is somewhere within a batch, so it has to be opened again.
        self._streamed = self._stream_states = None
        return self._stream

    def _deliveries(
        self, source: StreamSource, place: int, epoch: int, samples: Iterator[Any] | None
    ) -> Iterator[tuple[int, int, Any]]:
        """The stream from a place on: (position in the stream, copy, sample).

        ``samples``: the stream, if it stands there already.
        """
        # Not ``for`` over the stream: that calls __iter__ again, where an iterator of the user may
        # start anew.
        copies, me = self._copies, self.info.id
        if copies is None:
            samples = source.open(skip=place) if samples is None else samples
            while (sample := next(samples, _END)) is not _END:
                yield place, 0, sample
                place += 1
            return
        number, within = copies.start(me, epoch, place)
        samples = source.open(skip=number * copies.per_block)
        while block := list(islice(samples, copies.per_block)):
            first = number * copies.per_block
            for owner, copy_number in copies.block(me, epoch, number, len(block))[within:]:
                yield first + owner, copy_number, block[owner]
            number, within = number + 1, 0

    def _stream_kept_apart(self, needed: bool) -> AbstractContextManager[None]:
        """Preserves the states of the stream from stops and a collate that draw globally too.

        Samples that are skipped after a resume do not pass these, and the stream has to draw the
        same numbers as if they had.
        """
        if not needed:
            return nullcontext()
        if not self.info.process:
            return preserved_globals()
        if self._spare is None:
            self._spare = SpareGenerators()
        return self._spare.preserved()

    def _begin(self, *, trial: bool = False) -> TaskReport:
        self.set_up()
        if self._init_error is not None:
            error, self._init_error = self._init_error, None
            raise error
        self._road.begin(trial=trial)
        self._began = self._clock()
        return TaskReport()

    def _end(self, report: TaskReport, rows: int, prepared: int, started: float) -> TaskReport:
        report.busy = self._clock() - started
        report.rows = rows
        report.tally = self._road.context.tally.as_list()
        report.offers = list(self._road.context.offers)
        if prepared:
            reading = self._road.context.tally.seconds[0]
            self._recent.append((report.busy / prepared, reading / prepared))
        return report

    def unfinished(self) -> TaskReport:
        """The report of a task that raised: its time, and the samples it put into stores."""
        return TaskReport(busy=self._clock() - self._began, offers=list(self._road.context.offers))

    def _samples(self, keys: Keys, report: TaskReport, place: int) -> list[Any]:
        """The samples of these keys, without bad ones if those are skipped.

        ``place``: the position of the first key in the task.
        """
        try:
            return self._road.get(keys)
        except StageFailure as failure:
            self._road.rows.clear()
            if len(keys) == 1:
                return self._handle_bad(next(iter(keys)), failure, report, place)
        # Run them one by one to find the bad sample and prepare the others. Randomness is keyed,
        # so the second run gives the same samples as the first.
        samples = []
        for i in range(len(keys)):
            samples.extend(self._samples(keys.cut(i, 1), report, place + i))
        return samples

    def _handle_bad(
        self, key: Key, failure: StageFailure, report: TaskReport, place: int
    ) -> list[Any]:
        """Raise, skip or substitute a bad sample, as ``on_error`` says."""
        error = self._error(key.index, failure)
        if self.work.on_error == "raise":
            raise error from failure.__cause__
        cause = failure.__cause__
        report.bad.append((key.index, error.name, error.stage, f"{type(cause).__name__}: {cause}"))
        if self.work.on_error == "skip":
            report.missing.append(place)
            return []
        for substitute in substitutes(self.work.road, key):
            try:
                return self._road.get(Keys(key.epoch, [substitute], [key.replica]))
            except StageFailure:
                continue
        raise SampleError(
            f"{self._failed(key.index, failure)}\n"
            f"None of {SUBSTITUTES} other samples could take its place: the data or the pipeline "
            "is broken, not a sample.",
            index=key.index,
            name=error.name,
            stage=error.stage,
            details=error.details,
        ) from cause

    def _error(self, index: int, failure: StageFailure) -> SampleError:
        cause = failure.__cause__
        details = "".join(traceback.format_exception(cause)) if cause is not None else ""
        return SampleError(
            f"{self._failed(index, failure)}\n"
            'To leave bad samples out, give the loader on_error="skip" or "substitute".',
            index=index,
            name=self._name(index),
            stage=failure.stage,
            details=details,
        )

    def _failed(self, index: int, failure: StageFailure) -> str:
        cause = failure.__cause__
        return (
            f"{self._name(index)} (index {index}) failed in {failure.stage}: "
            f"{type(cause).__name__}: {cause}"
        )

    def _name(self, index: int) -> str:
        return sample_name(self.work.road, index)

    def _collate(self, samples: Any, keys: Keys, report: TaskReport) -> Any:
        collate = self.work.collate or self.work.fallback
        try:
            return collate(samples)
        except Misfit as misfit:
            present = [i for i in range(len(keys)) if i not in report.missing]
            index = keys.indices[present[misfit.place]]
            of_mix = self.work.road.source.parts is not None
            beside = f" ({self._name(keys.indices[present[0]])})" if of_mix else ""
            raise ShapeError(
                f"{self._name(index)} (index {index}) does not fit into its batch: "
                f"{misfit}{beside}. "
                "Bring all samples to one shape with a map (resize, crop), pad them with "
                "batch(..., pad=0), or give batch() a collate function.",
                index=index,
                name=self._name(index),
                stage="batch",
            ) from None
        except Exception as error:
            index = keys.indices[0] if len(keys) else -1
            raise SampleError(
                f"collate failed on the batch that begins with {self._name(index)} "
                f"(index {index}): {type(error).__name__}: {error}. It was called with "
                f"{_described(samples)}.",
                index=index,
                name=self._name(index),
                stage="collate",
                details=traceback.format_exc(),
            ) from error


def _described(samples: Any) -> str:
    """What a collate function was called with, for messages."""
    if type(samples) is list:
        return f"a list of {len(samples)} samples"
    return f"the {type(samples).__name__} that __getitems__ returned"


def _longer(tally: Tally, stages: int, report: TaskReport) -> list[Any]:
    """The counters of the first stages, with as many samples for those that the device does."""
    samples, seconds, *rest = tally.as_list()
    more = stages - len(samples)
    return [samples + [report.rows] * more, seconds + [report.busy] * more, *rest]


def _leaves(sample: Any) -> dict[int, list[Any]]:
    """The fields of a sample by number: text and bytes as they are, others as arrays."""
    return {
        number: [leaf if isinstance(leaf, (str, bytes)) else as_array(leaf)]
        for number, leaf in enumerate(flatten(sample)[0])
    }


def sample_name(road: Road, index: int) -> str:
    """The name of a sample, for messages."""
    try:
        return road.source.name(index)
    except Exception:  # a user's source; it must not hide the failure that the message is about
        return f"sample {index}"


def substitutes(road: Road, key: Key) -> list[int]:
    """The samples that may take the place of a bad one, in the order in which they are tried."""
    generator = Keyed(road.seed, "substitute").fresh(key)
    indices: list[int] = generator.integers(len(road.source), size=SUBSTITUTES).tolist()
    return indices


def _write(
    samples: list[Any],
    columns: Sequence[NDArray[Any] | None],
    layout: Layout,
    row: int,
    report: TaskReport,
    given: list[NDArray[Any]],
) -> None:
    """Write samples into their rows. ``given``: rows that a stop has written already."""
    if not samples:
        return
    skeleton = layout.skeleton
    if isinstance(skeleton, int):
        _write_column(samples, columns[0], layout, 0, row, report, given)
        return
    try:
        by_sample = [leaves_like(sample, skeleton) for sample in samples]
    except ValueError as error:
        raise LayoutChanged(str(error)) from None
    for number, values in enumerate(zip(*by_sample, strict=True)):
        _write_column(values, columns[number], layout, number, row, report, given)


def _write_column(
    values: Sequence[Any],
    column: NDArray[Any] | None,
    layout: Layout,
    number: int,
    row: int,
    report: TaskReport,
    given: list[NDArray[Any]],
) -> None:
    if column is None:
        for value in values:
            if not isinstance(value, (str, bytes)):
                raise LayoutChanged(f"a {type(value).__name__} where text or bytes were")
        report.objects.setdefault(number, []).extend(values)
        return
    leaf = layout.leaves[number]
    if not leaf.shape and not hasattr(values[0], "detach"):
        # One conversion for the whole group: a scalar at a time costs more than reading it.
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise LayoutChanged(str(error)) from None
        if array.dtype != leaf.dtype or array.ndim != 1:
            raise LayoutChanged(f"{array.dtype} where {leaf.dtype} was")
        column[row : row + len(values)] = array
        return
    small_tensors = leaf.nbytes <= STACKED and hasattr(values[0], "detach")
    if small_tensors and _stack_tensors(values, column[row : row + len(values)]):
        return
    for place, value in enumerate(values):
        if place < len(given) and value is given[place]:
            continue
        plain = value if type(value) is np.ndarray else as_array(value)
        if plain is None or plain.shape != leaf.shape or plain.dtype != leaf.dtype:
            found = type(value).__name__ if plain is None else f"{plain.dtype} {plain.shape}"
            raise LayoutChanged(f"{found} where {leaf.dtype} {leaf.shape} was")
        column[row + place] = plain


def _stack_tensors(values: Sequence[Any], rows: NDArray[Any]) -> bool:
    """Write tensors into rows with one call of torch. Returns false if they are not all alike."""
    torch = sys.modules.get("torch")
    if torch is None or {type(value) for value in values} != {torch.Tensor}:
        return False
    try:
        out = torch.from_numpy(rows)
        if {value.dtype for value in values} != {out.dtype} or values[0].shape != out.shape[1:]:
            return False
        torch.stack(values, out=out)
    except (RuntimeError, TypeError):  # other shapes, on a device, or they require a gradient
        return False
    return True
