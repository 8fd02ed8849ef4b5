"""Worker processes: for code that holds the GIL, or that draws from the global generators.

And crews: worker processes with several threads each.

What the training process does for its workers holds up the training loop: every message is received
and answered with the GIL, by a thread that wakes for it. So a message to a worker has all that it
lacks, and the thread of the pool lets messages collect while all workers have tasks in advance.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import mmap
import multiprocessing.util  # noqa: F401  its exit hook must be registered before ours
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.engine.pools.launch import (
    ChooseStart,
    Fork,
    Program,
    StartMethod,
    WorkerProcess,
    as_program,
    how_it_ended,
    outlives_workers,
)
from penstock.engine.pools.messages import (
    VOCABULARY,
    CannotStart,
    EndWorker,
    Started,
    TaskDone,
    TaskSent,
    TasksSent,
    WorkerSetup,
    outcome_of,
)
from penstock.engine.pools.pool import Desk
from penstock.engine.pools.restarts import MOST_KILLED, FailedStarts, killed_from_outside
from penstock.engine.pools.runner import Outcome, Task, Work, WorkerInfo, WorkerInit
from penstock.engine.pools.threads import WARN_AFTER
from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.schedule import RECENT, REST_FROM, rest
from penstock.engine.slots import Slot, shared_file
from penstock.errors import PipelineError, WorkerError
from penstock.serialize import Packed, pack

if TYPE_CHECKING:
    from penstock.engine.pools.zygote import Zygote

TASKS_AHEAD = 2
"""Tasks that each thread of a worker has: one to work on, and the next, so that it never waits."""

CREW_THREADS = 4
"""Threads of a worker process of a crew. Decoding, cropping and augmenting a photograph holds the
GIL for about a fifth of its time: more threads than this would wait for each other."""

MOST_NEW_SLOTS = 6
"""Slots new to a worker in one message, which has room for 8 descriptors."""

WATCH_EVERY = 0.2
"""Seconds between two looks for workers that take too long."""

START_LIMIT = 300.0
"""Seconds after which a worker that is not ready yet is warned about, or, if the loader has a
timeout, killed. Importing torch takes seconds, and more than a minute on a busy machine with a cold
network disk."""


class _WorkerHandle:
    """A worker process as the pool sees it.

    - ``first``: the number of its first thread among all workers; ``threads``: how many it has.
    - ``tasks``: each with the time since which the worker may work on it, in the order of sending;
      ``None``: all its threads work on tasks before it.
    - ``kept_back``: a task of ``tasks`` that is to run alone, and is sent when the others are done.
    - ``alone``: such a task was sent. ``late``: the tasks for which the pool killed it.
    - ``since``: the time at which it was started.
    - ``slots``: that it has mapped; ``freed``: those of them that it is to unmap.
    - ``ready``: it has started and takes tasks.
    - ``reason``: why the pool killed it, for the error message.
    - ``refused``: it has reported why it cannot start.
    - ``warned``: tasks that a warning was given for; -1: for its start.
    - ``exit_fd``: readable once the process has ended. Its socket does not tell: a process that it
      forked may keep that open.
    """

    def __init__(
        self,
        number: int,
        wire: Wire,
        process: WorkerProcess,
        since: float,
        first: int,
        threads: int,
    ) -> None:
        self.number = number
        self.first = first
        self.threads = threads
        self.wire = wire
        self.process = process
        self.since = since
        self.tasks: dict[int, tuple[Task, float | None]] = {}
        self.kept_back: Task | None = None
        self.alone = False
        self.late: set[int] = set()
        self.mapped = MappedSlots()
        self.slots: dict[int, weakref.ref[Slot]] = {}
        self.freed: deque[int] = deque()
        self.layout: object = None
        self.ready = False
        self.reason = ""
        self.refused = False
        self.warned: set[int] = set()
        self.exit_fd: int | None = None

    def open_exit(self) -> int | None:
        """Open ``exit_fd``, now that the process has started."""
        if self.process.pid is not None:
            with contextlib.suppress(OSError):  # an old kernel, or too many open files
                self.exit_fd = os.pidfd_open(self.process.pid)
        return self.exit_fd

    def close(self) -> None:
        self.wire.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)

    def takes_tasks(self, depth: int) -> bool:
        """Whether it has fewer than ``depth`` tasks for each thread, and may get another."""
        return (
            self.ready
            and len(self.tasks) < depth * self.threads
            and not self.alone
            and self.kept_back is None
        )

    def add(self, task: Task, now: float) -> None:
        """Record that the worker has this task too."""
        self.tasks[task.id] = (task, now if len(self.tasks) < self.threads else None)

    def settle(self, task: int, now: float) -> None:
        """Record that a task is done: the worker begins the next one that it has."""
        self.tasks.pop(task, None)
        self.alone = False
        for place, (number, (waiting, since)) in enumerate(self.tasks.items()):
            if place == self.threads:
                break
            if since is None and waiting is not self.kept_back:
                self.tasks[number] = (waiting, now)

    def at_work(self) -> list[tuple[Task, float]]:
        """The tasks that its threads work on, with the time since which they may do."""
        return [(task, since) for task, since in self.tasks.values() if since is not None]

    def ahead(self) -> int:
        """Samples that each of its threads has in advance, besides the task that it works on."""
        if len(self.tasks) <= self.threads:
            return 0
        waiting = [len(task.keys) for task, since in self.tasks.values() if since is None]
        return sum(waiting) // self.threads

    def knows(self, slot: Slot) -> None:
        """Record that the worker maps this slot, until the ring frees it."""
        number, freed = slot.id, self.freed
        # The last reference to a slot may go in any thread: appending to a deque is safe there.
        self.slots[number] = weakref.ref(slot, lambda _: freed.append(number))

    def forget_freed(self) -> list[int]:
        """The slots that were freed, for the worker to unmap."""
        freed = [self.freed.popleft() for _ in range(len(self.freed))]
        for number in freed:
            self.slots.pop(number, None)
            self.mapped.forget(number)
        return freed


class ProcessPool:
    """Worker processes on this machine, each with a socket of its own.

    ``size``: the number of workers. ``crew``: they are the threads of fewer processes, see
    ``crew_sizes``. If such a process dies, any of the tasks that its threads worked on may be the
    reason, so each of them runs alone in a process when it is dealt again.

    User code runs in the workers only, never in the process of the pool: a crash or an endless loop
    there would end the training.
    """

    kind: ClassVar[str] = "processes"
    own_process: ClassVar[bool] = True
    divides_tasks: ClassVar[bool] = False

    def __init__(
        self,
        work: Work,
        size: int,
        seed: int,
        init: WorkerInit | None = None,
        choose_start: ChooseStart = as_program,
        clock: Callable[[], float] = time.monotonic,
        *,
        crew: bool = False,
    ) -> None:
        self.size = size
        self._threads = crew_sizes(size) if crew else [1] * size
        """The threads of each worker process."""
        self._pinned = not work.road.source.indexed
        """Some tasks are for one worker only."""
        self._paces: deque[float] = deque(maxlen=RECENT)
        """Seconds that a sample of each recent task took."""
        self._done: list[tuple[int, Outcome]] = []
        """Outcomes that were received and not reported yet; for the thread of the pool alone."""
        self.restarts = 0
        self._work = work
        self._seed = seed
        self._init = init
        self._choose_start = choose_start
        self._start: StartMethod = "program"
        self._clock = clock
        self._lock = threading.RLock()
        self._workers: dict[int, _WorkerHandle] = {}
        self._selector: selectors.BaseSelector | None = None
        self._reader: threading.Thread | None = None
        # A weak reference: a strong one would keep a forgotten loader alive.
        self._desk: Callable[[], Desk | None] = lambda: None
        self._work_fd: int | None = None
        self._digest = b""
        self._zygote: Zygote | None = None
        self._alone = False
        """The zygote has threads, so each worker is a program by itself."""
        self._wake: tuple[int, int] | None = None
        self._notified = False
        """The thread of the pool was woken, and has not given out tasks since."""
        self._closing = False
        self._failed_starts = FailedStarts()
        self._due: dict[int, float] = {}
        """Workers to start again, and when."""
        self._warning: str | None = None
        """For ``watch``, which gives it in the thread of the training loop."""
        self._watched = -math.inf
        """When workers were last looked at."""
        self._given_up = False
        """Workers are missing, and the training loop has got the error that says why."""
        self._pid = os.getpid()
        _pools.add(self)

    # What the engine calls.

    @property
    def starting(self) -> bool:
        # Without the lock, which is held while a dead worker is waited for.
        return (
            self._reader is not None
            and not self._given_up
            and not any(worker.ready for worker in list(self._workers.values()))
        )

    def start(self, desk: Desk) -> None:
        if self._reader is not None:
            return
        self._desk = weakref.ref(desk)
        self._closing = self._notified = False
        self._pid = os.getpid()
        self._failed_starts = FailedStarts()
        self._due, self._warning, self._given_up = {}, None, False
        self._start = self._choose_start()
        if self._start == "program":  # first: it raises if the pipeline cannot be pickled
            self._work_fd = self._share_work()
        self._selector = selectors.DefaultSelector()
        self._wake = os.pipe()
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        # Workers must be started by a thread that does not end before them. A fork is best taken
        # from the first thread of a program, while that has no other.
        here = outlives_workers()
        if here:
            self._start_workers(range(len(self._threads)))
        self._reader = threading.Thread(
            target=self._read,
            args=(() if here else range(len(self._threads)),),
            name="penstock-workers",
            daemon=True,
        )
        self._reader.start()

    def notify(self) -> None:
        if self._reader is not None and threading.get_ident() == self._reader.ident:
            self._serve_all()
            return
        # Sending tasks here would hold up the training loop.
        with self._lock:
            if self._closing or self._notified or self._wake is None:
                return
            self._notified = True
            os.write(self._wake[1], b"x")

    def help(self) -> bool:
        return False

    def cancel(self, tasks: Collection[int]) -> None:
        pass

    def watch(self, limit: float | None) -> None:
        now = self._clock()
        if self._warning is None and not self._given_up and now - self._watched < WATCH_EVERY:
            return  # the loop calls this after every batch that it waited for
        self._watched = now
        with self._lock:
            warning, self._warning = self._warning, None
            if self._given_up:
                self._try_again()
            for worker in self._workers.values():
                if not worker.ready:
                    self._watch_start(worker, now - worker.since, limit)
                for task, since in worker.at_work():
                    if limit is not None and now - since > limit:
                        worker.reason = f"no answer for {limit:g} s"
                        worker.late.add(task.id)
                    elif now - since > WARN_AFTER and task.id not in worker.warned:
                        worker.warned.add(task.id)
                        warnings.warn(
                            f"worker {worker.number} (process {worker.process.pid}) has been "
                            f"working on samples {task.keys.indices[:8]} for more than "
                            f"{WARN_AFTER:g} s. Give the loader timeout= (seconds) to have such a "
                            "worker killed and its samples tried again.",
                            RuntimeWarning,
                            stacklevel=2,
                        )
                if worker.late:
                    _kill(worker)
        if warning is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)

    def _watch_start(self, worker: _WorkerHandle, seconds: float, limit: float | None) -> None:
        if limit is not None and seconds > max(limit, START_LIMIT):
            worker.reason = f"not ready after {seconds:.0f} s"
            _kill(worker)
        elif seconds > START_LIMIT and -1 not in worker.warned:
            worker.warned.add(-1)
            self._warning = (
                f"worker {worker.number} (process {worker.process.pid}) has not been ready for "
                f"{seconds:.0f} s since its start. It may wait for an import, or be stopped. With "
                "timeout= (seconds) the loader kills such a worker and starts another."
            )

    def outdated(self) -> bool:
        if self._start == "fork":
            # A forked worker has all of this process as it was, such as variables of modules: it
            # takes less time to fork again than to find out whether something was changed.
            return True
        # The digest has the addresses of arrays, not their contents: comparing contents would
        # cost as much as sending them again.
        return self._digest != self._packed().digest()

    def runs_here(self) -> bool:
        return threading.current_thread() is self._reader

    def close(self, limit: float | None = None) -> set[int]:
        if os.getpid() != self._pid:
            return set()  # a fork of the training process: the workers are not ours
        with self._lock:
            self._closing = True
            workers = list(self._workers.values())
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.wire.send(EndWorker())
        if self._wake is not None:
            os.write(self._wake[1], b"x")
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._reader = None
        self._end_workers()
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

    def _start_workers(self, numbers: Iterable[int]) -> None:
        """Start these workers; called by threads that live as long as the workers."""
        with self._lock:
            for number in numbers:
                if self._closing:
                    return
                try:
                    self._spawn(number)
                except OSError as error:
                    reason = f"cannot create a process: {error}"
                    self._start_again(number, reason, outside=True)

    def _restart_workers(self, numbers: list[int]) -> None:
        self.restarts += len(numbers)
        self._start_workers(numbers)

    def _start_again(self, number: int, reason: str, *, outside: bool) -> None:
        """Start a worker again that ended before it was ready, perhaps later, or give up."""
        pause = self._failed_starts.pause(number, outside=outside)
        count = self._failed_starts.count(number)
        if pause is None:
            self._give_up(
                WorkerError(
                    f"worker {number} was started {count} times and ended each time before it was "
                    f"ready (the last time: {reason}). "
                    + (
                        "Something ends new processes; if it is SIGKILL, the machine or the "
                        "container may have run out of memory: use fewer workers."
                        if outside
                        else "Its output on stderr may say why."
                    )
                    + " workers=0 runs the pipeline in this process."
                )
            )
            return
        if count > 2:
            self._warning = (
                f"worker {number} was started {count} times and ended each time before it was "
                f"ready (the last time: {reason}). It is started again with growing pauses; after "
                f"{MOST_KILLED} times the loader raises WorkerError."
            )
        if pause:
            self._due[number] = self._clock() + pause
        else:
            self._restart_workers([number])

    def _give_up(self, error: WorkerError) -> None:
        self._given_up = True
        self._due.clear()
        self._report_broken(error)

    def _try_again(self) -> None:
        """The training loop waits for batches after it got an error: start the missing workers."""
        self._given_up = False
        self._failed_starts = FailedStarts()
        now = self._clock()
        self._due = {n: now for n in range(len(self._threads)) if n not in self._workers}
        if self._wake is not None:
            os.write(self._wake[1], b"x")

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
        first, threads = sum(self._threads[:number]), self._threads[number]
        process: WorkerProcess
        try:
            if self._start == "fork":
                infos = [
                    WorkerInfo(first + thread, self.size, self._seed, process=True)
                    for thread in range(threads)
                ]
                close = partial(_close_in_child, ours)
                process = Fork(theirs, close, self._work, infos, self._init, os.getpid())
            else:
                process = self._start_program(first, threads, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _WorkerHandle(number, wire, process, self._clock(), first, threads)
        if self._alone and self._work_fd is not None:
            with contextlib.suppress(OSError):  # it died at once: the reader thread notices
                setup = WorkerSetup(list(sys.path), first, self.size, self._seed, threads)
                wire.send(setup, [self._work_fd])
        self._workers[number] = worker
        if self._selector is not None:
            self._selector.register(ours, selectors.EVENT_READ, worker)

    def _start_program(self, first: int, threads: int, theirs: socket.socket) -> WorkerProcess:
        """Have a worker forked by the zygote, which is started if there is none."""
        if self._alone or self._work_fd is None:
            return Program(theirs.fileno(), os.getpid())
        if self._zygote is not None and self._zygote.gone:
            self._end_zygote()
        if self._zygote is None:
            from penstock.engine.pools.zygote import Zygote

            self._zygote = Zygote(self._work_fd)
        return self._zygote.fork(first, threads, self.size, self._seed, theirs)

    def _end_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.end()

    # Sending and receiving.

    def _fill(self, desk: Desk, workers: list[_WorkerHandle]) -> None:
        """Give tasks to these workers, in one message each."""
        taken: dict[_WorkerHandle, list[Task]] = {}
        try:
            self._take(desk, workers, taken)
        finally:
            for worker, tasks in taken.items():
                self._send(worker, tasks)

    def _take(
        self, desk: Desk, workers: list[_WorkerHandle], taken: dict[_WorkerHandle, list[Task]]
    ) -> None:
        """Take tasks for these workers, as many as they lack."""
        # One task for each thread, then a second one: a few tasks go to different workers.
        for depth in range(1, TASKS_AHEAD + 1):
            for worker in workers:
                while worker.takes_tasks(depth):
                    task = desk.take(worker.first)
                    if task is None:
                        break
                    self._assign(worker, task, taken.setdefault(worker, []))
                else:
                    continue
                if not self._pinned:
                    return  # nor is there a task for another

    def _assign(self, worker: _WorkerHandle, task: Task, tasks: list[Task]) -> None:
        """Give the worker a task: add it to ``tasks``, which are to be sent, or keep it back."""
        alone = task.struck and worker.threads > 1
        if alone and worker.tasks:
            worker.tasks[task.id] = (task, None)
            worker.kept_back = task
            return
        worker.alone = alone
        worker.add(task, self._clock())
        tasks.append(task)

    def _send(self, worker: _WorkerHandle, tasks: list[Task]) -> None:
        fds: list[int] = []
        freed = worker.forget_freed() if worker.freed else []
        fields: list[tuple[Any, ...]] = []
        try:
            for task in tasks:
                fields.append(self._sent(worker, task, fds))
                if len(fds) == MOST_NEW_SLOTS:
                    worker.wire.send(TasksSent(fields, freed), fds)
                    fields, freed, fds = [], [], []
            if fields:
                worker.wire.send(TasksSent(fields, freed), fds)
        except ConnectionError:
            pass  # it is dead: the reader thread deals the tasks again
        except OSError as error:
            # Such as too many open files. What the worker knows of slots is no longer certain.
            worker.reason = f"cannot be sent a task: {error}"
            _kill(worker)
            self._report_broken(WorkerError(f"cannot send a task to a worker process: {error}"))

    def _sent(self, worker: _WorkerHandle, task: Task, fds: list[int]) -> TaskSent:
        """A task as it is sent to a worker. The descriptor of a new slot is added to ``fds``."""
        slot, new_slot = None, False
        if task.slot is not None:
            slot = task.slot.id
            mapped, unmapped = worker.mapped.touch(slot)
            if not mapped:
                new_slot = True
                fds.append(task.slot.fd)
                worker.knows(task.slot)
            if unmapped is not None:
                worker.slots.pop(unmapped, None)
        layout = None
        if task.layout is not None and worker.layout is not task.layout:
            worker.layout = task.layout
            layout = bytes(pack(task.layout).tobytes())
        keys = task.keys
        return TaskSent(
            task.id,
            task.kind,
            keys.epoch,
            keys.indices,
            keys.replicas,
            task.first,
            slot,
            new_slot,
            layout,
            task.number,
            task.resumed,
        )

    def _read(self, starting: Iterable[int]) -> None:
        """Receive messages, and replace workers that end. ``starting``: workers to start first."""
        try:
            self._start_workers(starting)
            while not self._closing and self._selector is not None:
                self._receive_next()
        finally:
            # The kernel kills workers that are left when this thread ends, if it started them.
            self._end_workers()

    def _receive_next(self) -> None:
        """Handle the next messages, or start the workers whose pause is over."""
        try:
            pause = None
            if self._due:
                pause = max(0.0, min(self._due.values()) - self._clock())
            if self._selector is None:
                return
            served: list[_WorkerHandle] = []
            events = self._selector.select(pause)
            readable = {event.fd for event, _ in events}
            try:
                for event, _ in events:
                    worker: _WorkerHandle | None = event.data
                    if worker is None:
                        os.read(event.fd, 1)
                        self._serve_all()
                    elif self._closing or self._workers.get(worker.number) is not worker:
                        continue  # buried because of another event
                    elif event.fd != worker.exit_fd:
                        if self._receive_from(worker):
                            served.append(worker)
                    elif worker.wire.socket.fileno() not in readable:
                        self._bury(worker)  # only now: its last messages came first
            finally:
                self._report_done()
                self._serve(served)
            now = self._clock()
            due = [number for number, at in self._due.items() if at <= now]
            for number in due:
                del self._due[number]
            self._restart_workers(due)
        except Exception as error:  # only ``close`` may end this thread
            self._report_broken(error)

    def _serve_all(self) -> None:
        """Give tasks to all workers that lack some."""
        desk = self._desk()
        with self._lock:
            self._notified = False
            if desk is not None and not self._closing:
                self._fill(desk, list(self._workers.values()))

    def _serve(self, workers: list[_WorkerHandle]) -> None:
        """Give workers that have finished tasks others, and rest if all have some in advance."""
        desk = self._desk()
        if desk is None or not workers:
            return
        with self._lock:
            if self._closing:
                return
            self._fill(desk, workers)
        if self.size < REST_FROM or not self._paces or self._due:
            return
        relaxed, least = desk.relaxed(), 0
        del desk
        if not relaxed:
            with self._lock:
                ready = [worker.ahead() for worker in self._workers.values() if worker.ready]
            least = min(ready, default=0)
        self._rest(rest(least, min(self._paces), relaxed=relaxed))

    def _rest(self, seconds: float) -> None:
        """Let messages collect, unless the training loop wants something."""
        if seconds and self._wake is not None:
            wake = select.poll()  # select() refuses descriptors from 1024 on
            wake.register(self._wake[0], select.POLLIN)
            wake.poll(1e3 * seconds)

    def _receive_from(self, worker: _WorkerHandle) -> bool:
        """Handle a message of this worker. Returns whether the worker has finished a task."""
        try:
            return self._receive(worker)
        except BaseException as error:
            # A message is lost: another worker does the tasks of this one.
            worker.reason = f"its message cannot be received: {error}"
            _kill(worker)
            raise

    def _receive(self, worker: _WorkerHandle) -> bool:
        received = worker.wire.receive()
        if received is None:
            self._bury(worker)
            return False
        message, _ = received
        if isinstance(message, TaskDone):
            self._take_back(worker, message)
            return True
        if isinstance(message, Started):
            worker.ready = True
            exit_fd = worker.open_exit()
            if exit_fd is not None and self._selector is not None:
                self._selector.register(exit_fd, selectors.EVENT_READ, worker)
            self._failed_starts.ready(worker.number)
            self.notify()
        elif isinstance(message, CannotStart):
            worker.refused = True
            self._give_up(
                WorkerError(
                    f"a worker process could not unpickle the pipeline:\n{message.details}\n"
                    "A worker has the sys.path of this process; modules that the pipeline uses "
                    "must be importable from there. workers=0 runs the pipeline in this process."
                )
            )
        return False

    def _take_back(self, worker: _WorkerHandle, message: TaskDone) -> None:
        with self._lock:
            worker.settle(message.id, self._clock())
            if worker.kept_back is not None and len(worker.tasks) == 1:
                task, worker.kept_back = worker.kept_back, None
                tasks: list[Task] = []
                del worker.tasks[task.id]
                self._assign(worker, task, tasks)
                self._send(worker, tasks)
        if message.rows:
            self._paces.append(message.busy / message.rows)
        self._done.append((message.id, outcome_of(message)))

    def _report_done(self) -> None:
        """Report all outcomes that were received, so that the training loop is woken once."""
        done, self._done = self._done, []
        desk = self._desk()
        if desk is not None and done:
            desk.done_all(done)

    def _bury(self, worker: _WorkerHandle) -> None:
        """Deal the tasks of a dead worker again, and start another worker in its place."""
        self._report_done()
        with self._lock:
            if self._closing or self._selector is None:
                return
            self._selector.unregister(worker.wire.socket)
            if worker.exit_fd is not None:
                self._selector.unregister(worker.exit_fd)
            code = worker.process.end(1.0)
            worker.close()
            reason = worker.reason or worker.process.error or how_it_ended(code)
            lost = list(worker.tasks)
            guilty = worker.late or {task.id for task, _ in worker.at_work()}
            if worker.process.innocent:
                guilty = set()
            worker.tasks.clear()
            del self._workers[worker.number]
            if not self._given_up and not worker.refused and not _exiting.is_set():
                if worker.ready:
                    self._restart_workers([worker.number])
                elif worker.process.declined:
                    self._alone = True
                    self._start_workers([worker.number])
                else:
                    outside = not worker.reason and (
                        bool(worker.process.error) or killed_from_outside(code)
                    )
                    self._start_again(worker.number, reason, outside=outside)
        desk = self._desk()
        if desk is None:
            return
        # A worker begins tasks in the order in which they were sent. The last one is reported
        # first, because each becomes the next to be dealt.
        for task in reversed(lost):
            desk.lost(task, guilty=task in guilty, reason=reason)
        del desk
        self.notify()

    def _end_workers(self) -> None:
        """End the workers that are left, in the thread of ``_read`` if it started them."""
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            # An idle worker ends at once; one that works or still starts is killed at once.
            worker.process.end(2.0 if worker.ready and not worker.tasks else 0.0)
            worker.close()
        self._end_zygote()

    def _report_broken(self, error: BaseException) -> None:
        desk = self._desk()
        if desk is not None:
            desk.broken(error)


def crew_sizes(workers: int) -> list[int]:
    """The number of threads of each process of a crew with this many workers.

    >>> crew_sizes(3), crew_sizes(9), crew_sizes(32)
    ([3], [3, 3, 3], [4, 4, 4, 4, 4, 4, 4, 4])
    """
    processes = -(-workers // CREW_THREADS)
    return [len(range(number, workers, processes)) for number in range(processes)]


_exiting = threading.Event()
"""The interpreter is shutting down. Then ``multiprocessing`` ends forked workers, perhaps before
the pool is closed, and they must not be replaced."""

atexit.register(_exiting.set)  # runs before the hook of multiprocessing.util, imported above


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()
"""All pools of this process."""


def _close_in_child(ours: socket.socket) -> None:
    """Close the sockets of all pools, which a forked worker has copies of."""
    ours.close()
    for pool in list(_pools):
        for worker in list(pool._workers.values()):
            worker.wire.close()
        if pool._selector is not None:
            pool._selector.close()
        for fd in pool._wake or ():
            os.close(fd)


def _kill(worker: _WorkerHandle) -> None:
    if worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)
