"""The pool without workers: the training loop prepares samples itself when it asks for a batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from penstock.engine.pools.pool import Desk
from penstock.engine.pools.runner import Runner, Work, WorkerInfo


class InlinePool:
    """Runs tasks in the thread of the training loop."""

    kind: ClassVar[str] = "none"
    own_process: ClassVar[bool] = False
    divides_tasks: ClassVar[bool] = False
    restarts = 0
    starting = False

    def __init__(self, work: Work, seed: int) -> None:
        self.size = 0
        self._runner = Runner(work, WorkerInfo(0, 1, seed, process=False))
        self._desk: Desk | None = None

    def start(self, desk: Desk) -> None:
        self._desk = desk

    def notify(self) -> None:
        pass

    def help(self) -> bool:
        task = self._desk.take(0) if self._desk is not None else None
        if task is None or self._desk is None:
            return False
        self._desk.done(task.id, self._runner.run(task))
        return True

    def cancel(self, tasks: Collection[int]) -> None:
        pass

    def watch(self, limit: float | None) -> None:
        pass

    def outdated(self) -> bool:
        return False

    def runs_here(self) -> bool:
        return False

    def close(self, limit: float | None = None) -> set[int]:
        self._desk = None
        return set()
