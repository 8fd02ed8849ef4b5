"""The messages between a pool and its worker processes, as small records."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

from penstock.engine.pools.runner import InSlot, Outcome, TaskReport
from penstock.engine.pools.wire import Vocabulary
from penstock.engine.schedule import TaskKind
from penstock.errors import WorkerError
from penstock.serialize import pack, unpack
from penstock.stops.stop import Offer


class WorkerSetup(NamedTuple):
    """To a new worker: which worker it is. The descriptor of its work comes along.

    ``path``: ``sys.path`` of the training process. ``number``: of its first thread among all
    ``workers``; ``threads``: how many of these it is.
    """

    path: list[str]
    number: int
    workers: int
    seed: int
    threads: int


class Started(NamedTuple):
    """From a worker: it is ready to take tasks."""


class CannotStart(NamedTuple):
    """From a worker: it could not unpack its work. ``details``: the traceback."""

    details: str


class EndWorker(NamedTuple):
    """To a worker: end."""


class TaskSent(NamedTuple):
    """One of the tasks of a message.

    ``slot``: where its rows go; ``new_slot``: it is new to the worker, and its descriptor comes
    along with the message. ``layout``: packed, if it is not that of the last task. ``batch``: the
    number of the batch in the worker's own stream, if it reads one. ``resumed``: see ``BatchKeys``.
    """

    id: int
    kind: TaskKind
    epoch: int
    indices: list[int]
    replicas: list[int] | None
    first: int
    slot: int | None
    new_slot: bool
    layout: bytes | None
    batch: int
    resumed: tuple[int, bytes] | None


class TasksSent(NamedTuple):
    """To a worker: tasks (the fields of ``TaskSent``), to be done in this order.

    ``freed``: slots that are not used any more, for the worker to unmap.
    """

    tasks: list[tuple[Any, ...]]
    freed: list[int]


class TaskDone(NamedTuple):
    """From a worker: the outcome of a task. ``more``: the fields of ``Particulars``, if any."""

    id: int
    rows: int
    taken: int
    busy: float
    tally: list[Any]
    more: list[Any] | None


class Particulars(NamedTuple):
    """What most outcomes do not have.

    ``nbytes``: size of the collated batch in the slot. ``objects``, ``layout`` and ``error`` are
    packed. ``reached``: see ``BatchKeys``.
    """

    offers: list[Offer]
    bad: list[tuple[int, str, str, str]]
    objects: bytes | None
    nbytes: int | None
    layout: bytes | None
    changed: bool
    error: bytes | None
    reached: bytes | None


VOCABULARY = Vocabulary(
    setup=WorkerSetup,
    started=Started,
    cannot_start=CannotStart,
    end=EndWorker,
    tasks=TasksSent,
    done=TaskDone,
)


class WorkerTraceback(Exception):
    """The traceback of an error in a worker process, as text; the cause of the error here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def done_message(task: int, outcome: Outcome, nbytes: int | None) -> TaskDone:
    """The message for an outcome."""
    report = outcome.report
    error, layout, objects = outcome.error, outcome.layout, report.objects
    more: list[Any] | None = None
    unusual = (error, layout, nbytes, report.reached) != (None,) * 4 or outcome.changed
    if unusual or report.offers or report.bad or objects:
        more = list(
            Particulars(
                report.offers,
                report.bad,
                bytes(pack(objects).tobytes()) if objects else None,
                nbytes,
                bytes(pack(layout).tobytes()) if layout is not None else None,
                outcome.changed,
                pack_error(error) if error is not None else None,
                report.reached,
            )
        )
    return TaskDone(task, report.rows, report.taken, report.busy, report.tally, more)


def outcome_of(message: TaskDone) -> Outcome:
    """The outcome in a message."""
    report = TaskReport(message.rows, message.taken, message.busy, message.tally)
    if message.more is None:
        return Outcome(report)
    more = Particulars(*message.more)
    report.offers = [(number, index, cost) for number, index, cost in more.offers]
    report.bad = [(index, name, stage, error) for index, name, stage, error in more.bad]
    if more.objects is not None:
        report.objects = unpack(more.objects)
    report.reached = more.reached
    return Outcome(
        report,
        value=InSlot(more.nbytes) if more.nbytes is not None else None,
        layout=unpack(more.layout) if more.layout is not None else None,
        error=unpack_error(more.error) if more.error is not None else None,
        changed=more.changed,
    )


def unpack_error(frame: bytes) -> BaseException:
    """The exception that ``pack_error`` packed, with the worker's traceback as its cause."""
    error, cause, text = unpack(frame)
    if error is None:
        return WorkerError(
            "a worker failed with an error that cannot be pickled. Its traceback in the worker:\n"
            f"{text}"
        )
    if cause is not None:
        error.__cause__ = cause
        cause.__cause__ = WorkerTraceback(text)
    else:
        error.__cause__ = WorkerTraceback(text)
    return error  # type: ignore[no-any-return]


def pack_error(error: BaseException) -> bytes:
    """An exception packed with its cause and traceback.

    If they cannot be pickled, the cause is left out, and then the exception itself.
    """
    text = "".join(traceback.format_exception(error))
    for pair in ((error, error.__cause__), (error, None)):
        try:
            frame = bytes(pack((*pair, text)).tobytes())
            unpack(frame)
        except Exception:  # a user's exception may refuse to pickle, or to be rebuilt
            continue
        return frame
    return bytes(pack((None, None, text)).tobytes())
