"""SpecAugment: masks bands of a spectrogram, in time and in frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.audio.program import MASK, SoundWork, one_step
from penstock.audio.sound import (
    SPECTROGRAM,
    AudioOperation,
    Sound,
    check_sound,
    contiguous,
    need_sound,
)
from penstock.image import arguments
from penstock.operation import Spec, at_most, counted

Spans = tuple[tuple[int, int], ...]
"""Each as (first index, index after the last)."""


_MOST = 2**31 - 1
"""That the compiled kernel can count."""


class Masks(NamedTuple):
    """The masked bands: time steps and mels."""

    time: Spans
    freq: Spans


@dataclass(frozen=True, slots=True)
class SpecAugment(AudioOperation):
    """Mask random bands of a spectrogram, in time and in frequency (SpecAugment, no warping).

    Each of ``time_masks`` bands is 0 to ``time`` steps wide, but at most ``share`` of all steps.
    Each of ``freq_masks`` bands is 0 to ``freq`` mels wide. All channels have the same masks.
    ``fill`` is the value of masked bands: a number, or ``"mean"`` for the mean of the clip, as in
    torchaudio. (0 is neutral in a normalized spectrogram, and loud in one that is not.)

    >>> import numpy as np
    >>> ones = np.ones((1, 2, 4), np.float32)
    >>> SpecAugment(fill=0.0).apply(ones, Masks(time=((1, 3),), freq=()))
    array([[[1., 0., 0., 1.],
            [1., 0., 0., 1.]]], dtype=float32)
    """

    random: ClassVar[bool] = True

    time_masks: int = 2
    time: int = 100
    freq_masks: int = 2
    freq: int = 27
    share: float = 0.2
    fill: float | str = "mean"

    def __post_init__(self) -> None:
        name = "spec_augment"
        for argument in ("time_masks", "time", "freq_masks", "freq"):
            checked = arguments.integer(name, argument, getattr(self, argument), least=0)
            object.__setattr__(self, argument, checked)
        object.__setattr__(self, "share", arguments.number(name, "share", self.share, 0.0, 1.0))
        if isinstance(self.fill, str):
            arguments.choice(name, "fill", self.fill, ("mean",))
        else:
            fill = arguments.number(name, "fill", self.fill, -math.inf, math.inf)
            object.__setattr__(self, "fill", fill)

    def output(self, spec: Spec) -> Spec:
        return need_sound("spec_augment", spec, SPECTROGRAM)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Masks:
        mels, steps = shape[-2:]
        drawn = rng.random((self.time_masks + self.freq_masks, 2)).tolist()
        longest, tallest = self._widest(mels, steps)
        return Masks(
            tuple(_span(steps, longest, *pair) for pair in drawn[: self.time_masks]),
            tuple(_span(mels, tallest, *pair) for pair in drawn[self.time_masks :]),
        )

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of different sets of bands. All bands of width 0 count as the same."""
        if shape is None:
            return None
        mels, steps = shape[-2:]
        longest, tallest = self._widest(mels, steps)
        return counted(
            _sets(self.time_masks, _bands(steps, longest))
            * _sets(self.freq_masks, _bands(mels, tallest))
        )

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` places of each mask."""
        return at_most(self.outcomes(shape), ranges=self.time_masks + self.freq_masks)

    def _widest(self, mels: int, steps: int) -> tuple[int, int]:
        return min(self.time, int(self.share * steps)), min(self.freq, mels)

    def apply(self, value: Any, params: Masks) -> Sound:
        spectrogram = check_sound("spec_augment", value, SPECTROGRAM)
        out: Sound = spectrogram.copy()
        fill = (
            contiguous(spectrogram).mean() if isinstance(self.fill, str) else np.float32(self.fill)
        )
        for first, last in params.time:
            out[:, :, first:last] = fill
        for first, last in params.freq:
            out[:, first:last] = fill
        return out

    def kernel_work(self, key: bytes) -> SoundWork | None:
        counts = (self.time_masks, self.time, self.freq_masks, self.freq)
        if max(counts) > _MOST:
            return None
        mean = isinstance(self.fill, str)
        return one_step(MASK, key, (*counts, self.share, mean, 0.0 if mean else self.fill))


def _span(size: int, widest: int, width: float, place: float) -> tuple[int, int]:
    """A band 0 to ``widest`` wide, anywhere in ``size``, from two numbers drawn from [0, 1)."""
    wide = int(width * (widest + 1))
    first = int(place * (size - wide + 1))
    return first, first + wide


def _bands(size: int, widest: int) -> int:
    """The number of different bands that ``_span`` can return."""
    return 1 + widest * (size + 1) - widest * (widest + 1) // 2


def _sets(masks: int, bands: int) -> int:
    """The number of different sets of ``masks`` bands, in which a band may occur twice."""
    return math.comb(bands + masks - 1, masks)
