"""Decoding: from the bytes of an audio file to a waveform.

Plain WAV files are read here, because a call of libsndfile takes longer than decoding a short clip.
libsndfile reads all other formats (FLAC, OGG, MP3, AIFF), and WAV files that are compressed or have
unusual widths. It decodes the part that is left of a file that was cut short, so lengths are
checked here first.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.audio.arithmetic import other_arithmetic
from penstock.audio.program import DECODE, SoundWork, one_step
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
from penstock.native import lend_libsndfile, load_soundfile
from penstock.operation import ArraySpec, BytesSpec, Spec, file_bytes

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class DecodeAudio(AudioOperation):
    """Decode a WAV, FLAC, OGG, MP3 or AIFF file to float32 (channels, frames).

    Values are from -1 to 1. ``rate`` is the sample rate of the result in Hz: files with another
    rate are resampled, as by ``resample``. Without it every file keeps its own rate, which
    you then give to the operations below. ``mono=True`` gives one channel, the mean of all.

    A file that is cut short, damaged or empty raises SourceError; it never gives silence. (An MP3
    without a length in its header cannot be checked: if it is cut short, the part that is left is
    decoded.) Plain WAV files are read without libsndfile, in a tenth of the time.

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
                f"decode got an array ({spec}); it needs the bytes of an audio file. If the "
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
                f"{error}. Copy the file again from its origin, or leave it out."
            ) from error
        return sound if self.rate is None else resample(sound, rate, self.rate)

    def arithmetic(self) -> str | None:
        return None if self.rate is None else other_arithmetic()

    def kernel_work(self, key: bytes) -> SoundWork:
        lend_libsndfile()
        return one_step(DECODE, key, (self.mono, self.rate or 0))

    def _sound(self, data: memoryview) -> tuple[Sound, int]:
        raw = read_wav(data) if is_wav(data) else None
        if raw is None:
            raw = read_by_libsndfile(data)
        if not SLOWEST_RATE <= raw.rate <= FASTEST_RATE:
            raise Unreadable(
                f"its header gives a sample rate of {raw.rate:,} Hz, which is not from "
                f"{SLOWEST_RATE:,} to {FASTEST_RATE:,}"
            )
        _check_channels(raw.numbers.shape[1])
        sound = _channels_first(raw, self.mono)
        if raw.numbers.dtype.kind == "f" and not np.isfinite(sound).all():
            raise Unreadable("it holds numbers that are not finite")
        return sound, raw.rate


def _check_channels(channels: int) -> None:
    if channels > MOST_CHANNELS:
        raise Unreadable(f"its header gives {channels:,} channels, more than {MOST_CHANNELS}")


def _channels_first(raw: RawSound, mono: bool) -> Sound:
    """The sound as (channels, frames), scaled to -1 to 1."""
    numbers, scale, _ = raw
    frames, channels = numbers.shape
    out: Sound = np.empty((1 if mono else channels, frames), np.float32)
    # Numbers too large for float32 become infinite, which the caller rejects.
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
"""The rest of the GUID that begins with the format number, in WAVE_FORMAT_EXTENSIBLE."""

_PLACEHOLDER = 0x7FFF0000
"""Sizes from this one up are placeholders. Recorders that cannot seek back to fill in the real size
write them: ffmpeg 0xFFFFFFFF, sox 0x7FFFF000. The sound then extends to the end of the file."""


class Unreadable(Exception):
    """The file cannot be decoded; the message says why."""


class RawSound(NamedTuple):
    """Numbers as stored in a file, (frames, channels). Times ``scale`` they are from -1 to 1."""

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
    """Read a WAV file; ``None`` if it is complete, but its format is for libsndfile."""
    header, sound = _chunks(data)
    kind = (header.tag, header.bits)
    width = header.bits // 8
    if kind not in _READERS or not header.channels or header.block != width * header.channels:
        return None
    frames = sound.nbytes // header.block
    if not frames:
        raise Unreadable("it holds no sound (0 frames)")
    numbers, scale = _READERS[kind](sound[: frames * header.block])
    return RawSound(numbers.reshape(frames, header.channels), scale, header.rate)


def _chunks(data: memoryview) -> tuple[_Format, memoryview]:
    """The format and the bytes of the sound; other chunks are skipped."""
    (whole,) = struct.unpack_from("<I", data, 4)
    header: _Format | None = None
    large: int | None = None
    at = 12
    while at + 8 <= data.nbytes:
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        left = data.nbytes - at
        if name == b"data":
            if header is None:
                raise Unreadable("its chunk b'data' comes before the chunk b'fmt '")
            if large is not None and size == 0xFFFFFFFF:
                size = large
            elif size >= _PLACEHOLDER or (size == 0 and whole in (0, 0xFFFFFFFF)):
                size = left
            if size > left:
                raise Unreadable(
                    f"it is cut short: the header states {size:,} bytes of sound, but only "
                    f"{left:,} are left"
                )
            return header, data[at : at + size]
        if size > left:
            raise Unreadable(
                f"it is cut short: chunk {name!r} has {size:,} bytes, but only {left:,} are left"
            )
        if name == b"fmt ":
            header = _format(data[at : at + size])
        elif name == b"ds64" and size >= 16:  # RF64: sizes of 64 bits
            (large,) = struct.unpack_from("<Q", data, at + 8)
        at += size + size % 2
    raise Unreadable("it is cut short, or has no sound: there is no chunk b'data'")


def _format(chunk: memoryview) -> _Format:
    if chunk.nbytes < 16:
        raise Unreadable(f"its format chunk has {chunk.nbytes} bytes, but needs at least 16")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and chunk.nbytes >= 40 and bytes(chunk[26:40]) == _GUID_TAIL:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    return _Format(tag, channels, rate, block, bits)


def _read_8_bits(sound: memoryview) -> tuple[NDArray[Any], float]:
    return np.frombuffer(sound, np.uint8).astype(np.int16) - np.int16(128), 2.0**-7


def _read_24_bits(sound: memoryview) -> tuple[NDArray[Any], float]:
    # Read four bytes at every third byte. The lowest of the four belongs to the number before, and
    # is masked off. This is thirty times as fast as copying three bytes at a time.
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
"""Frames read in one call, at least. More than an MP3 holds, because libsndfile makes errors at the
joints if it reads an MP3 in parts. Also a limit on memory for headers that claim billions."""

_UNKNOWN = 1 << 62
"""From this number of frames up, libsndfile means that the length is unknown."""

_OGG_PAGE = 27 + 255 + 255 * 255


class _File(io.BytesIO):
    """Bytes as a file in which seeking before the beginning does nothing.

    libsndfile seeks there in damaged files. An exception in its callback would be printed, not
    raised.
    """

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def read_by_libsndfile(data: memoryview) -> RawSound:
    """Read a file by libsndfile; raises Unreadable if it is damaged or incomplete."""
    _check_end(data)
    soundfile = load_soundfile()
    parts, done = [], 0
    try:
        with soundfile.SoundFile(_File(data)) as file:
            rate, channels, claimed = int(file.samplerate), int(file.channels), int(file.frames)
            _check_channels(channels)
            if claimed >= _UNKNOWN:
                raise Unreadable(
                    "its header does not state its length, as when it was encoded from a "
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
        why = str(_with_reason(error, data)).rstrip(".")
        raise Unreadable(f"it is damaged, cut short, or not audio (libsndfile: {why})") from error
    if done < claimed:
        raise Unreadable(
            f"it is cut short: the header states {claimed:,} frames, but only {done:,} are there"
        )
    if not done:
        raise Unreadable("it holds no sound (0 frames)")
    return RawSound(parts[0] if len(parts) == 1 else np.concatenate(parts), 1.0, rate)


def _with_reason(error: Exception, data: memoryview) -> Exception:
    """The error of a file that cannot be opened, with libsndfile's reason.

    libsndfile keeps the reason once for the whole process. If another thread opens a file before it
    is read, it is 0, so the file is opened again.
    """
    for _ in range(1_000):
        if getattr(error, "code", None) != 0:
            break
        try:
            load_soundfile().SoundFile(_File(data)).close()
        except RuntimeError as again:
            error = again
    return error


def _check_end(data: memoryview) -> None:
    """Reject files that are visibly cut short; libsndfile would decode the part that is left."""
    kind = bytes(data[:4])
    if kind == b"OggS":
        end = bytes(data[-_OGG_PAGE:])
        page = end[max(0, end.rfind(b"OggS")) :]
        whole = len(page) > 27 and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
        if not whole or not page[5] & 4:
            raise Unreadable("it is cut short: its last page is not marked as the end")
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
            f"it is cut short: the header states {claimed:,} bytes, but only {data.nbytes:,} are "
            "there"
        )
