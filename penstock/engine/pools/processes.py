"""Worker processes: for roads that hold the GIL, and for code that draws from global generators."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import ClassVar

from penstock.engine.pools.launch import Fork, Program, Start, WorkerProcess, how_it_ended
from penstock.engine.pools.messages import (
    VOCABULARY,
    CannotStart,
    EndWorker,
    Setup,
    Started,
    TaskDone,
    TaskSent,
    outcome_of,
)
from penstock.engine.pools.pool import Desk, Task, run
from penstock.engine.pools.runner import Runner, Work, WorkerInfo
from penstock.engine.pools.threads import WARN_AFTER
from penstock.engine.pools.wire import Known, Wire
from penstock.engine.pools.worker import Init
from penstock.engine.slots import shared_file
from penstock.errors import PipelineError, WorkerError
from penstock.serialize import Packed, pack

AHEAD = 2
"""Tasks a worker may have in hand: one to work on, one so that it never waits for the next."""


class _Worker:
    def __init__(self, number: int, wire: Wire, process: WorkerProcess) -> None:
        self.number = number
        self.wire = wire
        self.process = process
        self.tasks: dict[int, tuple[Task, float]] = {}
        self.known = Known()
        self.layout: object = None
        self.ready = False
        self.reason = ""
        self.warned: set[int] = set()


class ProcessPool:
    """Processes of this machine, each with its own socket."""

    kind: ClassVar[str] = "processes"
    own_process: ClassVar[bool] = True

    def __init__(
        self,
        work: Work,
        size: int,
        seed: int,
        init: Init | None = None,
        start: Start = "program",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.restarts = 0
        self._work = work
        self._seed = seed
        self._init = init
        self._start: Start = start
        self._clock = clock
        self._lock = threading.RLock()
        self._workers: dict[int, _Worker] = {}
        self._selector: selectors.BaseSelector | None = None
        self._reader: threading.Thread | None = None
        # Known weakly, or its pool would keep a forgotten loader alive.
        self._desk: Callable[[], Desk | None] = lambda: None
        self._code: int | None = None
        self._digest = b""
        self._wake: tuple[int, int] | None = None
        self._closing = False
        self._stillborn = 0
        self._pid = os.getpid()
        self._standin: Runner | None = None

    # What the engine calls.

    def start(self, desk: Desk) -> None:
        if self._workers:
            return
        self._desk = weakref.ref(desk)
        self._closing = False
        self._pid = os.getpid()
        self._standin = self._make_standin()
        self._selector = selectors.DefaultSelector()
        self._wake = os.pipe()
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        if self._start == "program":
            self._code = self._pack_code()
        for number in range(self.size):
            self._spawn(number)
        self._reader = threading.Thread(target=self._read, name="penstock-workers", daemon=True)
        self._reader.start()

    def notify(self) -> None:
        desk = self._desk()
        if desk is None:
            return
        with self._lock:
            if self._closing:
                return
            # Round by round, so that a few tasks are spread over all workers.
            for depth in range(1, AHEAD + 1):
                for worker in list(self._workers.values()):
                    if worker.ready and len(worker.tasks) < depth:
                        task = desk.take(worker.number)
                        if task is not None:
                            self._send(worker, task)

    def help(self) -> bool:
        """While no worker is ready yet, let the consumer do what it waits for itself.

        Workers that must import torch take seconds to start; the first batch need not.
        """
        if self._standin is None or any(worker.ready for worker in self._workers.values()):
            self._standin = None
            return False
        desk = self._desk()
        task = desk.take(-1) if desk is not None else None
        if desk is None or task is None:
            return False
        desk.done(task.id, run(self._standin, task))
        return True

    def watch(self, limit: float | None) -> None:
        now = self._clock()
        with self._lock:
            for worker in self._workers.values():
                if not worker.tasks:
                    continue
                task, since = next(iter(worker.tasks.values()))
                if limit is not None and now - since > limit:
                    worker.reason = f"no answer for {limit:g} s"
                    _kill(worker)
                elif now - since > WARN_AFTER and task.id not in worker.warned:
                    worker.warned.add(task.id)
                    warnings.warn(
                        f"worker {worker.number} (process {worker.process.pid}) has been working "
                        f"on samples {task.keys.indices[:8]} for more than {WARN_AFTER:g} s. "
                        "Give the loader timeout= to have it killed and the samples tried again.",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def outdated(self) -> bool:
        # Arrays count by where they lie, not by what is in them: comparing those would cost as
        # much as sending them again.
        return self._start == "program" and self._digest != self._packed().digest()

    def close(self, limit: float | None = None) -> set[int]:
        if os.getpid() != self._pid:
            return set()  # a fork of the training process: the workers are not ours
        with self._lock:
            self._closing = True
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.wire.send(EndWorker())
        if self._wake is not None:
            os.write(self._wake[1], b"x")
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        for worker in workers:
            # One that waits goes at once; one that works, or starts, is not worth waiting for.
            worker.process.end(2.0 if worker.ready and not worker.tasks else 0.0)
            worker.wire.close()
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        if self._wake is not None:
            for fd in self._wake:
                os.close(fd)
            self._wake = None
        if self._code is not None:
            os.close(self._code)
            self._code = None
        return set()

    # Starting.

    def _make_standin(self) -> Runner | None:
        """Whoever sets up workers, or reads a stream in each, must have all done in those."""
        needs_setup = self._init is not None and getattr(self._init, "exclusive", True)
        if needs_setup or not self._work.road.source.indexed or self._start == "fork":
            return None
        return Runner(self._work, WorkerInfo(-1, self.size, self._seed, process=False))

    def _packed(self) -> Packed:
        try:
            return pack((self._work, self._init), by_value=True)
        except Exception as error:
            raise PipelineError(
                f"the pipeline cannot be sent to worker processes: {type(error).__name__}: "
                f"{error}. Open files, locks and connections inside the worker, when first needed "
                "(leave them out in __getstate__), or use workers=0, or "
                'multiprocessing_context="fork".'
            ) from error

    def _pack_code(self) -> int:
        """The work as one file of shared memory, which all workers map and none copies."""
        packed = self._packed()
        self._digest = packed.digest()
        fd = shared_file(packed.nbytes)
        with mmap.mmap(fd, packed.nbytes) as target:
            view = memoryview(target)
            packed.write_into(view)
            view.release()
        return fd

    def _spawn(self, number: int) -> None:
        ours, theirs = Wire.pair()
        wire = Wire(ours, VOCABULARY)
        info = WorkerInfo(number, self.size, self._seed, process=True)
        process: WorkerProcess
        if self._start == "fork":
            others = [worker.wire.socket for worker in self._workers.values()]
            process = Fork(theirs, [*others, ours], self._work, info, self._init, os.getpid())
        else:
            process = Program(theirs.fileno(), os.getpid())
        theirs.close()
        worker = _Worker(number, wire, process)
        if self._code is not None:
            with contextlib.suppress(OSError):  # it died at once: the reader finds out
                wire.send(Setup(list(sys.path), number, self.size, self._seed), [self._code])
        self._workers[number] = worker
        if self._selector is not None:
            self._selector.register(ours, selectors.EVENT_READ, worker)

    # Sending and receiving.

    def _send(self, worker: _Worker, task: Task) -> None:
        fds = []
        slot_id = None
        if task.slot is not None:
            slot_id = task.slot.id
            known, _ = worker.known.touch(slot_id)
            if not known:
                fds = [task.slot.fd]
        layout = None
        if task.layout is not None and worker.layout is not task.layout:
            worker.layout = task.layout
            layout = bytes(pack(task.layout).tobytes())
        worker.tasks[task.id] = (task, self._clock())
        keys = task.keys
        message = TaskSent(
            task.id,
            task.kind,
            keys.epoch,
            keys.indices,
            keys.replicas,
            task.first,
            slot_id,
            layout,
            task.number,
        )
        with contextlib.suppress(OSError):  # it is dead: the reader finds out and deals again
            worker.wire.send(message, fds)

    def _read(self) -> None:
        while not self._closing and self._selector is not None:
            for event, _ in self._selector.select():
                worker = event.data
                if worker is None:
                    return
                try:
                    self._receive(worker)
                except Exception as error:  # nothing may end this thread but closing
                    self._report_broken(error)

    def _receive(self, worker: _Worker) -> None:
        received = worker.wire.receive()
        if received is None:
            self._bury(worker)
            return
        message, _ = received
        if isinstance(message, TaskDone):
            self._take_back(worker, message)
        elif isinstance(message, Started):
            worker.ready = True
            self._stillborn = 0
            self.notify()
        elif isinstance(message, CannotStart):
            self._stillborn = self.size + 1
            self._report_broken(
                WorkerError(
                    f"a worker process could not take up the pipeline:\n{message.details}\n"
                    "What it imports must be importable from sys.path as it is here."
                )
            )

    def _take_back(self, worker: _Worker, message: TaskDone) -> None:
        with self._lock:
            task, _ = worker.tasks.pop(message.id)
            for number, (waiting, _) in worker.tasks.items():
                worker.tasks[number] = (waiting, self._clock())
                break
        desk = self._desk()
        if desk is not None:
            desk.done(task.id, outcome_of(message))
            del desk
            self.notify()

    def _bury(self, worker: _Worker) -> None:
        """A worker is gone: deal its tasks again and start another in its place."""
        with self._lock:
            if self._closing or self._selector is None:
                return
            self._selector.unregister(worker.wire.socket)
            code = worker.process.end(1.0)
            worker.wire.close()
            reason = worker.reason or how_it_ended(code)
            lost = list(worker.tasks)
            worker.tasks.clear()
            self._stillborn = 0 if worker.ready else self._stillborn + 1
            give_up = self._stillborn > self.size
            if not give_up:
                self.restarts += 1
                self._spawn(worker.number)
            else:
                self._workers.pop(worker.number, None)
        desk = self._desk()
        if desk is None:
            return
        if give_up:
            self._report_broken(
                WorkerError(f"worker processes end before they are ready: {reason}.")
            )
            return
        for place, task in enumerate(lost):
            # Tasks are worked on in the order in which they were sent.
            desk.lost(task, guilty=place == 0, reason=reason)
        del desk
        self.notify()

    def _report_broken(self, error: BaseException) -> None:
        desk = self._desk()
        if desk is not None:
            desk.broken(error)


def _kill(worker: _Worker) -> None:
    if worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)
