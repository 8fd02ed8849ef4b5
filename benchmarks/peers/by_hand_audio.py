"""Hand-written transforms of one recording with NumPy and SciPy, for loaders without their own."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.audio.recordings import Recordings, mel_filters

ONE_THREAD = (("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1"))
"""The loader's workers run in parallel already; threads of BLAS would compete with them."""


class Draws(Protocol):
    """The method used of Python's ``random``, or of a generator like it."""

    def randint(self, low: int, high: int, /) -> int: ...


class Features:
    """Turns a sound (frames,) at the workload's rate into a masked log-mel spectrogram (1, mels,
    steps). Can be pickled and called from several threads."""

    def __init__(self, work: Recordings) -> None:
        self._work = work
        turns = np.arange(work.n_fft) / work.n_fft
        self._window = (0.5 - 0.5 * np.cos(2 * np.pi * turns)).astype(np.float32)
        self._filters = mel_filters(work)

    def __call__(self, sound: Any, draws: Draws) -> Any:
        return masked(self._log_mel(cut(sound, self._work, draws)), self._work, draws)

    def _log_mel(self, sound: Any) -> Any:
        from scipy.fft import rfft

        padded = np.pad(sound, self._work.n_fft // 2, mode="reflect")
        frames = sliding_window_view(padded, self._work.n_fft)[:: self._work.hop]
        spectrum = rfft(frames * self._window)
        power = spectrum.real**2 + spectrum.imag**2
        return np.log(np.maximum(self._filters @ power.T, np.float32(self._work.floor)))


def resampled(sound: Any, rate: int, work: Recordings) -> Any:
    """Resample to the workload's rate with SciPy's polyphase filter and its default weights."""
    if rate == work.rate:
        return sound
    from scipy.signal import resample_poly

    common = math.gcd(rate, work.rate)
    up, down = work.rate // common, rate // common
    return resample_poly(sound, up, down, window=_weights(max(up, down)))


@lru_cache(maxsize=16)
def _weights(widest: int) -> Any:
    """The filter that ``resample_poly`` would otherwise compute in every call, in 0.2 ms."""
    from scipy.signal import firwin

    weights = firwin(20 * widest + 1, 1 / widest, window=("kaiser", 5.0))
    return weights.astype(np.float32)


def cut(sound: Any, work: Recordings, draws: Draws) -> Any:
    """A random crop, or the whole sound padded with silence on both sides at random."""
    room = work.frames - len(sound)
    if room < 0:
        first = draws.randint(0, -room)
        return sound[first : first + work.frames]
    out = np.zeros(work.frames, np.float32)
    first = draws.randint(0, room)
    out[first : first + len(sound)] = sound
    return out


def masked(mels: Any, work: Recordings, draws: Draws) -> Any:
    """Apply SpecAugment in place, and add the axis of channels."""
    fill = mels.mean()
    for _ in range(work.masks):
        wide = draws.randint(0, work.time)
        first = draws.randint(0, mels.shape[1] - wide)
        mels[:, first : first + wide] = fill
        wide = draws.randint(0, work.freq)
        first = draws.randint(0, mels.shape[0] - wide)
        mels[first : first + wide] = fill
    return mels[np.newaxis]
