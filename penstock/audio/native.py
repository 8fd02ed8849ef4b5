"""The libraries behind sound, loaded when a sound is first worked on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from penstock.errors import MissingExtraError


@lru_cache(maxsize=1)
def load_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, libsndfile is not
        raise MissingExtraError.of(
            "decode, for all but plain WAV files,", "soundfile", "audio"
        ) from error
    return soundfile


@lru_cache(maxsize=1)
def load_fft() -> Any:
    """SciPy's FFT: it does several rows at once in float32, seven times as fast as NumPy's."""
    try:
        import scipy.fft
    except ImportError as error:
        raise MissingExtraError.of("mel_spectrogram", "SciPy", "audio") from error
    return scipy.fft


@lru_cache(maxsize=1)
def load_sparse() -> Any:
    """SciPy's sparse matrices, which multiply in the thread that calls.

    A dense product goes to BLAS, whose threads fight the workers: two workers that multiply by a
    mel filter bank were measured at a quarter of the speed of one.
    """
    try:
        import scipy.sparse
    except ImportError as error:
        raise MissingExtraError.of("penstock.audio", "SciPy", "audio") from error
    return scipy.sparse
