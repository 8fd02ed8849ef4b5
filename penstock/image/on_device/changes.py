"""The changes of automatic augmentation and colour jitter as numbers for a device.

Whatever does not depend on the pixels is computed here, on the host, with the arithmetic of
``native/augment``: tables of levels, the slope of a contrast, the colour matrix of a saturation,
the distance that each row of a shear moves. What is left for the device are lookups, and sums of
integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.image import tone
from penstock.image.augment import CHANGES, AugmentStep
from penstock.image.jitter import Jitter
from penstock.image.on_device.framing import Size, offsets_of
from penstock.image.on_device.parameters import Arrays
from penstock.keyed import Key, Keyed

(
    NOTHING,
    TABLE,
    ROWS,
    COLUMNS,
    SHIFT,
    ROTATE,
    SATURATE,
    SHARPEN,
    CONTRAST,
    STRETCH,
    EQUALIZE,
    HUE,
) = range(12)
"""Kinds of changes: what a device does. Shears along rows are ROWS, along columns COLUMNS."""

COUNTED = (CONTRAST, STRETCH, EQUALIZE)
"""These need the number of pixels with each level."""

_MOST_SATURATION = 1024.0
_MOST_BLUR = 1 << 22
_STEEPEST = float(1 << 40)
_GREY = tone.GREY
_NAMES = tuple(CHANGES)


@dataclass
class ChangeNumbers:
    """The numbers of one change of one picture. Only those of its kind are set."""

    kind: int = NOTHING
    table: Any = None
    matrix: Sequence[int] = (0,) * 10
    whole: Sequence[int] = (0, 0)
    turn: Sequence[float] = (0.0,) * 4
    slope: int = 0
    lean: float = 0.0
    runs: Any = None


def _clamped(value: float, most: float) -> float:
    return min(max(value, -most), most)


def _nearest(values: NDArray[Any], most: int) -> NDArray[np.int32]:
    whole: NDArray[np.int32] = np.rint(np.clip(values, -most, most)).astype(np.int32)
    return whole


def _by_table(tones: tone.Tones) -> ChangeNumbers:
    return (
        ChangeNumbers() if tones is tone.UNCHANGED else ChangeNumbers(TABLE, table=tones[0].table)
    )


def _saturate(factor: float) -> ChangeNumbers:
    if factor == 1.0:
        return ChangeNumbers()
    factor = _clamped(factor, _MOST_SATURATION)
    matrix = np.empty((3, 3), np.float32)
    matrix[:] = np.multiply(_GREY, 1.0 - factor).astype(np.float32)
    matrix[(0, 1, 2), (0, 1, 2)] += np.float32(factor)
    matrix = np.rint(matrix * np.float32(1024))
    down = np.rint(np.float32(-0.4999 - 0.5 * (1.0 - factor)) * np.float32(1024))
    return ChangeNumbers(SATURATE, matrix=[*map(int, matrix.reshape(-1)), int(down) + 512])


def _sharpen(factor: float, size: Size) -> ChangeNumbers:
    if factor == 1.0 or min(size) <= 2:
        return ChangeNumbers()
    blur = round(_clamped((1.0 - factor) * 9.0 / 13.0 * 1024, _MOST_BLUR))
    return ChangeNumbers(SHARPEN, whole=(blur, 0))


def _contrast(factor: float) -> ChangeNumbers:
    if factor == 1.0:
        return ChangeNumbers()
    factor = _clamped(factor, _STEEPEST)
    return ChangeNumbers(CONTRAST, slope=round(factor * 1024), lean=1.0 - factor)


def _shift(down: float, across: float, size: Size) -> ChangeNumbers:
    whole = int(_clamped(down, size[0])), int(_clamped(across, size[1]))
    return ChangeNumbers(SHIFT, whole=whole) if any(whole) else ChangeNumbers()


def _shear(kind: int, slope: float, size: Size) -> ChangeNumbers:
    if slope == 0:
        return ChangeNumbers()
    count, most = size if kind == ROWS else size[::-1]
    return ChangeNumbers(kind, runs=_nearest(slope * (np.arange(count) + 0.5), most))


def _rotate(degrees: float, size: Size) -> ChangeNumbers:
    degrees = math.fmod(degrees, 360.0)
    if degrees < 0:
        degrees += 360.0
    if degrees == 0:
        return ChangeNumbers()
    angle = degrees * (math.pi / 180)
    cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    half = np.float32(0.5)
    height, width = np.float32(size[0]) * half, np.float32(size[1]) * half
    turn = (cosine / width, sine / height, -sine / width, cosine / height)
    return ChangeNumbers(ROTATE, turn=[float(part) for part in turn])


def numbers_of(step: AugmentStep, size: Size) -> ChangeNumbers:
    """The numbers of one change of automatic augmentation. ``size``: of the picture."""
    name, m = step
    if name == "ShearX":
        return _shear(ROWS, m, size)
    if name == "ShearY":
        return _shear(COLUMNS, m, size)
    if name == "TranslateX":
        return _shift(0.0, m, size)
    if name == "TranslateY":
        return _shift(m, 0.0, size)
    if name == "Rotate":
        return _rotate(m, size)
    if name == "Brightness":
        return _by_table(tone.brightness(1.0 + m))
    if name == "Color":
        return _saturate(1.0 + m)
    if name == "Contrast":
        return _contrast(1.0 + m)
    if name == "Sharpness":
        return _sharpen(1.0 + m, size)
    if name == "Posterize":
        return _by_table(tone.posterize(int(m)))
    if name == "Solarize":
        return _by_table(tone.solarize(m))
    if name == "Invert":
        return _by_table(tone.invert())
    return ChangeNumbers({"AutoContrast": STRETCH, "Equalize": EQUALIZE}.get(name, NOTHING))


def _hue(turn: float) -> ChangeNumbers:
    return ChangeNumbers(HUE, turn=(turn % 1.0 * 360.0, 0.0, 0.0, 0.0))


def _jittered(jitter: Jitter) -> list[ChangeNumbers]:
    make = (lambda by: _by_table(tone.brightness(by)), _contrast, _saturate, _hue)
    chosen = ((make[which], jitter.factors[which]) for which in jitter.order)
    return [made(factor) for made, factor in chosen if factor is not None]


@dataclass(frozen=True)
class ChangesStage:
    """The changes of one augmentation, or of colour jitter, one after the other.

    ``fill``: the levels of pixels from outside the picture.
    """

    operation: Any
    keyed: Keyed
    fill: tuple[int, ...] = (0, 0, 0)
    frames: bool = field(default=False, init=False)

    def draw_one(self, key: Key, size: Size) -> list[ChangeNumbers]:
        """Draw the changes of one sample. Those that do nothing are left out."""
        drawn = self.operation.draw(self.keyed.at(key), (*size, 3))
        if isinstance(drawn, Jitter):
            numbers = _jittered(drawn)
        else:
            numbers = [numbers_of(step, size) for step in drawn]
        return [one for one in numbers if one.kind != NOTHING]

    def of_kernel(self, drawn: Any, size: Size) -> list[ChangeNumbers]:
        """The same, of what the compiled kernel has drawn."""
        steps = [AugmentStep(_NAMES[code], magnitude) for code, magnitude in drawn[4]]
        numbers = [numbers_of(step, size) for step in steps]
        return [one for one in numbers if one.kind != NOTHING]

    def pack(
        self, drawn: Sequence[list[ChangeNumbers]], sizes: Sequence[Size]
    ) -> dict[str, NDArray[Any]]:
        """The arrays of all samples, (n, most changes, ...)."""
        shape = (len(drawn), max([len(steps) for steps in drawn], default=0))
        longest = max(
            [len(one.runs) for steps in drawn for one in steps if one.runs is not None], default=0
        )
        out = np.array(sizes, np.int64).reshape(len(sizes), 2)
        arrays: dict[str, NDArray[Any]] = {
            "kind": np.zeros(shape, np.int32),
            "table": np.zeros((*shape, 256), np.uint8),
            "matrix": np.zeros((*shape, 10), np.int32),
            "whole": np.zeros((*shape, 2), np.int32),
            "turn": np.zeros((*shape, 4), np.float32),
            "slope": np.zeros(shape, np.int64),
            "lean": np.zeros(shape, np.float64),
            "runs": np.zeros((*shape, longest), np.int32),
            "fill": np.tile(np.array(self.fill, np.int32), (len(drawn), 1)),
            "out": np.concatenate([offsets_of(out)[:, None], out], axis=1),
        }
        for i, steps in enumerate(drawn):
            for j, one in enumerate(steps):
                arrays["kind"][i, j] = one.kind
                arrays["matrix"][i, j] = one.matrix
                arrays["whole"][i, j] = one.whole
                arrays["turn"][i, j] = one.turn
                arrays["slope"][i, j] = one.slope
                arrays["lean"][i, j] = one.lean
                if one.table is not None:
                    arrays["table"][i, j] = one.table
                if one.runs is not None:
                    arrays["runs"][i, j, : len(one.runs)] = one.runs
        return arrays

    def run(self, backend: Any, pictures: Any, arrays: Arrays, host: Arrays, final: Any) -> Any:
        return backend.change(pictures, arrays, host, final)
