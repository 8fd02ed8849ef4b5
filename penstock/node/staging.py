"""A group's engine. It stages finished batches in shared memory, for members to map."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from penstock.engine.engine import Engine
from penstock.engine.feed import Ready
from penstock.engine.open_batch import OpenBatch
from penstock.engine.pools.runner import InSlot, Outcome, Task
from penstock.engine.slots import Layout, Slot
from penstock.errors import SlotError
from penstock.order.plan import BatchKeys
from penstock.serialize import pack

_log = logging.getLogger("penstock.node")

LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of a process that has too many open files or too little memory at present."""


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
    busy: float = 0.0
    """Seconds of work."""
    tally: Sequence[Any] = ()
    """The counters of the stages, see ``Tally.as_list``."""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Rows that other machines have prepared, by machine."""

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
    """Limits the workers that are busy at the same time, over all groups of a node, to ``size``.

    What an engine takes is counted for that engine, and forgotten with it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lent = 0
        """Workers that may be busy for other machines."""
        self._lock = threading.Lock()
        self._taken: dict[StagingEngine, float] = {}

    @property
    def busy(self) -> float:
        """Workers that are busy, as they were counted."""
        with self._lock:
            return sum(self._taken.values())

    def add(self, engine: StagingEngine) -> None:
        with self._lock:
            self._taken[engine] = 0.0

    def remove(self, engine: StagingEngine) -> None:
        with self._lock:
            self._taken.pop(engine, None)
        self.notify(engine)

    def begin(self, share: float, engine: StagingEngine) -> bool:
        """Begin a task that takes this share of a worker; false if the limit is reached."""
        with self._lock:
            full = sum(self._taken.values()) + share > self.size + 1e-9
            if full or (engine.guest and not self._lends(share)):
                # Under this lock: whoever frees a share next finds that this engine waits for it.
                engine.limited = True
                return False
            self._taken[engine] = self._taken.get(engine, 0.0) + share
            return True

    def _lends(self, share: float) -> bool:
        """Whether a guest may begin a task: jobs of this machine come first."""
        guests = sum(taken for engine, taken in self._taken.items() if engine.guest)
        waits = any(engine.limited for engine in self._taken if not engine.guest)
        return not waits and guests + share <= self.lent + 1e-9

    def idle(self) -> float:
        """Workers that no job of this machine uses; 0 if one waits for a worker."""
        with self._lock:
            own = [engine for engine in self._taken if not engine.guest]
            if any(engine.limited for engine in own):
                return 0.0
            return max(0.0, self.size - sum(self._taken[engine] for engine in own))

    def end(self, share: float, engine: StagingEngine) -> None:
        """End a task. ``notify`` lets other engines begin the tasks they could not."""
        with self._lock:
            if engine in self._taken:
                self._taken[engine] -= share

    def notify(self, beside: StagingEngine) -> None:
        """Let the engines that reached the limit, except this one, begin their tasks.

        The caller must not hold the lock of a pool: two pools would wait for each other.
        """
        with self._lock:
            waiting = [engine for engine in self._taken if engine is not beside and engine.limited]
            for engine in waiting:
                engine.limited = False
        for engine in waiting:
            engine.pool.notify()

    def notify_later(self, beside: StagingEngine) -> None:
        """Like ``notify``, in a thread of its own, and only if an engine waits."""
        with self._lock:
            waits = any(engine.limited for engine in self._taken if engine is not beside)
        if waits:
            threading.Thread(target=self.notify, args=(beside,), name="penstock-limit").start()

    def occupied(self, share: float) -> bool:
        """Whether workers really have tasks up to the limit, so that this share is not free."""
        with self._lock:
            engines = list(self._taken)
        return sum(engine.load for engine in engines) + share > self.size + 1e-9

    def recount(self) -> float:
        """Count the tasks that workers have. Returns by how much the count was too high."""
        with self._lock:
            engines = list(self._taken)
        return sum(engine.recount() for engine in engines)

    def correct(self, engine: StagingEngine, load: float) -> float:
        with self._lock:
            if engine not in self._taken:
                return 0.0
            before, self._taken[engine] = self._taken[engine], load
            return before - load


class TaskInHand(NamedTuple):
    """A task that a worker has, since ``since`` on the engine's clock."""

    worker: int
    indices: list[int]
    since: float


class StagingEngine(Engine):
    """An engine that prepares for the members of a group, within the node's limit of workers.

    ``deliver`` is called with each finished batch, by the worker that has finished it. Another
    thread would have to wait until this worker, busy with its next task, lets it run.

    ``guest``: it prepares for another machine, with workers that jobs of this one leave.
    """

    epochs_in_order: ClassVar[bool] = False

    def __init__(
        self,
        *args: Any,
        limit: WorkerLimit,
        deliver: Callable[[Ready], None],
        clock: Callable[[], float] = time.monotonic,
        guest: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, in_order=False, **options)
        self.guest = guest
        self._deliver = deliver
        self._clock = clock
        # A worker process is given two tasks at a time, and works on one of them.
        self._share = 0.5 if self.pool.own_process else 1.0
        self.limited = False
        """A worker asked for a task and got none, because the limit was reached."""
        self.asked = False
        """A worker has asked for a task since the workers were started."""
        self.moves = 0
        """Tasks that were done or lost."""
        self._limit = limit
        self._in_hand: dict[int, TaskInHand] = {}
        """The tasks that count against the limit."""
        self.away: set[int] = set()
        """The tasks that other machines have."""
        self._lacked = False
        limit.add(self)

    def take(self, worker: int, *, away: int = 0) -> Task | None:
        if away:
            # It takes no worker of this machine.
            try:
                sent = super().take(worker, away=away)
            except OSError as error:
                if error.errno not in LACKING:
                    raise
                self._wait_for_descriptors(error)
                return None
            if sent is not None:
                self.away.add(sent.id)
            return sent
        self.asked = True
        task = None
        with self._lock:
            if not self._limit.begin(self._share, self):
                return None
            try:
                task = super().take(worker)
            except OSError as error:
                if error.errno not in LACKING:
                    raise
                self._wait_for_descriptors(error)
            finally:
                if task is None:
                    self._limit.end(self._share, self)
            if task is not None:
                self._in_hand[task.id] = TaskInHand(worker, task.keys.indices, self._clock())
                return task
        # Another engine may have found the limit reached meanwhile. Pools hold their lock when they
        # ask for a task, so another thread has to notify it.
        self._limit.notify_later(self)
        return None

    def _require_slot(self) -> None:
        """Wait for a slot: members release theirs while the caller of ``next`` waits."""
        try:
            super()._require_slot()
        except SlotError as error:
            self._wait_for_descriptors(error)

    def _wait_for_descriptors(self, error: OSError | SlotError) -> None:
        """There is no memory for a batch now. Workers ask again until there is."""
        self.starved = True
        if not self._lacked:
            self._lacked = True
            _log.warning("no memory for another batch until some are released: %s", error)

    def _uncount(self, task: int) -> None:
        """A task no longer counts against the limit; does nothing the second time."""
        with self._lock:
            if task in self.away:
                self.away.remove(task)
                self.moves += 1
                return
            if self._in_hand.pop(task, None) is None:
                return
            self.moves += 1
            self._limit.end(self._share, self)
        self._limit.notify(self)

    @property
    def load(self) -> float:
        """How many workers the tasks in hand take."""
        return len(self._in_hand) * self._share

    def recount(self) -> float:
        """Correct the count of the limit for this engine. Returns by how much it was too high."""
        with self._lock:
            return self._limit.correct(self, self.load)

    def in_hand(self) -> list[TaskInHand]:
        """The tasks that workers have, the oldest first."""
        with self._lock:
            return sorted(self._in_hand.values(), key=lambda task: task.since)

    def nudge(self) -> None:
        """Let all workers look for tasks, and open batches, as after any event."""
        self.limited = False
        self.wake()
        self.pool.notify()

    def end_workers(self) -> None:
        """End the workers and drop what is open. ``start`` starts other workers."""
        self._end_workers()
        self.asked = False

    @property
    def starting(self) -> bool:
        """Whether no worker can take tasks yet, or any more until another has started."""
        return not self.asked or self.pool.starting

    @property
    def occupied(self) -> bool:
        """Whether it has to wait: for workers of other groups, or for memory."""
        return self.starved or self._limit.occupied(self._share)

    @property
    def memory(self) -> int:
        """Bytes of all slots."""
        with self._lock:
            return self.ring.used

    # Batches from other machines.

    @property
    def layout(self) -> Layout | None:
        """The layout of its batches, once it is known."""
        return self._layout

    def slot_for(self, nbytes: int) -> Slot | None:
        """A slot for a batch that another machine has prepared; ``None`` if there is no memory."""
        try:
            with self._lock:
                return self.ring.acquire(nbytes)
        except OSError as error:
            if error.errno not in LACKING:
                raise
            return None

    def note_received(self, batch_keys: BatchKeys) -> None:
        """A batch came from another machine: remove the samples that no later batch needs."""
        self._keepers.handed_out(batch_keys, ())
        self._keepers.catch_up()

    def done_all(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        super().done_all(outcomes)
        for task, _ in outcomes:
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
        for task in [*self._in_hand, *self.away]:
            self._uncount(task)

    def close(self) -> None:
        super().close()
        self._limit.remove(self)
        if not self._abandoned:
            with self._lock:
                # Not left to the garbage collector: this is the memory of a whole group.
                self.ring.clear()

    def _note_handed_out(self, batch: OpenBatch) -> None:
        """Admit its samples now, before ``deliver`` gives back what was borrowed for the batch.

        Another machine may wait for a sample that was read here. If the batch were given back
        first, this node would answer that machine that it has to read the sample itself.
        """
        super()._note_handed_out(batch)
        self._keepers.catch_up()

    def _make_view(self, batch: OpenBatch) -> None:
        """Nothing: members make the views, of memory that they have mapped themselves."""

    def _ready(self, batch: OpenBatch) -> Ready:
        staged = self._stage(batch)
        return Ready(batch.batch_keys, staged, staged.rows, staged.nbytes)

    def _refuse(self, batch: OpenBatch, error: BaseException) -> Ready:
        self._keepers.handed_out(batch.batch_keys, ())
        self._keepers.catch_up()
        return Ready(batch.batch_keys, FailedBatch(error), 0, 0)

    def _stage(self, batch: OpenBatch) -> StagedBatch:
        rows = batch.summary.rows
        bad = [(sample.index, sample.name, sample.stage, sample.error) for sample in batch.bad]
        slot, layout, beside = batch.slot, batch.layout, None
        if rows == 0:
            batch.give_back(self.ring)
            return StagedBatch(None, None, 0, 0, None, bad)
        if batch.kind == "rows" and layout is not None:
            objects = {
                number: batch.summary.objects.get(number, [])
                for number, leaf in enumerate(layout.leaves)
                if leaf.dtype is None
            }
            nbytes = layout.row_nbytes * rows
            beside = bytes(pack(objects).tobytes()) if objects else None
        elif isinstance(batch.value, InSlot) and slot is not None:
            slot.refresh()
            nbytes, layout = batch.value.nbytes, None
        else:
            slot, nbytes, layout = *self._packed(batch.value), None
        batch.columns, batch.slot = [], None
        summary = batch.summary
        return StagedBatch(
            *(slot, layout, rows, nbytes, beside, bad),
            busy=summary.busy,
            tally=summary.tally,
            elsewhere=summary.elsewhere,
        )

    def _packed(self, value: Any) -> tuple[Slot, int]:
        """Pack a value into a new slot. Returns the slot and the packed size."""
        packed = pack(value)
        with self._lock:
            slot = self.ring.acquire(packed.nbytes)
        if slot is None:
            raise self.ring.exhausted(packed.nbytes)
        packed.write_into(memoryview(slot.map))
        return slot, packed.nbytes
