"""How many of the cores that this process may use are idle, over the time between two looks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class CpuTimes(NamedTuple):
    """CPU seconds since the machine has started, over all its cores."""

    idle: float
    whole: float


def read_cpu_times() -> CpuTimes | None:
    """The times of this machine; ``None`` where the system does not tell."""
    try:
        return parse_cpu_times(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return None


def parse_cpu_times(text: str, ticks: int) -> CpuTimes | None:
    """The times in the text of ``/proc/stat``, whose numbers are clock ticks.

    >>> parse_cpu_times("cpu  300 0 100 500 100 0 0 0 0 0", ticks=100)
    CpuTimes(idle=6.0, whole=10.0)
    """
    words = text.partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu":
        return None
    # Guest time, the last two numbers, is part of user time.
    numbers = [int(word) for word in words[1:9]]
    return CpuTimes((numbers[3] + numbers[4]) / ticks, sum(numbers) / ticks)


class IdleCores:
    """Idle cores between two looks, at most ``cores``.

    >>> times = iter([CpuTimes(0.0, 0.0), CpuTimes(3.0, 4.0)])
    >>> IdleCores(8, machine_cores=16, read=lambda: next(times)).look()
    8.0
    """

    def __init__(
        self,
        cores: int,
        *,
        machine_cores: int | None = None,
        read: Callable[[], CpuTimes | None] = read_cpu_times,
    ) -> None:
        self._cores = cores
        self._machine_cores = machine_cores or os.cpu_count() or cores
        self._read = read
        self._before = read()
        self._last = 0.0

    def look(self) -> float:
        """The average since the last look; 0 where the system does not tell."""
        now, before = self._read(), self._before
        if now is not None and before is not None and now.whole > before.whole:
            share = max(0.0, now.idle - before.idle) / (now.whole - before.whole)
            self._last = min(float(self._cores), share * self._machine_cores)
        if now is not None:
            self._before = now
        return self._last
