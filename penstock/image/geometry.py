"""Operations that move pixels: resize, crops and flips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.errors import PipelineError
from penstock.image import arguments
from penstock.image.boxes import Sizes
from penstock.image.pixels import check_image, need_image
from penstock.image.program import ImageWork, KernelFraming, framed_by
from penstock.image.resample import resize
from penstock.native import Image, load_cv2, with_channels
from penstock.operation import STEPS, ArraySpec, Operation, Spec, at_most, counted, fits

_ATTEMPTS = 10
"""torchvision falls back to a central box after this many boxes that do not fit."""


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Frame(NamedTuple):
    """Crop ``box`` of the picture, resize it to ``full`` (height, width), keep ``part`` of that.

    The ``frame`` methods of crops and resizes turn one frame into the next. So a sequence of them
    becomes a single frame, before any pixel is decoded.

    >>> whole = Frame.of(300, 400)
    >>> whole.resized(150, 200).cut(Box(10, 20, 128, 128))
    Frame(box=Box(top=0, left=0, height=300, width=400), full=(150, 200),
          part=Box(top=10, left=20, height=128, width=128))
    """

    box: Box
    full: tuple[int, int]
    part: Box

    @classmethod
    def of(cls, height: int, width: int) -> Frame:
        """The whole picture."""
        whole = Box(0, 0, height, width)
        return cls(whole, (height, width), whole)

    @property
    def size(self) -> tuple[int, int]:
        return self.part.height, self.part.width

    def cut(self, box: Box) -> Frame | None:
        """Keep only ``box`` of the kept part; ``None`` if it reaches outside."""
        top, left, height, width = box
        if top < 0 or left < 0 or top + height > self.part.height or left + width > self.part.width:
            return None
        return self._replace(part=Box(self.part.top + top, self.part.left + left, height, width))

    def resized(self, height: int, width: int) -> Frame | None:
        """Resize the kept part; ``None`` if the frame is resized already."""
        if self.full != (self.box.height, self.box.width):
            return None
        box = Box(self.box.top + self.part.top, self.box.left + self.part.left, *self.size)
        return Frame(box, (height, width), Box(0, 0, height, width))


_RESIZE, _RESIZE_SHORT, _CENTER_CROP, _RANDOM_CROP, _RANDOM_RESIZED_CROP = range(5)
"""The numbers of the kinds in the compiled kernel."""
_NO_RANGES = (0.0, 0.0, 0.0, 0.0)


class PaddedBox(NamedTuple):
    """A box of an image that is first padded by (left, top, right, bottom)."""

    padding: tuple[int, int, int, int]
    box: Box


def _of_size(name: str, spec: Spec, height: int, width: int) -> Spec:
    array = need_image(name, spec, any_dtype=True)
    return None if array is None else ArraySpec((height, width, array.shape[2]), array.dtype)


def _fraction(count: int, uniform: float) -> int:
    """One of ``count`` positions, chosen by a number from [0, 1)."""
    return int(uniform * count)


@dataclass(frozen=True, slots=True)
class Resize(Operation):
    """Resize the whole image, antialiased.

    One number is the length of the shorter side, and the aspect ratio is kept, as in torchvision.
    (height, width) is the exact size. On photographs the mean difference to torchvision's
    antialiased bilinear is below 2 grey levels (see ``resample``).

    >>> import numpy as np
    >>> Resize(4).apply(np.zeros((8, 12, 3), np.uint8), None).shape
    (4, 6, 3)
    """

    size: int | Sequence[int]
    _pair: tuple[int, int] = field(init=False, repr=False, compare=False)
    _short: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pair = arguments.image_size("resize", self.size)
        short = not isinstance(self.size, Sequence)
        object.__setattr__(self, "_pair", pair)
        object.__setattr__(self, "_short", short)
        object.__setattr__(self, "size", pair[0] if short else pair)

    def output(self, spec: Spec) -> Spec:
        array = need_image("resize", spec, any_dtype=True)
        if array is None:
            return None
        height, width, channels = array.shape
        if not self._short:
            return ArraySpec((*self._pair, channels), array.dtype)
        if height is None or width is None:
            return ArraySpec((None, None, channels), array.dtype)
        return ArraySpec((*self._target(height, width), channels), array.dtype)

    def apply(self, value: Any, params: Any) -> Image:
        return self.apply_to(value, params, None)

    def apply_to(self, value: Any, params: Any, out: Image | None) -> Image:
        image = check_image("resize", value, any_dtype=True)
        return resize(image, *self._target(image.shape[0], image.shape[1]), out)

    def frame(self, frame: Frame, params: Any) -> Frame | None:
        return frame.resized(*self._target(*frame.size))

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return framed_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelFraming | None:
        kind = _RESIZE_SHORT if self._short else _RESIZE
        return KernelFraming(kind, *self._pair, _NO_RANGES, key)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not self._short:
            return self._pair
        side = self._pair[0]
        if height <= width:
            return side, int(side * width / height)
        return int(side * height / width), side


@dataclass(frozen=True, slots=True)
class CenterCrop(Operation):
    """Crop the centre of the image. An image that is too small is padded with black.

    >>> import numpy as np
    >>> CenterCrop(2).apply(np.arange(16, dtype=np.uint8).reshape(4, 4, 1), None)[..., 0]
    array([[ 5,  6],
           [ 9, 10]], dtype=uint8)
    """

    size: int | Sequence[int]
    _pair: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pair = arguments.image_size("center_crop", self.size)
        object.__setattr__(self, "_pair", pair)
        object.__setattr__(self, "size", pair)

    def output(self, spec: Spec) -> Spec:
        return _of_size("center_crop", spec, *self._pair)

    def apply(self, value: Any, params: Any) -> Image:
        image = check_image("center_crop", value, any_dtype=True)
        height, width = self._pair
        rows, columns = image.shape[:2]
        if rows < height or columns < width:
            down, across = max(0, height - rows), max(0, width - columns)
            image = np.pad(
                image,
                ((down // 2, down - down // 2), (across // 2, across - across // 2), (0, 0)),
            )
            rows, columns = image.shape[:2]
        top, left = self._corner(rows, columns)
        return image[top : top + height, left : left + width]

    def frame(self, frame: Frame, params: Any) -> Frame | None:
        return frame.cut(Box(*self._corner(*frame.size), *self._pair))

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return framed_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelFraming | None:
        return KernelFraming(_CENTER_CROP, *self._pair, _NO_RANGES, key)

    def _corner(self, rows: int, columns: int) -> tuple[int, int]:
        height, width = self._pair
        return round((rows - height) / 2), round((columns - width) / 2)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(Operation):
    """Crop a box of random area and aspect ratio and resize it to one size, antialiased.

    ``scale`` is the share of the image area and ``ratio`` width over height, both as torchvision
    defines them: ten attempts to place a box, then the largest central box within ``ratio``. On
    photographs the mean difference to torchvision's antialiased bilinear, for the same box, is
    below 2 grey levels (see ``resample``).

    >>> import numpy as np
    >>> crop = RandomResizedCrop(4)
    >>> image = np.zeros((8, 12, 3), np.uint8)
    >>> crop.apply(image, crop.draw(np.random.default_rng(0), image.shape)).shape
    (4, 4, 3)
    """

    random: ClassVar[bool] = True

    size: int | Sequence[int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    _pair: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = "random_resized_crop"
        pair = arguments.image_size(name, self.size)
        object.__setattr__(self, "_pair", pair)
        object.__setattr__(self, "size", pair)
        object.__setattr__(
            self, "scale", arguments.positive_interval(name, "scale", self.scale, 1.0)
        )
        object.__setattr__(
            self, "ratio", arguments.positive_interval(name, "ratio", self.ratio, math.inf)
        )

    def output(self, spec: Spec) -> Spec:
        return _of_size("random_resized_crop", spec, *self._pair)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
        rows, columns = shape[0], shape[1]
        area = rows * columns
        smallest, largest = self.scale
        narrow, wide = self.ratio
        for _ in range(_ATTEMPTS):
            # One call for all four numbers: four calls would cost twice as much.
            part, turn, down, across = rng.random(4).tolist()
            target = area * (smallest + (largest - smallest) * part)
            ratio = narrow * (wide / narrow) ** turn
            width = round(math.sqrt(target * ratio))
            height = round(math.sqrt(target / ratio))
            if 0 < width <= columns and 0 < height <= rows:
                return Box(
                    _fraction(rows - height + 1, down),
                    _fraction(columns - width + 1, across),
                    height,
                    width,
                )
        return self._fallback(rows, columns)

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of different boxes: every size that the ranges allow, at every position."""
        if shape is None:
            return None
        rows, columns = shape[0], shape[1]
        area = rows * columns
        smallest, largest = self.scale
        sizes = Sizes.within((rows, columns), (area * smallest, area * largest), self.ratio)
        fallback = self._fallback(rows, columns)
        extra = sizes.outside and not sizes.holds(fallback.height, fallback.width)
        return counted(sizes.places(rows, columns) + extra)

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` places down and across: sizes and aspect ratios are not counted."""
        return at_most(self.outcomes(shape), ranges=2)

    def _fallback(self, rows: int, columns: int) -> Box:
        narrow, wide = self.ratio
        height, width = rows, columns
        if columns < narrow * rows:
            height = max(1, round(columns / narrow))
        elif columns > wide * rows:
            width = max(1, round(rows * wide))
        return Box((rows - height) // 2, (columns - width) // 2, height, width)

    def apply(self, value: Any, params: Box) -> Image:
        return self.apply_to(value, params, None)

    def apply_to(self, value: Any, params: Box, out: Image | None) -> Image:
        image = check_image("random_resized_crop", value, any_dtype=True)
        top, left, height, width = params
        return resize(image[top : top + height, left : left + width], *self._pair, out)

    def frame(self, frame: Frame, params: Box) -> Frame | None:
        part = frame.cut(params)
        return None if part is None else part.resized(*self._pair)

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return framed_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelFraming | None:
        ranges = (*self.scale, *self.ratio)
        return KernelFraming(_RANDOM_RESIZED_CROP, *self._pair, ranges, key)


@dataclass(frozen=True, slots=True)
class RandomCrop(Operation):
    """Crop a box of fixed size at a random position, after padding.

    ``padding`` is one number for all sides, (left and right, top and bottom), or (left, top,
    right, bottom). ``padding_mode`` is ``"constant"`` (pads with ``fill``), ``"reflect"`` or
    ``"edge"``. ``pad_if_needed`` pads images that are still too small; without it they are an
    error.

    >>> import numpy as np
    >>> crop = RandomCrop(32, padding=4)
    >>> image = np.zeros((32, 32, 3), np.uint8)
    >>> crop.apply(image, crop.draw(np.random.default_rng(0), image.shape)).shape
    (32, 32, 3)
    """

    random: ClassVar[bool] = True

    size: int | Sequence[int]
    padding: int | Sequence[int] = 0
    padding_mode: str = "constant"
    fill: float | Sequence[float] = 0
    pad_if_needed: bool = False
    _pair: tuple[int, int] = field(init=False, repr=False, compare=False)
    _sides: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)
    _fill: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pair = arguments.image_size("random_crop", self.size)
        sides = _sides(self.padding)
        fill = arguments.colour("random_crop", "fill", self.fill)
        arguments.choice(
            "random_crop", "padding_mode", self.padding_mode, ("constant", "reflect", "edge")
        )
        for name, value in (("size", pair), ("padding", sides), ("fill", fill)):
            object.__setattr__(self, name, value)
        for name, value in (("_pair", pair), ("_sides", sides), ("_fill", fill)):
            object.__setattr__(self, name, value)

    def output(self, spec: Spec) -> Spec:
        array = need_image("random_crop", spec, any_dtype=True)
        if array is not None:
            height, width, _ = array.shape
            self._check_room(height, width)
        return _of_size("random_crop", spec, *self._pair)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> PaddedBox:
        padding = self._padding(shape)
        below, beside = self._places(shape, padding)
        down, across = rng.random(2).tolist()
        return PaddedBox(
            padding, Box(_fraction(below, down), _fraction(beside, across), *self._pair)
        )

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of positions: rows times columns."""
        if shape is None:
            return None
        below, beside = self._places(shape, self._padding(shape))
        return counted(below * beside)

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` places down and across, if there are as many."""
        if shape is None:
            return None
        below, beside = self._places(shape, self._padding(shape))
        return counted(min(below, STEPS) * min(beside, STEPS))

    def _padding(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        self._check_room(shape[0], shape[1])
        height, width = self._pair
        left, top, right, bottom = self._sides
        short_rows = max(0, height - (shape[0] + top + bottom))
        short_columns = max(0, width - (shape[1] + left + right))
        return left + short_columns, top + short_rows, right + short_columns, bottom + short_rows

    def _places(
        self, shape: tuple[int, ...], padding: tuple[int, int, int, int]
    ) -> tuple[int, int]:
        left, top, right, bottom = padding
        height, width = self._pair
        return shape[0] + top + bottom - height + 1, shape[1] + left + right - width + 1

    def apply(self, value: Any, params: PaddedBox) -> Image:
        image = check_image("random_crop", value, any_dtype=True)
        (left, top, right, bottom), box = params
        if left or top or right or bottom:
            image = self._padded(image, left, top, right, bottom)
        return image[box.top : box.top + box.height, box.left : box.left + box.width]

    def frame(self, frame: Frame, params: PaddedBox) -> Frame | None:
        return None if any(params.padding) else frame.cut(params.box)

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return framed_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelFraming | None:
        # The kernel does not pad.
        return (
            None if any(self._sides) else KernelFraming(_RANDOM_CROP, *self._pair, _NO_RANGES, key)
        )

    def _padded(self, image: Image, left: int, top: int, right: int, bottom: int) -> Image:
        cv2 = load_cv2()
        border = {
            "constant": cv2.BORDER_CONSTANT,
            "reflect": cv2.BORDER_REFLECT_101,
            "edge": cv2.BORDER_REPLICATE,
        }[self.padding_mode]
        fill = self._fill * 4 if len(self._fill) == 1 else self._fill
        return with_channels(
            cv2.copyMakeBorder(image, top, bottom, left, right, border, value=fill)
        )

    def _check_room(self, height: int | None, width: int | None) -> None:
        if self.pad_if_needed:
            return
        left, top, right, bottom = self._sides
        if (height is not None and height + top + bottom < self._pair[0]) or (
            width is not None and width + left + right < self._pair[1]
        ):
            raise PipelineError(
                f"random_crop{self._pair} got an image of ({height}, {width}), padded by {top} + "
                f"{bottom} rows and {left} + {right} columns: too small to crop. Give "
                "pad_if_needed=True, or put resize() above it."
            )


def _sides(padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    """Padding as (left, top, right, bottom)."""
    given = arguments.as_sequence(padding)
    if given is None:
        given = (padding,)
    if len(given) not in (1, 2, 4):
        raise PipelineError(
            f"random_crop: padding is {padding!r}; give one number, (left and right, top and "
            "bottom), or (left, top, right, bottom)."
        )
    checked = [arguments.integer("random_crop", "padding", side, least=0) for side in given]
    left, top, right, bottom = checked * (4 // len(checked))
    return left, top, right, bottom


@dataclass(frozen=True, slots=True)
class RandomFlip(Operation):
    """Mirror the image left to right (``vertical=True``: top to bottom) with probability ``p``.

    >>> import numpy as np
    >>> RandomFlip().apply(np.array([[[1], [2], [3]]], np.uint8), True)[..., 0]
    array([[3, 2, 1]], dtype=uint8)
    """

    random: ClassVar[bool] = True

    p: float = 0.5
    vertical: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", arguments.number("random_flip", "p", self.p, 0.0, 1.0))

    def output(self, spec: Spec) -> Spec:
        return need_image("random_flip", spec, any_dtype=True)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> bool:
        return bool(rng.random() < self.p)

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return None if self.vertical else ImageWork(flip=(self.p, key))

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """2 if the image may or may not be mirrored, else 1."""
        return 2.0 if 0.0 < self.p < 1.0 else 1.0

    def apply(self, value: Any, params: bool) -> Image:
        return self.apply_to(value, params, None)

    def apply_to(self, value: Any, params: bool, out: Image | None) -> Image:
        image = check_image("random_flip", value, any_dtype=True)
        if not params:
            return image
        if image.shape[2] == 1 or not fits(out, image.shape, image.dtype):
            out = None
        # A reversed view would be free here but take 0.3 ms to copy later; this takes 0.01 ms.
        return with_channels(load_cv2().flip(image, 0 if self.vertical else 1, dst=out))
