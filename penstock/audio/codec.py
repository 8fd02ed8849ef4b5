"""Decoding: from the bytes of a file to sound."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from penstock.errors import PipelineError, SourceError
from penstock.native import load_soundfile
from penstock.operation import ArraySpec, BytesSpec, Spec, file_bytes

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class DecodeAudio(AudioOperation):
    """Bytes of a WAV, FLAC, OGG, MP3 or AIFF file to a float32 array (channels, frames).

    Values lie from -1 to 1. ``rate`` is the sample rate in Hz that the sound is wanted at: a file
    of another is resampled, as ``resample`` does it. Without it every file keeps its own rate,
    which the operations below are then to be told. ``mono=True`` gives one channel, the mean of
    all there are.

    A file that is cut short, damaged or empty is a SourceError, never a silence. (Most MP3s say
    how long they are; of one that does not, and is cut short, what there is is given.) RawSound WAV
    files are read without libsndfile, in a tenth of the time.

    >>> import io, wave
    >>> file = io.BytesIO()
    >>> with wave.open(file, "wb") as out:
    ...     out.setparams((1, 2, 8_000, 0, "NONE", ""))
    ...     out.writeframes(bytes(2 * 8_000))
    >>> DecodeAudio(rate=16_000).apply(file.getvalue(), None).shape
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
            plain = read_by_libsndfile(data)
        if not SLOWEST_RATE <= plain.rate <= FASTEST_RATE:
            raise Unreadable(f"its header gives {plain.rate:,} Hz, which is no rate of sound")
        if plain.numbers.shape[1] > MOST_CHANNELS:
            raise Unreadable(f"its header gives {plain.numbers.shape[1]:,} channels")
        sound = _channels_first(plain, self.mono)
        if plain.numbers.dtype.kind == "f" and not np.isfinite(sound).all():
            raise Unreadable("it holds numbers that are not finite")
        return sound, plain.rate


def _channels_first(plain: RawSound, mono: bool) -> Sound:
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


_INTEGER, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""What follows the format number where WAVE_FORMAT_EXTENSIBLE gives it as a GUID."""

_PLACEHOLDER = 0x7FFF0000
"""Sizes from here on are what recorders write that cannot go back to fill in the real one: ffmpeg
0xFFFFFFFF, sox 0x7FFFF000. The sound then goes on to the end of the file."""


class Unreadable(Exception):
    """The file is damaged; the message says how."""


class RawSound(NamedTuple):
    """Numbers as they lie in a file, (frames, channels); times ``scale`` they lie within 1."""

    numbers: NDArray[Any]
    scale: float
    rate: int


class _Format(NamedTuple):
    tag: int
    channels: int
    rate: int
    block: int
    bits: int


def is_wav(data: memoryview) -> bool:
    return bytes(data[:4]) in (b"RIFF", b"RF64") and bytes(data[8:12]) == b"WAVE"


def read_wav(data: memoryview) -> RawSound | None:
    """The sound of a WAV file; ``None`` if it is whole, and nothing this module reads."""
    found, sound = _chunks(data)
    kind = (found.tag, found.bits)
    width = found.bits // 8
    if kind not in _READERS or not found.channels or found.block != width * found.channels:
        return None
    frames = sound.nbytes // found.block
    if not frames:
        raise Unreadable("it holds no sound (0 frames)")
    numbers, scale = _READERS[kind](sound[: frames * found.block])
    return RawSound(numbers.reshape(frames, found.channels), scale, found.rate)


def _chunks(data: memoryview) -> tuple[_Format, memoryview]:
    """The format and the bytes of the sound, whatever other chunks there are."""
    (whole,) = struct.unpack_from("<I", data, 4)
    found: _Format | None = None
    large: int | None = None
    at = 12
    while at + 8 <= data.nbytes:
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        left = data.nbytes - at
        if name == b"data":
            if found is None:
                raise Unreadable("its sound comes before the chunk that tells its format")
            if large is not None and size == 0xFFFFFFFF:
                size = large
            elif size >= _PLACEHOLDER or (size == 0 and whole in (0, 0xFFFFFFFF)):
                size = left
            if size > left:
                raise Unreadable(
                    f"it is cut short: the header tells of {size:,} bytes of sound, and {left:,} "
                    "are there"
                )
            return found, data[at : at + size]
        if size > left:
            raise Unreadable(
                f"it is cut short: its chunk {name!r} has {size:,} bytes, and {left:,} are there"
            )
        if name == b"fmt ":
            found = _format(data[at : at + size])
        elif name == b"ds64" and size >= 16:  # RF64: sizes of 64 bits
            (large,) = struct.unpack_from("<Q", data, at + 8)
        at += size + size % 2
    raise Unreadable("it is cut short, or it never had any sound: there is no chunk b'data'")


def _format(chunk: memoryview) -> _Format:
    if chunk.nbytes < 16:
        raise Unreadable(f"its format chunk has {chunk.nbytes} bytes, and 16 are the least")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and chunk.nbytes >= 40 and bytes(chunk[26:40]) == _GUID_TAIL:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    return _Format(tag, channels, rate, block, bits)


def _read_8_bits(sound: memoryview) -> tuple[NDArray[Any], float]:
    return np.frombuffer(sound, np.uint8).astype(np.int16) - np.int16(128), 2.0**-7


def _read_24_bits(sound: memoryview) -> tuple[NDArray[Any], float]:
    # Four bytes every three, the lowest of them the last of the number before: thirty times as
    # fast as to copy three by three.
    spaced = np.empty(sound.nbytes + 1, np.uint8)
    spaced[1:] = np.frombuffer(sound, np.uint8)
    overlapping: NDArray[Any] = np.ndarray((sound.nbytes // 3,), "<i4", spaced, 0, (3,))
    return overlapping & np.int32(-256), 2.0**-31


_READERS: dict[tuple[int, int], Callable[[memoryview], tuple[NDArray[Any], float]]] = {
    (_INTEGER, 8): _read_8_bits,
    (_INTEGER, 16): lambda sound: (np.frombuffer(sound, "<i2"), 2.0**-15),
    (_INTEGER, 24): _read_24_bits,
    (_INTEGER, 32): lambda sound: (np.frombuffer(sound, "<i4"), 2.0**-31),
    (_FLOAT, 32): lambda sound: (np.frombuffer(sound, "<f4"), 1.0),
    (_FLOAT, 64): lambda sound: (np.frombuffer(sound, "<f8"), 1.0),
}


_FRAMES_FOR_A_BYTE = 100
_FRAMES_AT_ONCE = 1 << 20
"""How much is read in one go. It is more than any MP3 holds, because reading one of those in parts
breaks it at the joints; and it bounds what a header that claims billions can cost."""

_UNKNOWN = 1 << 62
"""From here on libsndfile's number of frames means that it does not know."""

_OGG_PAGE = 27 + 255 + 255 * 255


class _File(io.BytesIO):
    """Bytes as a file that may be told to go before its beginning, and then stays where it is.

    libsndfile tries that in damaged files; an error there would be printed, not raised.
    """

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def read_by_libsndfile(data: memoryview) -> RawSound:
    """The sound of any file libsndfile knows; Unreadable if it is damaged or not whole."""
    _check_end(data)
    soundfile = load_soundfile()
    parts, done = [], 0
    try:
        with soundfile.SoundFile(_File(data)) as file:
            rate, channels, claimed = int(file.samplerate), int(file.channels), int(file.frames)
            if channels > MOST_CHANNELS:
                raise Unreadable(f"its header gives {channels:,} channels")
            if claimed >= _UNKNOWN:
                raise Unreadable(
                    "its header does not tell how long it is, as when it was encoded from a "
                    "stream. Write it again from a file"
                )
            most = max(_FRAMES_AT_ONCE, _FRAMES_FOR_A_BYTE * data.nbytes)
            while done < claimed:
                part = file.read(min(most, claimed - done), dtype="float32", always_2d=True)
                if not len(part):
                    break
                parts.append(part)
                done += len(part)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        why = str(error).rstrip(".")
        raise Unreadable(f"it is damaged, cut short, or no sound (libsndfile: {why})") from error
    if done < claimed:
        raise Unreadable(
            f"it is cut short: the header tells of {claimed:,} frames, and {done:,} are there"
        )
    if not done:
        raise Unreadable("it holds no sound (0 frames)")
    return RawSound(parts[0] if len(parts) == 1 else np.concatenate(parts), 1.0, rate)


def _check_end(data: memoryview) -> None:
    """Refuse what can be seen to be cut short, and libsndfile would give the rest of."""
    kind = bytes(data[:4])
    if kind == b"OggS":
        end = bytes(data[-_OGG_PAGE:])
        page = end[max(0, end.rfind(b"OggS")) :]
        whole = len(page) > 27 and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
        if not whole or not page[5] & 4:
            raise Unreadable("it is cut short: its last page is not an end")
        return
    if data.nbytes < 24:
        return
    claimed = 0
    if kind == b"FORM":  # AIFF
        claimed = 8 + struct.unpack_from(">I", data, 4)[0]
    elif kind == b".snd":  # AU
        offset, size = struct.unpack_from(">II", data, 4)
        claimed = 0 if size == 0xFFFFFFFF else offset + size
    elif kind == b"riff":  # W64
        claimed = struct.unpack_from("<Q", data, 16)[0]
    if claimed > data.nbytes:
        raise Unreadable(
            f"it is cut short: the header tells of {claimed:,} bytes, and {data.nbytes:,} are there"
        )
