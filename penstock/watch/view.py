"""What views of this machine show: its loaders, and its node if there is one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.watch.live import Course, History, loaders
from penstock.watch.place import LivePlace
from penstock.watch.snapshot import Snapshot

PATIENCE = 2.0
"""Seconds that a node may take to answer: a view goes on without."""


@dataclass
class View:
    """Looks again and again; every look knows what happened since the last.

    Other threads may ask what was seen meanwhile.
    """

    place: LivePlace = field(default_factory=LivePlace)
    history: History = field(default_factory=History)
    courses: list[Course] = field(default_factory=list)
    node: dict[str, Any] | None = None
    node_before: dict[str, Any] | None = None
    time: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> None:
        node = _node()
        now, found = time.time(), loaders(self.place)
        with self._lock:
            self.time, self.courses = now, self.history.add(found, now)
            self.node_before, self.node = self.node, node

    def snapshots(self) -> list[Snapshot]:
        """Every loader as it was seen last."""
        with self._lock:
            return [course.last for course in self.courses]

    def plain(self) -> dict[str, Any]:
        """As what JSON has."""
        with self._lock:
            return {
                "time": self.time,
                "loaders": [course.plain() for course in self.courses],
                "node": self.node,
            }

    def lines(self, *, plain: bool = False) -> list[str]:
        """As text."""
        from penstock.watch.rendering import lines_of

        out = lines_of(self.courses, plain=plain) or [self._nothing()]
        return [*out, *self._node_lines()]

    def _nothing(self) -> str:
        problem = self.place.problem()
        return f"No loader is running.{f' None could say so: {problem}' if problem else ''}"

    def _node_lines(self) -> list[str]:
        import penstock
        from penstock.node.rendering import lines_of

        node, before = self.node, self.node_before
        if node is None:
            return []
        if node.get("release") != penstock.__version__:
            return ["", f"node    process {node.get('pid')}, of Penstock {node.get('release')}"]
        return ["", *lines_of(node, self.time, before)]


def _node() -> dict[str, Any] | None:
    from penstock.node.look import look

    try:
        return look(patience=PATIENCE)
    except (PenstockError, OSError):  # one that hangs, or may not be asked; `status` says which
        return None
