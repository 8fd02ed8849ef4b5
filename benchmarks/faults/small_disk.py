"""A small disk that can be filled: a tmpfs, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from benchmarks.faults.run import SkippedFaultError

PAGE = 4096

FILLER = "filler"


class SmallDisk:
    """A file system of ``size`` bytes, mounted at a new directory."""

    def __init__(self, place: Path, size: int) -> None:
        if os.geteuid() != 0:
            raise SkippedFaultError("needs root")
        self.place = place
        place.mkdir(mode=0o700, exist_ok=True)
        options = f"size={size},mode=0700"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            raise SkippedFaultError(f"cannot mount a tmpfs: {mounted.stderr.strip()}")

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        # Lazily: a process that failed may still have files open there.
        subprocess.run(["umount", "--lazy", str(self.place)], check=False)

    def fill(self, log: Path | None = None) -> None:
        """Fill the disk. ``log`` is extended to the end of its page, so that nothing fits into
        it."""
        if log is not None and log.exists():
            os.truncate(log, -(-log.stat().st_size // PAGE) * PAGE)
        # Writing ends with an error when the disk is full.
        with suppress(OSError), (self.place / FILLER).open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(PAGE))

    def free(self) -> None:
        (self.place / FILLER).unlink(missing_ok=True)
