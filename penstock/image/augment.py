"""Automatic augmentation: RandAugment, AutoAugment and TrivialAugment.

All three choose changes by name from one table. The result is that of applying the changes one
after the other, in torchvision's order and with its ranges. For the same changes and magnitudes:

- Shifts and changes by a lookup table have torchvision's bits.
- Other changes differ by at most one grey level each.
- Shears and rotations take the same source pixels, except for at most one pixel in a hundred. A
  source position halfway between two pixels (every fifth row, for a slope of a fifth) may round to
  either. Later steps can make such a difference larger.

The compiled kernel applies all steps in one call to images of three channels, without
interpolation. A ``LazyImage`` handles all other images, and every image if there is no kernel. Both
give the same bits, except for rotations: the kernel takes exactly torchvision's source pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.errors import PipelineError
from penstock.image import arguments, kernel
from penstock.image.lazy_image import LazyImage
from penstock.image.normalizing import Normalize
from penstock.image.pixels import FLOAT32, check_image, need_image
from penstock.image.program import ImageWork, KernelAugment, augmented_by
from penstock.image.tone import Table
from penstock.native import Image
from penstock.operation import Operation, Spec, counted, fits


class AugmentStep(NamedTuple):
    """One change: its name, and its magnitude in the unit of that change."""

    name: str
    magnitude: float

    @property
    def effect(self) -> AugmentStep:
        """A normal form: steps with the same result on every image have the same effect.

        The effect of a step that changes nothing is ``Identity``.
        """
        name, magnitude = self
        if name in _WITHOUT_STRENGTH or name == "Solarize":
            return self
        if name in ("TranslateX", "TranslateY", "Posterize"):
            magnitude = float(int(magnitude))
        nothing = 8.0 if name == "Posterize" else 0.0
        return (
            AugmentStep("Identity", 0.0) if magnitude == nothing else AugmentStep(name, magnitude)
        )


CHANGES: dict[str, Callable[[LazyImage, float], None]] = {
    "Identity": lambda lazy, m: None,
    "ShearX": LazyImage.shear_x,
    "ShearY": LazyImage.shear_y,
    "TranslateX": lambda lazy, m: lazy.shift(0, int(m)),
    "TranslateY": lambda lazy, m: lazy.shift(int(m), 0),
    "Rotate": LazyImage.rotate,
    "Brightness": lambda lazy, m: lazy.brightness(1.0 + m),
    "Color": lambda lazy, m: lazy.saturation(1.0 + m),
    "Contrast": lambda lazy, m: lazy.contrast(1.0 + m),
    "Sharpness": lambda lazy, m: lazy.sharpness(1.0 + m),
    "Posterize": lambda lazy, m: lazy.posterize(int(m)),
    "Solarize": LazyImage.solarize,
    "AutoContrast": lambda lazy, m: lazy.autocontrast(),
    "Equalize": lambda lazy, m: lazy.equalize(),
    "Invert": lambda lazy, m: lazy.invert(),
}

NUMBERS = {name: number for number, name in enumerate(CHANGES)}
"""The number of each change in the compiled kernel."""

NAMES = tuple(name for name in CHANGES if name != "Invert")
"""The changes RandAugment and TrivialAugment choose from. Only AutoAugment uses Invert."""

_WITHOUT_STRENGTH = ("AutoContrast", "Equalize", "Identity", "Invert")


@dataclass(frozen=True, slots=True)
class Space:
    """The magnitude of every change at full strength; weaker ones are in proportion.

    ``Posterize`` and ``Solarize`` grow stronger as their magnitude falls. So a strength of 0 leaves
    the image unchanged for every change that has a strength, with one exception: the weakest
    ``Solarize`` still inverts white.
    """

    shear: float
    shift: float
    shift_of_side: bool
    turn: float
    tone: float
    bits: int

    def step(
        self, name: str, strength: float, negative: bool, height: int, width: int
    ) -> AugmentStep:
        """The step for a strength from 0 to 1. ``negative``: the sign, if the change has one."""
        if name in _WITHOUT_STRENGTH:
            return AugmentStep(name, 0.0)
        if name == "Posterize":
            return AugmentStep(name, float(8 - round(self.bits * strength)))
        if name == "Solarize":
            return AugmentStep(name, 255.0 * (1.0 - strength))
        if name in ("ShearX", "ShearY"):
            most = self.shear
        elif name == "TranslateX":
            most = self.shift * width if self.shift_of_side else self.shift
        elif name == "TranslateY":
            most = self.shift * height if self.shift_of_side else self.shift
        elif name == "Rotate":
            most = self.turn
        else:
            most = self.tone
        return AugmentStep(name, -most * strength if negative else most * strength)


def _kernel_space(space: Space) -> tuple[float, float, bool, float, float, int]:
    return space.shear, space.shift, space.shift_of_side, space.turn, space.tone, space.bits


NARROW = Space(shear=0.3, shift=150 / 331, shift_of_side=True, turn=30.0, tone=0.9, bits=4)
"""AutoAugment and RandAugment. Their shifts are 150 pixels for an image of 331."""

WIDE = Space(shear=0.99, shift=32.0, shift_of_side=False, turn=135.0, tone=0.99, bits=6)
"""TrivialAugment."""


PolicyChange = tuple[str, float, int]
"""A change of an AutoAugment policy: its name, probability, and strength from 0 to 9."""

PolicyPair = tuple[PolicyChange, PolicyChange]

# AutoAugment's learnt policies. Each line is a pair of changes, "name probability strength" each.
# Changes without a strength have 0.
_IMAGENET = """
Posterize 0.4 8, Rotate 0.6 9
Solarize 0.6 5, AutoContrast 0.6 0
Equalize 0.8 0, Equalize 0.6 0
Posterize 0.6 7, Posterize 0.6 6
Equalize 0.4 0, Solarize 0.2 4
Equalize 0.4 0, Rotate 0.8 8
Solarize 0.6 3, Equalize 0.6 0
Posterize 0.8 5, Equalize 1.0 0
Rotate 0.2 3, Solarize 0.6 8
Equalize 0.6 0, Posterize 0.4 6
Rotate 0.8 8, Color 0.4 0
Rotate 0.4 9, Equalize 0.6 0
Equalize 0.0 0, Equalize 0.8 0
Invert 0.6 0, Equalize 1.0 0
Color 0.6 4, Contrast 1.0 8
Rotate 0.8 8, Color 1.0 2
Color 0.8 8, Solarize 0.8 7
Sharpness 0.4 7, Invert 0.6 0
ShearX 0.6 5, Equalize 1.0 0
Color 0.4 0, Equalize 0.6 0
Equalize 0.4 0, Solarize 0.2 4
Solarize 0.6 5, AutoContrast 0.6 0
Invert 0.6 0, Equalize 1.0 0
Color 0.6 4, Contrast 1.0 8
Equalize 0.8 0, Equalize 0.6 0
"""

_CIFAR10 = """
Invert 0.1 0, Contrast 0.2 6
Rotate 0.7 2, TranslateX 0.3 9
Sharpness 0.8 1, Sharpness 0.9 3
ShearY 0.5 8, TranslateY 0.7 9
AutoContrast 0.5 0, Equalize 0.9 0
ShearY 0.2 7, Posterize 0.3 7
Color 0.4 3, Brightness 0.6 7
Sharpness 0.3 9, Brightness 0.7 9
Equalize 0.6 0, Equalize 0.5 0
Contrast 0.6 7, Sharpness 0.6 5
Color 0.7 7, TranslateX 0.5 8
Equalize 0.3 0, AutoContrast 0.4 0
TranslateY 0.4 3, Sharpness 0.2 6
Brightness 0.9 6, Color 0.2 8
Solarize 0.5 2, Invert 0.0 0
Equalize 0.2 0, AutoContrast 0.6 0
Equalize 0.2 0, Equalize 0.6 0
Color 0.9 9, Equalize 0.6 0
AutoContrast 0.8 0, Solarize 0.2 8
Brightness 0.1 3, Color 0.7 0
Solarize 0.4 5, AutoContrast 0.9 0
TranslateY 0.9 9, TranslateY 0.7 9
AutoContrast 0.9 0, Solarize 0.8 3
Equalize 0.8 0, Invert 0.1 0
TranslateY 0.7 9, AutoContrast 0.9 0
"""


def _policy_change(text: str) -> PolicyChange:
    name, probability, strength = text.split()
    return name, float(probability), int(strength)


def _policy_pairs(text: str) -> tuple[PolicyPair, ...]:
    lines = (line.split(",") for line in text.strip().splitlines())
    return tuple((_policy_change(first), _policy_change(second)) for first, second in lines)


POLICIES: dict[str, tuple[PolicyPair, ...]] = {
    "imagenet": _policy_pairs(_IMAGENET),
    "cifar10": _policy_pairs(_CIFAR10),
}

STRENGTHS = 10
"""Number of strengths in AutoAugment policies: 0 to 9."""


AugmentSteps = tuple[AugmentStep, ...]
"""The drawn parameters of one sample, in the order in which they apply."""

_SAMPLINGS = ("nearest", "bilinear")

_NOTHING = AugmentStep("Identity", 0.0)


def apply_steps(image: Image, steps: AugmentSteps, fill: tuple[float, ...], smooth: bool) -> Image:
    """Apply all steps; returns ``image`` itself if they change nothing."""
    if not _kernel_supports(image, smooth):
        return _build_lazy_image(image, steps, fill, smooth).settle()
    out = np.empty(image.shape, np.uint8)
    return out if _apply_by_kernel(image, steps, fill, out, None) else image


def apply_except_table(
    image: Image, steps: AugmentSteps, fill: tuple[float, ...], smooth: bool
) -> tuple[Image, Table | None]:
    """Apply all steps except for a final lookup table (channels, 256), which is returned.

    A caller that looks up every level anyway, as normalizing does, can join the table with its own.
    A table of ``None`` means that the image is complete, which is always so with the kernel.
    """
    if _kernel_supports(image, smooth):
        return apply_steps(image, steps, fill, smooth), None
    return _build_lazy_image(image, steps, fill, smooth).pixels_and_table()


def apply_and_normalize(
    image: Image,
    steps: AugmentSteps,
    fill: tuple[float, ...],
    smooth: bool,
    normalize: Normalize,
    out: NDArray[Any] | None,
) -> NDArray[np.float32]:
    """Apply all steps and ``normalize``, with one lookup of every level for both.

    Writes into ``out`` if it has the right shape and type.
    """
    height, width, channels = image.shape
    if normalize.layout == "chw" and _kernel_supports(image, smooth):
        if out is None or not fits(out, (channels, height, width), FLOAT32):
            out = np.empty((channels, height, width), FLOAT32)
        _apply_by_kernel(image, steps, fill, out, normalize.table(channels))
        return out
    image, table = apply_except_table(image, steps, fill, smooth)
    if table is None:
        return normalize.apply_to(image, None, out)
    levels = np.take_along_axis(normalize.table(channels), table, axis=1)
    return normalize.look_up(image, levels, out)


_RAND_AUGMENT, _AUTO_AUGMENT, _TRIVIAL_AUGMENT = 1, 2, 3
"""The numbers of the kinds in the compiled kernel."""

_MOST_CHANGES = 32
"""Changes of a sample that the compiled kernel has room for when it draws them itself."""


def _kernel_policy(pairs: Sequence[PolicyPair]) -> bytes:
    rows = [[NUMBERS[name], chance, strength] for pair in pairs for name, chance, strength in pair]
    return np.array(rows, dtype=np.float64).tobytes()


def _kernel_fill(fill: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(map(round, fill if len(fill) == 3 else fill * 3))


def _kernel_supports(image: Image, smooth: bool) -> bool:
    """Whether the kernel handles this image.

    Must depend on the image and ``smooth`` only: the kernel's rotations differ from OpenCV's.
    """
    height, width, channels = image.shape
    return (
        channels == 3
        and not smooth
        and max(height, width) <= kernel.LONGEST_SIDE
        and native.kernel_available()
    )


def _apply_by_kernel(
    image: Image,
    steps: AugmentSteps,
    fill: tuple[float, ...],
    out: NDArray[Any],
    table: NDArray[np.float32] | None,
) -> bool:
    numbered = [(NUMBERS[name], magnitude) for name, magnitude in steps]
    image = np.ascontiguousarray(image)
    return kernel.augment(image, numbered, _kernel_fill(fill), out, table=table)


def _build_lazy_image(
    image: Image, steps: AugmentSteps, fill: tuple[float, ...], smooth: bool
) -> LazyImage:
    lazy = LazyImage(image, fill, smooth)
    for step in steps:
        CHANGES[step.name](lazy, step.magnitude)
    return lazy


@dataclass(frozen=True, slots=True)
class RandAugment(Operation):
    """RandAugment: ``num_ops`` changes, each chosen at random from 14, all of one strength.

    ``magnitude`` is from 0 to ``bins - 1``. Pixels from outside the image are ``fill``.

    >>> import numpy as np
    >>> augment = RandAugment(num_ops=2, magnitude=9)
    >>> [step.name for step in augment.draw(np.random.default_rng(0), (64, 64, 3))]
    ['Contrast', 'Identity']
    """

    random: ClassVar[bool] = True

    num_ops: int = 2
    magnitude: int = 9
    bins: int = 31
    fill: float | Sequence[float] = 0
    interpolation: str = "nearest"
    _fill: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.integer("rand_augment", "num_ops", self.num_ops, least=0)
        arguments.integer("rand_augment", "magnitude", self.magnitude, least=0)
        arguments.integer("rand_augment", "bins", self.bins, least=2)
        if self.magnitude >= self.bins:
            raise PipelineError(
                f"rand_augment: magnitude is {self.magnitude}; with {self.bins} bins it goes from "
                f"0 to {self.bins - 1}. Give a smaller magnitude, or more bins."
            )
        fill = _fill_and_sampling("rand_augment", self.fill, self.interpolation)
        object.__setattr__(self, "fill", fill)
        object.__setattr__(self, "_fill", fill)

    def output(self, spec: Spec) -> Spec:
        return need_image("rand_augment", spec)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AugmentSteps:
        strength = self.magnitude / (self.bins - 1)
        parts = rng.random((self.num_ops, 2)).tolist()
        return tuple(
            NARROW.step(NAMES[int(which * len(NAMES))], strength, way < 0.5, shape[0], shape[1])
            for which, way in parts
        )

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of different steps, to the power of ``num_ops``.

        A change with a sign counts twice. All steps that do nothing count as one. Orders count as
        different, although some steps give the same result in either order.
        """
        rows, columns = _sides(shape)
        strength = self.magnitude / (self.bins - 1)
        steps = {
            NARROW.step(name, strength, way, rows, columns).effect
            for name in NAMES
            for way in (False, True)
        }
        return counted(len(steps) ** self.num_ops)

    def apply(self, value: Any, params: AugmentSteps) -> Image:
        image = check_image("rand_augment", value)
        return apply_steps(image, params, self._fill, self.interpolation == "bilinear")

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return augmented_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelAugment | None:
        if self.interpolation != "nearest" or self.num_ops > _MOST_CHANGES:
            return None
        strength = self.magnitude / (self.bins - 1)
        space, fill = _kernel_space(NARROW), _kernel_fill(self._fill)
        return KernelAugment(
            _RAND_AUGMENT, self.num_ops, self.bins, strength, space, None, fill, key
        )


@dataclass(frozen=True, slots=True)
class AutoAugment(Operation):
    """AutoAugment: one of 25 learnt pairs of changes, each with its own probability and strength.

    ``policy`` is ``"imagenet"`` or ``"cifar10"``. Pixels from outside the image are ``fill``.

    >>> import numpy as np
    >>> augment = AutoAugment("cifar10")
    >>> [step.name for step in augment.draw(np.random.default_rng(0), (32, 32, 3))]
    ['AutoContrast']
    """

    random: ClassVar[bool] = True

    policy: str = "imagenet"
    fill: float | Sequence[float] = 0
    interpolation: str = "nearest"
    _fill: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.choice("auto_augment", "policy", self.policy, tuple(POLICIES))
        fill = _fill_and_sampling("auto_augment", self.fill, self.interpolation)
        object.__setattr__(self, "fill", fill)
        object.__setattr__(self, "_fill", fill)

    def output(self, spec: Spec) -> Spec:
        return need_image("auto_augment", spec)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AugmentSteps:
        which, *parts = rng.random(5).tolist()
        pairs = POLICIES[self.policy]
        pair = pairs[int(which * len(pairs))]
        return tuple(
            NARROW.step(name, strength / (STRENGTHS - 1), way < 0.5, shape[0], shape[1])
            for (name, probability, strength), part, way in zip(
                pair, parts[:2], parts[2:], strict=True
            )
            if part < probability
        )

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of different sequences of steps that the pairs allow.

        Each change is applied with either sign, or not at all if its probability is below 1. A
        sequence that several pairs allow counts once.
        """
        rows, columns = _sides(shape)
        runs = set()
        for pair in POLICIES[self.policy]:
            choices: list[set[AugmentStep]] = []
            for name, probability, strength in pair:
                steps = (
                    set()
                    if probability == 0.0
                    else {
                        NARROW.step(name, strength / (STRENGTHS - 1), way, rows, columns).effect
                        for way in (False, True)
                    }
                )
                choices.append(steps | ({_NOTHING} if probability < 1.0 else set()))
            runs |= {tuple(step for step in run if step != _NOTHING) for run in product(*choices)}
        return counted(len(runs))

    def apply(self, value: Any, params: AugmentSteps) -> Image:
        image = check_image("auto_augment", value)
        return apply_steps(image, params, self._fill, self.interpolation == "bilinear")

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return augmented_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelAugment | None:
        if self.interpolation != "nearest":
            return None
        policy = _kernel_policy(POLICIES[self.policy])
        space, fill = _kernel_space(NARROW), _kernel_fill(self._fill)
        return KernelAugment(_AUTO_AUGMENT, 2, 2, 0.0, space, policy, fill, key)


@dataclass(frozen=True, slots=True)
class TrivialAugment(Operation):
    """TrivialAugment Wide: one of 14 changes, at a random strength over wide ranges.

    >>> import numpy as np
    >>> augment = TrivialAugment()
    >>> [step.name for step in augment.draw(np.random.default_rng(0), (64, 64, 3))]
    ['Contrast']
    """

    random: ClassVar[bool] = True

    bins: int = 31
    fill: float | Sequence[float] = 0
    interpolation: str = "nearest"
    _fill: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.integer("trivial_augment", "bins", self.bins, least=2)
        fill = _fill_and_sampling("trivial_augment", self.fill, self.interpolation)
        object.__setattr__(self, "fill", fill)
        object.__setattr__(self, "_fill", fill)

    def output(self, spec: Spec) -> Spec:
        return need_image("trivial_augment", spec)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AugmentSteps:
        which, strong, way = rng.random(3).tolist()
        strength = int(strong * self.bins) / (self.bins - 1)
        name = NAMES[int(which * len(NAMES))]
        return (WIDE.step(name, strength, way < 0.5, shape[0], shape[1]),)

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of different steps: changes x strengths x signs, without duplicates.

        Posterize has fewer strengths, and some steps do nothing.
        """
        rows, columns = _sides(shape)
        steps = {
            WIDE.step(name, strong / (self.bins - 1), way, rows, columns).effect
            for name in NAMES
            for strong in range(self.bins)
            for way in (False, True)
        }
        return counted(len(steps))

    def apply(self, value: Any, params: AugmentSteps) -> Image:
        image = check_image("trivial_augment", value)
        return apply_steps(image, params, self._fill, self.interpolation == "bilinear")

    def kernel_work(self, key: bytes) -> ImageWork | None:
        return augmented_by(self.for_kernel(key))

    def for_kernel(self, key: bytes) -> KernelAugment | None:
        if self.interpolation != "nearest":
            return None
        space, fill = _kernel_space(WIDE), _kernel_fill(self._fill)
        return KernelAugment(_TRIVIAL_AUGMENT, 1, self.bins, 0.0, space, None, fill, key)


def _sides(shape: tuple[int, ...] | None) -> tuple[int, int]:
    """Height and width; 331 if unknown, since the counts depend on the size of tiny images only."""
    return (331, 331) if shape is None else (shape[0], shape[1])


def _fill_and_sampling(name: str, fill: Any, interpolation: Any) -> tuple[float, ...]:
    arguments.choice(name, "interpolation", interpolation, _SAMPLINGS)
    return arguments.colour(name, "fill", fill)
