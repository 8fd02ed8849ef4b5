"""Publishing the status of a loader: a small file, written by its workers or its loop."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
from typing import TYPE_CHECKING

from penstock import config
from penstock.engine.feed import Queue
from penstock.host.at_exit import Closes, close_at_exit
from penstock.host.process import command, started
from penstock.stats import Clock
from penstock.watch import running

if TYPE_CHECKING:
    from penstock.loader import Loader
    from penstock.watch.live_directory import LiveDirectory, ReportFile
    from penstock.watch.snapshot import Snapshot, Standing

EVERY = 0.5
"""Seconds between two reports: often enough for people, too seldom to slow training down."""

LIVELY = 2.0
"""Longest pause, in seconds, in which a view still seems live. Only very slow reports exceed it."""

TARGET_SHARE, LARGEST_SHARE = 1 / 2000, 1 / 100
"""Share of the time that reports should take, and that they may take to stay within ``LIVELY``."""

_numbers = itertools.count()


class Pulse:
    """Decides by the clock when the next report is due.

    The first is due at once, the next ones every ``every`` seconds, or less often if a report takes
    long.
    """

    __slots__ = ("_began", "_clock", "_every", "_next")

    def __init__(self, clock: Clock, every: float = EVERY) -> None:
        self._clock = clock
        self._every = every
        self._next = self._began = -math.inf

    def due(self) -> bool:
        return self._clock() >= self._next

    def begin(self) -> None:
        """Note that a report is begun."""
        self._began = self._clock()

    def end(self) -> None:
        """Note that the report is finished. Its duration decides when the next is due."""
        took = self._clock() - self._began
        pause = min(took / TARGET_SHARE, max(LIVELY, took / LARGEST_SHARE))
        self._next = self._began + max(self._every, pause)

    def stop(self) -> None:
        """Make no report due ever again."""
        self._next = math.inf

    @property
    def stopped(self) -> bool:
        return self._next == math.inf


class Publisher:
    """Publishes the status of one loader from its first batch until it is closed.

    It never disturbs training: if a report cannot be written, publishing stops silently. It keeps
    no reference to the loader, which could then never be garbage collected.

    A report takes about 300 us. So the thread of the training loop writes one only if the loop has
    to wait for a batch, or if no worker in this process will finish a task. All other reports are
    written by workers (``worked``).
    """

    def __init__(self, loader: Loader, *, clock: Clock = time.monotonic) -> None:
        self._pulse = Pulse(clock)
        self._directory: LiveDirectory | None = None
        self._file: ReportFile | None = None
        self._number = -1
        self._lock = threading.RLock()
        self.reported_waiting = False
        """The last report says that the loop waits."""
        self.asking = False
        """The loop asks for a batch, and may have to wait. Set by the loader."""
        self._exporter: Closes | None = None
        port = loader.options.metrics_port
        if port is not None:
            from penstock.watch.metrics import serve_metrics

            self._exporter = serve_metrics(port)
        close_at_exit(loader, self)

    def due(self) -> bool:
        """Whether there is something to report."""
        # The next step may take minutes, and must not be shown as waiting.
        return self.reported_waiting or self._pulse.due()

    @property
    def begun(self) -> bool:
        """There was a report."""
        return self._number >= 0

    def waits(self, loader: Loader) -> None:
        """The loop has waited for a batch for a long time. Make the first report if there is none.

        Other batches are reported when the loop asks for them. The first report loads modules,
        which takes 10 ms, and the first batch would come that much later.
        """
        if not self.begun:
            self.asked(loader)

    def asked(self, loader: Loader) -> None:
        """The loop asks for a batch. Report it if the loop has to wait."""
        if not self.due():
            return
        queue = loader.queue()
        if not queue.ready:
            self._publish(loader, queue, waiting=True)

    def moved(self, loader: Loader) -> None:
        """The loop has received a batch, or the epoch has ended."""
        if self.due():
            self._publish(loader, loader.queue(), waiting=False)

    def worked(self, loader: Loader) -> None:
        """A worker has finished a task, and reports in place of the loop. In any thread."""
        if not self._pulse.due() or not self._lock.acquire(blocking=False):
            return
        try:
            # While the loop asks for a batch, only the loop knows whether it waits.
            if self._pulse.due() and not self.asking and not self.reported_waiting:
                self._publish(loader, loader.queue(), waiting=False)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Remove the report, and stop serving metrics for this loader."""
        with self._lock:
            self._withdraw()
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _publish(self, loader: Loader, queue: Queue, *, waiting: bool) -> None:
        with self._lock:
            self._write_report(loader, queue, waiting=waiting)

    def _write_report(self, loader: Loader, queue: Queue, *, waiting: bool) -> None:
        self.reported_waiting = False
        try:
            if not self.begun:
                self._begin(loader)
            if self._pulse.stopped:
                return
            from penstock.watch.snapshot import to_json

            self._pulse.begin()
            self._write(to_json(snapshot_of(loader, self._number, queue, waiting=waiting)))
            self._pulse.end()
            self.reported_waiting = waiting
        except Exception:  # a failed report must not end the training
            self._withdraw()

    def _begin(self, loader: Loader) -> None:
        self._number = next(_numbers)
        running.add(loader, self._number)
        if not config.live():
            self._pulse.stop()
            return
        # Imported here, and not before the first batch unless that takes long.
        from penstock.watch.live_directory import LiveDirectory

        self._directory = LiveDirectory()
        self._directory.snapshots()  # removes the files of dead processes
        self._file = self._directory.report_file(self._number)

    def _write(self, text: str) -> None:
        if self._directory is None:
            return
        if self._file is None:
            self._file = self._directory.report_file(self._number)
        if not self._file.write(text):
            file, self._file = self._file, None
            file.close()

    def _withdraw(self) -> None:
        """Remove the report and publish no more. An outdated report would be worse than none."""
        self._pulse.stop()
        self.reported_waiting = False
        file, self._file = self._file, None
        if file is not None:
            file.close()
        if self._directory is not None:
            self._directory.remove_if_empty()


def snapshot_of(
    loader: Loader, number: int, queue: Queue | None = None, *, waiting: bool = False
) -> Snapshot:
    """The status of a loader at this moment."""
    from penstock.watch.snapshot import Snapshot

    pid, now = os.getpid(), time.time()
    return Snapshot(
        pid=pid,
        started=_started(pid),
        number=number,
        command=command(),
        written=now,
        waiting=now if waiting else None,
        standing=standing_of(loader, loader.queue() if queue is None else queue),
        stats=loader.stats(),
    )


def standing_of(loader: Loader, queue: Queue) -> Standing:
    """Where a loader is, and what lies ready for it."""
    from penstock.watch.snapshot import Standing

    options = loader.options
    return Standing(
        name=repr(loader),
        epoch=loader.epoch,
        batch=loader.batch,
        batches=loader.length(),
        share=options.share,
        rank=options.rank,
        world=options.world,
        finished=queue.finished,
        unfinished=queue.unfinished,
        slots=queue.slots,
        slot_bytes=queue.slot_bytes,
    )


@functools.cache
def _started(pid: int) -> int | None:
    """Start time of this process. Keyed by process number, because a fork has another one."""
    return started(pid)
