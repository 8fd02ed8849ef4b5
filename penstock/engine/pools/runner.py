"""The runner: does one task in one worker, whatever kind of pool the worker belongs to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.engine.schedule import group_of
from penstock.engine.slots import Layout
from penstock.errors import SampleError, ShapeError
from penstock.keyed import Key, Keyed, Keys, seed_globals
from penstock.source.stream import StreamSource
from penstock.stops.batch import Collate, Misfit
from penstock.stops.road import Road, scope_of
from penstock.stops.stop import StageFailure
from penstock.tree import as_array, leaves_like

OnError = Literal["raise", "skip", "substitute"]

SUBSTITUTES = 10
"""How many other samples are tried in place of a bad one before giving up."""


@dataclass(frozen=True)
class Work:
    """All that a worker needs to know, sent once."""

    road: Road
    collate: Collate | None
    fallback: Collate
    on_error: OnError
    rows: int


@dataclass(frozen=True)
class WorkerInfo:
    """Which worker this is, given to the ``init`` hook and to streams."""

    id: int
    count: int
    seed: int
    process: bool


@dataclass(slots=True)
class Report:
    """What came of a task, beside the rows it wrote.

    ``taken`` is how many samples a stream gave, bad ones included; none means that it has ended.
    """

    rows: int = 0
    taken: int = 0
    busy: float = 0.0
    tally: list[Any] = field(default_factory=list)
    offers: list[tuple[int, int, int]] = field(default_factory=list)
    bad: list[tuple[int, str, str, str]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    objects: dict[int, list[Any]] = field(default_factory=dict)


class LayoutChanged(Exception):
    """A batch's samples do not have the layout of the first; it must be stacked by itself."""


class Runner:
    """Runs tasks on an open road. One for every worker; not shared between threads."""

    def __init__(
        self,
        work: Work,
        info: WorkerInfo,
        init: Callable[[WorkerInfo, Work], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.work = work
        self.info = info
        self._init = init
        self._clock = clock
        self._road = work.road.open(clock)
        self._together = work.road.together
        self._cost = self._reading = 0.0
        self._began = clock()
        self._stream: Iterator[Any] | None = None
        self._streamed: tuple[int, int] | None = None

    def rows(
        self, keys: Keys, columns: Sequence[NDArray[Any] | None], layout: Layout, first: int
    ) -> Report:
        """Prepare these samples into their rows, from row ``first`` on. Raises LayoutChanged."""
        report = self._begin()
        started = self._clock()
        with scope_of(self.work.road, own_process=self.info.process):
            row, at = first, 0
            while at < len(keys):
                group = group_of(self._cost, self._reading, self._together, len(keys) - at)
                self._road.rows.aim(columns, layout.skeleton, row)
                samples = self._samples(keys.cut(at, group), report, at)
                _write(samples, columns, layout, row, report, self._road.rows.given)
                self._road.rows.clear()
                row += len(samples)
                at += group
        return self._end(report, row - first, len(keys), started)

    def whole(self, keys: Keys) -> tuple[Any, Report]:
        """Prepare and collate a whole batch."""
        report = self._begin()
        started = self._clock()
        with scope_of(self.work.road, own_process=self.info.process):
            samples = []
            for at in range(len(keys)):
                samples.extend(self._samples(keys.cut(at, 1), report, at))
            batch = self._collate(samples, keys, report) if samples else None
        return batch, self._end(report, len(samples), len(keys), started)

    def probe(self, keys: Keys) -> tuple[Layout | None, Report]:
        """Prepare the first sample that works, to learn the layout of batches."""
        report = self._begin(trial=True)
        started = self._clock()
        layout = None
        with scope_of(self.work.road, own_process=self.info.process):
            for place in range(len(keys)):
                # Whatever is bad here is met, and reported, again when its turn comes.
                samples = self._samples(keys.cut(place, 1), Report(), place)
                if samples:
                    layout = Layout.of(samples[0], self.work.rows)
                    break
        self._end(report, 0, 0, started)
        # The sample is prepared, counted and offered to caches again with its batch.
        report.tally = []
        return layout, report

    def pull(self, number: int, rows: int, epoch: int) -> tuple[Any, Report]:
        """The next batch of this worker's own stream; no rows at its end.

        ``number`` counts the batches of this stream, so that a worker that takes the place of a
        dead one reads on where the other stopped.
        """
        report = self._begin()
        started = self._clock()
        source = self.work.road.source
        if not isinstance(source, StreamSource):
            raise TypeError("only a stream can be pulled from")
        if self._stream is None or self._streamed != (epoch, number):
            if self.info.process:
                # A stream draws from the global generators as it likes; where it starts is keyed.
                seed_globals(Keyed(self.info.seed, "stream").at(Key(self.info.id, epoch)))
            self._stream = source.open(skip=number * rows)
        samples: list[Any] = []
        taken = 0
        with scope_of(self.work.road, own_process=self.info.process):
            for sample in self._stream:
                place = (number * rows + taken) * self.info.count + self.info.id
                source.value = sample
                samples.extend(self._samples(Keys(epoch, [place]), report, taken))
                taken += 1
                if taken == rows:
                    break
            self._streamed = (epoch, number + 1)
            keys = Keys(epoch, list(range(taken)))
            batch = self._collate(samples, keys, report) if samples else None
        self._end(report, len(samples), taken, started)
        report.taken = taken
        return batch, report

    def _begin(self, *, trial: bool = False) -> Report:
        if self._init is not None:
            init, self._init = self._init, None
            init(self.info, self.work)
        self._road.begin(trial=trial)
        self._began = self._clock()
        return Report()

    def _end(self, report: Report, rows: int, asked: int, started: float) -> Report:
        report.busy = self._clock() - started
        report.rows = rows
        report.tally = self._road.site.tally.as_list()
        report.offers = list(self._road.site.offers)
        if asked:
            self._cost = report.busy / asked
            self._reading = self._road.site.tally.seconds[0] / asked
        return report

    def unfinished(self) -> Report:
        """Reports a task that ended in an exception: its time, and what it put into stores."""
        return Report(busy=self._clock() - self._began, offers=list(self._road.site.offers))

    def _samples(self, keys: Keys, report: Report, place: int) -> list[Any]:
        """The samples of these keys, less the bad ones where those are to be skipped."""
        try:
            return self._road.get(keys)
        except StageFailure as failure:
            self._road.rows.clear()
            if len(keys) == 1:
                return self._bad(next(iter(keys)), failure, report, place)
        # Which of them it was, and what its neighbours are, is found one by one; keyed
        # randomness makes the second run the same as the first.
        samples = []
        for i in range(len(keys)):
            samples.extend(self._samples(keys.cut(i, 1), report, place + i))
        return samples

    def _bad(self, key: Key, failure: StageFailure, report: Report, place: int) -> list[Any]:
        error = self._error(key.index, failure)
        if self.work.on_error == "raise":
            raise error from failure.__cause__
        cause = failure.__cause__
        report.bad.append((key.index, error.name, error.stage, f"{type(cause).__name__}: {cause}"))
        if self.work.on_error == "skip":
            report.missing.append(place)
            return []
        for other in substitutes(self.work.road, key):
            try:
                return self._road.get(Keys(key.epoch, [other], [key.replica]))
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
        try:
            return self.work.road.source.name(index)
        except Exception:  # the name is for the message only, and must not hide the failure
            return f"sample {index}"

    def _collate(self, samples: list[Any], keys: Keys, report: Report) -> Any:
        collate = self.work.collate or self.work.fallback
        try:
            return collate(samples)
        except Misfit as misfit:
            present = [i for i in range(len(keys)) if i not in report.missing]
            index = keys.indices[present[misfit.place]]
            raise ShapeError(
                f"{self._name(index)} (index {index}) does not fit into its batch: {misfit}. "
                "Bring samples to one shape with a map (resize, crop), fill them up with "
                "batch(..., pad=0), or give a collate of your own.",
                index=index,
                name=self._name(index),
                stage="batch",
            ) from None
        except Exception as error:
            index = keys.indices[0] if len(keys) else -1
            raise SampleError(
                f"collate failed on the batch that begins with {self._name(index)} "
                f"(index {index}): {type(error).__name__}: {error}",
                index=index,
                name=self._name(index),
                stage="collate",
                details=traceback.format_exc(),
            ) from error


def substitutes(road: Road, key: Key) -> list[int]:
    """The samples that may take the place of a bad one, in the order in which they are tried."""
    generator = Keyed(road.seed, "substitute").fresh(key)
    found: list[int] = generator.integers(len(road.source), size=SUBSTITUTES).tolist()
    return found


def _write(
    samples: list[Any],
    columns: Sequence[NDArray[Any] | None],
    layout: Layout,
    row: int,
    report: Report,
    given: list[NDArray[Any]],
) -> None:
    """Put samples into their rows, but for what was ``given`` its row and is there already."""
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
    report: Report,
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
    for place, value in enumerate(values):
        if place < len(given) and value is given[place]:
            continue
        plain = value if type(value) is np.ndarray else as_array(value)
        if plain is None or plain.shape != leaf.shape or plain.dtype != leaf.dtype:
            found = type(value).__name__ if plain is None else f"{plain.dtype} {plain.shape}"
            raise LayoutChanged(f"{found} where {leaf.dtype} {leaf.shape} was")
        column[row + place] = plain
