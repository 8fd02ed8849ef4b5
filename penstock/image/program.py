"""Image operations as one program of the compiled kernel, which runs them without Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.image import jpeg_index
from penstock.stops.stop import KernelWork


class KernelFraming(NamedTuple):
    """A crop or resize as the compiled kernel runs it: ``Framing`` in ``native/program.h``.

    ``key`` is that of ``Keyed``. ``ranges``: lowest and highest scale, lowest and highest ratio.
    """

    kind: int
    height: int
    width: int
    ranges: tuple[float, float, float, float]
    key: bytes


class KernelAugment(NamedTuple):
    """An automatic augmentation as the compiled kernel draws it: ``Augment`` in that file."""

    kind: int
    number: int
    bins: int
    strength: float
    space: tuple[float, float, bool, float, float, int]
    policy: bytes | None
    fill: tuple[int, ...]
    key: bytes


@dataclass(frozen=True)
class ImageWork(KernelWork):
    """Decode, crop, resize, flip, augment and normalize, in this order; each may be missing.

    - ``decodes``: samples are the bytes of files, not pixels.
    - ``most_pixels``: larger pictures are left to Python, which refuses them with a message.
    - ``flip``: the probability of a flip, and the key of its random numbers.
    - ``table``: that of normalize.
    - ``indexed``: a crop reads a part of the file, so the JPEG index saves time.
    """

    decodes: bool = False
    most_pixels: int = 0
    framing: tuple[KernelFraming, ...] = ()
    flip: tuple[float, bytes] | None = None
    augment: KernelAugment | None = None
    table: NDArray[np.float32] | None = None
    indexed: bool = False

    def joined(self, below: KernelWork) -> ImageWork | None:
        if not isinstance(below, ImageWork) or self._last >= below._first:
            return None
        return ImageWork(
            self.decodes or below.decodes,
            max(self.most_pixels, below.most_pixels),
            self.framing or below.framing,
            self.flip or below.flip,
            self.augment or below.augment,
            self.table if below.table is None else below.table,
            self.indexed or below.indexed,
        )

    @property
    def _parts(self) -> list[int]:
        """The numbers of its parts, in the order in which the kernel runs them."""
        given = (
            self.decodes,
            bool(self.framing),
            self.flip is not None,
            self.augment is not None,
            self.table is not None,
        )
        return [number for number, part in enumerate(given) if part]

    @property
    def _first(self) -> int:
        return min(self._parts)

    @property
    def _last(self) -> int:
        return max(self._parts)

    @property
    def reads_files(self) -> bool:
        return self.decodes

    @property
    def fills_rows(self) -> bool:
        # All rows have one size, which only a crop or resize gives to pictures of other sizes.
        return bool(self.framing)

    @property
    def makes_input(self) -> bool:
        return self.table is None

    def fits(self, column: NDArray[Any]) -> bool:
        return column.ndim == 4 and column.flags.c_contiguous

    def program(self) -> Any:
        return native.kernel().Program(
            self.decodes,
            self.most_pixels,
            self.framing,
            self.flip,
            self.augment,
            self.table,
            self.indexed,
        )

    def index(self) -> Any:
        return jpeg_index.process_index().held if self.indexed else None


def framed_by(framing: KernelFraming | None) -> ImageWork | None:
    """The work of one crop or resize; ``None`` if the kernel cannot do it."""
    return None if framing is None else ImageWork(framing=(framing,))


def augmented_by(augment: KernelAugment | None) -> ImageWork | None:
    """The work of one automatic augmentation; ``None`` if the kernel cannot do it."""
    return None if augment is None else ImageWork(augment=augment)
