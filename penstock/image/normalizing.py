"""Normalizing: from uint8 levels to the float32 input of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.errors import PipelineError
from penstock.image import arguments, kernel
from penstock.image.pixels import FLOAT32, check_image, need_image
from penstock.image.program import ImageWork
from penstock.image.scratch import Scratch
from penstock.native import Image, load_cv2, with_channels
from penstock.operation import ArraySpec, Operation, Spec, fits

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_Floats = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Normalize(Operation):
    """Compute ``(level / 255 - mean) / std`` for each channel, as float32.

    ``mean`` and ``std`` are on the scale of 0 to 1, as in torchvision: one number for all channels,
    or one for each. ``layout="chw"`` gives (channels, height, width), the layout of PyTorch models.
    No other image operation can follow it. ``"hwc"`` keeps the axes as they are.

    >>> import numpy as np
    >>> Normalize(mean=0.5, std=0.5).apply(np.full((1, 2, 1), 255, np.uint8), None)
    array([[[1., 1.]]], dtype=float32)
    """

    mean: float | Sequence[float] = IMAGENET_MEAN
    std: float | Sequence[float] = IMAGENET_STD
    layout: str = "chw"
    _mean: _Floats = field(init=False, repr=False, compare=False)
    _std: _Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.choice("normalize", "layout", self.layout, ("chw", "hwc"))
        mean = arguments.per_channel("normalize", "mean", self.mean, -math.inf, math.inf)
        std = arguments.per_channel("normalize", "std", self.std, 0.0, math.inf)
        if 0.0 in std:
            raise PipelineError(f"normalize: std is {self.std!r}; give numbers above 0.")
        if len(mean) != len(std) and 1 not in (len(mean), len(std)):
            raise PipelineError(
                f"normalize: mean has {len(mean)} numbers and std has {len(std)}; give one for all "
                "channels, or one for each."
            )
        for name, value in (("mean", mean), ("std", std)):
            object.__setattr__(self, name, value)
            object.__setattr__(self, "_" + name, value)

    def output(self, spec: Spec) -> Spec:
        array = need_image("normalize", spec)
        if array is None:
            return None
        height, width, channels = array.shape
        own = max(len(self._mean), len(self._std))
        if channels is None and own > 1:
            channels = own
        if channels is not None:
            self._check_channels(channels)
        if self.layout == "chw":
            return ArraySpec((channels, height, width), FLOAT32)
        return ArraySpec((height, width, channels), FLOAT32)

    def kernel_work(self, key: bytes) -> ImageWork | None:
        channels = max(len(self._mean), len(self._std))
        if self.layout != "chw" or channels not in (1, 3):
            return None
        return ImageWork(table=self.table(3))

    def apply(self, value: Any, params: Any) -> NDArray[np.float32]:
        return self.apply_to(value, params, None)

    def apply_to(self, value: Any, params: Any, out: NDArray[Any] | None) -> NDArray[np.float32]:
        image = check_image("normalize", value)
        return self.look_up(image, self.table(image.shape[2]), out)

    def look_up(
        self, image: Image, table: NDArray[np.float32], out: NDArray[Any] | None
    ) -> NDArray[np.float32]:
        """Map the levels of an image by a table like that of ``table()``, in this layout."""
        height, width, channels = image.shape
        if self.layout == "hwc":
            cv2 = load_cv2()
            return with_channels(cv2.LUT(image, table.T[np.newaxis] if channels > 1 else table[0]))
        if out is None or not fits(out, (channels, height, width), FLOAT32):
            out = np.empty((channels, height, width), dtype=np.float32)
        look_up(image, table, out)
        return out

    def table(self, channels: int) -> NDArray[np.float32]:
        """The float32 value of each of the 256 levels, by channel."""
        self._check_channels(channels)
        return _table(self._mean, self._std, channels)

    def line(self, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Slope and offset of each channel: ``level * slope + offset``, rounded to float32 after
        each step, is the entry of ``table``."""
        table = self.table(channels)
        return _LINEAR_TABLES[id(table)].slopes[:, 0], table[:, 0]

    def _check_channels(self, channels: int) -> None:
        own = max(len(self._mean), len(self._std))
        if own not in (1, channels):
            raise PipelineError(
                f"normalize got an image of {channels} channel{'s' * (channels > 1)}, but mean "
                f"and std for {own}. Give one number for all channels, or {channels}."
            )


def look_up(image: Image, table: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Map the levels of an image by a table (channels, 256), channels first."""
    if image.shape[2] == 3 and image.flags.c_contiguous and native.kernel_available():
        kernel.look_up(image, table, out)
        return
    cv2 = load_cv2()
    planes = _PLANES.take(image.size).reshape(out.shape)
    cv2.split(image, list(planes))
    linear = _LINEAR_TABLES.get(id(table))
    if linear is None:
        for channel, plane in enumerate(planes):
            cv2.LUT(plane, table[channel], dst=out[channel])
        return
    # Arithmetic gives the same bits in less time than a lookup of each level.
    np.copyto(out, planes)
    out *= linear.slopes[:, np.newaxis]
    out += table[:, :1, np.newaxis]


_PLANES = Scratch(most=1 << 24)


class _LinearTable(NamedTuple):
    """A table made by ``_table``, and the difference between neighbouring levels, by channel."""

    table: NDArray[np.float32]
    slopes: NDArray[np.float32]


_LINEAR_TABLES: dict[int, _LinearTable] = {}
"""Keyed by the ``id`` of the table. An id is never reused, because this dict keeps the table."""


@cache
def _table(mean: _Floats, std: _Floats, channels: int) -> NDArray[np.float32]:
    """The float32 value of each of the 256 levels, by channel."""
    means = np.broadcast_to(np.array(mean), (channels,))[:, np.newaxis]
    stds = np.broadcast_to(np.array(std), (channels,))[:, np.newaxis]
    slopes = (1 / (255 * stds)).astype(np.float32)
    table: NDArray[np.float32] = np.arange(256, dtype=np.float32) * slopes
    table += (-means / stds).astype(np.float32)
    table.flags.writeable = False
    _LINEAR_TABLES[id(table)] = _LinearTable(table, slopes)
    return table
