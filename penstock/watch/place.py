"""The directory in which the running loaders of this user say how they are, a file for each."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from penstock import config
from penstock.errors import StoreError
from penstock.host.private_dir import check_own, own_directory
from penstock.host.process import alive, started
from penstock.watch.sheet import Sheet, read
from penstock.watch.snapshot import Snapshot, from_json

LIVE = "live"

_NAME = re.compile(r"(?P<pid>\d+)-\d+\.json")


class LivePlace:
    """Written by whoever runs a loader, read by whoever watches; both clear up after the dead."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or config.runtime_dir() / LIVE

    def make(self) -> None:
        # One after the other: a parent that is made in passing would be open to others.
        own_directory(self.path.parent)
        own_directory(self.path)

    def sheet(self, number: int) -> Sheet:
        """The file of one of this process's loaders."""
        self.make()
        return Sheet(self.path / f"{os.getpid()}-{number}.json")

    def leave(self) -> None:
        """Take the directory away if nobody is left."""
        with suppress(OSError):
            self.path.rmdir()

    def snapshots(self) -> list[Snapshot]:
        """All that living processes have there; what dead ones left is removed."""
        found = []
        for path, pid in self._files():
            body = read(path)
            snapshot = None if body is None else from_json(body)
            with suppress(OSError):
                if snapshot is not None and snapshot.pid == pid:
                    if alive(pid, snapshot.started):
                        found.append(snapshot)
                    else:
                        path.unlink()
                elif started(pid) is None:
                    path.unlink()
        return sorted(found, key=lambda one: one.key[::2])

    def problem(self) -> str:
        """Why nothing can be published there; empty where it can, or nobody has tried."""
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
        matched = [match for match in map(_NAME.fullmatch, names) if match is not None]
        return [(self.path / one[0], int(one["pid"])) for one in matched]
