"""How fast the cores are from moment to moment, while something else is measured on them.

Cores that are lent to others as well have more than one speed, and a run and the prediction it is
held against meet different mixtures of them. So on each core a thread decodes one small photograph
every now and then, and notes the CPU time that this took: not the wall's, which would count those
who had the core meanwhile. Two are decoded first, since a core that had nothing to do is slow to
begin with. That takes a fiftieth of a core, from everything that is measured.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import fmean

import penstock as ps

EVERY = 0.06
"""Seconds from one look to the next."""

WARMING = 2

SMALL = 30_000
"""Bytes of the photograph, about: half a millisecond."""


class Pace:
    """Looks at all cores as long as it is open."""

    def __init__(self, data: Path) -> None:
        files = (*data.rglob("*.jpg"), *data.rglob("*.jpeg"))
        self._photograph = min(files, key=lambda one: (_off(one), one)).read_bytes()
        self._looks: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._look, args=(core,), daemon=True)
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
        """CPU seconds of a photograph between two moments of ``time.perf_counter``."""
        return fmean(took for when, took in list(self._looks) if start <= when <= end)

    def _look(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        decode = ps.image.decode()
        while not self._over.wait(EVERY):
            for _ in range(WARMING):
                decode.apply(self._photograph, None)
            before = time.thread_time()
            decode.apply(self._photograph, None)
            self._looks.append((time.perf_counter(), time.thread_time() - before))


def _off(file: Path) -> int:
    return abs(file.stat().st_size - SMALL)
