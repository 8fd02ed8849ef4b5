"""A fault: what happens, its expected consequence, and the function that provokes it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.faults.run import FaultRun, NodeSettings

OTHERS = ("a", "b")
SUBJECT = "c"
"""The member that the fault happens to."""


@dataclass(frozen=True)
class Event:
    """When a fault happened, and the roles of the members.

    ``since`` is ``None`` if nobody's wait is measured. ``it``: processes of the affected member, if
    it continues. ``began``: the time at which it could start, if it had no batches before.
    ``pause``: seconds that it was stopped or slow by itself, which do not count as waiting.
    ``defects``: what went wrong, apart from batches.
    """

    since: float | None = None
    others: tuple[str, ...] = OTHERS
    it: tuple[str, ...] = ()
    began: float | None = None
    pause: float = 0.0
    defects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A fault, its expected consequence, and the function that provokes it."""

    name: str
    title: str
    follows: str
    provoke: Callable[[FaultRun, Namespace], Event]
    kind: Literal["threads", "processes"] = "threads"
    lag: Literal["detach", "wait"] = "detach"
    node: NodeSettings = field(default_factory=NodeSettings)
