"""Deep AutoAugment: a sequence of changes, each drawn from a learnt distribution of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.image import arguments, deep_policy, kernel
from penstock.image.augment import AugmentStep, apply_steps
from penstock.image.geometry import Box, RandomResizedCrop
from penstock.image.pixels import check_image, need_image
from penstock.image.resample import resize
from penstock.native import Image
from penstock.operation import Operation, Spec, counted

GREY = (125, 123, 114)
"""The colour of erased pixels, and of those that a shift brings in from outside."""

SHIFT = 1 / 8
"""The longest shift, as a share of the side: 4 of CIFAR's 32 pixels."""

_CUTOUT = {"cifar10": 16 / 32, "imagenet": 60 / 224}
"""The side of the erased square, as a share of the shorter side of the picture."""

_SIGNED = {
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateX": 0.45,
    "TranslateY": 0.45,
    "Rotate": 30.0,
    "Contrast": 0.9,
    "Color": 0.9,
    "Brightness": 0.9,
    "Sharpness": 0.9,
}
"""The largest magnitude of changes with a sign; shifts as a share of the side."""

_MIRRORED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
"""Half of these are applied in the other direction."""

_CROP = RandomResizedCrop(224)


class DeepStep(NamedTuple):
    """One layer: a change, ``Flip``, or one of ``Cutout``, ``Shift`` and ``Crop`` with a box.

    The box of ``Cutout`` is erased, that of ``Crop`` is resized to the size of the picture. The box
    of ``Shift`` is the part that stays visible, relative to the picture: its top and left may be
    negative.
    """

    name: str
    magnitude: float = 0.0
    box: Box | None = None


class LayerChoice(NamedTuple):
    name: str
    level: int


def _choices(last: str) -> tuple[LayerChoice, ...]:
    """The changes and magnitudes that each layer chooses from, in the order of the policies."""
    every, top = range(deep_policy.LEVELS), deep_policy.LEVELS - 1
    signed = [level for level in every if level != top // 2]
    rising = [level for level in every if level != top]
    out = [LayerChoice("Identity", 0)]
    for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"):
        out += [LayerChoice(name, level) for level in signed]
    out += [LayerChoice(name, 0) for name in ("AutoContrast", "Invert", "Equalize")]
    out += [LayerChoice(name, level) for name in ("Solarize", "Posterize") for level in rising]
    for name in ("Contrast", "Color", "Brightness", "Sharpness"):
        out += [LayerChoice(name, level) for level in signed]
    return (*out, *(LayerChoice(name, 0) for name in ("Flip", "Cutout", last)))


class DeepPolicy(NamedTuple):
    """``choices``: what each layer chooses from. ``upto``: (layers, choices), running sums of their
    probabilities, in millionths."""

    choices: tuple[LayerChoice, ...]
    upto: NDArray[np.int64]


@lru_cache(maxsize=2)
def _policy(name: str) -> DeepPolicy:
    text, last = {
        "cifar10": (deep_policy.CIFAR10, "Shift"),
        "imagenet": (deep_policy.IMAGENET, "Crop"),
    }[name]
    layers = [[int(number) for number in part.split()] for part in text.split("\n\n")]
    return DeepPolicy(_choices(last), np.array(layers, np.int64).cumsum(axis=1))


@dataclass(frozen=True, slots=True)
class DeepAutoAugment(Operation):
    """Deep AutoAugment: learnt layers of changes, six for CIFAR and five for ImageNet.

    ``policy`` is ``"imagenet"`` or ``"cifar10"``. Pixels from outside the picture are ``fill``. The
    policies contain flips, and replace random crops and erasing: the one for CIFAR shifts the
    picture, the one for ImageNet crops a random box and resizes it to the size of the picture. So
    give it pictures of the final size, without a random crop.

    >>> import numpy as np
    >>> augment = DeepAutoAugment("cifar10")
    >>> [step.name for step in augment.draw(np.random.default_rng(0), (32, 32, 3))]
    ['Solarize', 'Cutout', 'Shift', 'Shift', 'Shift', 'Identity']
    """

    random: ClassVar[bool] = True

    policy: str = "imagenet"
    fill: float | Sequence[float] = 0
    _fill: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments.choice("deep_auto_augment", "policy", self.policy, ("imagenet", "cifar10"))
        fill = arguments.colour("deep_auto_augment", "fill", self.fill)
        object.__setattr__(self, "fill", fill)
        object.__setattr__(self, "_fill", fill)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(_policy(self.policy).upto)

    def output(self, spec: Spec) -> Spec:
        return need_image("deep_auto_augment", spec)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[DeepStep, ...]:
        choices, upto = _policy(self.policy)
        steps = []
        for layer, (which, way, down, across) in zip(
            upto, rng.random((len(upto), 4)).tolist(), strict=True
        ):
            place = int(np.searchsorted(layer, int(which * layer[-1]), side="right"))
            steps.append(self._step(choices[place], way, down, across, rng, shape))
        return tuple(steps)

    def _step(
        self,
        choice: LayerChoice,
        way: float,
        down: float,
        across: float,
        rng: np.random.Generator,
        shape: tuple[int, ...],
    ) -> DeepStep:
        rows, columns = shape[0], shape[1]
        name = choice.name
        strength = choice.level / (deep_policy.LEVELS - 1)
        if name == "Flip":
            return DeepStep("Flip" if way < 0.5 else "Identity")
        if name == "Crop":
            return DeepStep(name, 0.0, _CROP.draw(rng, shape))
        if name == "Cutout":
            return DeepStep(name, 0.0, self._hole(rows, columns, down, across))
        if name == "Shift":
            most = int(rows * SHIFT), int(columns * SHIFT)
            top, left = (
                int(part * (2 * by + 1)) - by for part, by in zip((down, across), most, strict=True)
            )
            return DeepStep(name, 0.0, Box(top, left, rows, columns))
        if name == "Solarize":
            return DeepStep(name, 256.0 * strength)
        if name == "Posterize":
            return DeepStep(name, float(int(4 + 4 * strength)))
        if name not in _SIGNED:
            return DeepStep(name)
        magnitude = _SIGNED[name] * (2 * strength - 1)
        if name in _MIRRORED and way < 0.5:
            magnitude = -magnitude
        if name.startswith("Translate"):
            magnitude *= columns if name.endswith("X") else rows
        return DeepStep(name, magnitude)

    def _hole(self, rows: int, columns: int, down: float, across: float) -> Box:
        """A square around a random centre, without what lies outside the picture."""
        half = int(min(rows, columns) * _CUTOUT[self.policy]) // 2
        middle, centre = int(down * rows), int(across * columns)
        top, left = max(0, middle - half), max(0, centre - half)
        bottom, right = min(rows, middle + half), min(columns, centre + half)
        return Box(top, left, bottom - top, right - left)

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The product over all layers of the choices whose probability is above 0.

        Every position of a box counts, and the two directions of a change.
        """
        if shape is None:
            return None
        rows, columns = shape[0], shape[1]
        places = {
            "Flip": 1.0,
            "Cutout": float(rows * columns),
            "Shift": float((2 * int(rows * SHIFT) + 1) * (2 * int(columns * SHIFT) + 1)),
            "Crop": _CROP.outcomes(shape) or 1.0,
        }
        choices, upto = _policy(self.policy)
        total = 1.0
        for layer in np.diff(upto, prepend=0):
            total *= sum(
                places.get(choice.name, 1.0)
                for choice, chance in zip(choices, layer, strict=True)
                if chance
            )
        return counted(int(total))

    def apply(self, value: Any, params: tuple[DeepStep, ...]) -> Image:
        image = check_image("deep_auto_augment", value)
        pending: list[AugmentStep] = []
        for step in params:
            if step.name == "Flip" or step.box is not None:
                image = self._settled(image, pending)
                image = _moved(image, step)
            else:
                pending.append(AugmentStep(step.name, step.magnitude))
        return self._settled(image, pending)

    def _settled(self, image: Image, pending: list[AugmentStep]) -> Image:
        """Apply the pending changes in one call of the kernel."""
        if pending:
            image = apply_steps(image, tuple(pending), self._fill, smooth=False)
            pending.clear()
        return image


def _moved(image: Image, step: DeepStep) -> Image:
    rows, columns, channels = image.shape
    if step.box is None:
        return np.ascontiguousarray(image[:, ::-1])
    top, left, height, width = step.box
    if step.name == "Crop":
        fits = channels == 3 and max(rows, columns) <= kernel.LONGEST_SIDE
        if not fits or not native.kernel_available():
            return resize(image[top : top + height, left : left + width], rows, columns)
        resized: Image = np.empty(image.shape, np.uint8)
        kernel.resize(np.ascontiguousarray(image), step.box, resized)
        return resized
    out: Image = image.copy()
    if step.name == "Cutout":
        out[top : top + height, left : left + width] = GREY[:channels]
        return out
    out[:] = GREY[:channels]
    first, start = max(0, top), max(0, left)
    last, end = min(rows, rows + top), min(columns, columns + left)
    out[first - top : last - top, start - left : end - left] = image[first:last, start:end]
    return out
