"""Random erasing: paints over a rectangle of the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.image import arguments
from penstock.image.boxes import Sizes
from penstock.image.pixels import check_image, need_image
from penstock.native import Image
from penstock.operation import LEVELS, Operation, Spec, at_most, counted

_ATTEMPTS = 10
"""torchvision leaves the image unchanged after this many rectangles that do not fit."""


class Patch(NamedTuple):
    """The rectangle to paint over. ``noise``: its pixels, if they are random."""

    top: int
    left: int
    height: int
    width: int
    noise: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class Erase(Operation):
    """Paint over a random rectangle, with probability ``p``.

    ``scale`` is its share of the image area and ``ratio`` its height over its width, as in
    torchvision. ``value`` is a grey level, (red, green, blue), or ``"random"`` for noise from 0 to
    255. The image must be uint8, so put erase() above normalize(). There, a value of ImageNet's
    mean (124, 116, 104) has the effect that 0 has after normalizing.

    >>> import numpy as np
    >>> image = np.full((4, 4, 1), 9, np.uint8)
    >>> Erase().apply(image, Patch(1, 1, 2, 2, None))[..., 0]
    array([[9, 9, 9, 9],
           [9, 0, 0, 9],
           [9, 0, 0, 9],
           [9, 9, 9, 9]], dtype=uint8)
    """

    random: ClassVar[bool] = True

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | Sequence[float] | str = 0
    _fill: tuple[float, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", arguments.number("erase", "p", self.p, 0.0, 1.0))
        object.__setattr__(
            self, "scale", arguments.interval("erase", "scale", self.scale, 0.0, 1.0)
        )
        object.__setattr__(
            self, "ratio", arguments.positive_interval("erase", "ratio", self.ratio, math.inf)
        )
        if isinstance(self.value, str):
            arguments.choice("erase", "value", self.value, ("random",))
            object.__setattr__(self, "_fill", None)
        else:
            fill = arguments.colour("erase", "value", self.value)
            object.__setattr__(self, "value", fill)
            object.__setattr__(self, "_fill", fill)

    def output(self, spec: Spec) -> Spec:
        return need_image("erase", spec)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Patch | None:
        if rng.random() >= self.p:
            return None
        rows, columns = shape[0], shape[1]
        smallest, largest = self.scale
        low, tall = self.ratio
        for _ in range(_ATTEMPTS):
            part, turn, down, across = rng.random(4).tolist()
            area = rows * columns * (smallest + (largest - smallest) * part)
            ratio = low * (tall / low) ** turn
            height = round(math.sqrt(area * ratio))
            width = round(math.sqrt(area / ratio))
            if height < rows and width < columns:
                noise = None
                if self._fill is None:
                    noise = rng.integers(0, 256, (height, width, shape[2]), dtype=np.uint8)
                return Patch(
                    int(down * (rows - height + 1)),
                    int(across * (columns - width + 1)),
                    height,
                    width,
                    noise,
                )
        return None

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of rectangles, plus one if the image may stay unchanged.

        Noise counts as ``LEVELS`` fillings of each rectangle. Its real number of fillings would
        outweigh everything else, and mean little.
        """
        if self.p == 0.0:
            return 1.0
        if shape is None:
            return None
        rows, columns = shape[0], shape[1]
        smallest, largest = (rows * columns * part for part in self.scale)
        low, tall = self.ratio
        sizes = Sizes.within((rows - 1, columns - 1), (smallest, largest), (1 / tall, 1 / low))
        painted = sizes.places(rows, columns) * (LEVELS if self._fill is None else 1)
        return counted(painted + (self.p < 1.0 or sizes.outside))

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` places down and across, plus one for the unchanged image."""
        return at_most(self.outcomes(shape), ranges=2, more=1)

    def apply(self, value: Any, params: Patch | None) -> Image:
        image = check_image("erase", value)
        if params is None:
            return image
        out: Image = image.copy()
        part = out[
            params.top : params.top + params.height, params.left : params.left + params.width
        ]
        if params.noise is not None:
            part[:] = params.noise
        elif self._fill is not None:
            part[:] = self._fill[: image.shape[2]]
        return out
