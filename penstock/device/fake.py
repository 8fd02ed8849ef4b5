"""A fake device for tests: its side stream is a thread, and wrong synchronisation is an error.

A GPU does not report a batch that is read before its copy is done, or host memory that is written
while it is copied: the values are wrong, now and then. This device makes such faults visible:

- DeviceMemory of the device holds ``POISON`` until its copy is done, and again after it is freed.
- A copy whose source was changed or given up after ``copy`` was called is a fault.
- A registration that overlaps another, or ends twice, is a fault.
- ``pause`` stops the side stream, so that a test decides when copies happen.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.device.contract import DeviceMemory, Event, Fill, Unregister

POISON = 0xA5
"""Each byte of memory that is not written yet, or freed."""


class FakeEvent:
    """Done when the side stream gets to it."""

    def __init__(self) -> None:
        self._fired = threading.Event()

    def fire(self) -> None:
        self._fired.set()

    def done(self) -> bool:
        return self._fired.is_set()

    def wait(self) -> None:
        self._fired.wait()


class FakeDevice:
    """A device of ``capacity`` bytes. ``close`` ends its thread."""

    name = "fake:0"

    def __init__(self, capacity: int = 1 << 30) -> None:
        self._capacity = capacity
        self.faults: list[str] = []
        """Wrong synchronisation that was found."""
        self.peak = 0
        """The most bytes that were in use at once."""
        self.arrived = 0
        """Tensors that the training loop was given."""
        self.registered: dict[int, int] = {}
        """Address and size of registered memory."""
        self._in_use = 0
        self._lock = threading.Lock()
        self._runs = threading.Event()
        self._runs.set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._stream, name="fake-stream", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop the side stream before its next piece of work."""
        self._runs.clear()

    def go_on(self) -> None:
        """Let the side stream work again."""
        self._runs.set()

    def close(self) -> None:
        """End the thread, after all work that it was given."""
        self.go_on()
        self._work.put(None)
        self._thread.join()

    def _stream(self) -> None:
        while (work := self._work.get()) is not None:
            self._runs.wait()
            work()

    def register(self, address: int, nbytes: int) -> Unregister:
        if any(address < start + size and start < address + nbytes for start, size in self._ranges):
            self.faults.append(f"memory at {address:#x} was registered twice")
        self.registered[address] = nbytes

        def unregister() -> None:
            if self.registered.pop(address, None) is None:
                self.faults.append(f"memory at {address:#x} was not registered")

        return unregister

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return list(self.registered.items())

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor lies in registered memory."""
        first, nbytes = tensor.data_ptr(), tensor.nbytes
        return any(a <= first and first + nbytes <= a + size for a, size in self._ranges)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        expected = source.clone(memory_format=torch.contiguous_format)
        raw, target = self._allocate(source.shape, source.dtype)

        # As on a GPU, a copy in flight does not keep its source alive.
        alive = weakref.ref(source)

        def work() -> None:
            found = alive()
            if found is None:
                self.faults.append("host memory was given up while it was copied to the device")
            elif not _same_bytes(found, expected):
                self.faults.append("host memory was written while it was copied to the device")
            raw[:] = _bytes(expected).numpy()

        self._work.put(work)
        return target

    def compute(
        self,
        fill: Fill,
        sources: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        raw, target = self._allocate(shape, dtype)
        given = list(sources)

        def work() -> None:
            out = torch.empty(tuple(shape), dtype=dtype)
            fill(out, *given)
            # As on a GPU, memory that is given up meanwhile belongs to later work.
            given.clear()
            raw[:] = _bytes(out).numpy()

        self._work.put(work)
        return target

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        """Memory full of poison: its bytes, and a tensor over it."""
        raw = np.full(math.prod(shape) * dtype.itemsize, POISON, np.uint8)
        self._take(raw.nbytes)
        # The finalizer of the owner runs when the last view of the memory is gone.
        owner = _Owner(raw)
        target = torch.from_numpy(np.asarray(owner)).view(dtype).reshape(tuple(shape))
        weakref.finalize(owner, self._free, raw)
        return raw, target

    def record(self) -> Event:
        event = FakeEvent()
        self._work.put(event.fire)
        return event

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        # Work that the loop gives its stream happens after the event. Here the loop reads the
        # tensors at once, so it waits for the event itself.
        event.wait()
        self.arrived += len(tensors)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._in_use, self._capacity)

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if self._in_use + nbytes > self._capacity:
                raise torch.OutOfMemoryError(
                    f"the fake device has {self._capacity} bytes, {self._in_use} in use, and "
                    f"{nbytes} more are needed"
                )
            self._in_use += nbytes
            self.peak = max(self.peak, self._in_use)

    def _free(self, raw: Any) -> None:
        # Also for a copy in flight: its memory is used again only by later work of its stream.
        raw[:] = POISON
        with self._lock:
            self._in_use -= raw.nbytes


class _Owner:
    """DeviceMemory as an array. Arrays made of it refer to it."""

    def __init__(self, raw: Any) -> None:
        self.__array_interface__ = raw.__array_interface__


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    # By bytes: NaN differs from itself.
    return bool(torch.equal(_bytes(left), _bytes(right)))
