"""Any device of torch, the CPU included, with copies that are done at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from penstock.device.contract import DeviceMemory, Event, Fill, Unregister


class Done:
    """The event of work that is done already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainDevice:
    """A device without a side stream: the background thread waits for each copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        return str(self._device)

    def register(self, address: int, nbytes: int) -> Unregister:
        return _nothing

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self._device, copy=True)

    def compute(
        self,
        fill: Fill,
        sources: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        fill(out, *sources)
        return out

    def record(self) -> Event:
        return Done()

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        event.wait()

    def memory(self) -> DeviceMemory:
        """DeviceMemory of the machine: torch does not tell that of every kind of device."""
        page = os.sysconf("SC_PAGE_SIZE")
        free, capacity = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        return DeviceMemory(capacity - free, capacity)


def _nothing() -> None:
    """Ends a registration that registered nothing."""
