"""Worker threads: for operations that release the GIL. No start-up cost, no copies."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import ClassVar

from penstock.engine.pools.pool import Desk
from penstock.engine.pools.runner import Outcome, Runner, Task, Work, WorkerInfo
from penstock.errors import WorkerError

_log = logging.getLogger("penstock.workers")

LOG_AFTER = 5.0
"""Seconds after which ``close`` logs which thread it waits for."""

WARN_AFTER = 60.0
"""Seconds after which a task that is not done yet is warned about."""

IDLE_WAIT = 5.0
"""Seconds after which an idle thread checks whether the loader still exists."""

FIRST_RETRY, LONGEST_RETRY = 5e-3, 0.2
"""Seconds after which a thread tries again to take a task that had no slot. The wait doubles each
time up to the longest, because a training loop may hold its batch for long."""


class ThreadPool:
    """Threads of the training process."""

    kind: ClassVar[str] = "threads"
    own_process: ClassVar[bool] = False
    divides_tasks: ClassVar[bool] = False
    restarts = 0
    starting = False

    def __init__(
        self, work: Work, size: int, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.size = size
        self._work = work
        self._seed = seed
        self._clock = clock
        # A weak reference: a strong one would keep a forgotten loader alive.
        self._desk: Callable[[], Desk | None] = lambda: None
        self._closing = False
        self._notified = object()
        """Another object after each notification."""
        self._asleep: deque[threading.Lock] = deque()
        """For each thread that waits for tasks the lock that wakes it."""
        self._pinned = not work.road.source.indexed
        """Some tasks are for one worker only."""
        self._threads: list[threading.Thread] = []
        self._current: dict[int, tuple[Task, float]] = {}
        self._warned: set[int] = set()

    def start(self, desk: Desk) -> None:
        if self._threads:
            return
        self._desk = weakref.ref(desk)
        self._closing = False
        for number in range(self.size):
            info = WorkerInfo(number, self.size, self._seed, process=False)
            thread = threading.Thread(
                target=self._serve,
                args=(number, Runner(self._work, info)),
                name=f"penstock-{number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def notify(self) -> None:
        self._notified = object()
        # A thread that gets a task wakes the next one, so the training loop need not wake them all.
        self._wake(len(self._asleep) if self._closing or self._pinned else 1)

    def _wake(self, threads: int) -> None:
        try:
            for _ in range(threads):
                self._asleep.popleft().release()
        except IndexError:
            pass  # no more of them wait

    def _sleep(self, seen: object, seconds: float) -> None:
        """Wait until another thread wakes this one, unless there was a notification since."""
        lock = threading.Lock()
        lock.acquire()
        self._asleep.append(lock)
        # Only now: a notification from here on finds the lock.
        if self._notified is seen and not self._closing and lock.acquire(timeout=seconds):
            return
        with contextlib.suppress(ValueError):  # it was woken meanwhile
            self._asleep.remove(lock)

    def help(self) -> bool:
        return False

    def cancel(self, tasks: Collection[int]) -> None:
        pass

    def _working(self) -> Iterator[tuple[int, Task, float]]:
        """Each thread that works: its number, its task, and for how many seconds."""
        now = self._clock()
        for number, (task, since) in list(self._current.items()):
            yield number, task, now - since

    def watch(self, limit: float | None) -> None:
        for number, task, seconds in self._working():
            if limit is not None and seconds > limit:
                raise WorkerError(
                    f"thread {number} has been working on {_samples_of(task)} for more than the "
                    f"loader's timeout of {limit:g} s, and a thread cannot be ended from outside. "
                    'Give a longer timeout=, or kind="processes", whose workers are killed and '
                    f"their samples tried again. The thread is here:\n{self._stack(number)}"
                )
            if seconds > WARN_AFTER and task.id not in self._warned:
                self._warned.add(task.id)
                warnings.warn(
                    f"thread {number} has been working on {_samples_of(task)} for more than "
                    f"{WARN_AFTER:g} s. Give the loader timeout= (seconds) to make this an error.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _stack(self, number: int) -> str:
        frame = sys._current_frames().get(self._threads[number].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def outdated(self) -> bool:
        return False

    def runs_here(self) -> bool:
        return threading.current_thread() in self._threads

    def close(self, limit: float | None = None) -> set[int]:
        self._closing = True
        self.notify()
        hanging = [self._join(number, thread, limit) for number, thread in enumerate(self._threads)]
        # Threads that are left behind no longer belong to the pool; ``start`` makes new ones.
        self._threads, self._current = [], {}
        return {task.id for task in hanging if task is not None}

    def _join(self, number: int, thread: threading.Thread, limit: float | None) -> Task | None:
        """Wait for a thread to end. Returns its task if that exceeds ``limit``."""
        logged, wait = False, 0.05
        while True:
            thread.join(wait)
            wait = min(2 * wait, 1.0)
            if not thread.is_alive():
                return None
            working = {who: (task, seconds) for who, task, seconds in self._working()}
            if number not in working:
                continue  # it is between two tasks, and ends before it takes another
            task, seconds = working[number]
            if limit is not None and seconds > limit:
                _log.warning(
                    "thread %d is left running: it has been working on %s for %.0f s, longer than "
                    "the loader's timeout of %g s, and a thread cannot be ended from outside.",
                    number,
                    _samples_of(task),
                    seconds,
                    limit,
                )
                return task
            if not logged and seconds > LOG_AFTER:
                logged = True
                _log.warning(
                    "close() waits for thread %d, which has been working on %s for %.0f s. The "
                    "thread is here:\n%s",
                    number,
                    _samples_of(task),
                    seconds,
                    self._stack(number),
                )

    def _serve(self, number: int, runner: Runner) -> None:
        retry, slept = FIRST_RETRY, False
        threads, current = self._threads, self._current
        # A thread that was left behind finds a new list of threads in its pool, and ends.
        while not self._closing and self._threads is threads:
            seen = self._notified
            desk = self._desk()
            if desk is None:
                return
            task = take_task(desk, number)
            if task is None:
                patience = IDLE_WAIT
                if desk.starved:
                    patience, retry = retry, min(2 * retry, LONGEST_RETRY)
                del desk
                self._sleep(seen, patience)
                slept = True
                continue
            if slept:
                self._wake(1)
            retry, slept = FIRST_RETRY, False
            current[number] = (task, self._clock())
            outcome = run_task(runner, task)
            del current[number]
            desk.done(task.id, outcome)
            del desk, task, outcome


def take_task(desk: Desk, number: int) -> Task | None:
    """The next task for a thread. An error, such as no memory for a slot, ends the epoch."""
    try:
        return desk.take(number)
    except Exception as error:
        desk.broken(error)
        return None


def run_task(runner: Runner, task: Task) -> Outcome:
    """Run a task in a thread, which nothing that the task raises may end without a word."""
    try:
        return runner.run(task)
    except BaseException as error:
        return Outcome(runner.unfinished(), error=_not_an_exception(task, error))


def _not_an_exception(task: Task, error: BaseException) -> WorkerError:
    """The error for user code that raised SystemExit or the like."""
    return WorkerError(
        f"preparing {_samples_of(task)} raised {type(error).__name__}({error}), which ends a "
        "program and is not an exception. Raise an exception there, such as ValueError."
    )


def _samples_of(task: Task) -> str:
    indices = task.keys.indices
    return f"sample {indices[0]}" if len(indices) == 1 else f"samples {indices[:8]}"
