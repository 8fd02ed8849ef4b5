"""A kernel that sleeps instead of working, so that a small machine stands in for one of many cores.

``TimedKernel`` measures what each function of the compiled kernel takes for an item.
``SleepingKernel`` sleeps for that long, without the GIL, and returns at once what callers need. Its
queue, in which worker threads stay, sleeps for the sum of them for a sample. All that is left is
Python, which is what limits a machine of many cores.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import sleep, thread_time
from typing import Any

ITEMS: dict[str, Callable[..., int]] = {
    "read_files": lambda paths: len(paths),
    "regions": lambda requests: len(requests),
    "resize": lambda *_: 1,
    "augment": lambda *_: 1,
    "look_up": lambda *_: 1,
}
"""The functions that release the GIL, and the number of items in a call of each. Other functions
take a few microseconds with the GIL, so they really run."""

PR_SET_TIMERSLACK = 29


def wake_on_time() -> None:
    """Let threads that this thread starts wake up within a microsecond, instead of 50."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


class TimedKernel:
    """The compiled kernel, with a clock of CPU time around its functions. For one thread."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._items: defaultdict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if name not in ITEMS:
            return function

        def timed(*args: Any) -> Any:
            started = thread_time()  # other processes on this core do not count
            result = function(*args)
            self._seconds[name] += thread_time() - started
            self._items[name] += ITEMS[name](*args)
            return result

        return timed

    def costs(self) -> dict[str, float]:
        """Seconds per item of each function that was called."""
        return {name: self._seconds[name] / items for name, items in self._items.items() if items}


@dataclass
class Sleeps:
    """The sleeps of one thread: how many, and how long in total."""

    calls: int = 0
    seconds: float = 0.0


@dataclass
class SleepLog:
    """The sleeps of all threads. Each thread counts for itself, so no count is lost."""

    threads: list[Sleeps] = field(default_factory=list)
    _local: threading.local = field(default_factory=threading.local)

    def sleep(self, seconds: float) -> None:
        mine: Sleeps | None = getattr(self._local, "sleeps", None)
        if mine is None:
            mine = self._local.sleeps = Sleeps()
            self.threads.append(mine)
        sleep(seconds)
        mine.calls += 1
        mine.seconds += seconds

    def total(self) -> Sleeps:
        return Sleeps(
            sum(sleeps.calls for sleeps in self.threads),
            sum(sleeps.seconds for sleeps in self.threads),
        )


class SleepingKernel:
    """The compiled kernel with sleeps in place of its long functions.

    Files are read once, and rows keep what was in them. ``costs``: seconds per item, as
    ``TimedKernel.costs`` returns them.
    """

    def __init__(self, real: Any, costs: Mapping[str, float]) -> None:
        self._real = real
        self._costs = dict(costs)
        self._files: dict[str, bytes] = {}
        self.log = SleepLog()
        self.nap = sum(self._costs.values())
        """Seconds that the queue sleeps for a sample."""
        real.nap(self.nap)

    def __getattr__(self, name: str) -> Any:
        if name in ITEMS:
            raise NotImplementedError(
                f"the run calls {name}() of the kernel, and there is no sleeping stand-in for it"
            )
        return getattr(self._real, name)

    def _sleep(self, name: str, items: int) -> None:
        if name not in self._costs:
            raise NotImplementedError(
                f"the run calls {name}() of the kernel, and the run that was timed did not"
            )
        self.log.sleep(self._costs[name] * items)

    def read_files(self, paths: tuple[str, ...]) -> list[Any]:
        self._sleep("read_files", len(paths))
        new = tuple(path for path in paths if path not in self._files)
        if new:
            self._files.update(zip(new, self._real.read_files(new), strict=True))
        return [self._files[path] for path in paths]

    def regions(self, requests: tuple[tuple[Any, ...], ...]) -> list[None]:
        self._sleep("regions", len(requests))
        return [None] * len(requests)

    def resize(self, *_: Any) -> None:
        self._sleep("resize", 1)

    def augment(self, *_: Any) -> bool:
        self._sleep("augment", 1)
        return True

    def look_up(self, *_: Any) -> None:
        self._sleep("look_up", 1)
