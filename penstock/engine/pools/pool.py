"""What a pool is: workers that take tasks from the engine's desk and hand back outcomes.

Pools pull. A worker that is free asks the desk for the next task, so a slow one never sits on work
that another could do, and a pool of any kind, here or elsewhere, looks the same to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from penstock.engine.pools.runner import LayoutChanged, Report, Runner
from penstock.engine.schedule import TaskKind
from penstock.engine.slots import Layout, Slot
from penstock.keyed import Keys


@dataclass(slots=True)
class Task:
    """One piece of work: ``keys`` to prepare, and where their rows go."""

    id: int
    kind: TaskKind
    keys: Keys
    first: int
    slot: Slot | None
    layout: Layout | None
    columns: Sequence[Any]
    number: int = 0


@dataclass(frozen=True, slots=True)
class InSlot:
    """A collated batch that a worker process packed into the batch's slot."""

    nbytes: int


@dataclass(slots=True)
class Outcome:
    """What came of a task; one of ``error``, ``changed`` and the rest."""

    report: Report
    value: Any = None
    layout: Layout | None = None
    error: BaseException | None = None
    changed: bool = False


class Desk(Protocol):
    """The engine, as pools see it. Safe to call from any thread.

    ``starved``: there are tasks, but no memory for them, and some may come back without a notice.
    """

    starved: bool

    def take(self, worker: int) -> Task | None:
        """The next task for this worker, or ``None`` for now."""

    def done(self, task: int, outcome: Outcome) -> None:
        """A task has come to its end, good or bad."""

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        """The worker died, while working on this task (``guilty``) or before it came to it."""

    def broken(self, error: BaseException) -> None:
        """The pool cannot go on."""


class Pool(Protocol):
    """Workers of one kind. ``start`` may be called again after ``close``."""

    kind: ClassVar[str]
    size: int
    own_process: ClassVar[bool]
    restarts: int

    def start(self, desk: Desk) -> None:
        """Get the workers going, or at least on their way."""

    def notify(self) -> None:
        """There are tasks to take."""

    def help(self) -> bool:
        """Do one task in the caller's thread, if this pool works there; false if not."""

    def watch(self, limit: float | None) -> None:
        """Look for workers that hang: over a task for more than ``limit`` seconds."""

    def outdated(self) -> bool:
        """Workers have a copy of the dataset, and it is not like the original any more."""

    def close(self, limit: float | None = None) -> set[int]:
        """End all workers. Returns the tasks of workers that could not be ended.

        Processes are killed, so they never count. A thread cannot be killed: one that has been at
        its task for more than ``limit`` seconds, the loader's timeout, is left behind; without a
        limit, ``close`` waits for it. Call ``start`` to begin again.
        """


def run(runner: Runner, task: Task) -> Outcome:
    """Do a task in this thread."""
    try:
        if task.kind == "rows":
            if task.layout is None:
                raise TypeError("rows without a layout")
            return Outcome(runner.rows(task.keys, task.columns, task.layout, task.first))
        if task.kind == "whole":
            value, report = runner.whole(task.keys)
            return Outcome(report, value)
        if task.kind == "pull":
            value, report = runner.pull(task.number, len(task.keys), task.keys.epoch)
            return Outcome(report, value)
        layout, report = runner.probe(task.keys)
        return Outcome(report, layout=layout)
    except LayoutChanged:
        return Outcome(runner.unfinished(), changed=True)
    except Exception as error:
        return Outcome(runner.unfinished(), error=error)
