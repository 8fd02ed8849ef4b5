"""The file in which one loader says how it is: written over in place, read by anybody at any time.

A file that is put in the place of another by renaming is sent to the disk at once on ext4, 2.6 ms
that training would wait each time; writing over it takes 0.02 ms. So a reader may see half of one
report and half of the next, and knows it by the checksum.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path

TRIES = 20
"""How often a reader looks again when it came in the middle of writing."""

_HEAD = b'{"crc":"%08x","snapshot":'
_HEAD_LENGTH = len(_HEAD % 0)


class Sheet:
    """This process's end of it. It is gone when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._longest = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)

    def write(self, text: str) -> bool:
        """Say this from now on; false where the file has been removed by somebody."""
        body = text.encode()
        whole = _whole(body)
        self._longest = max(self._longest, len(whole))
        # What is left of a longer one would not be JSON.
        if os.pwrite(self._fd, whole.ljust(self._longest), 0) < len(whole):
            raise OSError(f"{self.path} could be written only in part")
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def read(path: Path) -> bytes | None:
    """What a sheet says; ``None`` where it is gone, or not one."""
    try:
        for _ in range(TRIES):
            found = path.read_bytes().rstrip()
            body = found[_HEAD_LENGTH:-1]
            if found == _whole(body):
                return body
    except OSError:
        pass
    return None


def _whole(body: bytes) -> bytes:
    return b"%b%b}" % (_HEAD % zlib.crc32(body), body)
