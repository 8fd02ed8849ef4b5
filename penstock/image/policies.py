"""AutoAugment's learnt policies: 25 pairs of (change, probability, strength from 0 to 9)."""

from __future__ import annotations

Choice = tuple[str, float, int]
Pair = tuple[Choice, Choice]

# One pair a line, "change probability strength, change probability strength"; a change that has
# no strength is given 0.
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


def _choice(text: str) -> Choice:
    name, probability, strength = text.split()
    return name, float(probability), int(strength)


def _pairs(text: str) -> tuple[Pair, ...]:
    lines = (line.split(",") for line in text.strip().splitlines())
    return tuple((_choice(first), _choice(second)) for first, second in lines)


POLICIES: dict[str, tuple[Pair, ...]] = {
    "imagenet": _pairs(_IMAGENET),
    "cifar10": _pairs(_CIFAR10),
}

STRENGTHS = 10
"""How many strengths a policy chooses from."""
