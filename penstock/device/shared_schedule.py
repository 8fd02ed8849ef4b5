"""The schedule of an engine in which a device prepares its share of each batch.

``Cooperation`` decides who takes which tiny-batch. This class translates between its decisions and
the pieces of the engine. It is called under the lock of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.device.cooperation import Assignment, Cooperation
from penstock.device.rows import DeviceRows
from penstock.engine.schedule import HANDING_TO_THREADS, Piece, RowsOnDevice, Schedule, TaskKind

TINY_BATCHES, EACH = 32, 8
"""Tiny-batches of a mini-batch, at least, and for each worker, where the user gives no
``tiny_batch``. The last of them to end decides when the mini-batch is complete, so each should be a
small share of it."""

LARGEST_TINY = 16
"""Samples of a tiny-batch at most."""

SMALLER = 4
"""The last quarter of a mini-batch is cut into smaller tiny-batches, down to a quarter of the size.
They fill the time in which a worker would be idle: the device's wait for its first task, and the
end. All of that size would cost a worker a quarter of a tiny-batch less, but four times as many
tasks (``benchmarks cooperate``)."""

FORESEES = True
"""The device is used where it helps, by measured times. Tests turn this off to force a split."""

BEGUN = 2
"""Batches that may have rows on the device before they are handed out, apart from the oldest."""

SampleSizes = Callable[[Sequence[int] | NDArray[np.int64]], Sequence[int]]


class MemoryNeeds(NamedTuple):
    """Bytes of the device: most that preparation takes, most that training takes, and in all."""

    prep_peak: int
    training_peak: int
    capacity: int


def usual_tiny(rows: int, workers: int) -> int:
    """Samples of the largest tiny-batches, for mini-batches of ``rows``.

    >>> usual_tiny(256, workers=4), usual_tiny(256, workers=16), usual_tiny(32, workers=4)
    (8, 2, 1)
    """
    return max(1, min(LARGEST_TINY, rows // max(TINY_BATCHES, EACH * workers)))


def cut(first: int, rows: int, samples: int) -> list[tuple[int, int]]:
    """The first row and the rows of each tiny-batch, of ``samples`` and at the end of fewer.

    >>> cut(0, 16, 4)
    [(0, 4), (4, 4), (8, 4), (12, 2), (14, 1), (15, 1)]
    """
    made, at = [], first
    while at < rows:
        left = rows - at
        part = 1
        while part < SMALLER and SMALLER * part * left <= rows - first:
            part *= 2
        count = min(-(-samples // part), left)
        made.append((at, count))
        at += count
    return made


@dataclass(slots=True)
class _Opened:
    """A batch that CPU and device prepare together: first row and rows of each tiny-batch."""

    rows: int
    tiny: list[tuple[int, int]]
    parts: dict[int, Any] = field(default_factory=dict)
    """What CPU workers have prepared for the device, by tiny-batch."""
    on_device: DeviceRows | None = None
    by_cpu: int = 0
    by_device: int = 0
    """Samples that each has prepared."""


class SharedSchedule(Schedule):
    """Deals the tiny-batches of each batch to CPU workers and to a device.

    ``sizes``: the bytes of samples. ``alone``: all tiny-batches are the device's. ``memory``:
    returns the memory that both need, if known.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self,
        workers: int,
        sizes: SampleSizes,
        *,
        tiny_batch: int | None = None,
        alone: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(workers, handing=HANDING_TO_THREADS, tiny_batch=tiny_batch)
        self.cooperation = Cooperation(
            max(1, workers), exact=True, most_begun=BEGUN, alone=alone, foresees=FORESEES
        )
        self._sizes = sizes
        self._clock = clock
        self._shared: dict[int, _Opened] = {}
        self._pieces: dict[int, tuple[Piece, Assignment]] = {}
        self._handed_out: float | None = None
        self.memory: Callable[[], MemoryNeeds | None] = lambda: None
        self.by_cpu = 0
        self.by_device = 0
        """Samples that each has prepared, of batches that were handed out."""

    def tiny_samples(self, rows: int) -> int:
        """Samples of the largest tiny-batch, for batches of ``rows``."""
        return self._tiny_batch or usual_tiny(rows, self.cooperation.workers)

    # What there is to do.

    def open(
        self,
        batch: int,
        rows: int,
        kind: TaskKind = "rows",
        pin: int | None = None,
        *,
        first: int = 0,
        indices: Sequence[int] | NDArray[np.int64] = (),
    ) -> None:
        if kind != "rows" or rows <= first:
            super().open(batch, rows, kind, pin, first=first)
            return
        step = self._tiny_batch
        if step is None:
            tiny = cut(first, rows, self.tiny_samples(rows))
        else:
            tiny = [(at, min(step, rows - at)) for at in range(first, rows, step)]
        nbytes = self._sizes(indices[:rows])
        sizes = [int(sum(nbytes[at : at + count])) for at, count in tiny]
        self._shared[batch] = _Opened(rows, tiny)
        self._left[batch] = len(tiny)
        self.cooperation.open(batch, sizes)

    # Who takes it.

    def take(self, worker: int) -> Piece | None:
        piece = super().take(worker)
        if piece is not None:
            return piece
        # Threads of the kernel take all tasks that there are, but the device needs some too.
        running = sum(1 for piece, _ in self._pieces.values() if piece.kind != "device")
        if running > self.local_workers:
            return None
        assignment = self.cooperation.take_cpu(self._clock())
        if assignment is None:
            return None
        return self._begin(assignment, "host" if assignment.part == "decode" else "rows")

    def take_device(self) -> Piece | None:
        assignment = self.cooperation.take_device(self._clock())
        if assignment is None:
            return None
        opened = self._shared[assignment.batch]
        if opened.on_device is None:
            opened.on_device = DeviceRows(opened.rows)
        part = opened.parts.pop(assignment.tiny), opened.on_device
        return self._begin(assignment, "device", part)

    def _begin(self, assignment: Assignment, kind: TaskKind, part: Any = None) -> Piece:
        first, count = self._shared[assignment.batch].tiny[assignment.tiny]
        self._next += 1
        piece = Piece(self._next, kind, assignment.batch, first, count, part=part)
        self._pieces[piece.id] = piece, assignment
        return piece

    def put_back(self, piece: int) -> None:
        found = self._pieces.pop(piece, None)
        if found is None:
            super().put_back(piece)
        else:
            self.cooperation.put_back(found[1])

    def cut(self, piece: int, count: int) -> Piece:
        if piece in self._pieces:
            raise TypeError("tiny-batches of a device are not cut")
        return super().cut(piece, count)

    # What became of it.

    def host_done(self, piece: int, part: Any, seconds: float) -> None:
        _, assignment = self._pieces.pop(piece)
        self.cooperation.done(assignment, self._clock(), seconds=seconds)
        if self.cooperation.device:
            self._shared[assignment.batch].parts[assignment.tiny] = part

    def done(self, piece: int, seconds: float) -> bool:
        found = self._pieces.pop(piece, None)
        if found is None:
            return super().done(piece, seconds)
        done, assignment = found
        opened = self._shared[done.batch]
        if done.kind == "device":
            opened.by_device += done.count
        else:
            opened.by_cpu += done.count
            self._recent.append(seconds / done.count)
        self.cooperation.done(assignment, self._clock(), whole=done.kind == "host", seconds=seconds)
        self._left[done.batch] -= 1
        return self._left[done.batch] == 0

    def lost(self, piece: int, *, guilty: bool) -> Piece | None:
        found = self._pieces.pop(piece, None)
        if found is None:
            return super().lost(piece, guilty=guilty)
        self.cooperation.lost(found[1])
        return None

    def on_device(self, batch: int) -> RowsOnDevice | None:
        opened = self._shared.get(batch)
        return None if opened is None or opened.on_device is None else opened.on_device

    def device_lost(self) -> None:
        for number in [n for n, (piece, _) in self._pieces.items() if piece.kind == "device"]:
            del self._pieces[number]
        again = self.cooperation.device_lost(finished_too=True)
        for batch, opened in self._shared.items():
            if self._left.get(batch):
                self._left[batch] += len(again.get(batch, ()))
                opened.parts.clear()
                opened.on_device, opened.by_device = None, 0

    # The end of batches.

    def loop_waits(self, waits: bool) -> None:
        self.cooperation.loop_waits(waits)

    def end(self, batch: int) -> None:
        super().end(batch)
        opened = self._shared.pop(batch, None)
        if opened is not None:
            self.by_cpu += opened.by_cpu
            self.by_device += opened.by_device
            now, before = self._clock(), self._handed_out
            self._handed_out = now
            self.cooperation.end(batch)
            needs = self.memory()
            if needs is not None:
                self.cooperation.sharing.memory(*needs)
            if before is not None:
                self.cooperation.sharing.record(now - before)

    def __contains__(self, piece: int) -> bool:
        return piece in self._pieces or super().__contains__(piece)

    def _forget(self, batch: int) -> None:
        super()._forget(batch)
        self.cooperation.drop(batch)
        self._shared.pop(batch, None)
        for number in [n for n, (piece, _) in self._pieces.items() if piece.batch == batch]:
            del self._pieces[number]
