"""The speed of the cores over time, sampled while something else is measured on them.

Cores shared with other virtual machines change their speed, so a run and the analysis that predicts
it may meet different speeds. A thread on each core regularly decodes one small photograph and
records its CPU time (not wall time, which would include other threads on the core). Two more are
decoded before it, because a core that was idle is slow at first. This takes a fiftieth of a core
away from the measurement.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import fmean

import penstock as ps

INTERVAL = 0.06
"""Seconds between two samples."""

WARM_UP = 2
"""Photographs decoded before each sample."""

PHOTOGRAPH_BYTES = 30_000
"""Preferred size of the photograph: takes about half a millisecond to decode."""


class Pace:
    """Samples the speed of all cores inside a ``with`` block."""

    def __init__(self, data: Path) -> None:
        files = (*data.rglob("*.jpg"), *data.rglob("*.jpeg"))
        self._photograph = min(files, key=lambda path: (_size_difference(path), path)).read_bytes()
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._sample, args=(core,), daemon=True)
            for core in sorted(os.sched_getaffinity(0))
        ]

    def __enter__(self) -> Pace:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def between(self, start: float, end: float) -> float:
        """Mean CPU seconds to decode the photograph, between two times of ``time.perf_counter``."""
        return fmean(took for when, took in list(self._samples) if start <= when <= end)

    def _sample(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        decode = ps.image.decode()
        while not self._over.wait(INTERVAL):
            for _ in range(WARM_UP):
                decode.apply(self._photograph, None)
            before = time.thread_time()
            decode.apply(self._photograph, None)
            self._samples.append((time.perf_counter(), time.thread_time() - before))


def _size_difference(file: Path) -> int:
    return abs(file.stat().st_size - PHOTOGRAPH_BYTES)
