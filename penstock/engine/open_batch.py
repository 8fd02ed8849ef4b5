"""A batch in the making: what has come of its pieces, and how they become one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.feed import Ready
from penstock.engine.pools.pool import InSlot, Task
from penstock.engine.pools.runner import Report, Work, substitutes
from penstock.engine.schedule import Piece, TaskKind
from penstock.engine.slots import Layout, Ring, Slot
from penstock.errors import DeadlySampleError
from penstock.keyed import Keys
from penstock.order.plan import BatchKeys
from penstock.serialize import unpack
from penstock.stats import BadSample
from penstock.tree import fill

PROBED = 64
"""How many samples may fail before the layout of batches cannot be learnt from one."""


class Loose(NamedTuple):
    """Rows of a batch that has no slot yet."""

    rows: int
    columns: list[NDArray[Any] | None]


@dataclass(slots=True)
class OpenBatch:
    """A batch that is open: being prepared, or waiting to be taken."""

    plan: BatchKeys
    keys: Keys
    kind: TaskKind
    slot: Slot | None = None
    layout: Layout | None = None
    columns: list[NDArray[Any] | None] = field(default_factory=list)
    loose: dict[int, Loose] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    value: Any = None
    error: BaseException | None = None
    complete: bool = False
    dropped: bool = False
    running: int = 0
    deadly: dict[int, Iterator[int]] = field(default_factory=dict)
    bad: list[BadSample] = field(default_factory=list)

    @classmethod
    def of(cls, plan: BatchKeys, kind: TaskKind) -> OpenBatch:
        replicas = plan.replicas.tolist() if plan.replicas is not None else None
        keys = Keys(plan.epoch, plan.indices.tolist(), replicas)
        return cls(plan, keys.cut(0, PROBED) if kind == "probe" else keys, kind)

    def task(self, piece: Piece) -> Task:
        """The work that one of its pieces is."""
        keys = self.keys.cut(piece.first, piece.count)
        first, columns, number = piece.first, self.columns, self.plan.number
        if self.layout is not None and self.slot is None:
            columns = self.layout.loose(piece.count)
            self.loose[first] = Loose(piece.count, columns)
            first = 0
        return Task(piece.id, piece.kind, keys, first, self.slot, self.layout, columns, number)

    def wrote(self, piece: Piece, report: Report) -> None:
        """A piece is done."""
        self.reports[piece.first] = report
        if self.slot is not None:
            self._settle(piece.first)

    def _settle(self, first: int) -> None:
        """Copy rows that were prepared before there was a slot to where they belong."""
        loose = self.loose.pop(first, None)
        if loose is None:
            return
        rows = self.reports[first].rows
        for column, part in zip(self.columns, loose.columns, strict=True):
            if column is not None and part is not None:
                column[first : first + rows] = part[:rows]

    def pieces(self) -> list[tuple[int, Report]]:
        """The pieces in the order of their rows."""
        return sorted(self.reports.items())

    def offers(self) -> list[tuple[int, int, int]]:
        return [offer for _, report in self.pieces() for offer in report.offers]

    def objects(self, number: int) -> list[Any]:
        """A field of text or bytes, of all its rows."""
        return [v for _, report in self.pieces() for v in report.objects.get(number, ())]

    def ready(self, ring: Ring) -> Ready:
        """The finished batch. Its arrays hold a lease on the slot, or the slot goes back."""
        pieces = self.pieces()
        rows = sum(report.rows for _, report in pieces)
        if rows == 0:
            self.give_back(ring)
            ended = self.kind == "pull" and not any(r.taken for _, r in pieces)
            return Ready(self.plan, None, 0, 0, ended)
        if self.kind == "rows" and self.layout is not None and self.slot is not None:
            closed_up(self.columns, pieces)
            leaves: list[Any] = self.layout.columns(ring.lease(self.slot), rows)
            for number, leaf in enumerate(self.layout.leaves):
                if leaf.dtype is None:
                    leaves[number] = self.objects(number)
            value = fill(self.layout.skeleton, leaves)
            nbytes = sum(leaf.nbytes for leaf in self.layout.leaves) * rows
        elif isinstance(self.value, InSlot) and self.slot is not None:
            self.slot.refresh()
            nbytes = self.value.nbytes
            value = unpack(memoryview(ring.lease(self.slot)).cast("B")[:nbytes])
        else:
            value, nbytes = self.value, 0
            self.give_back(ring)
        self.columns = []
        return Ready(self.plan, value, rows, nbytes)

    def write_into(self, slot: Slot) -> None:
        """Have this slot for its rows, or for what is collated of them."""
        self.slot = slot
        if self.layout is not None:
            self.columns = self.layout.columns(slot.map)
        for first in [first for first in self.loose if first in self.reports]:
            self._settle(first)

    def forget_slot(self, ring: Ring) -> None:
        """Have the slot used by no other batch: a thread may still write into it."""
        self.columns = []
        if self.slot is not None:
            ring.forget(self.slot)
            self.slot = None

    def give_back(self, ring: Ring) -> None:
        """Return the unused slot to the ring."""
        self.columns = []
        if self.slot is not None:
            ring.release(self.slot)
            self.slot = None


def struck(work: Work, job: OpenBatch, piece: Piece, reason: str) -> DeadlySampleError | None:
    """A piece has killed its worker twice: the error, or ``None`` where it is done without.

    To be left out it is reported as bad; to be substituted, its row has another sample's key.
    """
    index = job.keys.indices[piece.first] if job.keys.indices else -1
    name = work.road.source.name(index)
    error = _deadly(index, name, piece.count, reason)
    if work.on_error == "raise" or piece.kind != "rows":
        return error
    if work.on_error == "skip":
        job.reports[piece.first] = Report(bad=[(index, name, "worker", reason)])
        return None
    row = piece.first
    if row not in job.deadly:
        key = next(iter(job.keys.cut(row, 1)))
        job.deadly[row] = iter(substitutes(work.road, key))
        job.bad.append(BadSample(key.index, name, "worker", reason))
    other = next(job.deadly[row], None)
    if other is None:
        return error
    job.keys.indices[row] = other
    return None


def _deadly(index: int, name: str, count: int, reason: str) -> DeadlySampleError:
    """What is said of a piece that killed its worker twice: ``count`` samples from ``index`` on."""
    what = f"{name} (index {index})"
    if count > 1:
        what = f"one of {count} samples from {what} on"
    return DeadlySampleError(
        f"{what} killed its worker twice ({reason}). Look at that sample, or at the native "
        "code that reads it; a worker killed by signal 9 may have run out of memory.",
        index=index,
        name=name,
        stage="worker",
    )


def closed_up(columns: list[NDArray[Any] | None], pieces: list[tuple[int, Report]]) -> None:
    """Move rows up over those that skipped samples left empty."""
    at = 0
    for first, report in pieces:
        if first != at and report.rows:
            for column in columns:
                if column is not None:
                    rows = np.copy(column[first : first + report.rows])
                    column[at : at + report.rows] = rows
        at += report.rows
