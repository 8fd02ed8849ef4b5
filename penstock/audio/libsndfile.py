"""Files that libsndfile reads: FLAC, OGG, MP3, AIFF, and WAV that is compressed."""

from __future__ import annotations

import io
import struct

import numpy as np

from penstock.audio.sound import MOST_CHANNELS
from penstock.audio.wav import Plain, Unreadable
from penstock.native import load_soundfile

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


def read_sound(data: memoryview) -> Plain:
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
    return Plain(parts[0] if len(parts) == 1 else np.concatenate(parts), 1.0, rate)


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
