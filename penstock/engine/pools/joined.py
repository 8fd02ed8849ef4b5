"""What pools that join the workers of another pool with more help have in common.

The workers of ``local`` take tasks as ever. A thread of the joined pool deals tasks to the others:
to a device, or to the workers of other machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from penstock.engine.pools.pool import Desk, Pool


class JoinedPool:
    """The part of the contract ``Pool`` that is that of ``local``, and a bell for the thread.

    ``_wake`` protects what a subclass has, ``_notified`` included. The engine is never called with
    it.
    """

    def __init__(self, local: Pool) -> None:
        self.local = local
        self.own_process = local.own_process
        self.divides_tasks = local.divides_tasks
        self._desk: Callable[[], Desk | None] = lambda: None
        self._wake = threading.Condition()
        self._notified = False
        """Tasks may have come since the thread last looked."""
        self._closing = True
        self._thread: threading.Thread | None = None

    @property
    def size(self) -> int:
        return self.local.size

    @property
    def restarts(self) -> int:
        return self.local.restarts

    @property
    def starting(self) -> bool:
        return self.local.starting

    def notify(self) -> None:
        self.local.notify()
        self._ring()

    def _ring(self) -> None:
        with self._wake:
            self._notified = True
            self._wake.notify_all()

    def help(self) -> bool:
        return self.local.help()

    def cancel(self, tasks: Collection[int]) -> None:
        # The engine holds its lock. It drops outcomes that are not wanted any more.
        self.local.cancel(tasks)

    def watch(self, limit: float | None) -> None:
        self.local.watch(limit)

    def outdated(self) -> bool:
        return self.local.outdated()

    def runs_here(self) -> bool:
        return self.local.runs_here() or threading.current_thread() is self._thread
