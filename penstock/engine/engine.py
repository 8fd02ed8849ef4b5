"""The engine: the one crossing from keys to a stream of batches.

It keeps a few batches open ahead of the training loop, lets a pool prepare their pieces straight
into shared-memory slots, and hands them out in order. ``schedule`` decides which piece comes next;
the engine owns the lock, the slots and the waiting.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from penstock.engine.feed import Queue, Ready
from penstock.engine.keepers import Keepers
from penstock.engine.open_batch import Convert, OpenBatch, resolve_deadly_piece
from penstock.engine.pools.pool import Pool
from penstock.engine.pools.runner import Outcome, Task, TaskReport, Work
from penstock.engine.read_ahead import ReadAhead
from penstock.engine.schedule import (
    HANDING,
    HANDING_TO_THREADS,
    MOST_AHEAD,
    Piece,
    Schedule,
    TaskKind,
    batches_ahead,
    batches_ahead_of_sharers,
    batches_for_lenders,
    refill_from,
)
from penstock.engine.slot_policy import SlotPolicy
from penstock.engine.slots import Layout, Ring
from penstock.order.plan import BatchKeys
from penstock.stats import Meter

STOCK = 2
"""Finished batches that a loop which never waited of late should find next, for the pool to rest.
If it takes them all meanwhile, it wakes the pool."""

FEW_MISFITS, MISFITS = 2, 4
"""If more than a few batches, and more than one in this many, have another layout than the first,
batches are collated as a whole from then on. Otherwise each would be prepared twice."""

WATCH_EVERY = 1.0
"""Seconds between two looks for workers that hang, while the loop waits."""


class Engine:
    """Prepares batches ahead of the training loop. ``next`` is called from one thread at a time.

    - ``prefetch``: batches to prepare ahead; ``None``: chosen by their size.
    - ``tiny_batch``: samples of a task; ``None``: chosen by their cost.
    - ``layout``: the layout of batches; ``None``: learnt from the first sample.
    - ``in_order``: hand out batches in the order of the plan, not as they are finished.
    - ``timeout``: seconds that a worker may take for a task.
    - ``keepers``: get the samples that workers put into stores, and the batches handed out, in the
      order in which batches are handed out.
    - ``convert``: turns the value of each batch into what the loop gets; mostly called by the
      worker that completes the batch.
    - ``after_task``: called after tasks, by the thread that reports them.
    - ``long_wait``: called again and again while the loop waits for a batch for more than a second.
    - ``schedule``: deals pieces to a device too; without it there is none.
    """

    epochs_in_order: ClassVar[bool] = True
    """The batches are those of one loop. A node's may be of jobs that are epochs apart."""

    def __init__(
        self,
        work: Work,
        pool: Pool,
        ring: Ring,
        meter: Meter,
        *,
        prefetch: int | None,
        tiny_batch: int | None = None,
        layout: Layout | None,
        in_order: bool = True,
        timeout: float | None = None,
        keepers: Keepers,
        convert: Convert | None = None,
        after_task: Callable[[], None] | None = None,
        long_wait: Callable[[], None] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.work = work
        self.pool = pool
        self.ring = ring
        self.meter = meter
        self._prefetch = prefetch
        self._in_order = in_order
        self._timeout = timeout
        self._keepers = keepers
        self._convert = convert
        self._after_task = after_task
        self._long_wait = long_wait
        self._layout = layout
        self._whole = work.collate is not None
        self._misfits = 0
        """Batches that were prepared again because they do not have the layout of the first one."""
        self._slots = SlotPolicy(
            ring, pool.size, own_process=pool.own_process, early=schedule is None
        )
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._schedule = schedule or Schedule(
            pool.size,
            handing=HANDING if pool.own_process else HANDING_TO_THREADS,
            tiny_batch=tiny_batch,
            cuts=tiny_batch is not None or not pool.divides_tasks,
        )
        self._upcoming: Iterator[BatchKeys] = iter(())
        self._pending: BatchKeys | None = None
        self._first_row: TaskReport | None = None
        """The probe of the pending batch, if its sample is the first row of that batch."""
        self._any_thread = False
        """Workers may open batches, not only the thread of the training loop."""
        self._most_ahead: int | None = None
        """See ``Plan``."""
        self._to_open = False
        """Batches can be opened: the training loop has left it to the next worker."""
        self._all_opened = False
        """The plan has no more batches."""
        self._open_batches: OrderedDict[int, OpenBatch] = OrderedDict()
        self._tasks: dict[int, tuple[OpenBatch, Piece]] = {}
        self._last_number = 0
        self.starved = False
        """Tasks wait for a slot. The training loop releases slots without a notification."""
        self._idle = True
        """A worker found no task, so it waits to be notified. The others come for more tasks."""
        self._refill = 0
        """See ``refill_from``."""
        self._rests = False
        """The pool was told that the loop has batches for a while."""
        self.working = False
        """When a batch was last handed out, workers had tasks or were about to get some. So one of
        them will finish a task, and can do what need not be done by the training loop."""
        self._failure: BaseException | None = None
        self._wakes = 0
        """Counts what may give the waiting training loop something to do."""
        self._watched = 0.0
        """When the workers were last looked at."""
        self._started = False
        self._abandoned = False

    # What the loader calls.

    def start(
        self,
        batches: Iterator[BatchKeys],
        *,
        any_thread: bool = False,
        most_ahead: int | None = None,
    ) -> None:
        """Prepare these batches from now on, and drop the batches that were open before."""
        with self._lock:
            self._drop_all()
            objects = self.work.road.source.objects
            if objects is not None:
                lacking = self._keepers.lacking
                batches = ReadAhead(batches, objects, lacking, far=any_thread)
            self._plan_batches(batches)
            self._any_thread, self._most_ahead = any_thread, most_ahead
            self._failure = None
            self._idle = True
        if not self._started:
            self.pool.start(self)
            self._started = True
        self.meter.start()

    def take_ready(self) -> Ready | None:
        """The next batch if a worker has completed it; ``None``: ``next`` waits for it.

        It does the same as the rest of ``next``, in few calls. The training loop pays for each of
        them, and more than usual: after its step the CPU's caches have other code and data.
        """
        meter = self.meter
        started = meter.clock()
        with self._lock:
            open_batches = self._open_batches
            if not (open_batches and self._in_order and self._any_thread) or self._failure:
                return None
            number = next(iter(open_batches))
            batch = open_batches[number]
            view, slot = batch.view, batch.slot
            if view is None or slot is None or batch.error is not None or batch.running:
                return None
            del open_batches[number]
            self._schedule.end(number)
            if self._slots.learning:
                self._slots.record_request(ready=True)
            self._to_open = True
            more = self._schedule.shared or (
                not self._all_opened and len(open_batches) <= self._refill
            )
            notify = self.starved or (self._idle and more)
            if notify:
                self._idle = False
            self.working = self.pool.size > 0 and (
                notify or bool(self._tasks) or not self._all_opened
            )
        if notify:
            self.pool.notify()
        batch.view = None
        buffer = self.ring.lease(slot, view.buffer)
        if buffer is not view.buffer:  # a copy: file descriptors run out
            view = batch.view_of(buffer, self._convert) or view
        ready, summary = view.ready, batch.summary
        if self._keepers.any:
            self._note_handed_out(batch)
        waited = meter.clock() - started
        meter.handed_out(
            summary.busy, summary.tally, batch.bad, ready.rows, ready.nbytes, waited, batch
        )
        return ready

    def next(self) -> Ready | None:
        """Wait for the next batch and return it; ``None`` after the last."""
        ready = self.take_ready()
        if ready is not None:
            return ready
        started = self.meter.clock()
        self._schedule.loop_waits(True)
        try:
            while True:
                wakes = self._wakes
                batch, ended = self._next_finished()
                if batch is not None:
                    return self._hand_out(batch)
                if ended:
                    return None
                if self.pool.help():
                    continue
                self._wait(wakes)
                if self._long_wait is not None and self.meter.clock() - started >= WATCH_EVERY:
                    self._long_wait()
        finally:
            self._schedule.loop_waits(False)
            self.meter.waited(self.meter.clock() - started)

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""
        return self.pool.restarts

    def settled(self) -> bool:
        """Whether the next epoch may begin early. Called once before each ``start``."""
        return self._keepers.settled()

    def refresh(self) -> None:
        """Restart the workers if the dataset was changed since they were started."""
        if self._started and self.pool.outdated():
            self._end_workers()

    def ready(self) -> bool:
        """Whether ``next`` would return at once."""
        with self._lock:
            return self._finished() is not None

    def queue(self) -> Queue:
        """The number of open batches, and the memory that batches take."""
        with self._lock:
            batches = list(self._open_batches.values())
            finished = sum(batch.complete for batch in batches)
            return Queue(
                finished,
                len(batches) - finished,
                self._finished() is not None,
                self.ring.in_use,
                self.ring.used,
            )

    def wake(self) -> None:
        """Make ``next``, which waits in another thread, look for something to do."""
        with self._progress:
            self._wakes += 1
            self._progress.notify_all()

    def stop(self) -> None:
        """Drop all open batches, and prepare no more."""
        with self._lock:
            self._drop_all()
            self._plan_batches(iter(()))

    def _plan_batches(self, batches: Iterator[BatchKeys]) -> None:
        self._upcoming, self._pending = batches, None
        self._to_open = self._all_opened = False

    def close(self) -> None:
        """End the workers and close the stores."""
        if self.pool.runs_here():
            # The garbage collector found a forgotten loader while it ran in one of its workers,
            # which may hold the lock that the others wait for.
            threading.Thread(target=self.close, name="penstock-close", daemon=True).start()
            return
        self._end_workers()
        # A thread that could not be ended may still read from a store, so the stores stay open.
        if not self._abandoned:
            self._keepers.close()

    def _end_workers(self) -> None:
        """End the workers; ``start`` starts them again."""
        self.stop()
        abandoned = self.pool.close(self._timeout)
        with self._lock:
            self._abandoned |= bool(abandoned)
            for task in abandoned & self._tasks.keys():
                # The thread may still write into the slot, so no other batch may get it.
                self._tasks[task][0].forget_slot(self.ring)
            for batch, piece in self._tasks.values():
                self._keepers.lost(batch.keys.cut(piece.first, piece.count).indices)
                batch.running = 0
                batch.give_back(self.ring)
            self._tasks.clear()
            self._started = False

    def _next_finished(self) -> tuple[OpenBatch | None, bool]:
        """The batch to hand out now, or ``None``; and whether the last batch was handed out."""
        with self._lock:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            batch = self._take_ready()
            self._slots.record_request(ready=batch is not None)
            if batch is None:
                opened = self._open()
            elif batch.error is not None or self._most_ahead == 0:
                opened = False
            elif self._any_thread:
                self._to_open = True
                opened = not self._all_opened and len(self._open_batches) <= self._refill
            else:
                opened = self._open()
            if batch is None:
                self._require_slot()
            ended = batch is None and not self._open_batches and self._pending is None
            # Workers may have lacked slots that the loop has released meanwhile.
            more = opened or (batch is not None and self._schedule.shared)
            notify = self.starved or (more and self._idle)
            if batch is None and self._rests:
                notify, self._rests = True, False
            self._idle = self._idle and not notify
            self.working = self.pool.size > 0 and (
                notify or bool(self._tasks) or not self._all_opened
            )
        if notify:
            self.pool.notify()
        return batch, ended

    def _require_slot(self) -> None:
        """Give the next batch a slot. Raises SlotError if the caller of ``next`` holds them all."""
        self._slots.require_slot(self._open_batches.values())

    # What pools call.

    def take(self, worker: int, *, away: int = 0) -> Task | None:
        with self._lock:
            if self._to_open:
                self._open_in_worker()
            self._schedule.hurried = self._slots.learning
            piece = self._schedule.take_away(away) if away else self._schedule.take(worker)
            if piece is None:
                self.starved, self._idle = self.starved and away > 0, True
                return None
            batch = self._open_batches[piece.batch]
            try:
                count = self._slots.assign_slots(self._open_batches.values(), batch, piece)
            except BaseException:
                self._schedule.put_back(piece.id)
                raise
            self.starved = piece.count > 0 and not count
            if self.starved:
                self._idle = True
                self._schedule.put_back(piece.id)
                return None
            if count < piece.count:
                piece = self._schedule.cut(piece.id, count)
            batch.running += 1
            self._tasks[piece.id] = (batch, piece)
            return batch.task(piece)

    def left_over(self) -> int:
        with self._lock:
            return self._schedule.left_over()

    def relaxed(self) -> bool:
        with self._lock:
            first = list(itertools.islice(self._open_batches.values(), STOCK))
            self._rests = (
                not self._slots.learning
                and len(first) == STOCK
                and all(batch.complete for batch in first)
            )
            return self._rests

    def take_for_device(self) -> Task | None:
        with self._lock:
            piece = self._schedule.take_device()
            if piece is None:
                return None
            batch = self._open_batches[piece.batch]
            batch.running += 1
            self._tasks[piece.id] = (batch, piece)
            return batch.task(piece)

    def device_lost(self) -> None:
        with self._lock:
            for task, (batch, piece) in list(self._tasks.items()):
                if piece.kind == "device":
                    del self._tasks[task]
                    batch.running -= 1
                    if batch.dropped and not batch.running:
                        batch.give_back(self.ring)
            self._schedule.device_lost()
            self._progress.notify_all()
        self.pool.notify()

    def done(self, task: int, outcome: Outcome) -> None:
        self.done_all([(task, outcome)])

    def done_all(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        opened = False
        with self._lock:
            for task, outcome in outcomes:
                try:
                    opened |= self._take_in(task, outcome)
                except Exception as error:  # the other outcomes are still wanted
                    self.broken(error)
            # Once for all of them: a loop that wakes takes the GIL from the thread that reports.
            if opened or self._finished() is not None:
                self._progressed()
        if opened:
            self.pool.notify()
        try:
            # Here and not when a batch is handed out, which would hold up the training loop.
            self._keepers.catch_up()
        except Exception as error:
            self.broken(error)
        if self._after_task is not None:
            self._after_task()

    def _take_in(self, task: int, outcome: Outcome) -> bool:
        """Use the outcome of a task. Returns whether there are new tasks."""
        report = outcome.report
        self.meter.worked(report.busy)
        found = self._settle_task(task, outcome)
        if found is None:
            return False
        batch, piece = found
        if outcome.error is not None:
            self._fail(batch, outcome.error)
            self._keepers.discard(report.offers)
        elif outcome.changed:
            self._redo_whole(batch)
            self._keepers.discard(report.offers)
            return True
        elif piece.kind == "probe":
            last = self._schedule.done(piece.id, report.busy)
            return self._probed(batch, piece, outcome, last=last)
        elif outcome.part is not None:
            batch.add_report(piece, report)
            self._schedule.host_done(piece.id, outcome.part, report.busy)
            self._wakes += 1  # the loop may give it to the device
            return True
        else:
            if piece.kind != "device":  # the report of its rows is that of the CPU's part
                batch.add_report(piece, report)
            if piece.kind in ("whole", "pull"):
                batch.value = outcome.value
            if self._schedule.done(piece.id, report.busy):
                batch.finish(self._schedule.on_device(piece.batch))
                self._make_view(batch)
        return False

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        with self._lock:
            found = self._settle_task(task, Outcome(TaskReport()))
            if found is None:
                return
            batch, piece = found
            indices = batch.keys.cut(piece.first, piece.count).indices
            if guilty:
                self._keepers.check(indices)
            self._keepers.lost(indices)
            self.meter.retried()
            deadly = self._schedule.lost(piece.id, guilty=guilty)
            if deadly is not None:
                self._resolve_deadly(batch, deadly, reason)
            self._progress.notify_all()

    def broken(self, error: BaseException) -> None:
        with self._lock:
            # The first error is the cause; later ones follow from it.
            self._failure = self._failure or error
            self._progress.notify_all()

    # Opening.

    def _depth(self) -> int:
        """Batches that may be open at once."""
        depth = self._usual_depth()
        return depth if self._most_ahead is None else min(depth, max(1, self._most_ahead))

    def _usual_depth(self) -> int:
        if self._prefetch is not None:
            return self._prefetch
        if self._layout is None:
            return batches_ahead(0)
        rows, nbytes = self._layout.rows, self._layout.nbytes
        lent = self.pool.size - self._schedule.local_workers
        if lent > 0:
            ahead = self._depth_alone(rows, nbytes)
            return max(ahead, min(MOST_AHEAD, ahead + batches_for_lenders(rows, lent)))
        return self._depth_alone(rows, nbytes)

    def _depth_alone(self, rows: int, nbytes: int) -> int:
        """Batches that are prepared ahead for the workers of this machine."""
        if self.pool.divides_tasks:
            return batches_ahead_of_sharers(nbytes, rows, self._schedule.local_workers)
        # Threads share the memory of the loop, where one more large batch costs more than a worker
        # that waits.
        return (
            self._schedule.batches_ahead(nbytes, rows)
            if self.pool.own_process
            else batches_ahead(nbytes)
        )

    def _open(self) -> bool:
        """Open batches up to the prefetch depth. Returns whether there are new tasks."""
        self._to_open = False
        self._schedule.workers = max(1, self.pool.size)
        opened, depth = False, self._depth()
        self._refill = refill_from(depth)
        probing = self._probing()
        while len(self._open_batches) < depth and not probing:
            batch_keys = self._pending or next(self._upcoming, None)
            if batch_keys is None:
                self._all_opened = True
                break
            if self._too_early(batch_keys):
                self._pending = batch_keys
                break
            kind = self._kind(batch_keys)
            self._pending = batch_keys if kind == "probe" else None
            self._open_batch(batch_keys, kind)
            opened, probing = True, kind == "probe"
        return opened

    def _open_in_worker(self) -> None:
        """Open batches in place of the training loop, which gets the error if that fails."""
        try:
            self._open()
        except Exception as error:
            self._failure = self._failure or error
            self._progress.notify_all()

    def _too_early(self, batch_keys: BatchKeys) -> bool:
        """Whether a batch is more than one epoch ahead of the oldest open one.

        Stores have room for two versions of a sample: that of an epoch and that of the next one.
        """
        oldest = next(iter(self._open_batches.values()), None)
        return (
            self.epochs_in_order
            and oldest is not None
            and batch_keys.epoch > oldest.batch_keys.epoch + 1
        )

    def _probing(self) -> bool:
        """Whether the layout, which all later batches need, is still being learnt."""
        return any(batch.kind == "probe" for batch in self._open_batches.values())

    def _kind(self, batch_keys: BatchKeys) -> TaskKind:
        if batch_keys.stream is not None:
            return "pull"
        if self._whole:
            return "whole"
        return "probe" if self._layout is None else "rows"

    def _open_batch(self, batch_keys: BatchKeys, kind: TaskKind) -> None:
        batch = OpenBatch(batch_keys, kind)
        rows = batch.rows
        if kind == "rows" and self._layout is not None:
            if rows > self._layout.rows:  # a batch sampler's batches have any size
                self._layout = replace(self._layout, rows=rows)
            batch.layout = self._layout
            if self._first_row is not None:
                batch.add_first_row(self._first_row, self._layout)
                self._first_row = None
        self._last_number += 1
        self._open_batches[self._last_number] = batch
        done = len(batch.reports)
        self._schedule.open(
            self._last_number,
            rows,
            kind,
            pin=batch_keys.stream,
            first=done,
            indices=batch_keys.indices,
        )

    def _probed(self, batch: OpenBatch, piece: Piece, outcome: Outcome, *, last: bool) -> bool:
        """Use the result of a probe. Returns whether there are new tasks."""
        if batch.kind == "probe":
            self._first_row = outcome.report if outcome.report.rows else None
            if self._first_row is None:
                self._keepers.discard(outcome.report.offers)
            if outcome.report.taken or not self._probe_next(batch, piece):
                self._learn_layout(batch, outcome.layout)
            return True
        if last:
            self._whole_after_trials(batch)
        return last

    def _probe_next(self, batch: OpenBatch, piece: Piece) -> bool:
        """Learn the layout from the samples after this piece. Returns false if there are none."""
        first = piece.first + piece.count
        if first >= len(batch.keys):
            return False
        self._schedule.probe(piece.batch, first, len(batch.keys) - first)
        return True

    def _whole_after_trials(self, batch: OpenBatch) -> None:
        """Collate the samples of a batch that did not kill workers when prepared alone."""
        batch.leave_out_deadly()
        if len(batch.keys):
            self._schedule.redo_whole(self._number(batch), len(batch.keys), strikes=1)
        else:
            batch.finish()

    def _learn_layout(self, batch: OpenBatch, layout: Layout | None) -> None:
        """Use the layout of the first sample, or (``None``) collate every batch as a whole."""
        del self._open_batches[self._number(batch)]
        if layout is None:
            self._whole = True
        else:
            self._layout = layout

    def _redo_whole(self, batch: OpenBatch) -> None:
        """Prepare a batch again in one task: one of its samples does not have the layout.

        Pieces of it that are still running write into its slot until they end, so the new task gets
        another slot.
        """
        self._misfits += 1
        if self._misfits > FEW_MISFITS and MISFITS * self._misfits > self._last_number:
            self._whole = True  # shapes change all the time: nothing would be prepared only once
        number, offers = self._number(batch), batch.offers()
        if batch.running:
            batch.forget_slot(self.ring)
        batch.kind = "whole"
        batch.layout = None
        batch.reports.clear()
        batch.early_rows.clear()
        self._schedule.redo_whole(number, len(batch.keys))
        self._keepers.discard(offers)

    # Ending.

    def _take_ready(self) -> OpenBatch | None:
        number = self._finished()
        if number is None:
            return None
        batch = self._open_batches.pop(number)
        if batch.complete:
            self._schedule.end(number)
        else:
            self._schedule.drop(number)
        return batch

    def _finished(self) -> int | None:
        """The number of a batch that can be handed out now."""
        for number, batch in self._open_batches.items():
            # Pieces of a batch that is prepared again may still be writing into its slot.
            if (batch.error is not None or batch.complete) and not batch.running:
                return number
            if self._in_order:
                return None
        return None

    def _hand_out(self, batch: OpenBatch) -> Ready:
        if batch.error is not None:
            batch.give_back(self.ring)
            return self._refuse(batch, batch.error)
        summary, slot = batch.summary, batch.slot
        ready = self._ready(batch)
        if slot is not None and batch.kind != "rows":
            self._slots.whole_size = max(self._slots.whole_size, slot.size)
        # Counted when handed out, so that batches prepared ahead count in their own epoch.
        self.meter.handed_out(summary.busy, summary.tally, batch.bad, ready.rows, ready.nbytes)
        if self._keepers.any:
            self._note_handed_out(batch)
        return ready

    def _note_handed_out(self, batch: OpenBatch) -> None:
        """Tell the keepers, which may leave their work to the next worker that finishes a task."""
        keepers, summary = self._keepers, batch.summary
        keepers.handed_out(batch.batch_keys, summary.offers, summary.tally)
        if not (self.working and keepers.may_lag):
            keepers.catch_up()

    def _make_view(self, batch: OpenBatch) -> None:
        """Make the value of a complete batch, in the thread of a worker."""
        try:
            batch.make_view(self._convert)
        except Exception as error:
            self._fail(batch, error)

    def _ready(self, batch: OpenBatch) -> Ready:
        """The finished batch in the form in which it is handed out."""
        return batch.ready(self.ring, self._convert)

    def _refuse(self, batch: OpenBatch, error: BaseException) -> Ready:
        """Raise the error of a failed batch, or return what is handed out in its place."""
        raise error

    def _fail(self, batch: OpenBatch, error: BaseException) -> None:
        offers = batch.offers()
        batch.error = error
        batch.reports.clear()
        self._schedule.drop(self._number(batch))
        if batch.kind == "probe":
            self._forget_pending()
        self._keepers.discard(offers)

    def _resolve_deadly(self, batch: OpenBatch, piece: Piece, reason: str) -> None:
        error = resolve_deadly_piece(self.work, batch, piece, reason)
        if error is not None:
            self._fail(batch, error)
        elif batch.kind == "probe":
            # The sample is reported when it is prepared again with its batch.
            if not self._probe_next(batch, piece):
                self._learn_layout(batch, None)
        elif self.work.on_error == "substitute":
            self._schedule.deal_again(piece)
        elif not self._schedule.outstanding(piece.batch):
            if batch.kind == "whole":
                self._whole_after_trials(batch)
            else:
                batch.finish()

    def _progressed(self) -> None:
        """Wake the training loop: a batch can be handed out, or more can be opened.

        Not called for every piece: waking the loop interrupts a worker.
        """
        self._progress.notify_all()

    def _settle_task(self, task: int, outcome: Outcome) -> tuple[OpenBatch, Piece] | None:
        """The batch and piece of a task; ``None`` if its outcome is no longer wanted."""
        found = self._tasks.pop(task, None)
        if found is None:
            return None
        batch, piece = found
        batch.running -= 1
        if not batch.dropped and piece.id in self._schedule:
            return found
        self._keepers.discard(outcome.report.offers)
        if batch.dropped and not batch.running:
            batch.give_back(self.ring)
        self._progress.notify_all()
        return None

    def _drop_all(self) -> None:
        for number, batch in list(self._open_batches.items()):
            self._schedule.drop(number)
            batch.dropped = True
            self._keepers.discard(batch.offers())
            if not batch.running:
                batch.give_back(self.ring)
        self._open_batches.clear()
        self._forget_pending()
        self.pool.cancel([task for task, (batch, _) in self._tasks.items() if batch.dropped])

    def _forget_pending(self) -> None:
        """The batch whose first sample has shown the layout is not prepared."""
        first_row, self._pending, self._first_row = self._first_row, None, None
        if first_row is not None:
            self._keepers.discard(first_row.offers)

    def _number(self, batch: OpenBatch) -> int:
        return next(number for number, found in self._open_batches.items() if found is batch)

    def _wait(self, wakes: int) -> None:
        """Wait for progress, unless there was some after ``wakes`` was read."""
        with self._progress:
            if self._finished() is not None or self._wakes != wakes:
                return
            if self._failure is not None:
                return
            self._progress.wait(timeout=WATCH_EVERY)
        now = self.meter.clock()
        if now - self._watched >= WATCH_EVERY:
            self._watched = now
            self.pool.watch(self._timeout)
