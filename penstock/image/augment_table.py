"""The fifteen changes that automatic augmentation chooses from, by name, and how strong they get.

Names and ranges are torchvision's; ``Posterize`` and ``Solarize`` grow stronger as their magnitude
falls, so a strength of 0 leaves the image as it is for every change that has one (but for white,
which the weakest ``Solarize`` inverts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.image.lazy_image import LazyImage


class Step(NamedTuple):
    """One change, by name, and its magnitude in its own unit."""

    name: str
    magnitude: float

    @property
    def effect(self) -> Step:
        """What it comes down to: steps that do the same have the same, and that of one that does
        nothing is ``Identity``."""
        name, magnitude = self
        if name in _WITHOUT_STRENGTH or name == "Solarize":
            return self
        if name in ("TranslateX", "TranslateY", "Posterize"):
            magnitude = float(int(magnitude))
        nothing = 8.0 if name == "Posterize" else 0.0
        return Step("Identity", 0.0) if magnitude == nothing else Step(name, magnitude)


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
"""What the kernel calls them."""

NAMES = tuple(name for name in CHANGES if name != "Invert")
"""What RandAugment and TrivialAugment choose from; only AutoAugment inverts."""

_WITHOUT_STRENGTH = ("AutoContrast", "Equalize", "Identity", "Invert")


@dataclass(frozen=True, slots=True)
class Space:
    """The magnitude of every change at full strength; weaker ones are in proportion."""

    shear: float
    shift: float
    shift_of_side: bool
    turn: float
    tone: float
    bits: int

    def step(self, name: str, strength: float, negative: bool, height: int, width: int) -> Step:
        """A change at a strength from 0 to 1; ``negative`` matters where there are two ways."""
        if name in _WITHOUT_STRENGTH:
            return Step(name, 0.0)
        if name == "Posterize":
            return Step(name, float(8 - round(self.bits * strength)))
        if name == "Solarize":
            return Step(name, 255.0 * (1.0 - strength))
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
        return Step(name, -most * strength if negative else most * strength)


NARROW = Space(shear=0.3, shift=150 / 331, shift_of_side=True, turn=30.0, tone=0.9, bits=4)
"""AutoAugment's and RandAugment's, whose shifts are 150 pixels for an image of 331."""

WIDE = Space(shear=0.99, shift=32.0, shift_of_side=False, turn=135.0, tone=0.99, bits=6)
"""TrivialAugment's."""
