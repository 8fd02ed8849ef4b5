"""A GPU as a device. No line of this file has ever met a GPU: Penstock is developed without one.

``tests/device/test_contract.py`` runs over it where torch sees a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.device.contract import DeviceMemory, Event, Fill, Unregister

PORTABLE = 1
"""``cudaHostRegisterPortable``: the memory is registered for all GPUs of the process."""


def current_index(device: torch.device) -> int:
    """The number of the GPU that ``device`` means in this thread. Does not initialise CUDA, so that
    worker processes can still be forked."""
    if device.index is not None:
        return int(device.index)
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """A GPU, by its number, with a side stream of its own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)

    @property
    def name(self) -> str:
        return str(self._device)

    def register(self, address: int, nbytes: int) -> Unregister:
        runtime = torch.cuda.cudart()
        # The current device belongs to a thread. Without this, threads that make slots would take
        # memory of the first GPU in every rank.
        with torch.cuda.device(self._device):
            code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
        if code:
            raise OSError(f"cudaHostRegister of {nbytes} bytes failed with error {code}")

        def unregister() -> None:
            with torch.cuda.device(self._device):
                runtime.cudaHostUnregister(address)

        return unregister

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        # The memory comes from torch's allocator, which also serves the training step, and belongs
        # to the side stream: ``arrive`` names the stream that uses it too.
        with torch.cuda.stream(self._stream):
            return source.to(self._device, non_blocking=True)

    def compute(
        self,
        fill: Fill,
        sources: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        # The sources were allocated on this stream too, so the allocator may give their memory to
        # later work of it as soon as they are dropped.
        with torch.cuda.stream(self._stream):
            out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            fill(out, *sources)
            return out

    def record(self) -> Event:
        # A blocking event: the background thread sleeps while it waits, and does not poll.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaEvent(event)

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event.event)
        for tensor in tensors:
            tensor.record_stream(current)

    def memory(self) -> DeviceMemory:
        free, capacity = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(capacity - free, capacity)
