"""What a worker process and its pool say to each other, as small records."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

from penstock.engine.pools.pool import InSlot, Outcome
from penstock.engine.pools.runner import Report
from penstock.engine.pools.wire import Vocabulary
from penstock.engine.schedule import TaskKind
from penstock.errors import WorkerError
from penstock.serialize import pack, unpack


class Setup(NamedTuple):
    """To a new worker, with the descriptor of its work: which worker it is."""

    path: list[str]
    number: int
    workers: int
    seed: int


class Started(NamedTuple):
    """From a worker: it takes tasks now."""


class CannotStart(NamedTuple):
    """From a worker that could not unpack its work."""

    details: str


class EndWorker(NamedTuple):
    """To a worker: end."""


class TaskSent(NamedTuple):
    """To a worker: a task. A new slot comes as a descriptor, a new ``layout`` packed.

    ``batch`` counts the batches of the worker's own stream, where it reads one.
    """

    id: int
    kind: TaskKind
    epoch: int
    indices: list[int]
    replicas: list[int] | None
    first: int
    slot: int | None
    layout: bytes | None
    batch: int


class TaskDone(NamedTuple):
    """From a worker: the outcome of a task.

    ``nbytes``: size of the collated batch in the slot. ``objects``, ``layout`` and ``error`` are
    packed.
    """

    id: int
    rows: int
    taken: int
    busy: float
    tally: list[Any]
    offers: list[tuple[int, int, int]]
    bad: list[tuple[int, str, str, str]]
    objects: bytes | None
    nbytes: int | None
    layout: bytes | None
    changed: bool
    error: bytes | None


VOCABULARY = Vocabulary(
    setup=Setup,
    started=Started,
    cannot_start=CannotStart,
    end=EndWorker,
    task=TaskSent,
    done=TaskDone,
)


class WorkerTraceback(Exception):
    """Where in the worker an error happened."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def done_message(task: int, outcome: Outcome, nbytes: int | None) -> TaskDone:
    """The message for an outcome."""
    report = outcome.report
    error, layout, objects = outcome.error, outcome.layout, report.objects
    return TaskDone(
        task,
        report.rows,
        report.taken,
        report.busy,
        report.tally,
        report.offers,
        report.bad,
        bytes(pack(objects).tobytes()) if objects else None,
        nbytes,
        bytes(pack(layout).tobytes()) if layout is not None else None,
        outcome.changed,
        pack_error(error) if error is not None else None,
    )


def outcome_of(message: TaskDone) -> Outcome:
    """The outcome that a message is about."""
    report = Report(
        message.rows,
        message.taken,
        message.busy,
        message.tally,
        [(number, index, cost) for number, index, cost in message.offers],
        [(index, name, stage, error) for index, name, stage, error in message.bad],
        objects=unpack(message.objects) if message.objects is not None else {},
    )
    return Outcome(
        report,
        value=InSlot(message.nbytes) if message.nbytes is not None else None,
        layout=unpack(message.layout) if message.layout is not None else None,
        error=unpack_error(message.error) if message.error is not None else None,
        changed=message.changed,
    )


def unpack_error(frame: bytes) -> BaseException:
    """The exception that ``pack_error`` packed, with the worker's traceback as its cause."""
    error, cause, text = unpack(frame)
    if error is None:
        return WorkerError(f"a worker failed with an error that cannot be sent:\n{text}")
    if cause is not None:
        error.__cause__ = cause
        cause.__cause__ = WorkerTraceback(text)
    else:
        error.__cause__ = WorkerTraceback(text)
    return error  # type: ignore[no-any-return]


def pack_error(error: BaseException) -> bytes:
    """An exception with its cause and traceback; without those of them that do not pickle."""
    text = "".join(traceback.format_exception(error))
    for pair in ((error, error.__cause__), (error, None)):
        try:
            frame = bytes(pack((*pair, text)).tobytes())
            unpack(frame)
        except Exception:  # a user's exception may refuse to pickle, or to be rebuilt
            continue
        return frame
    return bytes(pack((None, None, text)).tobytes())
