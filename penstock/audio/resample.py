"""Resampling: windowed-sinc interpolation, in the compiled kernel or by a sparse matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.audio.arithmetic import other_arithmetic
from penstock.audio.program import RESAMPLE_TO, SoundWork, one_step
from penstock.audio.sound import (
    FLOAT32,
    WAVEFORM,
    AudioOperation,
    Sound,
    check_rate,
    check_sound,
    need_sound,
)
from penstock.native import kernel, load_sparse
from penstock.operation import ArraySpec, Spec

_CROSSINGS = 6
_ROLLOFF = 0.99
"""The zero crossings of the sinc to each side, and its relative cutoff: torchaudio's defaults."""

_LEAST_STEP = 128
"""The least number of frames between rows of input. Small ratios such as 3:1 are repeated up to it,
because rows that overlap by most of their length are copied many times. For 48 to 16 kHz this
reduced the time for a second of sound from 0.36 to 0.16 ms."""

_MOST_WEIGHTS = 1 << 17
"""Filters with more weights are left to SciPy. Only odd pairs of rates have them, such as 16,000
and 15,999 Hz. The kernel computes many outputs of one phase at a time; these have few of each."""

_BLOCK = 1 << 16
"""Numbers multiplied in one call: they and the result fit into the cache of a core."""


@dataclass(frozen=True, slots=True)
class Resample(AudioOperation):
    """Resample a sound to another rate, by windowed-sinc interpolation.

    The filter is that of ``torchaudio.transforms.Resample`` with its defaults: a sinc with a Hann
    window, 6 zero crossings to each side, cut off at 0.99 of the lower Nyquist frequency. Results
    differ from torchaudio by rounding only.

    >>> import numpy as np
    >>> Resample(44_100, 16_000).apply(np.zeros((1, 44_100), np.float32), None).shape
    (1, 16000)
    """

    from_rate: int
    to_rate: int

    def __post_init__(self) -> None:
        for argument in ("from_rate", "to_rate"):
            rate = check_rate("resample", argument, getattr(self, argument), least=1)
            object.__setattr__(self, argument, rate)

    def output(self, spec: Spec) -> Spec:
        array = need_sound("resample", spec, WAVEFORM)
        if array is None:
            return None
        channels, frames = array.shape
        if frames is not None:
            frames = frames_at(frames, self.from_rate, self.to_rate)
        return ArraySpec((channels, frames), FLOAT32)

    def apply(self, value: Any, params: Any) -> Sound:
        return resample(check_sound("resample", value, WAVEFORM), self.from_rate, self.to_rate)

    def arithmetic(self) -> str | None:
        return other_arithmetic()

    def kernel_work(self, key: bytes) -> SoundWork | None:
        if self.from_rate != self.to_rate and _compiled(self.from_rate, self.to_rate) is None:
            return None
        return one_step(RESAMPLE_TO, key, (self.from_rate, self.to_rate))


def frames_at(frames: int, from_rate: int, to_rate: int) -> int:
    """The number of frames of a sound at another rate."""
    return -(-frames * to_rate // from_rate)


def resample(sound: Sound, from_rate: int, to_rate: int) -> Sound:
    """Resample a sound (channels, frames). Returns the same array if the rates are equal.

    The compiled kernel and the product with a sparse matrix add up the same numbers in the same
    order, so their results have the same bits.
    """
    if from_rate == to_rate:
        return sound
    length = frames_at(sound.shape[1], from_rate, to_rate)
    compiled = None if kernel() is None else _compiled(from_rate, to_rate)
    if compiled is None:
        return _by_matrix(sound, length, _matrix(from_rate, to_rate))
    out = np.empty((len(sound), length), np.float32)
    step, before, weights = compiled
    sound = np.ascontiguousarray(sound)
    kernel().resample(sound, from_rate, to_rate, step, before, weights, out)
    return out


def _by_matrix(sound: Sound, length: int, by: _Matrix) -> Sound:
    step, outputs, before, matrix = by
    channels, frames = sound.shape
    rows = -(-length // outputs)
    span: int = matrix.shape[1]
    padded = np.zeros(max((rows - 1) * step + span, before + frames), np.float32)
    out = np.empty((channels, rows, outputs), np.float32)
    block = max(1, _BLOCK // span)
    for channel in range(channels):
        padded[before : before + frames] = sound[channel]
        for first in range(0, rows, block):
            last = min(rows, first + block)
            inputs: NDArray[np.float32] = np.ndarray(
                (span, last - first),
                np.float32,
                padded,
                first * step * padded.itemsize,
                (padded.itemsize, step * padded.itemsize),
            )
            out[channel, first:last] = (matrix @ np.ascontiguousarray(inputs)).T
    return out.reshape(channels, -1)[:, :length]


class _Filter(NamedTuple):
    """The interpolation filter for a pair of rates.

    ``step`` inputs give an output for each row of ``weights``. Their sums begin ``before`` frames
    before the input at the time of the output.
    """

    step: int
    before: int
    weights: NDArray[np.float32]


def _filter(from_rate: int, to_rate: int) -> _Filter:
    common = math.gcd(from_rate, to_rate)
    step, count = from_rate // common, to_rate // common
    cut = _ROLLOFF * min(step, count) / step
    before = math.ceil(_CROSSINGS / cut)
    phases = np.arange(count, dtype=np.int64) * step
    taps = np.arange(-before, before + 2)
    # Distance from the time of the output, in zero crossings of the sinc.
    times = (taps - (phases % count / count)[:, np.newaxis]) * cut
    np.clip(times, -_CROSSINGS, _CROSSINGS, out=times)
    weights = np.sinc(times) * np.cos(times * (np.pi / 2 / _CROSSINGS)) ** 2 * cut
    return _Filter(step, before, weights.astype(np.float32))


@lru_cache(maxsize=16)
def _compiled(from_rate: int, to_rate: int) -> _Filter | None:
    """The filter, which the compiled kernel then knows; ``None`` if it is one for SciPy."""
    common = math.gcd(from_rate, to_rate)
    crossings = 2 * _CROSSINGS / _ROLLOFF * max(1.0, from_rate / to_rate)
    if to_rate // common * crossings > _MOST_WEIGHTS:
        return None
    found = _filter(from_rate, to_rate)
    kernel().add_resampling(from_rate, to_rate, *found)
    return found


class _Matrix(NamedTuple):
    """``matrix`` times a row of input gives ``outputs`` frames.

    Each row begins ``step`` frames after the one before. The first begins ``before`` frames before
    the sound.
    """

    step: int
    outputs: int
    before: int
    matrix: Any


@lru_cache(maxsize=16)
def _matrix(from_rate: int, to_rate: int) -> _Matrix:
    """The filter as a sparse matrix with one row for each output phase."""
    step, before, weights = _filter(from_rate, to_rate)
    count, taps = weights.shape
    repeats = -(-_LEAST_STEP // step)
    starts = np.arange(count) * step // count + (step * np.arange(repeats))[:, np.newaxis]
    columns = starts.reshape(-1, 1) + np.arange(taps)
    rows = count * repeats
    matrix = load_sparse().csr_array(
        (
            np.tile(weights, (repeats, 1)).ravel(),
            columns.astype(np.int32).ravel(),
            np.arange(rows + 1, dtype=np.int32) * taps,
        ),
        shape=(rows, int(columns[-1, -1]) + 1),
    )
    return _Matrix(step * repeats, rows, before, matrix)
