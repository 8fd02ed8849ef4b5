"""A process that does a little work again and again: how fast a process gets on now.

On a busy machine everybody is slow. The ticks of the metronome then come late, so a job that waits
for its share of the processor is not mistaken for one that hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.alone import ROOT
from benchmarks.harness.processes import die_with_parent

SLEEP, WORK = 0.18, 0.02
"""Seconds that a tick sleeps, and seconds of processor time that it takes."""

TICK = SLEEP + WORK


class Metronome:
    """A clock that runs slower on a busy machine: seconds that a free machine needs for the ticks
    so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.metronome", str(path)],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )

    def now(self) -> float:
        # One byte for each tick.
        return TICK * self._path.stat().st_size if self._path.exists() else 0.0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def beat(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        time.sleep(SLEEP)
        end = time.process_time() + WORK
        while time.process_time() < end:
            pass
        os.write(file, b".")


if __name__ == "__main__":
    die_with_parent()
    beat(Path(sys.argv[1]))
