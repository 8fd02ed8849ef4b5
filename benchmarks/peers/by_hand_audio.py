"""One recording by hand, by NumPy and SciPy: what a loader is given that has no transforms."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.audio.recordings import Recordings, mel_filters

ONE_THREAD = (("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1"))
"""The loader's workers are the parallelism; threads of BLAS would fight them."""


class Draws(Protocol):
    """What is asked of Python's ``random``, or of a generator of its kind."""

    def randint(self, low: int, high: int, /) -> int: ...


class Features:
    """A sound (frames,) at the workload's rate to a masked log-mel spectrogram (1, mels, steps);
    pickles, and may be called by threads."""

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
    """At the workload's rate, by SciPy's polyphase filter with SciPy's own weights."""
    if rate == work.rate:
        return sound
    from scipy.signal import resample_poly

    common = math.gcd(rate, work.rate)
    up, down = work.rate // common, rate // common
    return resample_poly(sound, up, down, window=_weights(max(up, down)))


@lru_cache(maxsize=16)
def _weights(widest: int) -> Any:
    """What ``resample_poly`` works out anew for every call where it is not given: 0.2 ms."""
    from scipy.signal import firwin

    weights = firwin(20 * widest + 1, 1 / widest, window=("kaiser", 5.0))
    return weights.astype(np.float32)


def cut(sound: Any, work: Recordings, draws: Draws) -> Any:
    """A random part, or all of it at a random place in silence."""
    room = work.frames - len(sound)
    if room < 0:
        first = draws.randint(0, -room)
        return sound[first : first + work.frames]
    out = np.zeros(work.frames, np.float32)
    first = draws.randint(0, room)
    out[first : first + len(sound)] = sound
    return out


def masked(mels: Any, work: Recordings, draws: Draws) -> Any:
    """SpecAugment in place, and the axis of channels."""
    fill = mels.mean()
    for _ in range(work.masks):
        wide = draws.randint(0, work.time)
        first = draws.randint(0, mels.shape[1] - wide)
        mels[:, first : first + wide] = fill
        wide = draws.randint(0, work.freq)
        first = draws.randint(0, mels.shape[0] - wide)
        mels[first : first + wide] = fill
    return mels[np.newaxis]
