"""How fast the cores are from moment to moment, while something else is measured on them.

Cores that are lent to others as well have more than one speed, and a run and the prediction it is
held against meet different mixtures of them. So on each core a thread decodes one small photograph
every now and then, and notes the CPU time that this took: not the wall's, which would count those
who had the core meanwhile. Two are decoded first, since a core that had nothing to do is slow to
begin with. That takes a fiftieth of a core, from everything that is measured; in a process of its
own, so that it counts as nobody's work.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean

EVERY = 0.06
"""Seconds from one look to the next."""

WARMING = 2

SMALL = 30_000
"""Bytes of the photograph, about: half a millisecond."""

PATIENCE = 60.0
"""Seconds until the first look at the latest."""

_LOOK = struct.Struct("dd")
"""When, by ``time.perf_counter``, which is the same for all processes, and how long it took."""


class Pace:
    """Looks at all cores as long as it is open."""

    def __init__(self, data: Path) -> None:
        files = (*data.rglob("*.jpg"), *data.rglob("*.jpeg"))
        self._photograph = min(files, key=lambda one: (_off(one), one))

    def __enter__(self) -> Pace:
        self._looks = tempfile.TemporaryFile(buffering=0)
        # It ends with what it reads from, so also where this process is killed.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pace", str(self._photograph)],
            stdin=subprocess.PIPE,
            stdout=self._looks,
        )
        until = time.monotonic() + PATIENCE
        while not self.looks():
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError("the pace of the cores cannot be followed: see above")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._looks.close()

    def looks(self) -> list[tuple[float, float]]:
        """What was seen so far: moments, and CPU seconds of a photograph."""
        size = os.fstat(self._looks.fileno()).st_size
        whole = os.pread(self._looks.fileno(), size - size % _LOOK.size, 0)
        return [(when, took) for when, took in _LOOK.iter_unpack(whole)]

    def between(self, start: float, end: float) -> float:
        """CPU seconds of a photograph between two moments."""
        return fmean(took for when, took in self.looks() if start <= when <= end)


def follow(photograph: bytes, over: threading.Event) -> None:
    """Look at all cores until it is over, and say on the standard output what was seen."""
    threads = [
        threading.Thread(target=_look, args=(core, photograph, over))
        for core in sorted(os.sched_getaffinity(0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _look(core: int, photograph: bytes, over: threading.Event) -> None:
    import penstock as ps

    os.sched_setaffinity(0, {core})
    decode = ps.image.decode()
    while not over.wait(EVERY):
        for _ in range(WARMING):
            decode.apply(photograph, None)
        before = time.thread_time()
        decode.apply(photograph, None)
        took = time.thread_time() - before
        os.write(sys.stdout.fileno(), _LOOK.pack(time.perf_counter(), took))


def _off(file: Path) -> int:
    return abs(file.stat().st_size - SMALL)


def _main() -> None:
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    follow(Path(sys.argv[1]).read_bytes(), over)


if __name__ == "__main__":
    _main()
