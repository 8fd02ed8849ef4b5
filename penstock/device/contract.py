"""The contract of a device: registered memory, copies on a side stream, events, memory in use.

``plain.py`` is torch's CPU, ``cuda.py`` a GPU, ``fake.py`` a device with a thread for its side
stream that reports wrong synchronisation. ``tests/device/test_contract.py`` runs over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

Unregister = Callable[[], None]

Fill = Callable[..., None]
"""Computes a tensor: called with the tensor to fill, then with those that it is computed from."""


class DeviceMemory(NamedTuple):
    """Bytes of the device: in use by this process, and in all."""

    in_use: int
    capacity: int


class Event(Protocol):
    """A point in the work of the side stream."""

    def done(self) -> bool:
        """Whether the work up to this point is done."""

    def wait(self) -> None:
        """Block the calling thread until the work is done. Other threads go on."""


class Device(Protocol):
    """A device that batches are delivered to.

    It has one side stream, on which ``copy`` and ``compute`` work. One background thread calls them
    and ``record``; the thread of the training loop calls ``arrive``.
    """

    @property
    def name(self) -> str:
        """The name that torch has for it, such as ``cuda:0``."""

    def register(self, address: int, nbytes: int) -> Unregister:
        """Let the device copy from this host memory without a copy in between.

        The result ends that; call it before the memory is unmapped. Raises OSError if the memory
        cannot be registered.
        """

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device. ``source`` must not change until an event recorded
        later is done."""

    def compute(
        self,
        fill: Fill,
        sources: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Begin to compute a tensor of the device from others, after all earlier work of the side
        stream: ``fill(out, *sources)``. The sources may be given up at once."""

    def record(self) -> Event:
        """An event after all that the side stream was given so far."""

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        """Let the training loop use these tensors: its stream waits for ``event``.

        Their memory is used again only after the work that the loop gave its stream.
        """

    def memory(self) -> DeviceMemory:
        """DeviceMemory of the device."""
