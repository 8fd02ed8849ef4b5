"""Whether SciPy computes the bits of the compiled kernel on this machine.

Both compute the same products and sums in the same order, so on x86-64 they agree. A SciPy that was
compiled to fuse products and sums, or one with another Fourier transform, rounds differently. Where
there is no kernel and SciPy differs, fingerprints say so: samples that are kept must not be mixed.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.native import kernel_available

KERNEL_DIGEST = "2cf1ebbca127815b"
"""Of what the kernel computes for ``digest``."""


def other_arithmetic() -> str | None:
    """Identifies the arithmetic of filters and transforms if it is not that of the kernel."""
    if kernel_available():
        return None
    found = _digest_by_scipy()
    return None if found == KERNEL_DIGEST else found


@lru_cache(maxsize=1)
def _digest_by_scipy() -> str:
    return digest()


def digest() -> str:
    """A digest of a spectrogram and of resampled noise, of which every bit may differ."""
    from penstock.audio.mel import MelSpectrogram
    from penstock.audio.resample import resample

    # Without a generator of NumPy, whose numbers may change with its version.
    steps = np.arange(4_000, dtype=np.uint32) * np.uint32(2_654_435_761)
    noise: NDArray[Any] = ((steps >> 8).astype(np.float32) / np.float32(1 << 24))[np.newaxis]
    results = [resample(noise, 44_100, 16_000)]
    results += [
        MelSpectrogram(16_000, n_fft=n_fft, mels=24, log=False).apply(noise, None)
        for n_fft in (400, 512, 480)
    ]
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]
