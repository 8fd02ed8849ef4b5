"""Which files a dataset opens, and how long its batches take: noted in the processes that do it.

An audit hook sees every file that Python opens. It stays for as long as its process, so it is put
in place once, and only where something is analysed. Processes that are forked from here have it
too, and write what they see into a directory of the analysis.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_SKIPPED = (".py", ".pyc", ".so", ".pth", ".pyi", ".toml")


_noting: list[Opened] = []
"""What the audit hook tells, once there is one: the last that was made."""


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and _noting[0].on:
        _noting[0].heard(given)


class Opened:
    """Notes files while it is ``on``; forks go on noting as it was then."""

    def __init__(self, directory: Path) -> None:
        self.on = False
        self._directory = directory
        self._seen: set[str] = set()
        self._busy = False
        if not _noting:
            _noting.append(self)
            sys.addaudithook(_hook)
        _noting[0] = self

    def heard(self, given: tuple[Any, ...]) -> None:
        """A file is opened: its path and mode."""
        path, mode = given[0], given[1]
        if self._busy:
            return
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name in self._seen or name.endswith(_SKIPPED) or name.startswith(("/proc/", "/dev/")):
            return
        self._seen.add(name)
        self._busy = True  # what follows opens a file itself
        try:
            self.note("files", os.fsencode(name) + b"\0")
        finally:
            self._busy = False

    def note(self, what: str, text: bytes) -> None:
        """Write it down for whoever reads ``found``; one that cannot be written is not noted."""
        try:
            with open(self._directory / f"{os.getpid()}.{what}", "ab", 0) as file:
                file.write(text)
        except OSError:
            self.on = False

    def files(self) -> list[str]:
        """What was opened by this process and its forks, and is a file that can be read."""
        names = b"".join(self._all("files")).split(b"\0")
        found = dict.fromkeys(os.fsdecode(name) for name in names if name)
        return [name for name in found if os.path.isfile(name)]

    def times(self) -> list[float]:
        """Seconds that workers noted for their batches."""
        return [float(line) for part in self._all("times") for line in part.split()]

    def _all(self, what: str) -> list[bytes]:
        return [one.read_bytes() for one in sorted(self._directory.glob(f"*.{what}"))]
