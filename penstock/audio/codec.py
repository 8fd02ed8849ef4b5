"""Decoding: from the bytes of a file to sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.audio.libsndfile import read_sound
from penstock.audio.resample import resample
from penstock.audio.sound import (
    FASTEST_RATE,
    FLOAT32,
    MOST_CHANNELS,
    SLOWEST_RATE,
    AudioOperation,
    Sound,
    check_rate,
)
from penstock.audio.wav import Plain, Unreadable, is_wav, read_wav
from penstock.errors import PipelineError, SourceError
from penstock.operation import ArraySpec, BytesSpec, Spec, file_bytes

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class Decode(AudioOperation):
    """Bytes of a WAV, FLAC, OGG, MP3 or AIFF file to a float32 array (channels, frames).

    Values lie from -1 to 1. ``rate`` is the sample rate in Hz that the sound is wanted at: a file
    of another is resampled, as ``resample`` does it. Without it every file keeps its own rate,
    which the operations below are then to be told. ``mono=True`` gives one channel, the mean of
    all there are.

    A file that is cut short, damaged or empty is a SourceError, never a silence. (Most MP3s say
    how long they are; of one that does not, and is cut short, what there is is given.) Plain WAV
    files are read without libsndfile, in a tenth of the time.

    >>> import io, wave
    >>> file = io.BytesIO()
    >>> with wave.open(file, "wb") as out:
    ...     out.setparams((1, 2, 8_000, 0, "NONE", ""))
    ...     out.writeframes(bytes(2 * 8_000))
    >>> Decode(rate=16_000).apply(file.getvalue(), None).shape
    (1, 16000)
    """

    rate: int | None = None
    mono: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None:
            object.__setattr__(self, "rate", check_rate("decode", "rate", self.rate))
        if not isinstance(self.mono, bool):
            raise PipelineError(f"decode: mono is {self.mono!r}; give True or False.")

    def output(self, spec: Spec) -> Spec:
        encoded = (
            spec is None
            or isinstance(spec, BytesSpec)
            or (len(spec.shape) == 1 and spec.dtype == _UINT8)
        )
        if not encoded:
            raise PipelineError(
                f"decode got an array ({spec}), and works on the bytes of an audio file. If the "
                "sounds are decoded already, leave it out."
            )
        return ArraySpec((1 if self.mono else None, None), FLOAT32)

    def apply(self, value: Any, params: Any) -> Sound:
        data = file_bytes(value, "audio")
        try:
            sound, rate = self._sound(data)
        except Unreadable as error:
            raise SourceError(
                f"decode cannot read {data.nbytes:,} bytes that begin {bytes(data[:12])!r}: "
                f"{error}. Copy the file again from its origin, leave it out, or give "
                'on_error="skip" to the loader.'
            ) from error
        return sound if self.rate is None else resample(sound, rate, self.rate)

    def _sound(self, data: memoryview) -> tuple[Sound, int]:
        plain = read_wav(data) if is_wav(data) else None
        if plain is None:
            plain = read_sound(data)
        if not SLOWEST_RATE <= plain.rate <= FASTEST_RATE:
            raise Unreadable(f"its header gives {plain.rate:,} Hz, which is no rate of sound")
        if plain.numbers.shape[1] > MOST_CHANNELS:
            raise Unreadable(f"its header gives {plain.numbers.shape[1]:,} channels")
        sound = _channels_first(plain, self.mono)
        if plain.numbers.dtype.kind == "f" and not np.isfinite(sound).all():
            raise Unreadable("it holds numbers that are not finite")
        return sound, plain.rate


def _channels_first(plain: Plain, mono: bool) -> Sound:
    """(frames, channels) as (channels, frames), on the scale of 1."""
    numbers, scale, _ = plain
    frames, channels = numbers.shape
    out: Sound = np.empty((1 if mono else channels, frames), np.float32)
    # What float32 cannot hold is refused afterwards, as not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        if mono and channels > 1:
            total = numbers[:, 0].astype(np.float32)
            for channel in range(1, channels):
                total += numbers[:, channel]
            np.multiply(total, np.float32(scale / channels), out=out[0])
        else:
            np.multiply(numbers.T, np.float32(scale), out=out)
    return out
