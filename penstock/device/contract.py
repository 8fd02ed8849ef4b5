"""The contract of a device: memory, copies and work on streams, events, memory in use.

``plain.py`` is any device of torch without streams, ``cuda.py`` a GPU, ``fake.py`` a device with a
thread for each stream that reports wrong synchronisation. ``tests/device/test_contract.py`` runs
over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

Unregister = Callable[[], None]

StreamName = Literal["copy", "prep", "loop"]
"""``copy``: the side stream for copies. ``prep``: a stream of the lowest priority for preparation
beside the training step. ``loop``: the current stream of the calling thread, which for the thread
of the training loop is the stream of its steps."""


class DeviceMemory(NamedTuple):
    """Bytes of the device: in use by this process, and in all."""

    in_use: int
    capacity: int


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Whether the work up to this point is done."""

    def wait(self) -> None:
        """Block the calling thread until the work is done. Other threads go on."""


class Device(Protocol):
    """A device that batches are delivered to, and that may prepare a part of them.

    Its streams work one piece after the other, and beside each other. Any thread may call any
    method; ``loop`` means the stream of the thread that calls.
    """

    @property
    def name(self) -> str:
        """The name that torch has for it, such as ``cuda:0``."""

    @property
    def identity(self) -> str:
        """Equal in all processes of this machine that use this device, whatever its number there;
        empty if it cannot share memory with them."""

    def register(self, address: int, nbytes: int) -> Unregister:
        """Let the device copy from this host memory without a copy in between.

        The result ends that; call it before the memory is unmapped. Raises OSError if the memory
        cannot be registered.
        """

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: StreamName = "copy"
    ) -> torch.Tensor:
        """New memory for ``stream``. Raises torch.OutOfMemoryError.

        Another stream may use it after it has waited for an event of ``stream``. When the last
        reference is gone, the memory is used again by later work of ``stream``.
        """

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to new memory, on the stream ``copy``. ``source`` must not change
        until an event recorded later is done."""

    def copy_to(
        self, target: torch.Tensor, source: torch.Tensor, stream: StreamName = "copy"
    ) -> None:
        """Begin to copy a tensor of the host into memory of the device. ``source`` as in
        ``copy``."""

    def run(
        self,
        function: Callable[[], None],
        stream: StreamName,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Run operations of torch on a stream, after all that it was given before.

        ``reads`` and ``writes``: the memory of the device that they use. An exception of
        ``function`` is raised here, or by the events recorded after it.
        """

    def record(self, stream: StreamName = "copy") -> Event:
        """An event after all that the stream was given so far."""

    def wait(self, stream: StreamName, event: Event) -> None:
        """Let later work of a stream begin after ``event``. The calling thread goes on."""

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        """Let the training loop use these tensors: its stream waits for ``event``.

        Their memory is used again only after the work that the loop gave its stream.
        """

    def export(self, tensor: torch.Tensor) -> bytes:
        """A handle by which another process of this machine maps the memory of a tensor, once.

        All work on the tensor must be done. Its memory must stay until the other process has
        dropped its tensor. Raises OSError if the device cannot share memory.
        """

    def from_export(self, handle: bytes) -> torch.Tensor:
        """The tensor of another process, by its handle. Raises OSError if that has ended.

        It may be dropped only when the host knows that all work on it is done.
        """

    def memory(self) -> DeviceMemory:
        """Memory of the device in use, and its capacity."""
