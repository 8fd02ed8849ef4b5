"""Pictures of different sizes in one tensor on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Ragged:
    """The pixels of a tiny-batch: one region of each picture, RGB, channels last.

    - ``data``: uint8, one axis. A region has ``height * width * 3`` bytes without gaps, from its
      offset on. There may be gaps between regions.
    - ``host``: int64 (n, 5), one row for each picture: offset of the region in ``data``, its height
      and width, its top and left in the picture. A region that is the whole picture begins at 0, 0.
    - ``table``: the same numbers as a tensor on the device of ``data``.

    The host has the numbers too, so that nothing waits for the device to learn a size.

    >>> import numpy as np
    >>> pictures = Ragged.of([np.zeros((2, 3, 3), np.uint8), np.ones((1, 2, 3), np.uint8)])
    >>> pictures.offsets.tolist(), pictures.heights.tolist(), pictures.widths.tolist()
    ([0, 18], [2, 1], [3, 2])
    >>> pictures.picture(1).tolist()
    [[[1, 1, 1], [1, 1, 1]]]
    """

    data: torch.Tensor
    host: NDArray[np.int64]
    table: torch.Tensor

    @classmethod
    def of(cls, pictures: Sequence[NDArray[np.uint8]], device: Any = "cpu") -> Ragged:
        """Whole pictures (height, width, 3) from the host."""
        flat = [np.ascontiguousarray(picture).reshape(-1) for picture in pictures]
        data = torch.from_numpy(np.concatenate(flat)).to(device)
        return cls.packed(data, np.array([picture.shape[:2] for picture in pictures]))

    @classmethod
    def packed(
        cls,
        data: torch.Tensor,
        sizes: NDArray[Any],
        origins: NDArray[Any] | None = None,
        offsets: NDArray[Any] | None = None,
    ) -> Ragged:
        """Regions of these sizes (n, 2) in ``data``, one after the other unless ``offsets`` differ.

        ``origins``: (n, 2), top and left of each region in its picture.
        """
        host = np.zeros((len(sizes), 5), np.int64)
        host[:, 1:3] = sizes
        if offsets is None:
            host[1:, 0] = (host[:-1, 1] * host[:-1, 2] * 3).cumsum()
        else:
            host[:, 0] = offsets
        if origins is not None:
            host[:, 3:5] = origins
        return cls(data, host, torch.from_numpy(host).to(data.device))

    @classmethod
    def stacked(cls, images: torch.Tensor) -> Ragged:
        """Pictures of one size, a contiguous tensor (n, height, width, 3)."""
        count, height, width, _ = images.shape
        return cls.packed(images.reshape(-1), np.full((count, 2), (height, width)))

    def __len__(self) -> int:
        return len(self.host)

    @property
    def offsets(self) -> torch.Tensor:
        return self.table[:, 0]

    @property
    def heights(self) -> torch.Tensor:
        return self.table[:, 1]

    @property
    def widths(self) -> torch.Tensor:
        return self.table[:, 2]

    @property
    def tops(self) -> torch.Tensor:
        return self.table[:, 3]

    @property
    def lefts(self) -> torch.Tensor:
        return self.table[:, 4]

    def picture(self, number: int) -> torch.Tensor:
        """One region (height, width, 3), without a copy."""
        start, height, width, *_ = map(int, self.host[number])
        return self.data[start : start + height * width * 3].view(height, width, 3)

    def images(self) -> torch.Tensor | None:
        """All regions as (n, height, width, 3) without a copy; ``None`` if that is not possible."""
        if not len(self):
            return None
        start, height, width, *_ = map(int, self.host[0])
        size = height * width * 3
        expected = start + np.arange(len(self)) * size
        if (self.host[:, 1:3] != (height, width)).any() or (self.host[:, 0] != expected).any():
            return None
        return self.data[start : start + len(self) * size].view(len(self), height, width, 3)
