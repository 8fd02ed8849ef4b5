"""Worker threads that stay in the compiled kernel, for roads that it runs by itself.

All threads share each task, which is a whole batch, sample by sample. None of that needs the GIL.
Python runs once per batch, so even 64 workers do not wait for the GIL or take it from the training
loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from penstock import native
from penstock.engine.pools.native_road import NativeRoad, NativeTask
from penstock.engine.pools.pool import Desk
from penstock.engine.pools.runner import Outcome, Runner, Task, TaskReport, Work
from penstock.engine.pools.threads import (
    FIRST_RETRY,
    IDLE_WAIT,
    LONGEST_RETRY,
    ThreadPool,
    run_task,
    take_task,
)

_CLOSED, _TAKE, _DONE, _SAMPLE = range(4)
"""Why a worker comes back to Python: ``Reason`` in ``native/queue.h``."""


class NativePool(ThreadPool):
    """Threads of the training process that prepare samples in the compiled kernel."""

    divides_tasks: ClassVar[bool] = True

    def __init__(
        self,
        work: Work,
        size: int,
        seed: int,
        road: NativeRoad,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(work, size, seed, clock)
        self._road = road
        self._queue: Any = None
        self._jobs: dict[int, Any] = {}
        self._deferred: deque[Task] = deque()
        """Tasks that need a sample which a task in the queue is about to keep."""
        self._deferring = threading.Lock()
        self._retry = FIRST_RETRY

    def start(self, desk: Desk) -> None:
        if not self._threads:
            self._queue = native.kernel().Queue(self.size)
            self._road.forget_tasks()
        super().start(desk)

    def close(self, limit: float | None = None) -> set[int]:
        hanging = super().close(limit)
        # Jobs hold the memory of their batches.
        self._queue, self._jobs = None, {}
        self._deferred.clear()
        return hanging

    def notify(self) -> None:
        queue = self._queue
        if queue is None:
            return
        if self._closing:
            queue.close()
        else:
            queue.ask()

    def cancel(self, tasks: Collection[int]) -> None:
        queue, jobs = self._queue, self._jobs
        for number in tasks:
            job = jobs.get(number)
            if job is not None:
                queue.cancel(job)

    def _working(self) -> Iterator[tuple[int, Task, float]]:
        yield from super()._working()
        queue, jobs = self._queue, self._jobs
        for number, task_id, row, seconds in queue.running() if queue is not None else ():
            job = jobs.get(task_id)
            if job is not None:
                yield number, _one_sample(job.tag.task, row), seconds

    def _serve(self, number: int, runner: Runner) -> None:
        try:
            self._work_in_kernel(number, runner)
        except Exception as error:  # without a word, the loop would wait for this thread for ever
            desk = self._desk()
            if desk is None:
                raise
            desk.broken(error)

    def _work_in_kernel(self, number: int, runner: Runner) -> None:
        queue, current, threads = self._queue, self._current, self._threads
        while not self._closing and self._threads is threads:
            reason, job, row = queue.work(number, IDLE_WAIT)
            if reason == _CLOSED:
                return
            if reason == _SAMPLE:
                # A thread that was left behind has no right to the rows any more.
                if not self._closing and self._threads is threads:
                    held: NativeTask = job.tag
                    current[number] = (_one_sample(held.task, row), self._clock())
                    self._road.run_in_python(held, row, runner)
                    del current[number]
                    if held.errors:
                        queue.cancel(job)
                    del held
                queue.settle(job)
                del job
                continue
            desk = self._desk()
            if desk is None:
                return
            if reason == _DONE:
                task = job.tag.task
                self._jobs.pop(task.id, None)
                desk.done(task.id, self._outcome(job))
                self._submit_deferred(desk)
            del job
            self._take_tasks(desk, number, runner)
            del desk

    def _outcome(self, job: Any) -> Outcome:
        try:
            return self._road.outcome(job)
        except Exception as error:
            return Outcome(TaskReport(), error=error)

    def _take_tasks(self, desk: Desk, number: int, runner: Runner) -> None:
        """Put all tasks that there are into the queue."""
        while (task := take_task(desk, number)) is not None:
            self._retry = FIRST_RETRY
            if not self._road.accepts(task):
                self._current[number] = (task, self._clock())
                outcome = run_task(runner, task)
                del self._current[number]
                desk.done(task.id, outcome)
                continue
            if self._road.reads_in_python:
                self._queue.ask()  # another worker reads the files of the next task meanwhile
            self._submit(desk, task)
        if desk.starved:
            retry, self._retry = self._retry, min(2 * self._retry, LONGEST_RETRY)
            self._queue.ask(retry)

    def _submit(self, desk: Desk, task: Task) -> None:
        """Put a task into the queue, or defer it."""
        held = None
        try:
            # Under the lock: the task that this one waits for must not end before it is deferred.
            with self._deferring:
                held = self._road.look_up(task)
                if held is None:
                    self._deferred.append(task)
                    return
            job = self._road.job(held)
        except Exception as error:
            desk.done(task.id, Outcome(TaskReport(), error=error))
            if held is not None:
                self._submit_deferred(desk)
            return
        self._jobs[task.id] = job
        self._queue.submit(job)

    def _submit_deferred(self, desk: Desk) -> None:
        with self._deferring:
            deferred = [self._deferred.popleft() for _ in range(len(self._deferred))]
        for task in deferred:
            self._submit(desk, task)


def _one_sample(task: Task, row: int) -> Task:
    """A task of one sample of this task, for messages."""
    keys = task.keys.cut(row, 1)
    return Task(task.id, task.kind, keys, task.first + row, None, None, (), task.number)
