"""One copy of each batch for all jobs of a group on one device.

The first job to need a batch copies it to memory of the device that the other jobs have mapped.
Each job, this one included, then makes its tensors from there, on the device: a batch crosses the
bus once. So each job has tensors of its own, which it may write to, and which stay if another job
ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.device.contract import Device
from penstock.order.plan import BatchKeys

if TYPE_CHECKING:  # jobs of all frameworks import this module
    import torch

_log = logging.getLogger("penstock.device")

ALIGN = 256
"""Each tensor in shared memory begins at a multiple of this."""

FAILURES = 3
"""Copies of other jobs in a row that cannot be read before a job gives up. One that ends may make
one of them fail."""


class MakeShared(NamedTuple):
    """This job makes the copy, in the memory with this number. ``readers``: jobs that map it."""

    place: int
    readers: Sequence[int]


class UseShared(NamedTuple):
    """Another job has made the copy: see ``UseCopy`` of the node."""

    owner: int
    place: int
    version: int
    layout: str


class CopyDesk(Protocol):
    """Where jobs agree on who makes a copy. Used from one thread.

    Its methods raise OSError if the others cannot be asked. ``name``: for messages.
    """

    name: str

    def join(self, device: str) -> None:
        """Take part, with the device of this identity."""

    def ask(self, keys: BatchKeys) -> MakeShared | UseShared | None:
        """Who copies this batch; ``None``: this job, for itself alone. Waits for other jobs, but
        only for a while."""

    def made(self, version: int, layout: str, handles: dict[int, bytes]) -> None:
        """The copy that ``ask`` was answered with is made."""

    def ended(self) -> None:
        """The copy of the last ``ask`` was read, or could not be made."""

    def handle(self, owner: int, place: int, version: int) -> bytes | None:
        """The handle of memory that ``ask`` told to use; ``None`` if it was taken before."""

    def gone(self) -> Sequence[int] | None:
        """The jobs that have left since the last call; ``None``: all, their numbers are invalid."""

    def close(self) -> None:
        """Take part no longer. Waits a little for those who read this job's copies."""


@dataclass(slots=True)
class _SharedMemory:
    """Memory of this job that others have mapped. ``readers``: those that have a handle."""

    memory: torch.Tensor
    version: int
    readers: set[int]


class SharedCopy:
    """The part of a delivery that shares copies with other jobs. Used from one thread.

    If anything fails, it says so once, and this job copies all batches for itself from then on.
    """

    def __init__(self, device: Device, desk: CopyDesk) -> None:
        self._device = device
        self._desk = desk
        self._places: dict[int, _SharedMemory] = {}
        self._versions = 0
        self._mapped: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """By owner and place: version and memory."""
        self._asked: MakeShared | UseShared | None = None
        self._layout = ""
        self._over = False
        self._failures = 0
        self.made = self.used = 0
        """Batches that this job has copied for others too, and those that it has not copied."""
        if not device.identity:
            self._stop("it cannot share memory with other processes")
            return
        try:
            desk.join(device.identity)
        except OSError as error:
            self._stop(str(error))

    def views(self, keys: BatchKeys, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Tensors of the device that have these values when the stream ``copy`` gets there.

        They are shared: they may only be read, by work of that stream, until ``finish``. ``None``:
        this job copies the batch for itself.
        """
        if self._over or not tensors:
            return None
        try:
            self._drop_gone()
            asked = self._asked = self._desk.ask(keys)
            if asked is None:
                return None
            layout, starts, nbytes = _layout(tensors)
            self._layout = layout
            if isinstance(asked, UseShared):
                memory = self._usable(asked)
                if memory is None:
                    return None
            else:
                memory = self._memory(asked.place, nbytes)
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            self._stop(str(error))
            return None
        views = [
            memory[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        if isinstance(asked, MakeShared):
            for view, tensor in zip(views, tensors, strict=True):
                self._device.copy_to(view, tensor)
            self.made += 1
        else:
            self.used += 1
        return views

    def _memory(self, place: int, nbytes: int) -> torch.Tensor:
        found = self._places.get(place)
        if found is None or found.memory.nbytes < nbytes:
            self._places.pop(place, None)
            del found  # its memory goes back first
            self._versions += 1
            import torch

            memory = self._device.allocate((nbytes,), torch.uint8)
            found = self._places[place] = _SharedMemory(memory, self._versions, set())
        return found.memory

    def _usable(self, use: UseShared) -> torch.Tensor | None:
        """The memory of another job; ``None`` if that failed, which it may a few times."""
        try:
            if use.layout != self._layout:
                raise OSError(f"it has tensors of {use.layout}, this job of {self._layout}")
            memory = self._map(use)
        except (OSError, RuntimeError) as error:
            self._failures += 1
            if self._failures == FAILURES:
                raise OSError(f"the copy of another job cannot be used: {error}") from error
            self.fail()
            return None
        self._failures = 0
        return memory

    def _map(self, use: UseShared) -> torch.Tensor:
        key = use.owner, use.place
        version, memory = self._mapped.pop(key, (-1, None))
        if memory is None or version != use.version:
            memory = None
            handle = self._desk.handle(*key, use.version)
            if handle is None:
                raise OSError("another job sent no handle of its memory")
            memory = self._device.from_export(handle)
        self._mapped[key] = use.version, memory
        return memory

    def _drop_gone(self) -> None:
        gone = self._desk.gone()
        if gone is None:
            self._mapped.clear()
            for place in self._places.values():
                place.readers.clear()
            return
        for key in [key for key in self._mapped if key[0] in gone]:
            del self._mapped[key]

    def finish(self) -> None:
        """The work of the stream ``copy`` on the last views is done."""
        asked, self._asked = self._asked, None
        if asked is None or self._over:
            return
        try:
            if isinstance(asked, UseShared):
                self._desk.ended()
                return
            place = self._places[asked.place]
            new = [reader for reader in asked.readers if reader not in place.readers]
            handles = {reader: self._device.export(place.memory) for reader in new}
            self._desk.made(place.version, self._layout, handles)
            place.readers |= set(new)
        except (OSError, RuntimeError) as error:
            self._stop(str(error))

    def fail(self) -> None:
        """The last copy could not be made or read."""
        asked, self._asked = self._asked, None
        if asked is not None and not self._over:
            try:
                self._desk.ended()
            except OSError as error:
                self._stop(str(error))

    def _stop(self, why: str) -> None:
        if self._over:
            return
        self._over, self._asked = True, None
        _log.warning(
            "%s: this job copies each batch to %s for itself, and shares no copy with other jobs: "
            "%s. Batches are the same.",
            self._desk.name,
            self._device.name,
            why,
        )
        self.close()

    def close(self) -> None:
        """Take part no longer, and free the shared memory."""
        self._over = True
        if self._mapped:
            # A batch that found no memory may have begun to read the copy of another job.
            with contextlib.suppress(Exception):
                self._device.record("copy").wait()
        self._desk.close()
        self._places.clear()
        self._mapped.clear()


def _layout(tensors: Sequence[torch.Tensor]) -> tuple[str, list[int], int]:
    """The tensors in words, where each begins in shared memory, and the bytes of all."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGN) * ALIGN
    words = [f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.") for tensor in tensors]
    return ", ".join(words), starts, max(1, end)
