"""The contract of the work that a device can do for a pipeline: the lower part of its road.

CPU workers do the upper part, and pack what the device needs into one buffer: coefficients or
pixels, and the parameters that were drawn for each sample. Both parts together make the same bits
as the CPU alone, unless the user asked for a decoder with other bits (``exact``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.keyed import Keys
from penstock.stops.field import On

if TYPE_CHECKING:
    import torch

Allocate = Callable[[int], NDArray[np.uint8]]
"""Returns memory of the host with this many bytes, from which a device can copy."""


class PackedPart(NamedTuple):
    """What the device needs of a tiny-batch.

    ``buffer``: bytes that are copied to the device, from ``Allocate``. ``about``: what the host
    knows of them, such as offsets and shapes; any value.
    """

    buffer: NDArray[np.uint8]
    about: Any = None


class DeviceWork(Protocol):
    """The part of a road that a device can run.

    ``above``: the CPU runs this many stops of the road for a tiny-batch of the device. ``on`` and
    ``field``: the field of samples that the device makes; see ``Field``.
    """

    @property
    def name(self) -> str:
        """What the device does, in words, for users."""

    @property
    def exact(self) -> bool:
        """Whether the device makes the bits of the CPU. If not, it prepares all samples, so that
        they do not depend on who is faster."""

    @property
    def tolerance(self) -> str:
        """What differs from the CPU, in words; empty if ``exact``."""

    @property
    def above(self) -> int: ...

    @property
    def on(self) -> On: ...

    @property
    def field(self) -> str: ...

    def sizes(self, indices: Sequence[int] | NDArray[np.int64]) -> Sequence[int]:
        """The bytes of samples, by which tiny-batches are sorted; any measure of their cost."""

    def usual_bytes(self) -> int:
        """Bytes that ``pack`` makes of most samples; buffers are allocated for it beforehand."""

    def pack(self, keys: Keys, values: Sequence[Any], allocate: Allocate) -> PackedPart | None:
        """Do the CPU's part for these values of the field; ``None``: the CPU has to prepare them.

        Called by several workers at once. ``values`` come from the stop above.
        """

    def rehearsal(
        self, samples: int, allocate: Allocate
    ) -> tuple[PackedPart, tuple[int, ...], torch.dtype] | None:
        """A made-up tiny-batch, and the shape and type of its rows; ``None`` if there is none.

        It runs before the first batch, so that kernels are compiled and libraries loaded by then.
        """

    def run(self, buffer: torch.Tensor, about: Any, rows: torch.Tensor) -> None:
        """Do the device's part: make ``rows`` of the bytes in ``buffer``, both on the device.

        Runs on one stream, and may only give work to the current stream.
        """

    def failed(self, about: Any) -> bool:
        """Whether ``run`` could not make the rows, which the CPU then has to prepare. Asked after
        the work on the device is done."""
