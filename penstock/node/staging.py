"""A group's engine. It stages finished batches in shared memory, for members to map."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.engine import Engine
from penstock.engine.feed import Ready
from penstock.engine.open_batch import OpenBatch, close_gaps
from penstock.engine.pools.runner import InSlot, Outcome, Task
from penstock.engine.slots import Layout, Slot
from penstock.order.plan import BatchKeys
from penstock.serialize import pack


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch in a slot: rows in a layout, or, without a layout, ``nbytes`` of a packed value.

    ``beside``: fields of text or bytes, packed; they are not in the slot.
    """

    slot: Slot | None
    layout: Layout | None
    rows: int
    nbytes: int
    beside: bytes | None
    bad: list[tuple[int, str, str, str]]

    @property
    def size(self) -> int:
        """Bytes of memory that the batch takes."""
        return 0 if self.slot is None else self.slot.size


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that could not be prepared."""

    error: BaseException


class Chooser(Protocol):
    """Chooses the batch to prepare next."""

    def next_batch(self) -> BatchKeys | None: ...


class ChosenBatches(Iterator[BatchKeys]):
    """The batches to prepare. Unlike other iterators it may yield more after ``StopIteration``."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __next__(self) -> BatchKeys:
        keys = self._chooser.next_batch()
        if keys is None:
            raise StopIteration
        return keys


class WorkerLimit:
    """Limits the workers that are busy at the same time, over all groups of a node, to ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._busy = 0.0
        self._lock = threading.Lock()
        self._engines: list[StagingEngine] = []

    def add(self, engine: StagingEngine) -> None:
        with self._lock:
            self._engines.append(engine)

    def remove(self, engine: StagingEngine) -> None:
        with self._lock:
            self._engines = [other for other in self._engines if other is not engine]

    def begin(self, share: float) -> bool:
        """Begin a task that takes this share of a worker; false if the limit is reached."""
        with self._lock:
            if self._busy + share > self.size + 1e-9:
                return False
            self._busy += share
            return True

    def end(self, share: float, of: StagingEngine) -> None:
        """End a task of an engine, and let the other engines begin the tasks they could not."""
        with self._lock:
            self._busy -= share
            waiting = [engine for engine in self._engines if engine is not of and engine.limited]
        for engine in waiting:
            engine.limited = False
            engine.pool.notify()


class StagingEngine(Engine):
    """An engine that prepares for the members of a group, within the node's limit of workers.

    ``deliver`` is called with each finished batch, by the worker that has finished it. Another
    thread would have to wait until this worker, busy with its next task, lets it run.
    """

    def __init__(
        self,
        *args: Any,
        limit: WorkerLimit,
        deliver: Callable[[Ready], None],
        **options: Any,
    ) -> None:
        super().__init__(*args, in_order=False, **options)
        self._deliver = deliver
        # A worker process is given two tasks at a time, and works on one of them.
        self._share = 0.5 if self.pool.own_process else 1.0
        self.limited = False
        """A worker asked for a task and got none, because the limit was reached."""
        self._limit = limit
        self._counted: set[int] = set()
        """The tasks that count against the limit."""
        limit.add(self)

    def take(self, worker: int) -> Task | None:
        if not self._limit.begin(self._share):
            self.limited = True
            return None
        task = super().take(worker)
        if task is None:
            self._limit.end(self._share, self)
        else:
            self._counted.add(task.id)
        return task

    def _uncount(self, task: int) -> None:
        """A task no longer counts against the limit; does nothing the second time."""
        with self._lock:
            counted = task in self._counted
            self._counted.discard(task)
        if counted:
            self._limit.end(self._share, self)

    def done(self, task: int, outcome: Outcome) -> None:
        super().done(task, outcome)
        self._uncount(task)
        self._go_on()

    def _go_on(self) -> None:
        """Deliver a finished batch, if there is one, then open another in its place."""
        try:
            self._deliver_and_open()
        except BaseException as error:
            self.broken(error)

    def _deliver_and_open(self) -> None:
        with self._lock:
            batch = self._take_ready()
        if batch is not None:
            self._deliver(self._hand_out(batch))
            # Choosing the next batch takes time: first let members run that wait for this one.
            os.sched_yield()
        with self._lock:
            opened = self._open()
        if opened:
            self.pool.notify()

    def _progressed(self) -> None:
        """Nothing: the worker that has finished a piece also delivers and opens batches."""

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        super().lost(task, guilty=guilty, reason=reason)
        self._uncount(task)
        # The batch is finished if its last sample was one that kills workers, and is left out.
        self._go_on()

    def _end_workers(self) -> None:
        super()._end_workers()
        # Workers that were killed report nothing.
        for task in list(self._counted):
            self._uncount(task)

    def close(self) -> None:
        super().close()
        self._limit.remove(self)

    def _ready(self, batch: OpenBatch) -> Ready:
        staged = self._stage(batch)
        return Ready(batch.batch_keys, staged, staged.rows, staged.nbytes)

    def _refuse(self, batch: OpenBatch, error: BaseException) -> Ready:
        self._keepers.handed_out(batch.batch_keys)
        return Ready(batch.batch_keys, FailedBatch(error), 0, 0)

    def _stage(self, batch: OpenBatch) -> StagedBatch:
        pieces = batch.pieces()
        rows = sum(report.rows for _, report in pieces)
        bad = [(sample.index, sample.name, sample.stage, sample.error) for sample in batch.bad]
        slot, layout, beside = batch.slot, batch.layout, None
        if rows == 0:
            batch.give_back(self.ring)
            return StagedBatch(None, None, 0, 0, None, bad)
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
        return StagedBatch(slot, layout, rows, nbytes, beside, bad)

    def _packed(self, value: Any) -> tuple[Slot, int]:
        """Pack a value into a new slot. Returns the slot and the packed size."""
        packed = pack(value)
        with self._lock:
            slot = self.ring.acquire(packed.nbytes)
        if slot is None:
            raise self.ring.exhausted(packed.nbytes)
        packed.write_into(memoryview(slot.map))
        return slot, packed.nbytes
