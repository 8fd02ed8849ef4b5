"""Mel spectrograms: the energy of a sound by time and by pitch."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.audio.arithmetic import other_arithmetic
from penstock.audio.program import MEL, SoundStep, SoundWork
from penstock.audio.sound import (
    FLOAT32,
    WAVEFORM,
    AudioOperation,
    Sound,
    check_rate,
    check_sound,
    need_sound,
)
from penstock.errors import PipelineError
from penstock.image import arguments
from penstock.native import kernel, load_fft, load_sparse
from penstock.operation import ArraySpec, Spec

_BLOCK = 1 << 16
"""Numbers transformed in one call: they and their spectrum fit into the cache of a core."""


@dataclass(frozen=True, slots=True)
class MelSpectrogram(AudioOperation):
    """Compute the mel spectrogram (channels, mels, steps) of a sound at ``rate``.

    The definition is that of ``torchaudio.transforms.MelSpectrogram``: Hann windows of ``win``
    frames (default: ``n_fft``) every ``hop`` frames, magnitude to the ``power``, summed by ``mels``
    triangular filters from ``f_min`` to ``f_max`` Hz (default: half the rate). ``scale`` is
    ``"htk"`` or ``"slaney"``; ``norm="slaney"`` divides each filter by its width. With ``center``
    the sound is mirrored at both ends, so that step ``t`` is centred at frame ``t * hop``.

    ``log=True`` gives the natural logarithm, ``"db"`` decibels (10 times the decimal logarithm of
    the power, for any ``power``). Both first raise values to at least ``floor``. ``top_db`` then
    raises values to at least the maximum of the clip minus ``top_db``. ``log=False`` gives the sums
    without a logarithm.

    >>> import numpy as np
    >>> MelSpectrogram(16_000).apply(np.zeros((1, 16_000), np.float32), None).shape
    (1, 80, 101)
    """

    rate: int
    n_fft: int = 400
    hop: int = 160
    mels: int = 80
    f_min: float = 0.0
    f_max: float | None = None
    win: int | None = None
    power: float = 2.0
    log: bool | str = True
    floor: float = 1e-10
    top_db: float | None = None
    center: bool = True
    scale: str = "htk"
    norm: str | None = None

    def __post_init__(self) -> None:
        name = "mel_spectrogram"
        rate = check_rate(name, "rate", self.rate)
        checked: dict[str, Any] = {"rate": rate}
        for argument, least in (("n_fft", 2), ("hop", 1), ("mels", 1)):
            checked[argument] = arguments.integer(
                name, argument, getattr(self, argument), least=least
            )
        win = checked["n_fft"] if self.win is None else self.win
        checked["win"] = arguments.integer(name, "win", win, least=1)
        if checked["win"] > checked["n_fft"]:
            raise PipelineError(f"{name}: win is {win}; give at most n_fft, {self.n_fft}.")
        checked["f_min"] = arguments.number(name, "f_min", self.f_min, 0.0, rate / 2)
        f_max = rate / 2 if self.f_max is None else self.f_max
        checked["f_max"] = arguments.number(name, "f_max", f_max, 0.0, rate / 2)
        if checked["f_max"] <= checked["f_min"]:
            raise PipelineError(f"{name}: f_max is {f_max}; give more than f_min, {self.f_min}.")
        for argument in ("power", "floor"):
            checked[argument] = arguments.number(
                name, argument, getattr(self, argument), 0.0, math.inf
            )
            if not checked[argument]:
                raise PipelineError(
                    f"{name}: {argument} is {checked[argument]}; give a number above 0."
                )
        if not isinstance(self.log, bool):
            arguments.choice(name, "log", self.log, ("db",))
        if self.top_db is not None:
            if self.log != "db":
                raise PipelineError(f'{name}: top_db is {self.top_db!r}; give log="db" with it.')
            checked["top_db"] = arguments.number(name, "top_db", self.top_db, 0.0, math.inf)
        arguments.choice(name, "scale", self.scale, ("htk", "slaney"))
        if self.norm is not None:
            arguments.choice(name, "norm", self.norm, ("slaney",))
        for argument, value in checked.items():
            object.__setattr__(self, argument, value)
        empty = empty_filters(self._triangles())
        if empty:
            warnings.warn(
                f"{name}: with mels={self.mels} and n_fft={self.n_fft} the filters "
                f"{', '.join(map(str, empty))} lie between two frequencies, and always give 0. "
                'Give fewer mels, a larger n_fft, or scale="slaney".',
                stacklevel=3,
            )

    def output(self, spec: Spec) -> Spec:
        array = need_sound("mel_spectrogram", spec, WAVEFORM)
        if array is None:
            return None
        channels, frames = array.shape
        steps = None if frames is None else self._steps(frames)
        return ArraySpec((channels, self.mels, steps), FLOAT32)

    def apply(self, value: Any, params: Any) -> Sound:
        sound = check_sound("mel_spectrogram", value, WAVEFORM)
        channels, frames = sound.shape
        steps = self._steps(frames)
        program = None if kernel() is None else _program(self)
        if program is not None:
            out = np.empty((channels, self.mels, steps), np.float32)
            if program.run(np.ascontiguousarray(sound), out, 0, 0, 0):
                return out
        return self._by_numpy(sound, steps)

    def _by_numpy(self, sound: Sound, steps: int) -> Sound:
        """The spectrogram without the compiled kernel, which computes the same bits."""
        channels = len(sound)
        if self.center:
            sound = mirrored(sound, self.n_fft // 2)
        sound = np.ascontiguousarray(sound)
        window = _window(self.n_fft, self.win or self.n_fft)[:, np.newaxis]
        filters = _filters(*self._triangles())
        rfft = load_fft().rfft
        out = np.empty((channels, self.mels, steps), np.float32)
        block = max(1, _BLOCK // self.n_fft)
        for channel in range(channels):
            for first in range(0, steps, block):
                count = min(block, steps - first)
                # Steps are the last axis, as the filters need them: transposing afterwards would
                # take a fifth of the total time. Not by as_strided, which takes 4 us.
                cut: Sound = np.ndarray(
                    (self.n_fft, count),
                    np.float32,
                    sound[channel],
                    first * self.hop * sound.itemsize,
                    (sound.itemsize, self.hop * sound.itemsize),
                )
                strength = self._strength(rfft(cut * window, axis=0))
                out[channel, :, first : first + count] = filters @ strength
        return self._scaled(out)

    def _strength(self, spectrum: NDArray[Any]) -> Sound:
        squares: Sound = np.square(spectrum.real)
        squares += np.square(spectrum.imag)
        if self.power == 2.0:
            pass
        elif self.power == 1.0:
            np.sqrt(squares, out=squares)
        else:
            np.power(squares, np.float32(self.power / 2), out=squares)
        return squares

    def _scaled(self, mels: Sound) -> Sound:
        if self.log is False:
            return mels
        np.maximum(mels, np.float32(self.floor), out=mels)
        mels = natural_log(mels) if np.float32(self.floor) >= _LEAST_NORMAL else np.log(mels)
        if self.log is True:
            return mels
        mels *= np.float32(self._to_decibels)
        if self.top_db is not None:
            np.maximum(mels, mels.max() - np.float32(self.top_db), out=mels)
        return mels

    @property
    def _to_decibels(self) -> float:
        """What natural logarithms are multiplied by."""
        return 20.0 / self.power / math.log(10.0)

    def arithmetic(self) -> str | None:
        return other_arithmetic()

    def kernel_work(self, key: bytes) -> SoundWork | None:
        step = self._kernel_step(key)
        return None if step is None else SoundWork((step,))

    def _kernel_step(self, key: bytes) -> SoundStep | None:
        """``None`` if the kernel cannot compute this spectrogram."""
        if not _smooth(self.n_fft) or self.power not in (1.0, 2.0):
            return None
        if self.log and np.float32(self.floor) < _LEAST_NORMAL:
            return None
        filters = _filters(*self._triangles())
        first = [
            row[0] if len(row) else 0 for row in np.split(filters.indices, filters.indptr[1:-1])
        ]
        numbers = (
            self.n_fft,
            self.hop,
            self.mels,
            self.center,
            self.power == 1.0,
            _DECIBELS if self.log == "db" else _NATURAL if self.log else _PLAIN,
            self.floor,
            self._to_decibels,
            self.top_db or 0.0,
            self.top_db is not None,
        )
        tables = (
            _window(self.n_fft, self.win or self.n_fft),
            np.array(first, np.int32),
            filters.indptr.astype(np.int32),
            filters.data,
        )
        return SoundStep(MEL, key, numbers, tables)

    def _steps(self, frames: int) -> int:
        padded = frames + 2 * (self.n_fft // 2) if self.center else frames
        if padded < self.n_fft:
            raise PipelineError(
                f"mel_spectrogram got {frames} frames, but one step needs n_fft={self.n_fft}. Put "
                "pad() above it, or give center=True."
            )
        return 1 + (padded - self.n_fft) // self.hop

    def _triangles(self) -> tuple[Any, ...]:
        return (self.rate, self.n_fft, self.mels, self.f_min, self.f_max, self.scale, self.norm)


def mirrored(sound: Sound, count: int) -> Sound:
    """The sound with ``count`` mirrored frames added at both ends."""
    channels, frames = sound.shape
    if frames <= count:
        return np.pad(sound, ((0, 0), (count, count)), mode="reflect")
    # Without np.pad, which takes 20 us, more than a tenth of the whole spectrogram.
    out = np.empty((channels, frames + 2 * count), np.float32)
    out[:, count : count + frames] = sound
    out[:, :count] = sound[:, count:0:-1]
    out[:, count + frames :] = sound[:, -2 : -2 - count : -1]
    return out


@lru_cache(maxsize=16)
def _program(operation: MelSpectrogram) -> Any:
    """The program of the compiled kernel for one spectrogram; ``None`` if it has none."""
    step = operation._kernel_step(bytes(16))
    return None if step is None else kernel().SoundProgram((step,))


_PLAIN, _NATURAL, _DECIBELS = range(3)
_LEAST_NORMAL = np.finfo(np.float32).tiny


def _smooth(number: int) -> bool:
    """Whether its prime factors are 2, 3 and 5: the compiled kernel transforms such lengths."""
    for factor in (2, 3, 5):
        while number % factor == 0:
            number //= factor
    return number == 1


def natural_log(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logarithms of positive normal numbers, infinity and NaN, exact to one last bit.

    NumPy's own logarithm has other bits on other processors. This is the polynomial of FreeBSD's
    ``logf``, whose steps ``take_logs`` in ``native/sound/mel.h`` repeats.
    """
    one, root_half = 0x3F800000, 0x3F3504F3
    # In place, because memory for results takes longer than the arithmetic.
    bits = values.view(np.int32) + np.int32(one - root_half)
    exponent = ((bits >> 23) - 127).astype(np.float32)
    bits &= 0x7FFFFF
    bits += root_half
    f = bits.view(np.float32)
    f -= np.float32(1)
    s = f + np.float32(2)
    np.divide(f, s, out=s)
    z = s * s
    w = z * z
    out = _polynomial(w, _LOG[0], _LOG[2], z)
    out += _polynomial(w, _LOG[1], _LOG[3], w)
    half = f * np.float32(0.5)
    half *= f
    out += half
    out *= s
    np.multiply(exponent, _LN2_LOW, out=z)
    out += z
    out -= half
    out += f
    exponent *= _LN2_HIGH
    out += exponent
    if not np.isfinite(values.max()):
        out = np.where(np.isfinite(values), out, values)
    return out


def _polynomial(
    w: NDArray[np.float32], low: np.float32, high: np.float32, times: NDArray[np.float32]
) -> NDArray[np.float32]:
    """``times * (low + w * high)``."""
    out = w * high
    out += low
    out *= times
    return out


_LOG = [
    np.float32(float.fromhex(text))
    for text in ("0xaaaaaap-24", "0xccce13p-25", "0x91e9eep-25", "0xf89e26p-26")
]
_LN2_HIGH = np.float32(float.fromhex("0x1.62e300p-1"))
_LN2_LOW = np.float32(float.fromhex("0x1.2fefa2p-17"))


@lru_cache(maxsize=16)
def _window(n_fft: int, win: int) -> NDArray[np.float32]:
    """A periodic Hann window of ``win`` numbers, centred in ``n_fft`` zeros."""
    window = np.zeros(n_fft, np.float32)
    first = (n_fft - win) // 2
    window[first : first + win] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(win) / win)
    window.flags.writeable = False
    return window


@lru_cache(maxsize=16)
def triangles(
    rate: int, n_fft: int, mels: int, f_min: float, f_max: float, scale: str, norm: str | None
) -> NDArray[np.float64]:
    """The filters as (mels, frequencies). Each triangle ends at the peaks of its neighbours."""
    frequencies = np.linspace(0, rate // 2, n_fft // 2 + 1)
    pitches = np.linspace(to_mel(f_min, scale), to_mel(f_max, scale), mels + 2)
    tops = np.array([to_hertz(pitch, scale) for pitch in pitches])
    widths = np.diff(tops)[:, np.newaxis]
    slopes = frequencies - tops[:, np.newaxis]
    filters: NDArray[np.float64] = np.maximum(
        0.0, np.minimum(slopes[:-2] / widths[:-1], -slopes[2:] / widths[1:])
    )
    if norm == "slaney":
        filters *= 2.0 / (tops[2:] - tops[:-2])[:, np.newaxis]
    filters.flags.writeable = False
    return filters


def empty_filters(arguments: tuple[Any, ...]) -> list[int]:
    """The numbers of the filters that are 0 at every frequency."""
    empty: list[int] = np.flatnonzero(triangles(*arguments).max(axis=1) == 0.0).tolist()
    return empty


@lru_cache(maxsize=16)
def _filters(*arguments: Any) -> Any:
    """The filters as a sparse matrix: each is nonzero at only a few of 201 frequencies."""
    return load_sparse().csr_array(triangles(*arguments).astype(np.float32))


_LINEAR = 200.0 / 3
_BREAK = 1000.0
_LOG_STEP = math.log(6.4) / 27.0
"""Slaney's scale: linear up to 1 kHz, then 27 mels for every factor of 6.4."""


def to_mel(hertz: float, scale: str) -> float:
    if scale == "htk":
        return 2595.0 * math.log10(1.0 + hertz / 700.0)
    if hertz < _BREAK:
        return hertz / _LINEAR
    return _BREAK / _LINEAR + math.log(hertz / _BREAK) / _LOG_STEP


def to_hertz(mel: float, scale: str) -> float:
    if scale == "htk":
        return 700.0 * (math.pow(10.0, mel / 2595.0) - 1.0)
    if mel < _BREAK / _LINEAR:
        return mel * _LINEAR
    return _BREAK * math.exp(_LOG_STEP * (mel - _BREAK / _LINEAR))
