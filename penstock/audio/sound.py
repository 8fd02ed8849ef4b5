"""What operations ask of the sounds they get: stated when built, checked when applied."""

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
"""More than any recording has: an array that claims more has its axes the other way round."""

SLOWEST_RATE = 1_000
FASTEST_RATE = 768_000
"""Beyond what sound is recorded at; a rate outside is a damaged header or a mistake."""


class AudioOperation(Operation):
    """An operation on the field ``"audio"`` of samples that are dicts.

    Clips are short, so that time goes into many small steps of NumPy's, for which threads wait for
    each other: two of them prepared 1,288 clips a second where two processes prepared 3,460.
    """

    field: ClassVar[str] = "audio"
    holds_gil: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The name users write: ``DecodeAudio`` is ``decode``."""
        return super().name.removesuffix("_audio")


def need_sound(name: str, spec: Spec, ndims: tuple[int, ...]) -> ArraySpec | None:
    """The spec of a sound that can be worked on, ``None`` if nothing is known of it."""
    if isinstance(spec, BytesSpec):
        raise PipelineError(
            f"{name} got encoded bytes, and works on decoded sound. Put decode() above it."
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
            hint = "Add the axis of channels with a map above it." if ndim == 1 else "Reshape it."
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}, and works on {wanted}. {hint}"
        )
    if spec.dtype != FLOAT32:
        raise PipelineError(
            f"{name} got a sound of {spec.dtype}, and works on float32. Convert it with a map "
            "above it; whole numbers are to be divided by their largest, to lie within 1."
        )
    channels = spec.shape[0]
    if channels is not None and channels > MOST_CHANNELS:
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}, which would be {channels} channels, and "
            f"works on {wanted}. Transpose it with a map above it."
        )
    if 0 in spec.shape:
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}, which holds no sound. Check what makes it."
        )
    return spec


def check_sound(name: str, value: Any, ndims: tuple[int, ...]) -> Sound:
    """The same rules, for a value that is there; 0.5 us where nothing is wrong."""
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
            f"{name} got {type(value).__name__}, and works on NumPy arrays {wanted}. Convert it "
            "with a map above it."
        )
    need_sound(name, ArraySpec.of(value.shape, value.dtype), ndims)
    return value


def contiguous(sound: Sound) -> Sound:
    """The sound with its numbers one after the other in memory.

    What adds up numbers adds them in the order they lie in, and rounds accordingly: a view, and
    the copy of it that a cache gives, must have one sum.
    """
    return np.ascontiguousarray(sound)


def check_rate(name: str, what: str, value: Any, *, least: int = SLOWEST_RATE) -> int:
    """A sample rate in Hz."""
    rate = arguments.integer(name, what, value, least=least)
    if rate > FASTEST_RATE:
        raise PipelineError(
            f"{name}: {what} is {value!r}; give a rate in Hz, of {FASTEST_RATE:,} at most."
        )
    return rate
