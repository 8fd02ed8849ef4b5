"""Roads that the compiled kernel runs by itself: from files to rows, without Python in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.engine.pools.runner import LayoutChanged, Outcome, Runner, Task, TaskReport
from penstock.keyed import Keys
from penstock.stats import Tally
from penstock.stops.hold import keeps_samples
from penstock.stops.road import Road
from penstock.stops.stop import KernelWork, Offer, StepContext, Stop


@dataclass
class NativeTask:
    """A task in the kernel's queue.

    - ``missing``: places of samples that a cache did not have; the kernel reads their files.
    - ``reports``: by place, of the samples that the kernel left to Python.
    - ``errors``: by place, what was raised for them.
    """

    task: Task
    context: StepContext
    access: Any = None
    missing: list[int] = field(default_factory=list)
    reports: dict[int, TaskReport] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.errors)


class NativeRoad:
    """A road whose samples the compiled kernel prepares: files, perhaps a cache, image operations."""

    def __init__(
        self,
        road: Road,
        work: KernelWork,
        paths: Any,
        labels: Callable[[NDArray[np.int64]], NDArray[Any]] | None,
        cache: Any,
    ) -> None:
        self._road = road
        self._program = work.program()
        self._index = work.index()
        self._paths = paths
        self._labels = labels
        self._cache = cache
        self._job_type = native.kernel().Job

    def accepts(self, task: Task) -> bool:
        """Whether the kernel can write the rows of this task."""
        wanted = 1 if self._labels is None else 2
        if task.kind != "rows" or len(task.columns) != wanted:
            return False
        images = task.columns[0]
        return images is not None and images.ndim == 4 and images.flags.c_contiguous

    def job(self, task: Task) -> Any:
        """The job of the kernel's queue for a task."""
        road, keys = self._road, task.keys
        rows = slice(task.first, task.first + len(keys))
        indices = np.array(keys.indices, dtype=np.int64)
        if self._labels is not None:
            task.columns[1][rows] = self._labels(indices)
        held = NativeTask(task, StepContext(road.seed, Tally(len(road.stages), road.holds)))
        inputs = None
        if self._cache is not None:
            held.access = self._cache.access(held.context)
            samples, held.missing = held.access.find(keys)
            inputs = samples if self._labels is None else [s and s[0] for s in samples]
        replicas = keys.replicas
        return self._job_type(
            self._program,
            self._paths,
            self._index,
            held,
            task.id,
            indices,
            keys.epoch,
            None if replicas is None else np.array(replicas, dtype=np.int64),
            inputs,
            bool(held.missing),
            task.columns[0][rows],
        )

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
        report = self._report(held, job)
        if held.errors:
            error = held.errors[min(held.errors)]
            if isinstance(error, LayoutChanged):
                return Outcome(report, changed=True)
            return Outcome(report, error=error)
        if report.missing:
            _close_gaps(held.task, report)
        return Outcome(report)

    def _report(self, held: NativeTask, job: Any) -> TaskReport:
        task, count = held.task, len(held.task.keys)
        reading, working, augmenting, nbytes, files = job.spent
        offers = self._keep(held, job)
        tally = held.context.tally
        by_kernel = count - len(held.reports)
        tally.samples[:] = [files] + [by_kernel] * (len(tally.samples) - 1)
        # Seconds of a stage include those of the stages above it.
        first = 1 if self._cache is None else 2
        framed = reading + working - augmenting
        tally.seconds[:] = [reading] * first + [framed] * (len(tally.seconds) - first)
        tally.seconds[-1] = reading + working
        tally.bytes_read = nbytes
        report = TaskReport(rows=count, busy=reading + working, tally=tally.as_list())
        for place, part in sorted(held.reports.items()):
            report.busy += part.busy
            report.bad += part.bad
            offers[place] = part.offers
            if not part.rows:
                report.rows -= 1
                report.missing.append(place)
            if part.tally:
                report.tally = _added(report.tally, part.tally)
        report.offers = [offer for place in sorted(offers) for offer in offers[place]]
        return report

    def _keep(self, held: NativeTask, job: Any) -> dict[int, list[Offer]]:
        """Put the files that were read into the cache. Returns the offers by place."""
        if held.access is None:
            return {}
        keys: Keys = held.task.keys
        places = [place for place in held.missing if place not in held.reports]
        hits = len(keys) - len(held.missing) - sum(p not in held.missing for p in held.reports)
        held.access.count(hits, len(places))
        if not places or held.failed:
            return {}
        files = job.files()
        places = [place for place in places if files[place] is not None]
        indices = [keys.indices[place] for place in places]
        samples: list[Any] = [files[place] for place in places]
        if self._labels is not None:
            labels = self._labels(np.array(indices, dtype=np.int64)).tolist()
            samples = list(zip(samples, labels, strict=True))
        held.access.keep(indices, samples)
        by_index = {offer[1]: offer for offer in held.context.offers}
        return {
            place: [by_index[index]]
            for place, index in zip(places, indices, strict=True)
            if index in by_index
        }


def native_road(road: Road, *, stacked: bool) -> NativeRoad | None:
    """The road for the compiled kernel; ``None`` if Python has to run a part of it.

    ``stacked``: samples are stacked into batches in place, without a collate function.
    """
    files = road.source.file_samples() if stacked and native.kernel_available() else None
    if files is None:
        return None
    stops = list(road.stops)
    cache = stops.pop(0) if stops and _is_lending_cache(stops[0]) else None
    work = _joined(stops, road.seed)
    if work is None or not work.complete:
        return None
    return NativeRoad(road, work, files.listing.kernel_paths(), files.labels, cache)


def _is_lending_cache(stop: Stop) -> bool:
    """Whether this is a cache that hands out its samples without a copy."""
    return keeps_samples(stop) and stop.transparent and stop.in_memory and stop.lends


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


def _close_gaps(task: Task, report: TaskReport) -> None:
    """Move rows up over the rows that skipped samples left empty."""
    count = len(task.keys)
    gone = set(report.missing)
    good = [task.first + place for place in range(count) if place not in gone]
    for column in task.columns:
        column[task.first : task.first + len(good)] = column[good]


def _added(tally: list[Any], more: list[Any]) -> list[Any]:
    """The sum of two tallies in the form of ``Tally.as_list``."""
    return [
        [a + b for a, b in zip(x, y, strict=True)] if isinstance(x, list) else x + y
        for x, y in zip(tally, more, strict=True)
    ]
