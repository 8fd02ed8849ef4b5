"""A GPU as a device. No line of this file has ever met a GPU: Penstock is developed without one.

``tests/device/test_contract.py`` runs over it where torch sees a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # registers how tensors are pickled

from penstock.device.contract import DeviceMemory, Event, StreamName, Unregister

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
    """A GPU, by its number, with a stream for copies and one for preparation."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        # 0 is the lowest priority that CUDA has. The default stream has the same; a training step
        # on a stream of a higher one goes first.
        self._prep = torch.cuda.Stream(self._device, priority=0)

    def _of(self, stream: StreamName) -> torch.cuda.Stream:
        if stream == "loop":
            return torch.cuda.current_stream(self._device)
        return self._prep if stream == "prep" else self._stream

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def identity(self) -> str:
        # Numbers depend on CUDA_VISIBLE_DEVICES.
        return f"cuda-{torch.cuda.get_device_properties(self._device).uuid}"

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

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: StreamName = "copy"
    ) -> torch.Tensor:
        with torch.cuda.stream(self._of(stream)):
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def copy_to(
        self, target: torch.Tensor, source: torch.Tensor, stream: StreamName = "copy"
    ) -> None:
        used = self._of(stream)
        with torch.cuda.stream(used):
            target.copy_(source, non_blocking=True)
        target.record_stream(used)

    def run(
        self,
        function: Callable[[], None],
        stream: StreamName,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        used = self._of(stream)
        with torch.cuda.stream(used):
            function()
        for tensor in (*reads, *writes):
            tensor.record_stream(used)

    def record(self, stream: StreamName = "copy") -> Event:
        # A blocking event: the background thread sleeps while it waits, and does not poll.
        event = torch.cuda.Event(blocking=True)
        event.record(self._of(stream))
        return CudaEvent(event)

    def wait(self, stream: StreamName, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._of(stream).wait_event(event.event)

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event.event)
        for tensor in tensors:
            tensor.record_stream(current)

    def export(self, tensor: torch.Tensor) -> bytes:
        # torch's own way: the IPC handle of the block, an offset, and a counter in shared memory.
        # torch keeps the block until the receiver has dropped the tensor.
        with torch.cuda.device(self._device):
            return bytes(ForkingPickler.dumps(tensor))

    def from_export(self, handle: bytes) -> torch.Tensor:
        with torch.cuda.device(self._device):
            try:
                found: torch.Tensor = pickle.loads(handle)
            except RuntimeError as error:
                raise OSError(f"a tensor of another process cannot be mapped: {error}") from error
        return found

    def memory(self) -> DeviceMemory:
        free, capacity = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(capacity - free, capacity)
