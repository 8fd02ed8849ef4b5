"""Native libraries, imported on first use. This is the only importer of the compiled kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.errors import MissingExtraError

Image = NDArray[Any]
"""Pixels as (height, width, channels); uint8 and RGB unless an operation says otherwise."""


@lru_cache(maxsize=1)
def _load_kernel() -> tuple[Any, str]:
    """The compiled module and an empty string, or ``None`` and the reason why it is missing."""
    try:
        from penstock import _kernel
    except ImportError as error:
        return None, (
            f"the kernel is not built, or cannot be loaded ({error}). Install a C compiler and "
            "libjpeg-turbo's headers (libjpeg-turbo8-dev, libjpeg62-turbo-dev or "
            "libjpeg-turbo-devel), then install penstock from source."
        )
    return _kernel, ""


def kernel() -> Any:
    """The compiled kernel; ``None`` if it is missing or switched off."""
    return None if _switched_off() else _load_kernel()[0]


def kernel_available() -> bool:
    """Whether the compiled kernel is installed and not switched off."""
    return kernel() is not None


def why_no_kernel() -> str:
    """Why the kernel is not available; empty if it is."""
    return "PENSTOCK_NO_KERNEL is set." if _switched_off() else _load_kernel()[1]


def _switched_off() -> bool:
    return config.no_kernel()


@lru_cache(maxsize=1)
def load_cv2() -> Any:
    """OpenCV, limited to the calling thread: parallelism comes from the workers.

    It prints nothing, unless the user has set ``OPENCV_LOG_LEVEL``: what it says about a damaged
    file, Penstock raises as an error that names the sample.
    """
    try:
        import cv2
    except ImportError as error:
        raise MissingExtraError.of("penstock.image", "OpenCV", "image") from error
    cv2.setNumThreads(0)
    if not config.opencv_log_level():
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2


@lru_cache(maxsize=1)
def load_simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as error:
        raise MissingExtraError.of("decode", "simplejpeg", "image") from error
    return simplejpeg


def with_channels(image: Image) -> Image:
    """The image as (height, width, channels): OpenCV drops the axis of a single channel."""
    return image if image.ndim == 3 else image[:, :, np.newaxis]


@lru_cache(maxsize=1)
def load_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: soundfile is installed, libsndfile is not
        raise MissingExtraError.of(
            "decode, for all but plain WAV files,", "soundfile", "audio"
        ) from error
    return soundfile


@lru_cache(maxsize=1)
def lend_libsndfile() -> None:
    """Let the compiled kernel decode FLAC by the libsndfile that soundfile has loaded, if any."""
    try:
        soundfile = load_soundfile()
        library, ffi = soundfile._snd, soundfile._ffi
        functions = [
            int(ffi.cast("uintptr_t", ffi.addressof(library, name)))
            for name in ("sf_open_virtual", "sf_readf_float", "sf_close")
        ]
    except (MissingExtraError, AttributeError, TypeError):
        return
    compiled = _load_kernel()[0]
    if compiled is not None:
        compiled.use_libsndfile(*functions)


@lru_cache(maxsize=1)
def load_fft() -> Any:
    """SciPy's FFT: it transforms several rows at once in float32, seven times as fast as NumPy."""
    try:
        import scipy.fft
    except ImportError as error:
        raise MissingExtraError.of("mel_spectrogram", "SciPy", "audio") from error
    return scipy.fft


@lru_cache(maxsize=1)
def load_sparse() -> Any:
    """SciPy's sparse matrices, which multiply in the calling thread.

    A dense product uses BLAS, whose threads compete with the workers: two workers that multiplied
    by a dense mel filter bank ran at a quarter of the speed of one.
    """
    try:
        import scipy.sparse
    except ImportError as error:
        raise MissingExtraError.of("penstock.audio", "SciPy", "audio") from error
    return scipy.sparse
