"""The directory in which the running loaders of this user publish their status, one file each.

A report file is overwritten in place. Replacing it by renaming would be safer, but ext4 then writes
the new file to disk at once: training would wait 2.6 ms for each report instead of 0.02 ms. So a
reader may see half of one report and half of the next, and detects that by a checksum.
"""

from __future__ import annotations

import os
import re
import zlib
from contextlib import suppress
from pathlib import Path

from penstock import config
from penstock.errors import StoreError
from penstock.host.private_dir import check_own, own_directory
from penstock.host.process import alive, started
from penstock.watch.snapshot import Snapshot, from_json

LIVE = "live"

TRIES = 20
"""Attempts to read a report file that is being written at the same moment."""

_NAME = re.compile(r"(?P<pid>\d+)-\d+\.json")

_HEAD = b'{"crc":"%08x","snapshot":'
_HEAD_LENGTH = len(_HEAD % 0)


class LiveDirectory:
    """Writers are the processes that run loaders, readers are the views.

    Both remove the files of processes that have died.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or config.runtime_dir() / LIVE

    def create(self) -> None:
        # Parent first: mkdir(parents=True) would create it with a mode that others can read.
        own_directory(self.path.parent)
        own_directory(self.path)

    def report_file(self, number: int) -> ReportFile:
        """Create the file of this process's loader with that number."""
        self.create()
        return ReportFile(self.path / f"{os.getpid()}-{number}.json")

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            self.path.rmdir()

    def snapshots(self) -> list[Snapshot]:
        """The snapshots of all live processes. Files of dead processes are removed."""
        snapshots = []
        for path, pid in self._files():
            body = read_report(path)
            snapshot = None if body is None else from_json(body)
            with suppress(OSError):
                if snapshot is not None and snapshot.pid == pid:
                    if alive(pid, snapshot.started):
                        snapshots.append(snapshot)
                    else:
                        path.unlink()
                elif started(pid) is None:
                    path.unlink()
        return sorted(snapshots, key=lambda snapshot: (snapshot.pid, snapshot.number))

    def problem(self) -> str:
        """Why loaders cannot publish here; empty if they can or if the directory is missing."""
        try:
            check_own(self.path.parent)
            check_own(self.path)
        except FileNotFoundError:
            return ""
        except (OSError, StoreError) as error:
            return str(error)
        return ""

    def _files(self) -> list[tuple[Path, int]]:
        try:
            names = sorted(os.listdir(self.path)) if not self.problem() else []
        except OSError:
            return []
        matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
        return [(self.path / match[0], int(match["pid"])) for match in matches]


class ReportFile:
    """The writing end of a report file. ``close`` removes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._longest = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)

    def write(self, text: str) -> bool:
        """Replace the report; returns false if the file has been deleted from outside."""
        content = _with_checksum(text.encode())
        self._longest = max(self._longest, len(content))
        # Spaces overwrite the rest of a longer report, so that the file stays valid JSON.
        if os.pwrite(self._fd, content.ljust(self._longest), 0) < len(content):
            raise OSError(f"Only part of a report could be written to {self.path}")
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def read_report(path: Path) -> bytes | None:
    """The text last written to a report file; ``None`` if it is gone or not a report."""
    try:
        for _ in range(TRIES):
            content = path.read_bytes().rstrip()
            body = content[_HEAD_LENGTH:-1]
            if content == _with_checksum(body):
                return body
    except OSError:
        pass
    return None


def _with_checksum(body: bytes) -> bytes:
    return b"%b%b}" % (_HEAD % zlib.crc32(body), body)
