"""Roads that the compiled kernel runs by itself: from files to rows, without Python in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    ``places``: the positions in the task of the samples that the hold was asked for.
    """

    access: Access
    places: list[int]
    found: Found

    def missing(self) -> list[int]:
        return [self.places[i] for i in self.found.missing]

    def to_keep(self) -> list[int]:
        return [self.places[i] for i in self.found.keep]

    def count(self, left_out: set[int]) -> None:
        """Count hits and misses, except for samples that Python prepared, and so counted."""
        if not left_out:
            misses = len(self.found.missing)
            self.access.count(len(self.places) - misses, misses)
            return
        missing = set(self.missing())
        counted = [place for place in self.places if place not in left_out]
        misses = sum(place in missing for place in counted)
        self.access.count(len(counted) - misses, misses)


@dataclass
class NativeTask:
    """A task in the kernel's queue.

    - ``files``, ``pixels``: what a cache of files, and a hold of pixels, have of its samples.
    - ``versions``: of the pixels, by place; empty if they have none.
    - ``claims``: the samples whose pixels this task will keep: (index, version).
    - ``reports``: by place, of the samples that the kernel left to Python.
    - ``errors``: by place, what was raised for them.
    """

    task: Task
    context: StepContext
    files: Lookup | None = None
    pixels: Lookup | None = None
    claims: set[tuple[int, int]] = field(default_factory=set)
    reports: dict[int, TaskReport] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def versions(self) -> list[int]:
        return [] if self.pixels is None else self.pixels.found.versions or []

    def claim(self, pixels: Lookup) -> None:
        """Note what a hold of pixels has of its samples, and what it will keep of the others."""
        self.pixels = pixels
        indices, versions = self.task.keys.indices, self.versions
        self.claims = {
            (indices[place], versions[place] if versions else 0) for place in pixels.to_keep()
        }


@dataclass(frozen=True)
class _Segments:
    """The parts of a native road: files, a cache of them, a head, a hold of its pixels, the rest.

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
        self._paths = files.listing.kernel_paths()
        self._labels = files.labels
        self._contents = files.contents
        self._job_type = native.kernel().Job
        self._lock = threading.Lock()
        self._claimed: set[tuple[int, int]] = set()
        """Samples that tasks in the queue will keep."""

    def accepts(self, task: Task) -> bool:
        """Whether the kernel can write the rows of this task."""
        wanted = 1 if self._labels is None else 2
        if task.kind != "rows" or len(task.columns) != wanted:
            return False
        images = task.columns[0]
        return images is not None and images.ndim == 4 and images.flags.c_contiguous

    def job(self, task: Task) -> Any | None:
        """The job of the kernel's queue for a task.

        ``None``: a task in the queue is about to keep a sample that this one needs, too. The last
        batches of an epoch and the first ones of the next may share samples.
        """
        with self._lock:
            held = self._look_up(task)
            if not held.claims.isdisjoint(self._claimed):
                return None
            self._claimed |= held.claims
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
        places = list(range(len(task.keys)))
        if segments.hold is not None:
            pixels = _look_up(segments.hold, held.context, task.keys, places)
            held.claim(pixels)
            places = pixels.missing()
        if segments.cache is not None:
            held.files = _look_up(segments.cache, held.context, task.keys, places)
        return held

    def _make_job(self, held: NativeTask) -> Any:
        task, keys = held.task, held.task.keys
        rows = slice(task.first, task.first + len(keys))
        indices = np.array(keys.indices, dtype=np.int64)
        if self._labels is not None:
            task.columns[1][rows] = self._labels(indices)
        return self._job_type(
            self._program,
            self._head,
            self._paths,
            self._index,
            held,
            task.id,
            indices,
            keys.epoch,
            np.array(held.versions, dtype=np.int64) if held.versions else None,
            None if keys.replicas is None else np.array(keys.replicas, dtype=np.int64),
            self._inputs(held),
            held.files is not None and bool(held.files.found.keep),
            self._kept(held),
            task.columns[0][rows],
        )

    def _inputs(self, held: NativeTask) -> list[Any] | None:
        """What the holds have of each sample; ``None`` for a file that is to be read."""
        inputs: list[Any] = [None] * len(held.task.keys)
        lookups = [lookup for lookup in (held.pixels, held.files) if lookup is not None]
        for lookup in lookups:
            samples = lookup.found.samples
            if self._labels is not None:
                samples = [sample and sample[0] for sample in samples]
            if len(lookup.places) == len(inputs):
                inputs = list(samples)
                continue
            for place, sample in zip(lookup.places, samples, strict=True):
                if sample is not None:
                    inputs[place] = sample
        if self._contents:
            for place, index in enumerate(held.task.keys.indices):
                if inputs[place] is None:
                    inputs[place] = self._contents.get(index)
        return inputs if lookups or self._contents else None

    def _kept(self, held: NativeTask) -> NDArray[np.int64] | None:
        """1 for each sample whose pixels will be kept."""
        if held.pixels is None:
            return None
        kept = np.zeros(len(held.task.keys), dtype=np.int64)
        kept[held.pixels.to_keep()] = 1
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
        reading, working, heading, head_augmenting, augmenting, nbytes, files = job.spent
        segments, tally = self._segments, held.context.tally
        by_python = held.reports.keys()
        count = len(held.task.keys) - len(by_python)
        above = count
        if held.pixels is not None:
            missing = held.pixels.missing()
            above = sum(place not in by_python for place in missing) if by_python else len(missing)
        stages = len(tally.samples)
        head = segments.stages_above_hold
        tally.samples[:] = [files] + [above] * (head - 1) + [count] * (stages - head)
        # Seconds of a stage include those of the stages above it.
        framed = reading + working - augmenting
        first = 1 if segments.cache is None else 2
        tally.seconds[:] = [reading] * first + [framed] * (stages - first)
        if segments.hold is not None:
            decoded = reading + heading - head_augmenting
            tally.seconds[first : head - 1] = [decoded] * (head - 1 - first)
            tally.seconds[head - 1 : head + 1] = [reading + heading] * 2
        tally.seconds[-1] = reading + working
        tally.bytes_read = nbytes
        return tally

    def _keep(self, held: NativeTask, job: Any) -> dict[int, list[Offer]]:
        """Put what is new into the holds. Returns the offers by place."""
        offers: dict[int, list[Offer]] = {}
        for lookup, results in ((held.files, job.files), (held.pixels, job.pixels)):
            if lookup is None:
                continue
            lookup.count(set(held.reports))
            places = [place for place in lookup.to_keep() if place not in held.reports]
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
        keys = held.task.keys
        indices = [keys.indices[place] for place in places]
        samples: list[Any] = [results[place] for place in places]
        if lookup is held.pixels:
            samples = [np.asarray(sample) for sample in samples]
        if self._labels is not None:
            labels = self._labels(np.array(indices, dtype=np.int64)).tolist()
            samples = list(zip(samples, labels, strict=True))
        versions = [held.versions[place] for place in places] if held.versions else ()
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
    segments = None if files is None else _segments(road, _lender)
    if files is None or segments is None:
        return None
    return NativeRoad(road, segments, files)


def can_be_native(road: Road, *, stacked: bool) -> bool:
    """Whether ``native_road`` will return a road, once the stores are open."""
    if not stacked or not native.kernel_available() or road.source.file_samples() is None:
        return False
    return _segments(road, _can_lend) is not None


def _segments(road: Road, lender: Callable[[Stop, Road], Hold | None]) -> _Segments | None:
    stops = list(road.stops)
    cache = lender(stops[0], road) if stops else None
    if cache is not None:
        del stops[0]
    place = next((i for i, stop in enumerate(stops) if keeps_samples(stop)), None)
    if place is None:
        work = _joined(stops, road.seed)
        if work is None or not work.reads_files or not work.fills_rows:
            return None
        return _Segments(cache, None, None, work, 1)
    hold = lender(stops[place], road)
    head, work = _joined(stops[:place], road.seed), _joined(stops[place + 1 :], road.seed)
    if hold is None or head is None or work is None:
        return None
    if not (head.reads_files and head.makes_pixels and work.fills_rows) or work.reads_files:
        return None
    return _Segments(cache, head, hold, work, 1 + len(road.stops[: road.stops.index(hold)]))


def _lender(stop: Stop, road: Road) -> Hold | None:
    """The stop if it keeps samples, and hands them out without a copy."""
    if not keeps_samples(stop) or stop.store is None:
        return None
    context = StepContext(road.seed, Tally(len(road.stages), road.holds))
    return stop if stop.lent(context) is not None else None


def _can_lend(stop: Stop, road: Road) -> Hold | None:
    """The stop if it keeps samples, and can hand them out without a copy."""
    return stop if keeps_samples(stop) and stop.can_lend else None


def _joined(stops: list[Stop], seed: int) -> KernelWork | None:
    whole: KernelWork | None = None
    for stop in stops:
        work = stop.for_kernel(seed)
        if work is None:
            return None
        whole = work if whole is None else whole.joined(work)
        if whole is None:
            return None
    return whole


def _look_up(hold: Hold, context: StepContext, keys: Keys, places: list[int]) -> Lookup:
    access = hold.lent(context)
    if access is None:
        raise TypeError(f"{hold.name} does not lend its samples any more")
    return Lookup(access, places, access.find(keys.pick(places)))


def _close_gaps(task: Task, report: TaskReport) -> None:
    """Move rows up over the rows that skipped samples left empty."""
    gone = set(report.missing)
    good = [task.first + place for place in range(len(task.keys)) if place not in gone]
    for column in task.columns:
        column[task.first : task.first + len(good)] = column[good]
