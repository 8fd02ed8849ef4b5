"""A batch in preparation: the reports of its pieces, its slot, and how they become one value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.feed import Ready
from penstock.engine.pools.runner import (
    InSlot,
    Task,
    TaskReport,
    Work,
    sample_name,
    substitutes,
)
from penstock.engine.schedule import Piece, RowsOnDevice, TaskKind
from penstock.engine.slots import Layout, Ring, Slot
from penstock.errors import DeadlySampleError
from penstock.keyed import Keys
from penstock.order.plan import BatchKeys
from penstock.serialize import unpack
from penstock.stats import BadSample, add_tallies
from penstock.stops.stop import Offer
from penstock.tree import fill

Convert = Callable[[Any], Any]

PROBED = 64
"""The layout of batches is learnt from the first of this many samples that does not fail."""


class EarlyRows(NamedTuple):
    """Rows that a worker prepares before their batch has a slot, in memory of their own."""

    rows: int
    columns: list[NDArray[Any] | None]


class Summary(NamedTuple):
    """The reports of all pieces of a complete batch, added up by the worker that completed it.

    The thread of the training loop then pays nothing for each piece. ``taken``: samples that a
    stream gave. ``tally``: as ``Tally.as_list`` returns it, empty if no piece has one. ``offers``
    and ``objects``, the values of fields of text or bytes: in the order of rows. ``elsewhere``:
    rows that other machines have prepared, by machine.
    """

    rows: int
    taken: int
    busy: float
    tally: list[Any]
    offers: list[Offer]
    objects: dict[int, list[Any]]
    elsewhere: dict[str, int]

    @classmethod
    def of(cls, reports: list[TaskReport]) -> Summary:
        if len(reports) == 1:  # small batches of many workers
            [only] = reports
            elsewhere = {only.machine: only.rows} if only.machine else {}
            return cls(
                only.rows,
                only.taken,
                only.busy,
                only.tally,
                only.offers,
                only.objects,
                elsewhere,
            )
        return cls(
            sum([report.rows for report in reports]),
            sum([report.taken for report in reports]),
            sum([report.busy for report in reports]),
            add_tallies([report.tally for report in reports if report.tally]),
            [offer for report in reports for offer in report.offers],
            {
                number: [value for report in reports for value in report.objects.get(number, ())]
                for number in {number for report in reports for number in report.objects}
            },
            {
                name: sum([report.rows for report in reports if report.machine == name])
                for name in {report.machine for report in reports if report.machine}
            },
        )


EMPTY = Summary(0, 0, 0.0, [], [], {}, {})


class BatchView(NamedTuple):
    """A complete batch as the loop gets it. ``buffer``: the one that its arrays are views of."""

    buffer: Any
    ready: Ready


@dataclass(slots=True)
class OpenBatch:
    """A batch that is being prepared, or is complete and waits for the training loop.

    - ``batch_keys``: the batch in the plan.
    - ``early_rows`` and ``reports``: by the first row of each piece.
    - ``value``: a batch that was collated as a whole.
    - ``running``: number of tasks that workers have.
    - ``dropped``: the batch is no longer wanted; its slot is returned after the last task.
    - ``substitutes``: by row, the samples left to try in place of one that kills workers.
    - ``deadly``: rows of a batch collated as a whole whose samples kill workers.
    - ``summary``: of a complete batch, in place of ``reports``.
    - ``view``: of a complete batch of rows, made by the worker that completed it.
    - ``on_device``: the rows of a complete batch that a device has prepared; ``placed``: the first
      row and the rows of each piece, for it.
    """

    batch_keys: BatchKeys
    kind: TaskKind
    slot: Slot | None = None
    layout: Layout | None = None
    columns: list[NDArray[Any] | None] = field(default_factory=list)
    early_rows: dict[int, EarlyRows] = field(default_factory=dict)
    reports: dict[int, TaskReport] = field(default_factory=dict)
    value: Any = None
    error: BaseException | None = None
    complete: bool = False
    dropped: bool = False
    running: int = 0
    substitutes: dict[int, Iterator[int]] = field(default_factory=dict)
    deadly: set[int] = field(default_factory=set)
    bad: list[BadSample] = field(default_factory=list)
    summary: Summary = EMPTY
    view: BatchView | None = None
    on_device: RowsOnDevice | None = None
    placed: list[tuple[int, int]] = field(default_factory=list)
    _keys: Keys | None = None

    @property
    def keys(self) -> Keys:
        """The samples to prepare. Listed for the first task, not in the thread of the loop."""
        if self._keys is None:
            planned = self.batch_keys
            replicas = None if planned.replicas is None else planned.replicas[: self.rows].tolist()
            self._keys = Keys(planned.epoch, planned.indices[: self.rows].tolist(), replicas)
        return self._keys

    @property
    def rows(self) -> int:
        """How many samples to prepare."""
        if self._keys is not None:
            return len(self._keys)
        rows = len(self.batch_keys.indices)
        return min(rows, PROBED) if self.kind == "probe" else rows

    def task(self, piece: Piece) -> Task:
        """The task for a piece. Without a slot, its rows get memory of their own."""
        keys = self.keys.cut(piece.first, piece.count)
        first, columns, number = piece.first, self.columns, self.batch_keys.number
        if self.layout is not None and self.slot is None:
            columns = self.layout.new_columns(piece.count)
            self.early_rows[first] = EarlyRows(piece.count, columns)
            first = 0
        return Task(
            piece.id,
            piece.kind,
            keys,
            first,
            self.slot,
            self.layout,
            columns,
            number,
            piece.strikes > 0,
            piece.part,
            self.batch_keys.resumed,
        )

    def add_report(self, piece: Piece, report: TaskReport) -> None:
        """Record that a piece is done."""
        before = self.reports.get(piece.first)
        if before is not None:  # the CPU's part of a piece that the device did not finish
            report.offers[:0] = before.offers
        self.reports[piece.first] = report
        if self.slot is not None:
            self._copy_early_rows(piece.first)

    def add_first_row(self, report: TaskReport, layout: Layout) -> None:
        """Use the sample that has shown the layout as the first row. ``report``: of its probe."""
        values = {number: value for number, [value] in report.objects.items()}
        columns = layout.new_columns(1)
        for number, column in enumerate(columns):
            if column is not None:
                column[0] = values.pop(number)
        self.early_rows[0] = EarlyRows(1, columns)
        report.objects = {number: [value] for number, value in values.items()}
        self.reports[0] = report

    def _copy_early_rows(self, first: int) -> None:
        """Copy the piece that begins with row ``first`` into the slot, if it was prepared early."""
        early = self.early_rows.pop(first, None)
        if early is None:
            return
        rows = self.reports[first].rows
        for column, part in zip(self.columns, early.columns, strict=True):
            if column is not None and part is not None:
                column[first : first + rows] = part[:rows]

    def finish(self, on_device: RowsOnDevice | None = None) -> None:
        """Make the batch complete: all its pieces are done."""
        pieces = self.pieces()
        if on_device is not None:
            self.on_device = on_device
            self.placed = [(first, report.rows) for first, report in pieces]
        reports = [report for _, report in pieces]
        self.summary = Summary.of(reports)
        if self.kind == "pull" and reports:
            self.batch_keys = self.batch_keys._replace(reached=reports[0].reached)
        self.bad.extend([BadSample(*bad) for report in reports for bad in report.bad])
        if self.kind == "rows" and self.layout is not None and self.slot is not None:
            close_gaps(self.columns, pieces)
        # Freed here, because freeing hundreds of objects takes as long as adding them up.
        self.reports.clear()
        self._keys = None
        self.complete = True

    def pieces(self) -> list[tuple[int, TaskReport]]:
        """The first row and the report of each piece, in the order of rows."""
        return sorted(self.reports.items())

    def offers(self) -> list[Offer]:
        """The samples that its pieces put into stores, in the order of rows."""
        if self.complete:
            return self.summary.offers
        return [offer for _, report in self.pieces() for offer in report.offers]

    def make_view(self, convert: Convert | None) -> None:
        """Make the value of a complete batch of rows, so that the training loop finds it ready.

        ``convert``: turns the value into what the loop gets.
        """
        if self.kind == "rows" and self.slot is not None and self.summary.rows:
            self.view = self.view_of(self.slot.buffer(), convert)
            self.columns = []

    def view_of(self, buffer: Any, convert: Convert | None) -> BatchView | None:
        """The batch as a view of ``buffer``; ``None`` if it has no layout."""
        layout, summary = self.layout, self.summary
        if layout is None:
            return None
        leaves: list[Any] = layout.columns(buffer, summary.rows)
        for number, leaf in enumerate(layout.leaves):
            if leaf.dtype is None:
                leaves[number] = summary.objects.get(number, [])
        if self.on_device is not None:
            column = self.on_device.column
            leaves[column] = self.on_device.leaf(leaves[column], self.placed)
        value = fill(layout.skeleton, leaves)
        nbytes = layout.row_nbytes * summary.rows
        ready = Ready(self.batch_keys, _converted(value, convert), summary.rows, nbytes)
        return BatchView(buffer, ready)

    def ready(self, ring: Ring, convert: Convert | None = None) -> Ready:
        """The finished batch. Its arrays hold a lease on the slot, or the slot goes back.

        ``convert``: as for ``make_view``.
        """
        if self.view is None:
            self.make_view(convert)
        view, self.view, self.columns = self.view, None, []
        if view is not None and self.slot is not None:
            buffer = ring.lease(self.slot, view.buffer)
            if buffer is not view.buffer:  # a copy: file descriptors run out
                view = self.view_of(buffer, convert) or view
            return view.ready
        rows = self.summary.rows
        if rows == 0:
            self.give_back(ring)
            ended = self.kind == "pull" and not self.summary.taken
            return Ready(self.batch_keys, None, 0, 0, ended)
        if isinstance(self.value, InSlot) and self.slot is not None:
            self.slot.refresh()
            nbytes = self.value.nbytes
            value = unpack(memoryview(ring.lease(self.slot)).cast("B")[:nbytes])
        else:
            value, nbytes = self.value, 0
            self.give_back(ring)
        return Ready(self.batch_keys, _converted(value, convert), rows, nbytes)

    def leave_out_deadly(self) -> None:
        """Go on without the samples that kill workers."""
        self._keys = self.keys.pick([r for r in range(len(self.keys)) if r not in self.deadly])
        self.deadly.clear()

    def use_slot(self, slot: Slot) -> None:
        """Write rows, or the collated batch, into this slot from now on."""
        self.slot = slot
        if self.layout is not None:
            self.columns = self.layout.columns(slot.map)
        for first in [first for first in self.early_rows if first in self.reports]:
            self._copy_early_rows(first)

    def forget_slot(self, ring: Ring) -> None:
        """Take the slot out of the ring: a thread may still write into it."""
        self.columns, self.view = [], None
        if self.slot is not None:
            ring.forget(self.slot)
            self.slot = None

    def give_back(self, ring: Ring) -> None:
        """Return the unused slot to the ring."""
        self.columns, self.view = [], None
        if self.slot is not None:
            ring.release(self.slot)
            self.slot = None


def _converted(value: Any, convert: Convert | None) -> Any:
    return value if convert is None else convert(value)


def resolve_deadly_piece(
    work: Work, batch: OpenBatch, piece: Piece, reason: str
) -> DeadlySampleError | None:
    """Apply ``on_error`` to a piece that killed its worker twice.

    Returns the error to raise. Returns ``None`` if the sample was skipped (reported as bad), if its
    row got the key of another sample, which is to be prepared in its place, or if it was only to
    show the layout of batches.
    """
    index = batch.keys.indices[piece.first] if batch.keys.indices else -1
    name = sample_name(work.road, index)
    one_sample = piece.kind in ("rows", "probe")
    remedy = ""
    if work.on_error == "raise" and one_sample:
        remedy = ' To leave such samples out, give the loader on_error="skip" or "substitute".'
    error = _deadly_error(index, name, piece.count, reason, remedy)
    if work.on_error == "raise" or not one_sample:
        return error
    if batch.kind == "probe":
        return None
    row = piece.first
    if work.on_error == "skip":
        if piece.kind == "rows":
            batch.reports[row] = TaskReport(bad=[(index, name, "worker", reason)])
        else:
            batch.deadly.add(row)
            batch.bad.append(BadSample(index, name, "worker", reason))
        return None
    if row not in batch.substitutes:
        key = next(iter(batch.keys.cut(row, 1)))
        batch.substitutes[row] = iter(substitutes(work.road, key))
        batch.bad.append(BadSample(key.index, name, "worker", reason))
    substitute = next(batch.substitutes[row], None)
    if substitute is None:
        return error
    batch.keys.indices[row] = substitute
    return None


def _deadly_error(index: int, name: str, count: int, reason: str, remedy: str) -> DeadlySampleError:
    """The error for ``count`` samples from ``index`` on that killed their worker twice."""
    what = f"{name} (index {index})"
    if count > 1:
        what = f"one of the {count} samples from {what} on"
    return DeadlySampleError(
        f"{what} killed its worker twice ({reason}). Look at that sample, or at the native code "
        "that reads it; a worker killed by SIGKILL may have run out of memory." + remedy,
        index=index,
        name=name,
        stage="worker",
    )


def close_gaps(columns: list[NDArray[Any] | None], pieces: list[tuple[int, TaskReport]]) -> None:
    """Move rows up over the rows that skipped samples left empty."""
    end = 0
    for first, report in pieces:
        if first != end and report.rows:
            for column in columns:
                if column is not None:
                    rows = np.copy(column[first : first + report.rows])
                    column[end : end + report.rows] = rows
        end += report.rows
