"""The pool that joins CPU workers with a device that prepares its share of each batch.

CPU workers take tasks as ever, and among them the CPU's part of what the device prepares. A thread
waits for the device and reports its tasks. In the *spatial* mode it also gives the device its
tasks, on a stream of their own. In the *temporal* mode the thread of the training loop does that,
on the stream of its steps, while it waits for a batch (``help``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from penstock.device.contract import Device, Event, StreamName
from penstock.device.cooperation import Cooperation
from penstock.device.rows import DeviceRows
from penstock.device.shared_schedule import MemoryNeeds
from penstock.device.staging import Staging
from penstock.device.work import DeviceWork, PackedPart
from penstock.engine.pools.joined import JoinedPool
from penstock.engine.pools.pool import Desk, Pool
from penstock.engine.pools.runner import Outcome, Task, TaskReport
from penstock.errors import MissingExtraError
from penstock.stops.stop import column_of

_log = logging.getLogger("penstock.device")

IN_FLIGHT = 2
"""Tasks that the device has at once: one that it runs, and one whose bytes are on their way."""

PATIENCE = 30.0
"""Seconds after which a task that the device has not done means that it does not answer."""

CLOSE_LIMIT = 5.0
"""Seconds that ``close`` waits for a device that does not answer."""

IDLE_WAIT = 5.0
"""Seconds after which the idle thread looks whether the loader still exists."""


class _Flight(NamedTuple):
    """A task that the device has.

    ``buffer``: the number of its buffer on the device. ``source``: what is copied into it, which
    has to live as long as the copy takes. ``target``: the rows that the device writes.
    """

    task: Task
    rows: DeviceRows
    about: Any
    buffer: int
    source: torch.Tensor
    target: torch.Tensor
    event: Event
    since: float


class DevicePool(JoinedPool):
    """A pool with the workers of ``local`` and one device. See ``Pool``.

    ``find``: returns the device; called in the thread of the pool, because that may take seconds.
    ``samples``: of a tiny-batch.
    ``patience``: seconds that the device may take for a task.
    """

    kind: ClassVar[str] = "device"

    def __init__(
        self,
        local: Pool,
        work: DeviceWork,
        cooperation: Cooperation,
        staging: Staging,
        find: Callable[[], Device],
        samples: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        patience: float | None = None,
    ) -> None:
        super().__init__(local)
        self._work = work
        self._cooperation = cooperation
        self._staging = staging
        self._find = find
        self._samples = samples
        self._clock = clock
        self._patience = PATIENCE if patience is None else patience
        self._device: Device | None = None
        self._buffers: list[torch.Tensor | None] = [None] * IN_FLIGHT
        self._free = list(range(IN_FLIGHT))
        self._flights: deque[_Flight] = deque()
        self._giving = 0
        """Threads that give the device a task."""
        self.lost_because = ""
        """Why the device takes part no longer; empty if it does."""
        self.copied = 0
        """Bytes that were copied to the device for its tasks."""
        self.allocated = 0
        """Bytes of the buffers on the device."""
        self.most_in_use = 0
        """The most memory of the device that was in use after a task."""
        self.name = ""
        self._capacity = 0
        self._batch_bytes = 0

    # What the engine calls.

    def start(self, desk: Desk) -> None:
        self._desk = weakref.ref(desk)
        self.local.start(desk)
        if self._thread is None and not self.lost_because:
            self._closing = False
            self._thread = threading.Thread(target=self._serve, name="penstock-device", daemon=True)
            self._thread.start()

    def help(self) -> bool:
        """In the temporal mode, give the device a task on the stream of the loop."""
        desk = self._desk()
        if (
            desk is not None
            and self._device is not None
            and self._cooperation.sharing.mode == "temporal"
            and self._give(desk, "loop")
        ):
            return True
        return super().help()

    def watch(self, limit: float | None) -> None:
        super().watch(limit)
        with self._wake:
            since = self._flights[0].since if self._flights else None
        if since is not None and self._clock() - since > self._patience:
            self._lose(f"it has not finished a task for {self._patience:g} seconds")

    def memory_needs(self, batches: int) -> MemoryNeeds | None:
        """The memory of preparation, which has rows of this many batches, and of training.

        ``None``: not known yet.
        """
        if not self._capacity:
            return None
        prep = self.allocated + batches * self._batch_bytes
        return MemoryNeeds(prep, max(0, self.most_in_use - prep), self._capacity)

    def close(self, limit: float | None = None) -> set[int]:
        with self._wake:
            self._closing = True
            thread, self._thread = self._thread, None
            self._wake.notify_all()
        # Workers may still pack what the device is to get.
        abandoned = self.local.close(limit)
        if thread is not None:
            thread.join(CLOSE_LIMIT)
            if thread.is_alive():
                _log.warning("a thread is left behind: the device does not answer")
                return abandoned
        with self._wake:
            self._flights.clear()
            self._buffers = [None] * IN_FLIGHT
            self._free = list(range(IN_FLIGHT))
            self._device = None
        self._staging.close()
        return abandoned

    # The thread of the device.

    def _serve(self) -> None:
        try:
            self._deal()
        finally:
            # Memory must not be freed before the device is done with it, whatever it returns. The
            # thread of the loop may be about to give it one more task.
            with self._wake:
                self._wake.wait_for(lambda: not self._giving)
            for flight in list(self._flights):
                with contextlib.suppress(Exception):
                    flight.event.wait()

    def _deal(self) -> None:
        try:
            device = self._find()
            self._prepare(device)
        except MissingExtraError as error:
            desk = self._desk()
            if desk is not None:
                desk.broken(error)
            return
        except Exception as error:
            self._lose(_reason(error))
            return
        self.name = device.name
        with self._wake:
            self._device = device
        self._ring()
        desk = self._desk()
        if desk is not None:
            desk.wake()
        del desk
        while True:
            with self._wake:
                flight = self._flights[0] if self._flights else None
                if self._closing and flight is None:
                    return
                self._notified = False
            if self.lost_because:
                return
            desk = self._desk()
            if desk is None:
                return
            spatial = self._cooperation.sharing.mode == "spatial" and not self._closing
            if spatial and self._give(desk, "prep"):
                continue
            if flight is not None:
                self._settle(desk, flight)
                continue
            del desk
            with self._wake:
                if not self._notified and not self._closing and not self._flights:
                    self._wake.wait(IDLE_WAIT)

    def _prepare(self, device: Device) -> None:
        """Allocate and compile before the first step."""
        nbytes = self._samples * self._work.usual_bytes()
        # One for each worker that packs, those ahead of the device, and those in flight.
        self._staging.reserve(2 * self.local.size + 1 + IN_FLIGHT, max(1, nbytes))
        for number in range(IN_FLIGHT):
            self._buffer(device, number, self._staging.size)
        rehearsal = self._work.rehearsal(self._samples, self._staging.take)
        if rehearsal is None:
            return
        packed, shape, dtype = rehearsal
        source = torch.from_numpy(packed.buffer)
        buffer = self._buffer(device, 0, source.nbytes)[: source.nbytes]
        rows = device.allocate(shape, dtype, "prep")
        device.copy_to(buffer, source, "copy")
        device.wait("prep", device.record("copy"))
        device.run(
            lambda: self._work.run(buffer, packed.about, rows),
            "prep",
            reads=[buffer],
            writes=[rows],
        )
        device.record("prep").wait()

    def _buffer(self, device: Device, number: int, nbytes: int) -> torch.Tensor:
        """A buffer on the device with at least this many bytes."""
        found = self._buffers[number]
        if found is None or found.nbytes < nbytes:
            self._buffers[number] = found = None  # its memory goes back first
            size = max(nbytes, self._staging.size)
            self._buffers[number] = found = device.allocate((size,), torch.uint8, "copy")
            self.allocated = sum(b.nbytes for b in self._buffers if b is not None)
        return found

    def _give(self, desk: Desk, stream: StreamName) -> bool:
        """Give the device a task. Returns false if there is none, or it has enough."""
        with self._wake:
            device = self._device
            if not self._free or self._closing or self.lost_because or device is None:
                return False
            buffer = self._free.pop()
            self._giving += 1
        task = None
        try:
            task = desk.take_for_device()
            if task is not None:
                self._begin(device, task, buffer, stream)
        except Exception as error:
            self._lose(_reason(error))
            return False
        finally:
            with self._wake:
                self._giving -= 1
                self._wake.notify_all()
        if task is None:
            with self._wake:
                self._free.append(buffer)
            return False
        # The CPU may now prepare the next one for the device.
        self.local.notify()
        self._ring()
        return True

    def _begin(self, device: Device, task: Task, number: int, stream: StreamName) -> None:
        packed: PackedPart
        rows: DeviceRows
        packed, rows = task.part
        layout = task.layout
        column = (
            None if layout is None else column_of(layout.skeleton, self._work.on, self._work.field)
        )
        if layout is None or column is None:
            raise TypeError("rows without a layout")
        leaf = layout.leaves[column]
        if rows.tensor is None:
            dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
            rows.column = column
            rows.tensor = device.allocate((rows.count, *leaf.shape), dtype, "prep")
            self._batch_bytes = max(self._batch_bytes, rows.tensor.nbytes)
            if stream != "prep":
                device.wait(stream, device.record("prep"))
        source = torch.from_numpy(packed.buffer)
        buffer = self._buffer(device, number, source.nbytes)[: source.nbytes]
        target = rows.tensor[task.first : task.first + len(task.keys)]
        device.copy_to(buffer, source, "copy")
        copied = device.record("copy")
        work, about = self._work, packed.about
        try:
            device.wait(stream, copied)
            device.run(
                lambda: work.run(buffer, about, target), stream, reads=[buffer], writes=[target]
            )
            event = device.record(stream)
        except BaseException:
            copied.wait()  # its source is about to be given up
            raise
        self.copied += source.nbytes
        task.part = None
        flight = _Flight(task, rows, about, number, source, target, event, self._clock())
        with self._wake:
            self._flights.append(flight)

    def _settle(self, desk: Desk, flight: _Flight) -> None:
        """Wait for the oldest task of the device, and report it."""
        try:
            flight.event.wait()
        except Exception as error:
            self._lose(_reason(error))
            return
        with self._wake:
            if self.lost_because:
                return
            self._flights.popleft()
            self._free.append(flight.buffer)
            device = self._device
        if device is not None:
            in_use, self._capacity = device.memory()
            self.most_in_use = max(self.most_in_use, in_use)
        if self._work.failed(flight.about):
            desk.lost(flight.task.id, guilty=False, reason="the device cannot decode it")
        else:
            flight.rows.written[flight.task.first] = len(flight.task.keys)
            desk.done(flight.task.id, Outcome(TaskReport(rows=len(flight.task.keys))))
        self.local.notify()  # what is the CPU's may have changed
        if self._cooperation.sharing.mode == "temporal":
            desk.wake()  # the device has room for the next task

    def _lose(self, reason: str) -> None:
        """The device takes part no longer: the CPU prepares what it had."""
        with self._wake:
            if self.lost_because or self._closing:
                return
            self.lost_because = reason
            device, self._device = self._device, None
            self._wake.notify_all()
        name = "the device" if device is None else device.name
        _log.warning(
            "%s prepares no more samples: %s. The CPU prepares all of them; %s.",
            name,
            reason,
            "batches are the same" if self._work.exact else f"note that {self._work.tolerance}",
        )
        desk = self._desk()
        if desk is not None:
            desk.device_lost()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
