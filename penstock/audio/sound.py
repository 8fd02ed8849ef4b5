"""Checks of the sounds that operations get, when a pipeline is built and when it runs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.image import arguments
from penstock.operation import ArraySpec, BytesSpec, Operation, Spec

FLOAT32 = np.dtype(np.float32)

Sound = NDArray[Any]
"""Float32: a waveform as (channels, frames), or a spectrogram as (channels, mels, steps)."""

WAVEFORM = (2,)
SPECTROGRAM = (3,)
EITHER = (2, 3)

_AXES = {2: "(channels, frames)", 3: "(channels, mels, steps)"}
_MADE_BY = {2: "decode()", 3: "mel_spectrogram()"}

MOST_CHANNELS = 64
"""More than recordings have. An array with more has its axes in the wrong order."""

SLOWEST_RATE = 1_000
FASTEST_RATE = 768_000
"""No sound is recorded beyond these rates; others come from damaged headers or mistakes."""


class AudioOperation(Operation):
    """An audio operation. In samples that are dicts it works on the field ``"audio"``.

    Clips are short, so without the compiled kernel time goes into many small NumPy calls, for which
    threads wait for the GIL: two threads prepared 1,288 clips a second, two processes 3,460.
    """

    field: ClassVar[str] = "audio"
    holds_gil: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name users write: ``DecodeAudio`` is ``decode``."""
        return super().name.removesuffix("_audio")


def need_sound(name: str, spec: Spec, ndims: tuple[int, ...]) -> ArraySpec | None:
    """Check the spec of a sound; returns it, or ``None`` if nothing is known of it."""
    if isinstance(spec, BytesSpec):
        raise PipelineError(
            f"{name} got encoded bytes; it needs decoded sound. Put decode() above it."
        )
    if spec is None:
        return None
    wanted = " or ".join(_AXES[ndim] for ndim in ndims)
    ndim = len(spec.shape)
    if ndim not in ndims:
        if ndim in _AXES:
            hint = (
                f"Put {_MADE_BY[3]} above it."
                if ndim == 2
                else f"Put it between {_MADE_BY[2]} and {_MADE_BY[3]}."
            )
        else:
            hint = "Add a channel axis with a map above it." if ndim == 1 else "Reshape it."
        raise PipelineError(f"{name} got an array of shape {spec.shape}; it needs {wanted}. {hint}")
    if spec.dtype != FLOAT32:
        raise PipelineError(
            f"{name} got a sound of {spec.dtype}; it needs float32. Convert it with a map above "
            "it, and scale integers to the range -1 to 1."
        )
    channels = spec.shape[0]
    if channels is not None and channels > MOST_CHANNELS:
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}, which would be {channels} channels; it "
            f"needs {wanted}. Transpose it with a map above it."
        )
    if 0 in spec.shape:
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}, which holds no sound. Check the stage "
            "above it."
        )
    return spec


def check_sound(name: str, value: Any, ndims: tuple[int, ...]) -> Sound:
    """Check a sound by the rules of ``need_sound``; 0.5 us for a correct one."""
    if (
        isinstance(value, np.ndarray)
        and value.ndim in ndims
        and value.dtype == FLOAT32
        and value.shape[0] <= MOST_CHANNELS
        and value.size
    ):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        need_sound(name, BytesSpec(), ndims)
    if not isinstance(value, np.ndarray):
        wanted = " or ".join(_AXES[ndim] for ndim in ndims)
        raise PipelineError(
            f"{name} got {type(value).__name__}; it needs a NumPy array {wanted}. Convert it "
            "with a map above it."
        )
    need_sound(name, ArraySpec.of(value.shape, value.dtype), ndims)
    return value


def contiguous(sound: Sound) -> Sound:
    """The sound in C order, copied if necessary.

    NumPy adds numbers in memory order, and rounds accordingly. A view, and the contiguous copy of
    it that a cache returns, must have the same sum.
    """
    return np.ascontiguousarray(sound)


def check_rate(name: str, argument: str, value: Any, *, least: int = SLOWEST_RATE) -> int:
    """Check a sample rate in Hz."""
    rate = arguments.integer(name, argument, value, least=least)
    if rate > FASTEST_RATE:
        raise PipelineError(
            f"{name}: {argument} is {value!r}; give a rate in Hz, at most {FASTEST_RATE:,}."
        )
    return rate
