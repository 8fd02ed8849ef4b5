"""A group's engine: it stages finished batches in shared memory instead of handing them out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.engine import Engine
from penstock.engine.feed import Ready
from penstock.engine.open_batch import OpenBatch, close_gaps
from penstock.engine.pools.pool import InSlot, Outcome, Task
from penstock.engine.slots import Layout, Slot
from penstock.order.plan import BatchKeys
from penstock.serialize import pack


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch in a slot: rows in a layout, or, without one, ``nbytes`` of a packed value.

    ``beside`` has what is not in the slot: fields of text or bytes, packed.
    """

    slot: Slot | None
    layout: Layout | None
    rows: int
    nbytes: int
    beside: bytes | None
    bad: list[tuple[int, str, str, str]]

    @property
    def size(self) -> int:
        """Bytes of memory that it takes."""
        return 0 if self.slot is None else self.slot.size


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that could not be prepared."""

    error: BaseException


class Chooser(Protocol):
    """Chooses the batch to prepare next."""

    def next_plan(self) -> BatchKeys | None: ...


class Plans(Iterator[BatchKeys]):
    """The batches to prepare. Unlike other iterators it may have more after it ended."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __next__(self) -> BatchKeys:
        plan = self._chooser.next_plan()
        if plan is None:
            raise StopIteration
        return plan


class Crew:
    """How many tasks all groups of a node together may be at."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._busy = 0.0
        self._lock = threading.Lock()
        self._engines: list[StagingEngine] = []

    def enrol(self, engine: StagingEngine) -> None:
        with self._lock:
            self._engines.append(engine)

    def dismiss(self, engine: StagingEngine) -> None:
        with self._lock:
            self._engines = [one for one in self._engines if one is not engine]

    def begin(self, share: float) -> bool:
        with self._lock:
            if self._busy + share > self.size + 1e-9:
                return False
            self._busy += share
            return True

    def end(self, share: float, of: StagingEngine) -> None:
        with self._lock:
            self._busy -= share
            waiting = [one for one in self._engines if one is not of and one.idle]
        for one in waiting:
            one.idle = False
            one.pool.notify()


class StagingEngine(Engine):
    """An engine that works for several members, as part of a crew.

    ``share`` is how much of a worker one task takes: worker processes have two tasks in hand, and
    work on one of them. ``deliver`` is called with each batch by the worker that has finished it:
    another thread would have to wait until this one, busy with its next task, lets it.
    """

    def __init__(
        self, *args: Any, crew: Crew, deliver: Callable[[Ready], None], **options: Any
    ) -> None:
        super().__init__(*args, in_order=False, **options)
        self._deliver = deliver
        self.share = 0.5 if self.pool.own_process else 1.0
        self.idle = False
        self._crew = crew
        crew.enrol(self)

    def take(self, worker: int) -> Task | None:
        if not self._crew.begin(self.share):
            self.idle = True
            return None
        task = super().take(worker)
        if task is None:
            self._crew.end(self.share, self)
        return task

    def done(self, task: int, outcome: Outcome) -> None:
        super().done(task, outcome)
        self._crew.end(self.share, self)
        try:
            self._go_on()
        except BaseException as error:
            self.broken(error)

    def _go_on(self) -> None:
        """Deliver a batch that is finished by now, if there is one, and let members have the core
        who wait for it with that; then open another in its place, which takes time to choose."""
        with self._lock:
            batch = self._take_ready()
        if batch is not None:
            self._deliver(self._hand_out(batch))
            os.sched_yield()
        with self._lock:
            opened = self._open()
        if opened:
            self.pool.notify()

    def _progressed(self) -> None:
        """What there is to do then, the worker does that is done with its piece."""

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        super().lost(task, guilty=guilty, reason=reason)
        self._crew.end(self.share, self)

    def close(self) -> None:
        super().close()
        self._crew.dismiss(self)

    def _ready(self, batch: OpenBatch) -> Ready:
        staged = self._stage(batch)
        return Ready(batch.batch_keys, staged, staged.rows, staged.nbytes)

    def _refuse(self, batch: OpenBatch, error: BaseException) -> Ready:
        return Ready(batch.batch_keys, FailedBatch(error), 0, 0)

    def _stage(self, batch: OpenBatch) -> Staged:
        pieces = batch.pieces()
        rows = sum(report.rows for _, report in pieces)
        bad = [(one.index, one.name, one.stage, one.error) for one in batch.bad]
        slot, layout, beside = batch.slot, batch.layout, None
        if rows == 0:
            batch.give_back(self.ring)
            return Staged(None, None, 0, 0, None, bad)
        if batch.kind == "rows" and layout is not None:
            close_gaps(batch.columns, pieces)
            objects = {
                number: batch.objects(number)
                for number, leaf in enumerate(layout.leaves)
                if leaf.dtype is None
            }
            nbytes = sum(leaf.nbytes for leaf in layout.leaves) * rows
            beside = bytes(pack(objects).tobytes()) if objects else None
        elif isinstance(batch.value, InSlot) and slot is not None:
            slot.refresh()
            nbytes, layout = batch.value.nbytes, None
        else:
            slot, nbytes, layout = *self._packed(batch.value), None
        batch.columns, batch.slot = [], None
        return Staged(slot, layout, rows, nbytes, beside, bad)

    def _packed(self, value: Any) -> tuple[Slot, int]:
        """A value that is in no slot yet, in one."""
        packed = pack(value)
        with self._lock:
            slot = self.ring.acquire(packed.nbytes)
        if slot is None:
            raise self.ring.exhausted(packed.nbytes)
        packed.write_into(memoryview(slot.map))
        return slot, packed.nbytes
