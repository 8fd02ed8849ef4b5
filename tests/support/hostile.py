"""Functions for workers that kill, hang or refuse. Imports little: workers import it too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

DEADLY = 0
"""The sample that kills or hangs its worker: the first one, from which the layout is learnt."""


def in_a_worker(value: float, home: int) -> float:
    """The value. Fails in the process ``home``, that of the training loop."""
    if os.getpid() == home:
        raise AssertionError("user code in the training process")
    return value


def noted(value: float, directory: Path) -> float:
    """The value. Makes a file with the number of this process as its name."""
    (directory / str(os.getpid())).touch()
    return value


def jitter(value: float, rng: Any) -> float:
    return value + float(rng.random())


def deadly(value: float, home: int) -> float:
    in_a_worker(value, home)
    if value == DEADLY:
        signal.raise_signal(signal.SIGSEGV)  # in this thread, as native code does
    return value


def hanging(value: float, home: int, announced: Path) -> float:
    """Hangs on the deadly sample, after it has made a file in ``announced``."""
    in_a_worker(value, home)
    if value == DEADLY:
        (announced / str(os.getpid())).touch()
        while True:
            signal.pause()
    return value
