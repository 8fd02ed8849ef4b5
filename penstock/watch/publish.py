"""A loader's report on itself: a small file, written in passing by the thread that trains."""

from __future__ import annotations

import functools
import itertools
import os
import time
from typing import TYPE_CHECKING

from penstock import config
from penstock.engine.feed import Queue
from penstock.host.at_exit import Closes, close_at_exit
from penstock.host.process import command, started
from penstock.stats import Clock
from penstock.watch import running
from penstock.watch.place import LivePlace
from penstock.watch.pulse import Pulse
from penstock.watch.sheet import Sheet
from penstock.watch.snapshot import Snapshot, Standing, to_json

if TYPE_CHECKING:
    from penstock.loader import Loader

_numbers = itertools.count()


class Publisher:
    """Publishes how one loader is, from the first batch on until it is closed.

    It never disturbs training: where nothing can be written, nothing is. It does not hold on to
    the loader, which would then never be let go.
    """

    def __init__(self, loader: Loader, *, clock: Clock = time.monotonic) -> None:
        self._pulse = Pulse(clock)
        self._place: LivePlace | None = None
        self._sheet: Sheet | None = None
        self._number = -1
        self._said_waiting = False
        self._exporter: Closes | None = None
        port = loader.options.metrics_port
        if port is not None:
            from penstock.watch.exporter import serve

            self._exporter = serve(port)
        close_at_exit(loader, self)

    def asked(self, loader: Loader) -> None:
        """The loop asks for a batch. Worth a report if it has to wait for it."""
        if not self._pulse.due():
            return
        queue = loader.queue()
        if not queue.ready:
            self._publish(loader, queue, waiting=True)

    def moved(self, loader: Loader) -> None:
        """The loop has got one, or will get none."""
        # That it waits must not be said for longer than it does, however long the step is.
        if self._said_waiting or self._pulse.due():
            self._publish(loader, loader.queue(), waiting=False)

    def close(self) -> None:
        """Take back what was published."""
        self._take_back()
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _publish(self, loader: Loader, queue: Queue, *, waiting: bool) -> None:
        self._said_waiting = False
        try:
            if self._number < 0:
                self._begin(loader)
            if self._pulse.stopped:
                return
            self._pulse.begin()
            self._write(to_json(snapshot_of(loader, self._number, queue, waiting=waiting)))
            self._pulse.end()
            self._said_waiting = waiting
        except Exception:  # whatever it is, training goes on
            self._take_back()

    def _begin(self, loader: Loader) -> None:
        self._number = next(_numbers)
        running.add(loader, self._number)
        if not config.live():
            self._pulse.stop()
            return
        self._place = LivePlace()
        self._place.snapshots()  # which clears up after the dead
        self._sheet = self._place.sheet(self._number)

    def _write(self, text: str) -> None:
        if self._place is None:
            return
        if self._sheet is None:
            self._sheet = self._place.sheet(self._number)
        if not self._sheet.write(text):
            sheet, self._sheet = self._sheet, None
            sheet.close()

    def _take_back(self) -> None:
        """Publish no more. A view that stands still would be worse than none."""
        self._pulse.stop()
        self._said_waiting = False
        sheet, self._sheet = self._sheet, None
        if sheet is not None:
            sheet.close()
        if self._place is not None:
            self._place.leave()


def snapshot_of(
    loader: Loader, number: int, queue: Queue | None = None, *, waiting: bool = False
) -> Snapshot:
    """The loader as of now."""
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
    options = loader.options
    try:
        batches: int | None = len(loader)
    except TypeError:  # a stream has no length
        batches = None
    return Standing(
        name=repr(loader),
        epoch=loader.epoch,
        batch=loader.batch,
        batches=batches,
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
    """When this process was started; a fork is another."""
    return started(pid)
