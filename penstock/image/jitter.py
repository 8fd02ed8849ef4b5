"""Random changes of brightness, contrast, saturation and hue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.image import arguments
from penstock.image.lazy_image import LazyImage
from penstock.image.pixels import check_image, need_image
from penstock.native import Image
from penstock.operation import LEVELS, STEPS, Operation, Spec, counted

_Range = tuple[float, float]

_CHANGES = (LazyImage.brightness, LazyImage.contrast, LazyImage.saturation, LazyImage.hue)
_ORDERS = tuple(permutations(range(4)))


class Jitter(NamedTuple):
    """The order in which (brightness, contrast, saturation, hue) change, and their factors."""

    order: tuple[int, ...]
    factors: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class ColorJitter(Operation):
    """Change brightness, contrast, saturation and hue at random, in random order.

    One number ``x`` means a factor from ``max(0, 1 - x)`` to ``1 + x``; a pair is (from, to). Hue
    is a part of the colour circle, ``-x`` to ``x``, with ``x`` up to 0.5. The definitions are
    torchvision's. Brightness has its bits; each other change is within one grey level for factors
    up to 2.

    >>> import numpy as np
    >>> jitter = ColorJitter(brightness=0.4)
    >>> image = np.full((2, 2, 3), 100, np.uint8)
    >>> params = jitter.draw(np.random.default_rng(0), image.shape)
    >>> jitter.apply(image, params)[0, 0].tolist()
    [81, 81, 81]
    """

    random: ClassVar[bool] = True

    brightness: float | Sequence[float] | None = None
    contrast: float | Sequence[float] | None = None
    saturation: float | Sequence[float] | None = None
    hue: float | Sequence[float] | None = None
    _ranges: tuple[_Range | None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges = (
            _factors("brightness", self.brightness),
            _factors("contrast", self.contrast),
            _factors("saturation", self.saturation),
            _turns(self.hue),
        )
        object.__setattr__(self, "_ranges", ranges)
        for name, value in zip(
            ("brightness", "contrast", "saturation", "hue"), ranges, strict=True
        ):
            object.__setattr__(self, name, value)

    def output(self, spec: Spec) -> Spec:
        return need_image("color_jitter", spec)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Jitter:
        order, *parts = rng.random(5).tolist()
        return Jitter(
            _ORDERS[int(order * len(_ORDERS))],
            tuple(
                None if span is None else span[0] + (span[1] - span[0]) * part
                for span, part in zip(self._ranges, parts, strict=True)
            ),
        )

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``LEVELS`` factors for each change that has a range, times the orders of all changes.

        Saturation and hue do not count for grey images.
        """
        changes, ranges = self._counts(shape)
        return counted(math.factorial(changes) * LEVELS**ranges)

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` strengths of each change that has a range, in any order."""
        return counted(STEPS ** self._counts(shape)[1])

    def _counts(self, shape: tuple[int, ...] | None) -> tuple[int, int]:
        """The number of changes that a sample gets, and of those that have a range."""
        grey = shape is not None and shape[-1] == 1
        spans = [span for span in self._ranges[: 2 if grey else 4] if span is not None]
        return len(spans), sum(low < high for low, high in spans)

    def apply(self, value: Any, params: Jitter) -> Image:
        lazy = LazyImage(check_image("color_jitter", value))
        for which in params.order:
            factor = params.factors[which]
            if factor is not None:
                _CHANGES[which](lazy, factor)
        return lazy.settle()


def _factors(argument: str, given: float | Sequence[float] | None) -> _Range | None:
    if given is None:
        return None
    if isinstance(given, Sequence):
        factors = arguments.interval("color_jitter", argument, given, 0.0, math.inf)
    else:
        width = arguments.number("color_jitter", argument, given, 0.0, math.inf)
        factors = (max(0.0, 1.0 - width), 1.0 + width)
    return None if factors == (1.0, 1.0) else factors


def _turns(given: float | Sequence[float] | None) -> _Range | None:
    if given is None:
        return None
    if isinstance(given, Sequence):
        turns = arguments.interval("color_jitter", "hue", given, -0.5, 0.5)
    else:
        width = arguments.number("color_jitter", "hue", given, 0.0, 0.5)
        turns = (-width, width)
    return None if turns == (0.0, 0.0) else turns
