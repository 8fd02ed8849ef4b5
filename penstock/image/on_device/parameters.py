"""The parameters of a tiny-batch: drawn on the host, packed so that one copy brings them over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 16

Arrays = Mapping[str, Any]
"""The parameters of one stage by name: NumPy arrays on the host, tensors on a device."""


class LeftToCpu(Exception):
    """The device cannot prepare this sample with the bits of the CPU; says why."""


@dataclass(frozen=True, eq=False)
class DeviceParameters:
    """The drawn parameters of the samples of a tiny-batch that a device prepares.

    - ``places``: the numbers of these samples in the tiny-batch. All other arrays have one row for
      each of them.
    - ``left``: the samples that the CPU must prepare: place to reason.
    - ``regions``: int32 (n, 4), the part (top, left, height, width) of each picture that is needed.
    - ``frames``: int32 (n, 6), the box (top, left, height, width) of each picture that the first
      stage resizes, and the height and width that it resizes it to. If the box is much larger, the
      CPU lets libjpeg shrink the file first, which gives other bits: a decoder must leave such a
      file to the CPU.
    - ``stages``: the parameters of each stage, views of ``buffer``.
    - ``buffer``: uint8; all that a device needs.
    """

    places: NDArray[np.int64]
    left: dict[int, str]
    regions: NDArray[np.int32]
    frames: NDArray[np.int32]
    stages: tuple[dict[str, NDArray[Any]], ...]
    buffer: NDArray[np.uint8] = field(repr=False)

    def __len__(self) -> int:
        return len(self.places)

    def on(self, buffer: Any) -> tuple[dict[str, Any], ...]:
        """The stages as tensors: views of ``buffer``, a copy of this one's on any device."""
        import torch

        start = self.buffer.ctypes.data
        stages = []
        for stage in self.stages:
            tensors = {}
            for name, array in stage.items():
                first = array.ctypes.data - start if array.size else 0
                kind = getattr(torch, array.dtype.name)
                part = buffer[first : first + array.nbytes]
                tensors[name] = part.view(kind).view(array.shape)
            stages.append(tensors)
        return tuple(stages)


def pack(
    places: NDArray[np.int64],
    left: dict[int, str],
    regions: NDArray[np.int32],
    frames: NDArray[np.int32],
    stages: list[dict[str, NDArray[Any]]],
) -> DeviceParameters:
    """Copy the arrays of all stages into one buffer."""
    sizes = [-(-array.nbytes // _ALIGN) * _ALIGN for stage in stages for array in stage.values()]
    # NumPy aligns to 16 bytes at least, so that every array has the alignment of its type.
    buffer = np.zeros(sum(sizes), np.uint8)
    at, packed = 0, []
    for stage in stages:
        views = {}
        for name, array in stage.items():
            views[name] = buffer[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            views[name][...] = array
            at += -(-array.nbytes // _ALIGN) * _ALIGN
        packed.append(views)
    return DeviceParameters(places, left, regions, frames, tuple(packed), buffer)
