"""Operations on the loudness and the channels of a sound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from penstock.audio.program import GAIN, MIX, NORMALIZE, SoundWork, one_step
from penstock.audio.sound import (
    EITHER,
    FLOAT32,
    WAVEFORM,
    AudioOperation,
    Sound,
    check_sound,
    contiguous,
    need_sound,
)
from penstock.errors import PipelineError
from penstock.image import arguments
from penstock.operation import LEVELS, ArraySpec, Spec, at_most

_LEAST_VARIANCE = 1e-7
"""Added to the variance of a clip before dividing by it, so that silence stays silence."""


@dataclass(frozen=True, slots=True)
class Mono(AudioOperation):
    """Mix to one channel: the mean of all channels.

    >>> import numpy as np
    >>> Mono().apply(np.array([[0, 1], [1, 1]], np.float32), None)
    array([[0.5, 1. ]], dtype=float32)
    """

    def output(self, spec: Spec) -> Spec:
        array = need_sound("mono", spec, WAVEFORM)
        return None if array is None else ArraySpec((1, array.shape[1]), FLOAT32)

    def apply(self, value: Any, params: Any) -> Sound:
        sound = check_sound("mono", value, WAVEFORM)
        return sound if len(sound) == 1 else contiguous(sound).mean(axis=0, keepdims=True)

    def kernel_work(self, key: bytes) -> SoundWork:
        return one_step(MIX, key, ())


@dataclass(frozen=True, slots=True)
class RandomGain(AudioOperation):
    """Change the volume by a number of decibels drawn from ``low`` to ``high``.

    Values are not clipped: those of a loud clip may exceed 1.

    >>> import numpy as np
    >>> RandomGain().apply(np.array([[0.5, -0.5]], np.float32), 2.0)
    array([[ 1., -1.]], dtype=float32)
    """

    random: ClassVar[bool] = True

    low: float = -6.0
    high: float = 6.0

    def __post_init__(self) -> None:
        pair = (self.low, self.high)
        low, high = arguments.interval("random_gain", "(low, high)", pair, -200.0, 200.0)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def output(self, spec: Spec) -> Spec:
        return need_sound("random_gain", spec, WAVEFORM)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> float:
        """The factor to multiply by."""
        return float(10.0 ** ((self.low + (self.high - self.low) * rng.random()) / 20.0))

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``LEVELS`` for a range of gains, 1 for a fixed one."""
        return float(LEVELS) if self.low < self.high else 1.0

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """``STEPS`` loudnesses."""
        return at_most(self.outcomes(shape), ranges=1)

    def apply(self, value: Any, params: float) -> Sound:
        out: Sound = check_sound("random_gain", value, WAVEFORM) * np.float32(params)
        return out

    def kernel_work(self, key: bytes) -> SoundWork:
        return one_step(GAIN, key, (self.low, self.high))


@dataclass(frozen=True, slots=True)
class NormalizeAudio(AudioOperation):
    """Compute ``(value - mean) / std``, for waveforms and spectrograms.

    Give the ``mean`` and ``std`` of your data. Without them every clip is normalized by its own
    mean and standard deviation, over all channels together.

    >>> import numpy as np
    >>> NormalizeAudio(mean=-4.0, std=2.0).apply(np.array([[-4, 0]], np.float32), None)
    array([[0., 2.]], dtype=float32)
    """

    mean: float | None = None
    std: float | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            missing = "mean" if self.mean is None else "std"
            raise PipelineError(f"normalize: {missing} is missing; give mean and std, or neither.")
        if self.mean is None:
            return
        mean = arguments.number("normalize", "mean", self.mean, -math.inf, math.inf)
        std = arguments.number("normalize", "std", self.std, 0.0, math.inf)
        if std == 0.0:
            raise PipelineError(f"normalize: std is {self.std!r}; give a number above 0.")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def output(self, spec: Spec) -> Spec:
        return need_sound("normalize", spec, EITHER)

    def apply(self, value: Any, params: Any) -> Sound:
        sound = check_sound("normalize", value, EITHER)
        if self.mean is not None and self.std is not None:
            out: Sound = sound - np.float32(self.mean)
            std = self.std
        else:
            out = sound - contiguous(sound).mean()
            std = math.sqrt(float(np.square(contiguous(out)).mean()) + _LEAST_VARIANCE)
        out *= np.float32(1.0 / std)
        return out

    def kernel_work(self, key: bytes) -> SoundWork:
        if self.mean is None or self.std is None:
            return one_step(NORMALIZE, key, (True, 0.0, 0.0))
        return one_step(NORMALIZE, key, (False, self.mean, 1.0 / self.std))
