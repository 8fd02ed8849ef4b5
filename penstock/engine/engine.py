"""The engine: the one crossing from keys to a stream of batches.

It keeps a few batches open ahead of the consumer, lets a pool prepare their pieces straight into
shared-memory slots, and hands them out in order. What is decided, ``schedule`` decides; here are
the lock, the slots and the waiting.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.engine.open_batch import OpenBatch, Ready, struck
from penstock.engine.pools.pool import Outcome, Pool, Task
from penstock.engine.pools.runner import Report, Work
from penstock.engine.schedule import Piece, Schedule, TaskKind, ahead
from penstock.engine.slot_policy import SlotPolicy
from penstock.engine.slots import Layout, Ring
from penstock.order.deal import BatchKeys
from penstock.order.streams import Rotation
from penstock.stats import BadSample, Meter


class Engine:
    """Prepares batches ahead of the consumer. ``next`` is called from one thread at a time.

    ``admit`` and ``discard`` are told, in the order of batches, what was put into caches by
    batches that were handed out and by batches that nobody will take.
    """

    def __init__(
        self,
        work: Work,
        pool: Pool,
        ring: Ring,
        meter: Meter,
        *,
        prefetch: int | None,
        layout: Layout | None,
        in_order: bool = True,
        timeout: float | None = None,
        admit: Callable[[list[tuple[int, int, int]]], None],
        discard: Callable[[list[tuple[int, int, int]]], None],
    ) -> None:
        self.work = work
        self.pool = pool
        self.ring = ring
        self.meter = meter
        self._prefetch = prefetch
        self._in_order = in_order
        self._timeout = timeout
        self._admit = admit
        self._discard = discard
        self._layout = layout
        self._whole = work.collate is not None
        self._slots = SlotPolicy(ring, pool.size, own_process=pool.own_process)
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._schedule = Schedule(pool.size)
        self._plans: Iterator[BatchKeys] = iter(())
        self._rotation: Rotation | None = None
        self._pending: BatchKeys | None = None
        self._jobs: OrderedDict[int, OpenBatch] = OrderedDict()
        self._tasks: dict[int, tuple[OpenBatch, Piece]] = {}
        self._next_job = 0
        self.starved = False
        """There is work, but no slot for it as of now; one that the loop lets go comes unsaid."""
        self._failure: BaseException | None = None
        self._started = False

    # What the loader calls.

    def start(self, plans: Iterator[BatchKeys], rotation: Rotation | None = None) -> None:
        """Prepare these batches from now on; whatever was open before is dropped."""
        with self._lock:
            self._drop_all()
            self._plans = plans
            self._rotation = rotation
            self._pending = None
            self._failure = None
        if not self._started:
            self.pool.start(self)
            self._started = True

    def next(self) -> Ready | None:
        """The next batch, or ``None`` after the last. Waits for it."""
        started = self.meter.clock()
        self.meter.start()
        try:
            while True:
                job, ended = self._turn()
                if job is not None:
                    return self._hand_out(job)
                if ended:
                    return None
                if not self.pool.help():
                    self._wait()
        finally:
            self.meter.waited(self.meter.clock() - started)

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""
        return self.pool.restarts

    def refresh(self) -> None:
        """Let workers see what was changed in the dataset since they were started."""
        if self._started and self.pool.outdated():
            self.close()

    def wake(self) -> None:
        """There may be more to prepare now, while ``next`` waits in another thread."""
        with self._progress:
            self._progress.notify_all()

    def stop(self) -> None:
        """Drop everything that is open."""
        with self._lock:
            self._drop_all()
            self._plans = iter(())
            self._pending = None

    def close(self) -> None:
        """End the workers; ``start`` begins anew."""
        self.stop()
        self.pool.close()
        with self._lock:
            # Nobody is left to hand these back.
            for job, _ in self._tasks.values():
                job.running = 0
                job.give_back(self.ring)
            self._tasks.clear()
            self._started = False

    def _turn(self) -> tuple[OpenBatch | None, bool]:
        """A batch to hand out, or none as of now; and whether none will come any more."""
        with self._lock:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            # What the loop gave back since may be what a worker found missing.
            opened = self._open() or self.starved
            job = self._take_ready()
            self._slots.asked(ready=job is not None)
            if job is None:
                self._slots.serve_next(self._jobs.values())
            elif job.error is None:
                opened = self._open() or opened
            ended = job is None and not self._jobs and self._pending is None
        if opened:
            self.pool.notify()
        return job, ended

    # What pools call.

    def take(self, worker: int) -> Task | None:
        with self._lock:
            piece = self._schedule.take(worker)
            if piece is None:
                self.starved = False
                return None
            job = self._jobs[piece.batch]
            count = self._slots.serve(self._jobs.values(), job, piece)
            self.starved = piece.count > 0 and not count
            if self.starved:
                self._schedule.put_back(piece.id)
                return None
            if count < piece.count:
                piece = self._schedule.cut(piece.id, count)
            job.running += 1
            self._tasks[piece.id] = (job, piece)
            return job.task(piece)

    def done(self, task: int, outcome: Outcome) -> None:
        opened = False
        with self._lock:
            self.meter.worked(outcome.report.busy)
            found = self._came_back(task, outcome)
            if found is None:
                return
            job, piece = found
            if outcome.error is not None:
                self._fail(job, outcome.error)
            elif outcome.changed:
                self._do_whole(job)
                opened = True
            elif piece.kind == "probe":
                self._schedule.done(piece.id, outcome.report.busy)
                self._learn(job, outcome.layout)
                opened = True
            else:
                job.wrote(piece, outcome.report)
                if piece.kind != "rows":
                    job.value = outcome.value
                if self._schedule.done(piece.id, outcome.report.busy):
                    job.complete = True
            if opened or self._finished() is not None:
                self._progressed()
        if opened:
            self.pool.notify()

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        with self._lock:
            found = self._came_back(task, Outcome(Report()))
            if found is None:
                return
            job, piece = found
            self.meter.retried()
            deadly = self._schedule.lost(piece.id, guilty=guilty)
            if deadly is not None:
                self._deadly(job, deadly, reason)
            self._progress.notify_all()

    def broken(self, error: BaseException) -> None:
        with self._lock:
            # The first says what happened; later ones are what followed from it.
            self._failure = self._failure or error
            self._progress.notify_all()

    # Opening.

    def _depth(self) -> int:
        if self._prefetch is not None:
            return self._prefetch
        return ahead(0 if self._layout is None else self._layout.nbytes)

    def _open(self) -> bool:
        """Open as many batches as may be open; true if there is something new to do."""
        opened = False
        while len(self._jobs) < self._depth() and not self._probing():
            plan = self._pending or next(self._plans, None)
            if plan is None:
                break
            kind = self._kind()
            self._pending = plan if kind == "probe" else None
            self._open_job(plan, kind)
            opened = True
        return opened

    def _probing(self) -> bool:
        """The layout is just being learnt, and all that follows needs it."""
        return any(job.kind == "probe" for job in self._jobs.values())

    def _kind(self) -> TaskKind:
        if self._rotation is not None:
            return "pull"
        if self._whole:
            return "whole"
        return "probe" if self._layout is None else "rows"

    def _open_job(self, plan: BatchKeys, kind: TaskKind) -> None:
        job = OpenBatch.of(plan, kind)
        rows = len(job.keys)
        if kind == "rows" and self._layout is not None:
            if rows > self._layout.rows:  # a batch sampler's batches have any size
                self._layout = replace(self._layout, rows=rows)
            job.layout = self._layout
        self._next_job += 1
        self._jobs[self._next_job] = job
        pin = self._rotation.worker(plan) if self._rotation is not None else None
        self._schedule.open(self._next_job, rows, kind, pin)

    def _learn(self, job: OpenBatch, layout: Layout | None) -> None:
        """What the first sample taught: the layout of batches, or that they do not stack."""
        del self._jobs[self._number(job)]
        if layout is None:
            self._whole = True
        else:
            self._layout = layout

    def _do_whole(self, job: OpenBatch) -> None:
        """Some sample is unlike the first of the first batch: stack this batch by itself."""
        number = self._number(job)
        job.kind = "whole"
        job.layout = None
        self._discard(job.offers())
        job.reports.clear()
        job.loose.clear()
        self._schedule.whole(number, len(job.keys))

    # Ending.

    def _take_ready(self) -> OpenBatch | None:
        number = self._finished()
        if number is None:
            return None
        self._schedule.drop(number)
        return self._jobs.pop(number)

    def _finished(self) -> int | None:
        """A batch that can be handed out now."""
        for number, job in self._jobs.items():
            # A piece of a batch that is done over may still be writing into its slot.
            if (job.error is not None or job.complete) and not job.running:
                return number
            if self._in_order:
                return None
        return None

    def _hand_out(self, job: OpenBatch) -> Ready:
        if job.error is not None:
            job.give_back(self.ring)
            return self._refuse(job, job.error)
        offers = job.offers()
        if offers:
            self._admit(offers)
        pieces = job.pieces()
        self.meter.batch_times.append(sum(report.busy for _, report in pieces))
        for _, report in pieces:
            # Counted when handed out, so that what was prepared ahead does not blur an epoch.
            if report.tally:
                self.meter.add(report.tally)
            job.bad.extend(BadSample(*bad) for bad in report.bad)
        for bad in job.bad:
            self.meter.bad(bad)
        slot = job.slot
        ready = self._ready(job)
        if slot is not None and job.kind != "rows":
            self._slots.whole_size = max(self._slots.whole_size, slot.size)
        if ready.rows:
            self.meter.delivered(ready.rows, ready.nbytes)
        if ready.ended and self._rotation is not None:
            self._rotation.ended(job.plan)
        return ready

    def _ready(self, job: OpenBatch) -> Ready:
        """A finished batch, in the form in which it is handed out."""
        return job.ready(self.ring)

    def _refuse(self, job: OpenBatch, error: BaseException) -> Ready:
        """What is handed out in place of a batch that could not be prepared."""
        raise error

    def _fail(self, job: OpenBatch, error: BaseException) -> None:
        job.error = error
        self._schedule.drop(self._number(job))
        if job.kind == "probe":
            self._pending = None

    def _deadly(self, job: OpenBatch, piece: Piece, reason: str) -> None:
        error = struck(self.work, job, piece, reason)
        if error is not None:
            self._fail(job, error)
        elif self.work.on_error == "substitute":
            self._schedule.again(piece)
        elif not self._schedule.outstanding(piece.batch):
            job.complete = True

    def _progressed(self) -> None:
        """A batch can be handed out, or more can be opened: the loop may be waiting for that. Not
        for each piece: to wake it then would interrupt a worker."""
        self._progress.notify_all()

    def _came_back(self, task: int, outcome: Outcome) -> tuple[OpenBatch, Piece] | None:
        """What a task was for, or ``None`` if nobody waits for it any more."""
        found = self._tasks.pop(task, None)
        if found is None:
            return None
        job, piece = found
        job.running -= 1
        if not job.dropped and piece.id in self._schedule:
            return found
        self._discard(outcome.report.offers)
        if job.dropped and not job.running:
            job.give_back(self.ring)
        self._progress.notify_all()
        return None

    def _drop_all(self) -> None:
        for number, job in list(self._jobs.items()):
            self._schedule.drop(number)
            job.dropped = True
            self._discard(job.offers())
            if not job.running:
                job.give_back(self.ring)
        self._jobs.clear()

    def _number(self, job: OpenBatch) -> int:
        return next(number for number, found in self._jobs.items() if found is job)

    def _wait(self) -> None:
        with self._progress:
            if self._finished() is not None:
                return
            if self._failure is None:
                self._progress.wait(timeout=1.0)
        self.pool.watch(self._timeout)
