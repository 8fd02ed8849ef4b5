"""The contract of pools: workers that take tasks from the engine and hand back outcomes.

Pools pull: a free worker takes the next task, so a slow worker never holds tasks that another could
do. To the engine, pools of all kinds look the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from penstock.engine.pools.runner import LayoutChanged, Runner, TaskReport
from penstock.engine.schedule import TaskKind
from penstock.engine.slots import Layout, Slot
from penstock.keyed import Keys


@dataclass(slots=True)
class Task:
    """Work for one worker: samples to prepare, and where their rows go.

    ``first``: the row of the first sample in ``columns``. ``number``: of the batch in its epoch or
    stream.
    """

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
    """The result of a task: ``error``, ``changed``, or neither.

    ``value``: the collated batch of a task of kind ``"whole"`` or ``"pull"``. ``layout``: the
    result of a ``"probe"``. ``changed``: a sample did not have the layout of the batch.
    """

    report: TaskReport
    value: Any = None
    layout: Layout | None = None
    error: BaseException | None = None
    changed: bool = False


class Desk(Protocol):
    """The engine as pools see it. Safe to call from any thread.

    ``starved``: tasks wait for a slot. The training loop releases slots without a notification.
    """

    starved: bool

    def take(self, worker: int) -> Task | None:
        """The next task for this worker; ``None`` if there is none at present."""

    def done(self, task: int, outcome: Outcome) -> None:
        """Report the outcome of a task."""

    def lost(self, task: int, *, guilty: bool, reason: str) -> None:
        """Report that the worker died while working on this task (``guilty``), or before it."""

    def broken(self, error: BaseException) -> None:
        """Report that the pool cannot go on."""


class Pool(Protocol):
    """Workers of one kind. ``start`` may be called again after ``close``."""

    kind: ClassVar[str]
    size: int
    own_process: ClassVar[bool]
    restarts: int

    def start(self, desk: Desk) -> None:
        """Start the workers, without waiting until they are ready."""

    def notify(self) -> None:
        """Wake idle workers: there are tasks to take."""

    def help(self) -> bool:
        """Do one task in the caller's thread. Returns false if the pool does not work there."""

    def watch(self, limit: float | None) -> None:
        """Look for workers that have been at one task for more than ``limit`` seconds."""

    def outdated(self) -> bool:
        """Whether the dataset was changed since workers got their copy of it."""

    def close(self, limit: float | None = None) -> set[int]:
        """End all workers. Returns the tasks of workers that could not be ended.

        Processes can always be killed. A thread cannot: one that has been at its task for more
        than ``limit`` seconds, the timeout of the loader, is left behind; without a limit,
        ``close`` waits for it. ``start`` may be called afterwards.
        """


def run(runner: Runner, task: Task) -> Outcome:
    """Run a task in this thread. Exceptions become part of the outcome."""
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
