"""Roads that the compiled kernel runs by itself: from files to rows, without Python in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.engine.pools.runner import LayoutChanged, Outcome, Runner, Task, TaskReport
from penstock.keyed import Keys
from penstock.source.source import FileSamples
from penstock.stats import Tally, add_tallies
from penstock.stops.hold import Access, Found, Hold, keeps_samples
from penstock.stops.road import Road
from penstock.stops.stop import KernelWork, Offer, StepContext, Stop


@dataclass
class Lookup:
    """What one hold has of the samples of a task.

    ``places``: the positions in the task of the samples that the hold was asked for. ``missing``:
    those that it does not have; ``to_keep``: those of them that it will keep.
    """

    access: Access
    found: Found
    places: Sequence[int]
    missing: list[int]
    to_keep: list[int]

    @classmethod
    def of(cls, access: Access, keys: Keys, places: list[int] | None) -> Lookup:
        """Look up the samples at these places of a task; ``None``: all of them."""
        if places is None:
            found = access.find(keys)
            return cls(access, found, range(len(keys)), found.missing, found.keep)
        found = access.find(keys.pick(places))
        missing, to_keep = [places[i] for i in found.missing], [places[i] for i in found.keep]
        return cls(access, found, places, missing, to_keep)

    def count(self, left_out: Collection[int]) -> None:
        """Count hits and misses, except for samples that Python prepared, and so counted."""
        asked, misses = len(self.places), len(self.missing)
        if left_out:
            asked = sum(place not in left_out for place in self.places)
            misses = sum(place not in left_out for place in self.missing)
        self.access.count(asked - misses, misses)


@dataclass
class NativeTask:
    """A task in the kernel's queue.

    - ``files``, ``made``: what a cache of files, and a hold of the head's results, have of its
      samples.
    - ``claims``: the indices of the samples whose results this task will keep.
    - ``read``: by place, what Python has read for the kernel; ``reading``: the seconds it took.
    - ``reports``: by place, of the samples that the kernel left to Python.
    - ``errors``: by place, what was raised for them.
    """

    task: Task
    context: StepContext
    files: Lookup | None = None
    made: Lookup | None = None
    claims: set[int] = field(default_factory=set)
    read: dict[int, Any] = field(default_factory=dict)
    reading: float = 0.0
    reports: dict[int, TaskReport] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def contents(self) -> list[bytes | None]:
        """A copy of what Python read of each sample."""
        places = range(len(self.task.keys))
        return [bytes(self.read[place]) if place in self.read else None for place in places]

    @property
    def versions(self) -> list[int]:
        """Of the results of the head, by place; empty if they have none."""
        return [] if self.made is None else self.made.found.versions or []


@dataclass(frozen=True)
class _Segments:
    """The parts of a native road: files, a cache of them, a head, a hold of its results, the rest.

    ``head`` and ``hold`` are both there, or neither.
    """

    cache: Hold | None
    head: KernelWork | None
    hold: Hold | None
    work: KernelWork
    stages_above_hold: int


class NativeRoad:
    """A road whose samples the compiled kernel prepares. Shared by the workers of a pool."""

    def __init__(self, road: Road, segments: _Segments, files: FileSamples) -> None:
        self._road = road
        self._stages, self._holds = len(road.stages), road.holds
        self._segments = segments
        head = segments.head
        self._program = segments.work.program()
        self._head = None if head is None else head.program()
        self._index = segments.work.index() if head is None else head.index()
        self._paths = files.kernel_paths()
        self._files = files
        self._job_type = native.kernel().Job
        self._lock = threading.Lock()
        self._claimed: set[int] = set()
        """Samples that tasks in the queue will keep."""

    @property
    def reads_in_python(self) -> bool:
        """Whether Python reads the files, with the GIL released within."""
        return self._files.read is not None

    def accepts(self, task: Task) -> bool:
        """Whether the kernel can write the rows of this task."""
        if task.kind != "rows" or task.layout is None:
            return False
        fields = [self._files.content_field, *self._files.others]
        columns = [_column(task, field) for field in fields]
        if len(task.columns) != len(fields) or any(column is None for column in columns):
            return False
        return self._segments.work.fits(columns[0])

    def look_up(self, task: Task) -> NativeTask | None:
        """What the holds have of a task's samples.

        ``None``: a task in the queue is about to keep a sample that this one needs, too. The last
        batches of an epoch and the first ones of the next may share samples.
        """
        with self._lock:
            held = self._look_up(task)
            if not held.claims.isdisjoint(self._claimed):
                return None
            self._claimed |= held.claims
        return held

    def job(self, held: NativeTask) -> Any:
        """The job of the kernel's queue for a task that was looked up."""
        try:
            return self._make_job(held)
        except BaseException:
            self._release(held)
            raise

    def _release(self, held: NativeTask) -> None:
        with self._lock:
            self._claimed -= held.claims

    def forget_tasks(self) -> None:
        """Forget the tasks in the queue: they were dropped with it."""
        with self._lock:
            self._claimed.clear()

    def _look_up(self, task: Task) -> NativeTask:
        road, segments = self._road, self._segments
        held = NativeTask(task, StepContext(road.seed, Tally(self._stages, self._holds)))
        places = None
        if segments.hold is not None:
            made = held.made = _look_up(segments.hold, held.context, task.keys, None)
            indices = task.keys.indices
            held.claims = {indices[place] for place in made.to_keep}
            places = made.missing
        if segments.cache is not None:
            held.files = _look_up(segments.cache, held.context, task.keys, places)
        return held

    def _make_job(self, held: NativeTask) -> Any:
        task, keys = held.task, held.task.keys
        rows = slice(task.first, task.first + len(keys))
        indices, versions = np.array(keys.indices, dtype=np.int64), held.versions
        for name, numbers in self._files.others.items():
            _column(task, name)[rows] = numbers(indices)
        inputs = self._inputs(held)
        if inputs is not None and self._files.read is not None:
            self._read(held, indices, inputs)
        return self._job_type(
            self._program,
            self._head,
            self._paths,
            self._index,
            held,
            task.id,
            indices,
            keys.epoch,
            np.array(versions, dtype=np.int64) if versions else None,
            None if keys.replicas is None else np.array(keys.replicas, dtype=np.int64),
            inputs,
            self._paths is not None and held.files is not None and bool(held.files.to_keep),
            self._kept(held),
            _column(task, self._files.content_field)[rows],
        )

    def _read(self, held: NativeTask, indices: NDArray[np.int64], inputs: list[Any]) -> None:
        """Add what the source reads to the inputs; what stays ``None`` is left to Python."""
        started = time.perf_counter()
        places = [place for place, value in enumerate(inputs) if value is None]
        if places and self._files.read is not None:
            for place, content in zip(places, self._files.read(indices[places]), strict=True):
                inputs[place] = content
                if content is not None:
                    held.read[place] = content
        held.reading = time.perf_counter() - started

    def _inputs(self, held: NativeTask) -> list[Any] | None:
        """What the holds have of each sample; ``None`` for a file that is to be read."""
        files = self._files
        inputs: list[Any] = [None] * len(held.task.keys)
        lookups = [lookup for lookup in (held.made, held.files) if lookup is not None]
        for lookup in lookups:
            samples = lookup.found.samples
            if files.content_field is not None:
                samples = [sample and files.content(sample) for sample in samples]
            if len(lookup.places) == len(inputs):
                inputs = list(samples)
                continue
            for place, sample in zip(lookup.places, samples, strict=True):
                if sample is not None:
                    inputs[place] = sample
        if files.contents:
            for place, index in enumerate(held.task.keys.indices):
                if inputs[place] is None:
                    inputs[place] = files.contents.get(index)
        return inputs if lookups or files.contents or files.read is not None else None

    def _kept(self, held: NativeTask) -> NDArray[np.int64] | None:
        """1 for each sample of which the result of the head will be kept."""
        if held.made is None:
            return None
        kept = np.zeros(len(held.task.keys), dtype=np.int64)
        kept[held.made.to_keep] = 1
        return kept

    def run_in_python(self, held: NativeTask, place: int, runner: Runner) -> None:
        """Prepare a sample that the kernel left to Python."""
        task = held.task
        if task.layout is None:
            raise TypeError("rows without a layout")
        try:
            held.reports[place] = runner.rows(
                task.keys.cut(place, 1), task.columns, task.layout, task.first + place
            )
        except Exception as error:
            held.reports[place] = runner.unfinished()
            held.errors[place] = error

    def outcome(self, job: Any) -> Outcome:
        """The outcome of a task whose job is done."""
        held: NativeTask = job.tag
        try:
            report = self._report(held, job)
        finally:
            self._release(held)
        if held.errors:
            error = held.errors[min(held.errors)]
            if isinstance(error, LayoutChanged):
                return Outcome(report, changed=True)
            return Outcome(report, error=error)
        if report.missing:
            _close_gaps(held.task, report)
        return Outcome(report)

    def _report(self, held: NativeTask, job: Any) -> TaskReport:
        offers = self._keep(held, job)
        tally, count = self._tally(held, job), len(held.task.keys)
        report = TaskReport(rows=count, busy=tally.seconds[-1], tally=tally.as_list())
        for place, part in sorted(held.reports.items()):
            report.busy += part.busy
            report.bad += part.bad
            offers[place] = part.offers
            if not part.rows:
                report.rows -= 1
                report.missing.append(place)
            if part.tally:
                report.tally = add_tallies([report.tally, part.tally])
        report.offers = [offer for place in sorted(offers) for offer in offers[place]]
        return report

    def _tally(self, held: NativeTask, job: Any) -> Tally:
        *_, nbytes, files = job.spent
        tally = held.context.tally
        by_python = held.reports.keys()
        count = len(held.task.keys) - len(by_python)
        above = count
        if held.made is not None:
            missing = held.made.missing
            above = sum(place not in by_python for place in missing) if by_python else len(missing)
        stages = len(tally.samples)
        head = self._segments.stages_above_hold
        tally.samples[:] = [files] + [above] * (head - 1) + [count] * (stages - head)
        seconds = self._seconds_by_step(job) if job.steps else self._seconds(job)
        tally.seconds[:] = [held.reading + part for part in seconds]
        read = [view for place, view in held.read.items() if place not in by_python]
        tally.samples[0] += len(read)
        tally.bytes_read = nbytes + sum(map(len, read))
        return tally

    def _seconds(self, job: Any) -> list[float]:
        """Seconds of each stage and the stages above it, for images."""
        reading, working, heading, head_augmenting, augmenting, *_ = job.spent
        segments, stages = self._segments, self._stages
        framed = reading + working - augmenting
        first = 1 if segments.cache is None else 2
        seconds = [reading] * first + [framed] * (stages - first)
        if segments.hold is not None:
            head = segments.stages_above_hold
            decoded = reading + heading - head_augmenting
            seconds[first : head - 1] = [decoded] * (head - 1 - first)
            seconds[head - 1 : head + 1] = [reading + heading] * 2
        seconds[-1] = reading + working
        return seconds

    def _seconds_by_step(self, job: Any) -> list[float]:
        """The same for sounds: every stop that keeps no samples is a step."""
        reading, working, *_ = job.spent
        seconds, steps = [reading], iter(job.steps)
        for stop in self._road.stops:
            seconds.append(seconds[-1] + (0.0 if stop.keeps else next(steps)))
        seconds[-1] = reading + working
        return seconds

    def _keep(self, held: NativeTask, job: Any) -> dict[int, list[Offer]]:
        """Put what is new into the holds. Returns the offers by place."""
        offers: dict[int, list[Offer]] = {}
        reports = held.reports
        contents = held.contents if self._paths is None else job.files
        for lookup, results in ((held.files, contents), (held.made, job.made)):
            if lookup is None:
                continue
            lookup.count(reports)
            places = [place for place in lookup.to_keep if place not in reports]
            if places and not held.errors:
                for place, offer in self._keep_in(lookup, held, places, results()):
                    offers.setdefault(place, []).append(offer)
        return offers

    def _keep_in(
        self, lookup: Lookup, held: NativeTask, places: list[int], results: list[Any]
    ) -> list[tuple[int, Offer]]:
        """Keep the results of these places. Returns the offers that were made for them."""
        # A task that was cancelled has not prepared all of them.
        places = [place for place in places if results[place] is not None]
        all_indices, all_versions = held.task.keys.indices, held.versions
        indices = [all_indices[place] for place in places]
        samples: list[Any] = [results[place] for place in places]
        if lookup is held.made:
            samples = [np.asarray(sample) for sample in samples]
        samples = self._files.samples(samples, indices)
        versions = [all_versions[place] for place in places] if all_versions else ()
        before = len(held.context.offers)
        lookup.access.keep(indices, versions, samples)
        made = {offer[1]: offer for offer in held.context.offers[before:]}
        if not made:
            return []
        return [
            (place, made[index])
            for place, index in zip(places, indices, strict=True)
            if index in made
        ]


def native_road(road: Road, *, stacked: bool) -> NativeRoad | None:
    """The road for the compiled kernel; ``None`` if Python has to run a part of it.

    ``stacked``: samples are stacked into batches in place, without a collate function.
    """
    files = road.source.file_samples() if stacked and native.kernel_available() else None
    segments = None if files is None else _segments(road, files, _lender)
    if files is None or segments is None:
        return None
    return NativeRoad(road, segments, files)


def can_be_native(road: Road, *, stacked: bool) -> bool:
    """Whether ``native_road`` will return a road, once the stores are open."""
    files = road.source.file_samples() if stacked and native.kernel_available() else None
    return files is not None and _segments(road, files, _can_lend) is not None


def _segments(
    road: Road, files: FileSamples, lender: Callable[[Stop, Road], Hold | None]
) -> _Segments | None:
    stops = list(road.stops)
    cache = lender(stops[0], road) if stops else None
    if cache is not None:
        del stops[0]
    place = next((i for i, stop in enumerate(stops) if keeps_samples(stop)), None)
    if place is None:
        work = _joined(stops, road.seed, files.content_field)
        if (
            work is None
            or not work.reads_files
            or not work.fills_rows
            or not _suits(work, road, files)
        ):
            return None
        return _Segments(cache, None, None, work, 1)
    hold = lender(stops[place], road)
    head = _joined(stops[:place], road.seed, files.content_field)
    work = _joined(stops[place + 1 :], road.seed, files.content_field)
    if hold is None or head is None or work is None:
        return None
    if not (head.reads_files and head.makes_input and work.fills_rows) or work.reads_files:
        return None
    if not _suits(head, road, files):
        return None
    return _Segments(cache, head, hold, work, 1 + len(road.stops[: road.stops.index(hold)]))


_LOOKS = 16
"""Files whose names are looked at, evenly spread over all."""


def _suits(work: KernelWork, road: Road, files: FileSamples) -> bool:
    """Whether the kernel can probably decode the files. Those that it leaves take the GIL."""
    count = len(road.source)
    looks = range(0, count, count if files.peek else max(1, count // _LOOKS))
    return all(work.suits(road.source.name(index), files.peek) for index in looks)


def _lender(stop: Stop, road: Road) -> Hold | None:
    """The stop if it keeps samples, and hands them out without a copy."""
    if not keeps_samples(stop) or stop.store is None:
        return None
    context = StepContext(road.seed, Tally(len(road.stages), road.holds))
    return stop if stop.lent(context) is not None else None


def _can_lend(stop: Stop, road: Road) -> Hold | None:
    """The stop if it keeps samples, and can hand them out without a copy."""
    return stop if keeps_samples(stop) and stop.can_lend else None


def _joined(stops: list[Stop], seed: int, field: str | int | None) -> KernelWork | None:
    whole: KernelWork | None = None
    for stop in stops:
        work = stop.for_kernel(seed, field)
        if work is None:
            return None
        whole = work if whole is None else whole.joined(work)
        if whole is None:
            return None
    return whole


def _look_up(hold: Hold, context: StepContext, keys: Keys, places: list[int] | None) -> Lookup:
    access = hold.lent(context)
    if access is None:
        raise TypeError(f"{hold.name} does not lend its samples any more")
    return Lookup.of(access, keys, places)


def _column(task: Task, field: str | int | None) -> Any:
    """The column of the batch for a field of samples; ``None`` if it has none."""
    skeleton: Any = None if task.layout is None else task.layout.skeleton
    try:
        number = skeleton if field is None else skeleton[field]
    except (TypeError, LookupError):
        return None
    return task.columns[number] if type(number) is int else None


def _close_gaps(task: Task, report: TaskReport) -> None:
    """Move rows up over the rows that skipped samples left empty."""
    gone = set(report.missing)
    good = [task.first + place for place in range(len(task.keys)) if place not in gone]
    for column in task.columns:
        column[task.first : task.first + len(good)] = column[good]
