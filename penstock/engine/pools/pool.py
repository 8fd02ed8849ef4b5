"""The contract of pools: workers that take tasks from the engine and hand back outcomes.

Pools pull: a free worker takes the next task, so a slow worker never holds tasks that another could
do. To the engine, pools of all kinds look the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

from penstock.engine.pools.runner import Outcome, Task


class Desk(Protocol):
    """The engine as pools see it. Safe to call from any thread.

    ``starved``: tasks wait for a slot. The training loop releases slots without a notification.
    """

    starved: bool

    def take(self, worker: int, *, away: int = 0) -> Task | None:
        """The next task for this worker; ``None`` if there is none at present.

        ``away``: at most this many samples, for a worker on another machine. It gets only rows that
        no worker has died on, and only what the workers of this machine leave.
        """

    def left_over(self) -> int:
        """Samples that the workers of this machine leave to those of other machines."""

    def relaxed(self) -> bool:
        """Whether the training loop has batches for a while.

        Then outcomes may be reported a little later. The loop notifies the pool if it has to wait.
        """

    def take_for_device(self) -> Task | None:
        """The next task for a device that prepares a part of each batch; ``None`` if there is
        none at present."""

    def device_lost(self) -> None:
        """Report that the device takes no more tasks, and that those it has are not done."""

    def done(self, task: int, outcome: Outcome) -> None:
        """Report the outcome of a task."""

    def done_all(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Report the outcomes of several tasks, for about the cost of one."""

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        """Report that the worker died while working on this task (``guilty``), or before it."""

    def wake(self) -> None:
        """Let the training loop, if it waits for a batch, look for something to do (``help``)."""

    def broken(self, error: BaseException) -> None:
        """Report that the pool cannot go on."""


class Pool(Protocol):
    """Workers of one kind. ``start`` may be called again after ``close``."""

    kind: ClassVar[str]

    @property
    def size(self) -> int:
        """The number of workers. Where other machines lend theirs, it changes."""

    @property
    def own_process(self) -> bool:
        """Whether the workers of this machine are processes."""

    @property
    def divides_tasks(self) -> bool:
        """Whether workers share a task, so that the engine need not cut batches for them."""

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""

    @property
    def starting(self) -> bool:
        """Whether workers were started, or will be started again, and none takes tasks yet."""

    def start(self, desk: Desk) -> None:
        """Start the workers, without waiting until they are ready."""

    def notify(self) -> None:
        """Wake idle workers: there are tasks to take."""

    def help(self) -> bool:
        """Do one task in the caller's thread. Returns false if there is none, or workers do it."""

    def cancel(self, tasks: Collection[int]) -> None:
        """Skip what is left of these tasks, if possible: their outcomes are no longer wanted."""

    def watch(self, limit: float | None) -> None:
        """Look for workers that have been at one task for more than ``limit`` seconds."""

    def outdated(self) -> bool:
        """Whether the dataset was changed since workers got their copy of it."""

    def runs_here(self) -> bool:
        """Whether the caller's thread is one of the workers, so that it cannot wait for them."""

    def close(self, limit: float | None = None) -> set[int]:
        """End all workers. Returns the tasks of workers that could not be ended.

        Processes can always be killed. A thread cannot: one that has been at its task for more
        than ``limit`` seconds, the timeout of the loader, is left behind; without a limit,
        ``close`` waits for it. ``start`` may be called afterwards.
        """
