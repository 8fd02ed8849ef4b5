"""Shared memory between the processes of one run: the current phase, and the state of each job."""

from __future__ import annotations

import time
from enum import IntEnum
from pathlib import Path

import numpy as np

from benchmarks.harness.processes import POLL_INTERVAL


class Phase(IntEnum):
    """The current phase of a run, set by the benchmark."""

    IMPORT = 0
    RUN = 1
    INSPECT = 2
    END = 3


class JobState(IntEnum):
    """How far one process has come."""

    STARTING = 0
    IMPORTED = 1
    RUNNING = 2
    INSPECTED = 3


class Board:
    """A file of numbers that all processes map, so that no messages are sent while measuring.

    It has one entry for each of ``places`` processes, by number.
    """

    def __init__(self, path: Path, places: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (1 + 2 * places)))
        cells = np.memmap(path, np.int64, "r+", shape=(1 + 2 * places,))
        self._phase, self._states, self._counts = np.split(cells, (1, 1 + places))

    @property
    def phase(self) -> Phase:
        return Phase(int(self._phase[0]))

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase[0] = phase

    def state(self, place: int) -> JobState:
        return JobState(int(self._states[place]))

    def set_state(self, place: int, state: JobState) -> None:
        self._states[place] = state

    def add(self, place: int, samples: int) -> None:
        """Count samples of a process."""
        self._counts[place] += samples

    def counts(self) -> list[int]:
        """The number of samples of each process so far."""
        counts: list[int] = self._counts.tolist()
        return counts

    def wait_for(self, phase: Phase) -> None:
        """Wait until the run has reached a phase. Called by the jobs."""
        while self.phase < phase:
            time.sleep(POLL_INTERVAL)
