"""Any device of torch, the CPU included, whose work is done at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from penstock.device.contract import DeviceMemory, Event, StreamName, Unregister


class Done:
    """The event of work that is done already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainDevice:
    """A device without streams: the thread that calls waits for each copy and piece of work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def identity(self) -> str:
        return ""

    def register(self, address: int, nbytes: int) -> Unregister:
        return _nothing

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self._device, copy=True)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: StreamName = "copy"
    ) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def copy_to(
        self, target: torch.Tensor, source: torch.Tensor, stream: StreamName = "copy"
    ) -> None:
        target.copy_(source)

    def run(
        self,
        function: Callable[[], None],
        stream: StreamName,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        function()

    def record(self, stream: StreamName = "copy") -> Event:
        return Done()

    def wait(self, stream: StreamName, event: Event) -> None:
        event.wait()

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        event.wait()

    def export(self, tensor: torch.Tensor) -> bytes:
        raise OSError(f"{self.name} cannot share memory with other processes")

    def from_export(self, handle: bytes) -> torch.Tensor:
        raise OSError(f"{self.name} cannot share memory with other processes")

    def memory(self) -> DeviceMemory:
        """Memory of the machine: torch does not tell that of every kind of device."""
        page = os.sysconf("SC_PAGE_SIZE")
        free, capacity = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        return DeviceMemory(capacity - free, capacity)


def _nothing() -> None:
    """Ends a registration that registered nothing."""
