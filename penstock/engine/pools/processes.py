"""Worker processes: for code that holds the GIL, or that draws from the global generators."""

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

from penstock.engine.pools.launch import Fork, Program, StartMethod, WorkerProcess, how_it_ended
from penstock.engine.pools.messages import (
    VOCABULARY,
    CannotStart,
    EndWorker,
    Started,
    TaskDone,
    TaskSent,
    WorkerSetup,
    outcome_of,
)
from penstock.engine.pools.pool import Desk
from penstock.engine.pools.runner import Runner, Task, Work, WorkerInfo, WorkerInit
from penstock.engine.pools.threads import WARN_AFTER
from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.slots import shared_file
from penstock.errors import PipelineError, WorkerError
from penstock.serialize import Packed, pack

TASKS_AHEAD = 2
"""Tasks that a worker has at a time: one to work on, and the next, so that it never waits."""


class _WorkerHandle:
    """A worker process as the pool sees it.

    - ``tasks``: each with the time since which the worker may work on it, in the order of sending.
    - ``ready``: it has started and takes tasks.
    - ``reason``: why the pool killed it, for the error message.
    - ``warned``: tasks that a warning was given for.
    """

    def __init__(self, number: int, wire: Wire, process: WorkerProcess) -> None:
        self.number = number
        self.wire = wire
        self.process = process
        self.tasks: dict[int, tuple[Task, float]] = {}
        self.mapped = MappedSlots()
        self.layout: object = None
        self.ready = False
        self.reason = ""
        self.warned: set[int] = set()


class ProcessPool:
    """Worker processes on this machine, each with a socket of its own."""

    kind: ClassVar[str] = "processes"
    own_process: ClassVar[bool] = True

    def __init__(
        self,
        work: Work,
        size: int,
        seed: int,
        init: WorkerInit | None = None,
        start: StartMethod = "program",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.restarts = 0
        self._work = work
        self._seed = seed
        self._init = init
        self._start: StartMethod = start
        self._clock = clock
        self._lock = threading.RLock()
        self._workers: dict[int, _WorkerHandle] = {}
        self._selector: selectors.BaseSelector | None = None
        self._reader: threading.Thread | None = None
        # A weak reference: a strong one would keep a forgotten loader alive.
        self._desk: Callable[[], Desk | None] = lambda: None
        self._work_fd: int | None = None
        self._digest = b""
        self._wake: tuple[int, int] | None = None
        self._closing = False
        self._failed_starts = 0
        self._pid = os.getpid()
        self._stand_in: Runner | None = None

    # What the engine calls.

    def start(self, desk: Desk) -> None:
        if self._workers:
            return
        self._desk = weakref.ref(desk)
        self._closing = False
        self._pid = os.getpid()
        self._stand_in = self._make_stand_in()
        self._selector = selectors.DefaultSelector()
        self._wake = os.pipe()
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        if self._start == "program":
            self._work_fd = self._share_work()
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
            # One task for each worker, then a second one: a few tasks go to different workers.
            for depth in range(1, TASKS_AHEAD + 1):
                for worker in list(self._workers.values()):
                    if worker.ready and len(worker.tasks) < depth:
                        task = desk.take(worker.number)
                        if task is not None:
                            self._send(worker, task)

    def help(self) -> bool:
        """While no worker is ready, do a task in the thread of the training loop.

        Workers that must import torch take seconds to start; the first batch need not wait.
        """
        if self._stand_in is None or any(worker.ready for worker in self._workers.values()):
            self._stand_in = None
            return False
        desk = self._desk()
        task = desk.take(-1) if desk is not None else None
        if desk is None or task is None:
            return False
        desk.done(task.id, self._stand_in.run(task))
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
                        "Give the loader timeout= (seconds) to have such a worker killed and its "
                        "samples tried again.",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def outdated(self) -> bool:
        # The digest has the addresses of arrays, not their contents: comparing contents would
        # cost as much as sending them again.
        return self._start == "program" and self._digest != self._packed().digest()

    def runs_here(self) -> bool:
        return False

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
            # An idle worker ends at once; one that works or still starts is killed at once.
            worker.process.end(2.0 if worker.ready and not worker.tasks else 0.0)
            worker.wire.close()
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        if self._wake is not None:
            for fd in self._wake:
                os.close(fd)
            self._wake = None
        if self._work_fd is not None:
            os.close(self._work_fd)
            self._work_fd = None
        return set()

    # Starting.

    def _make_stand_in(self) -> Runner | None:
        """The runner for ``help``; ``None`` if samples must be prepared in workers only.

        That is so if workers are set up by ``init``, read a stream each, or are forked.
        """
        needs_setup = self._init is not None and getattr(self._init, "exclusive", True)
        if needs_setup or not self._work.road.source.indexed or self._start == "fork":
            return None
        return Runner(self._work, WorkerInfo(-1, self.size, self._seed, process=False))

    def _packed(self) -> Packed:
        try:
            return pack((self._work, self._init), by_value=True)
        except Exception as error:
            raise PipelineError(
                f"the pipeline cannot be sent to worker processes, because a part of it cannot be "
                f"pickled: {type(error).__name__}: {error}. Open files, locks and connections in "
                "the worker when they are first needed (leave them out in __getstate__), use "
                'workers=0, or, with penstock.torch, multiprocessing_context="fork".'
            ) from error

    def _share_work(self) -> int:
        """The descriptor of shared memory with the packed work, which all workers map."""
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
        worker = _WorkerHandle(number, wire, process)
        if self._work_fd is not None:
            with contextlib.suppress(OSError):  # it died at once: the reader thread notices
                wire.send(
                    WorkerSetup(list(sys.path), number, self.size, self._seed), [self._work_fd]
                )
        self._workers[number] = worker
        if self._selector is not None:
            self._selector.register(ours, selectors.EVENT_READ, worker)

    # Sending and receiving.

    def _send(self, worker: _WorkerHandle, task: Task) -> None:
        fds = []
        slot_id = None
        if task.slot is not None:
            slot_id = task.slot.id
            mapped, _ = worker.mapped.touch(slot_id)
            if not mapped:
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
        with contextlib.suppress(OSError):  # it is dead: the reader thread deals the task again
            worker.wire.send(message, fds)

    def _read(self) -> None:
        while not self._closing and self._selector is not None:
            for event, _ in self._selector.select():
                worker = event.data
                if worker is None:
                    return
                try:
                    self._receive(worker)
                except Exception as error:  # only ``close`` may end this thread
                    self._report_broken(error)

    def _receive(self, worker: _WorkerHandle) -> None:
        received = worker.wire.receive()
        if received is None:
            self._bury(worker)
            return
        message, _ = received
        if isinstance(message, TaskDone):
            self._take_back(worker, message)
        elif isinstance(message, Started):
            worker.ready = True
            self._failed_starts = 0
            self.notify()
        elif isinstance(message, CannotStart):
            self._failed_starts = self.size + 1
            self._report_broken(
                WorkerError(
                    f"a worker process could not unpickle the pipeline:\n{message.details}\n"
                    "A worker has the sys.path of this process; modules that the pipeline uses "
                    "must be importable from there. workers=0 runs the pipeline in this process."
                )
            )

    def _take_back(self, worker: _WorkerHandle, message: TaskDone) -> None:
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

    def _bury(self, worker: _WorkerHandle) -> None:
        """Deal the tasks of a dead worker again, and start another worker in its place."""
        with self._lock:
            if self._closing or self._selector is None:
                return
            self._selector.unregister(worker.wire.socket)
            code = worker.process.end(1.0)
            worker.wire.close()
            reason = worker.reason or how_it_ended(code)
            lost = list(worker.tasks)
            worker.tasks.clear()
            self._failed_starts = 0 if worker.ready else self._failed_starts + 1
            give_up = self._failed_starts > self.size
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
                WorkerError(
                    f"{self._failed_starts} worker processes in a row died before they were ready "
                    f"(the last one: {reason}). Their output on stderr may say why. workers=0 runs "
                    "the pipeline in this process."
                )
            )
            return
        for place, task in enumerate(lost):
            # A worker runs tasks in the order in which they were sent: it died during the first.
            desk.lost(task, guilty=place == 0, reason=reason)
        del desk
        self.notify()

    def _report_broken(self, error: BaseException) -> None:
        desk = self._desk()
        if desk is not None:
            desk.broken(error)


def _kill(worker: _WorkerHandle) -> None:
    if worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)
