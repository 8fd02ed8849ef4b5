"""A board of numbers that the processes of one run share: what all should do, how far each is."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np

NAP = 0.002
"""Seconds between two looks at the board."""

PR_SET_PDEATHSIG = 1
"""As the kernel's headers have it."""


class Phase(IntEnum):
    """What everybody should be doing."""

    IMPORT = 0
    RUN = 1
    LOOK = 2
    END = 3


class Stand(IntEnum):
    """How far one process is."""

    STARTING = 0
    IMPORTED = 1
    RUNNING = 2
    LOOKED = 3


class Board:
    """One file of numbers, mapped by everybody: nobody has to be sent anything while time counts.

    ``places`` is how many processes have a line on it, by number.
    """

    def __init__(self, path: Path, places: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (1 + 2 * places)))
        cells = np.memmap(path, np.int64, "r+", shape=(1 + 2 * places,))
        self._phase, self._stands, self._counts = np.split(cells, (1, 1 + places))

    @property
    def phase(self) -> Phase:
        return Phase(int(self._phase[0]))

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase[0] = phase

    def stand(self, place: int) -> Stand:
        return Stand(int(self._stands[place]))

    def stands(self, place: int, stand: Stand) -> None:
        self._stands[place] = stand

    def add(self, place: int, samples: int) -> None:
        self._counts[place] += samples

    def counts(self) -> list[int]:
        """What everybody has counted so far, at one moment."""
        found: list[int] = self._counts.tolist()
        return found

    def wait_for(self, phase: Phase) -> None:
        """For those who are told: until it has come this far."""
        while self.phase < phase:
            time.sleep(NAP)


def wait_until(
    reached: Callable[[], bool], check: Callable[[], None], patience: float, what: str
) -> None:
    """For those who tell: until something is so. ``check`` raises if it will never be."""
    give_up = time.monotonic() + patience
    while not reached():
        check()
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} after {patience:.0f} s")
        time.sleep(NAP)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it is gone, however it went: the
    others it would have to end are sessions of their own."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
