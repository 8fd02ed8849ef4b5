"""Outcomes as messages: what a worker process answers, and what is made of it."""

from __future__ import annotations

import traceback
from typing import Any

from penstock.engine.pools.pool import InSlot, Outcome
from penstock.engine.pools.runner import Report
from penstock.errors import WorkerError
from penstock.serialize import pack, unpack


class WorkerTraceback(Exception):
    """Where in the worker it happened."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def to_message(task: int, outcome: Outcome, nbytes: int | None) -> list[Any]:
    """The answer to a task; ``nbytes`` is the size of the batch that was packed into the slot."""
    report = outcome.report
    error, layout, objects = outcome.error, outcome.layout, report.objects
    return [
        "done",
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
    ]


def from_message(message: list[Any]) -> Outcome:
    _, _, rows, taken, busy, tally, offers, bad, objects, nbytes, layout, changed, error = message
    if error is not None:
        return Outcome(Report(), error=unpack_error(error))
    report = Report(
        rows,
        taken,
        busy,
        tally,
        [(c, i, n) for c, i, n in offers],
        [(i, a, b, c) for i, a, b, c in bad],
        objects=unpack(objects) if objects is not None else {},
    )
    return Outcome(
        report,
        value=InSlot(nbytes) if nbytes is not None else None,
        layout=unpack(layout) if layout is not None else None,
        changed=changed,
    )


def unpack_error(frame: bytes) -> BaseException:
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
    """An exception, its cause and its traceback, in whatever form can travel."""
    text = "".join(traceback.format_exception(error))
    for pair in ((error, error.__cause__), (error, None)):
        try:
            frame = bytes(pack((*pair, text)).tobytes())
            unpack(frame)
        except Exception:  # exceptions of the user's may refuse to pickle, or to come back
            continue
        return frame
    return bytes(pack((None, None, text)).tobytes())
