"""Watches how workers spend their time: on a core, queueing for one, or waiting, and for what.

CPU time and the time in the queue come from counters of the kernel (``schedstat``). What a worker
waits for comes from the system call in which it is, looked at many times a second from another
process, so that the worker and its GIL are not disturbed. ``use_of`` is pure.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.diagnose.analyze.machine import below
from penstock.diagnose.analyze.report import WorkerUse

PERIOD = 0.02
"""Seconds between two looks."""

MOST_PLACES = 3
"""Places in the user's code that a report keeps."""

# Kinds of waiting by the number of the system call. Penstock's workers wait for work in recvmsg.
_X86_64 = {
    "sleep": (35, 230),
    "open": (2, 4, 6, 21, 89, 217, 257, 262, 267, 332, 437, 439),
    "read": (0, 17, 19, 295),
    "lock": (65, 72, 73, 202, 220),
    "network": (42, 44, 45, 46),
    "idle": (7, 23, 47, 232, 270, 271, 281),
}
_AARCH64 = {
    "sleep": (101, 115),
    "open": (48, 56, 61, 78, 79, 291, 437, 439),
    "read": (63, 65, 67, 69),
    "lock": (25, 32, 98, 192, 193),
    "network": (203, 206, 207, 211),
    "idle": (22, 72, 73, 212),
}
_TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def kind_of(syscall: str, state: str, file: Callable[[int], str], machine: str) -> str:
    """What a thread does, from its ``/proc`` files; ``running`` if it is on a core or queues.

    ``file`` gives the target of a descriptor: reading from a pipe or a socket is waiting for work.

    >>> kind_of("230 0x0 0x0", "S", str, "x86_64"), kind_of("running", "R", str, "x86_64")
    ('sleep', 'running')
    >>> kind_of("0 0x5 0x7f", "S", lambda fd: "socket:[1]", "x86_64")
    'idle'
    """
    first, *given = syscall.split() or ["running"]
    if first == "running" or not first.isdigit():
        # A page that is not in memory is read without a system call.
        return "read" if state == "D" else "running"
    number = int(first)
    if state == "R":
        return "running"
    table = _TABLES.get(machine, {})
    found = next((kind for kind, numbers in table.items() if number in numbers), "other")
    if found == "read" and given:
        target = file(int(given[0], 16))
        if target.startswith(("pipe:", "socket:", "anon_inode:")):
            return "idle"
    return found


@dataclass
class Thread:
    """What was seen of one thread: CPU seconds, seconds in the queue, and looks by kind."""

    computing: float = 0.0
    queueing: float = 0.0
    slices: int = 0
    looks: Counter[str] = field(default_factory=Counter)


def use_of(
    threads: Iterable[Thread],
    seconds: float,
    places: Mapping[str, int] | None = None,
    busy: float | None = None,
) -> WorkerUse | None:
    """The use of workers that were watched for ``seconds``; ``None`` if none did anything.

    ``places``: looks at which a worker waited, by place in the user's code. ``busy``: share of the
    time in which workers had a batch to prepare, if known: then the rest is idle, and waiting that
    looks idle but exceeds it is waiting for a peer.
    """
    active = [thread for thread in threads if thread.slices]
    if not active or seconds <= 0:
        return None
    whole = seconds * len(active)
    computing = min(1.0, sum(thread.computing for thread in active) / whole)
    queueing = min(1.0 - computing, sum(thread.queueing for thread in active) / whole)
    looks: Counter[str] = Counter()
    for thread in active:
        looks.update(thread.looks)
    del looks["running"]
    waited, left = sum(looks.values()), 1.0 - computing - queueing
    shares = {kind: left * count / waited for kind, count in looks.items()} if waited else {}
    idle = shares.pop("idle", 0.0 if waited else left)
    if busy is not None and idle > 1 - busy:
        shares["network"] = shares.get("network", 0.0) + idle - (1 - busy)
        idle = 1 - busy
    total = sum((places or {}).values())
    waiting = sum(shares.values())
    named = sorted((places or {}).items(), key=lambda pair: -pair[1])[:MOST_PLACES]
    return WorkerUse(
        seconds=whole,
        computing=computing,
        queueing=queueing,
        idle=idle,
        places=tuple((place, waiting * count / total) for place, count in named),
        **shares,
    )


LITTLE = 0.2
"""Waiting below this share of a worker's time is left in its cost: the measurement errs as much."""


def pause_share(use: WorkerUse) -> float:
    """Share of the preparation of a sample in which a worker needs no core.

    Waiting for a lock is not part of it: others cannot work meanwhile.

    >>> round(pause_share(WorkerUse(10.0, computing=0.2, sleep=0.6, idle=0.2)), 2)
    0.75
    """
    active = 1 - use.idle
    waits = sum(share for cause, share in use.waits.items() if cause != "lock")
    share = waits / active if active > 0 else 0.0
    return share if share >= LITTLE else 0.0


class WorkerWatch:
    """Watches the workers inside a ``with`` block, from a thread of this process.

    Workers are the threads of processes below this one, except those in ``others``, which the
    script has started for itself; or with ``threads`` the other threads of this process.
    """

    def __init__(self, *, threads: bool, others: Iterable[int] = ()) -> None:
        self._threads = threads
        self._others = frozenset(others)
        self._seen: dict[tuple[int, int], Thread] = {}
        self._first: dict[tuple[int, int], tuple[float, float, int]] = {}
        self._ending = threading.Event()
        self._loop = threading.get_native_id()
        self._watcher = threading.Thread(target=self._watch, name="penstock-watch", daemon=True)
        self._machine = platform.machine()
        self.places: Counter[str] = Counter()
        self.seconds = 0.0

    def __enter__(self) -> WorkerWatch:
        self._began = time.perf_counter()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._watcher.join()
        self.seconds = time.perf_counter() - self._began

    @property
    def watched(self) -> set[int]:
        """The processes that were looked at."""
        return {pid for pid, _ in list(self._seen)}

    def use(
        self, busy: float | None = None, places: Mapping[str, int] | None = None
    ) -> WorkerUse | None:
        return use_of(self._seen.values(), self.seconds, places or self.places, busy)

    def _watch(self) -> None:
        own = threading.get_native_id()
        pids: list[int] = [os.getpid()]
        look = 0
        while True:
            if not self._threads and look % 10 == 0:
                pids = [pid for pid in below(os.getpid()) if pid not in self._others]
            look += 1
            for pid in pids:
                for tid in _tasks(pid, all_threads=self._threads):
                    if tid not in (own, self._loop):
                        self._look(pid, tid)
            if self._ending.wait(PERIOD):
                break

    def _look(self, pid: int, tid: int) -> None:
        base = Path(f"/proc/{pid}/task/{tid}")
        try:
            counted = (base / "schedstat").read_text().split()
            state = (base / "stat").read_text().rpartition(")")[2].split()[0]
            syscall = (base / "syscall").read_text()
        except (OSError, IndexError):
            return
        ran, queued, slices = int(counted[0]) / 1e9, int(counted[1]) / 1e9, int(counted[2])
        first = self._first.setdefault((pid, tid), (ran, queued, slices))
        thread = self._seen.setdefault((pid, tid), Thread())
        thread.computing, thread.queueing = ran - first[0], queued - first[1]
        thread.slices = slices - first[2]

        def file(fd: int) -> str:
            try:
                return os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                return ""

        kind = kind_of(syscall, state, file, self._machine)
        if self._threads and kind == "lock":
            # A thread of a pool waits for work, or for the GIL, in the same call as for a lock.
            kind = "lock" if self._in_user_code(tid) else "idle"
        elif self._threads and kind not in ("running", "idle"):
            self._in_user_code(tid)
        thread.looks[kind] += 1

    def _in_user_code(self, tid: int) -> bool:
        """Whether this thread of the process runs the user's code; counts the place."""
        ident = next((one.ident for one in threading.enumerate() if one.native_id == tid), None)
        frame = sys._current_frames().get(ident) if ident is not None else None
        found = place_of(frame)
        if found:
            self.places[found] += 1
        return bool(found)


_naming: set[int] = set()
"""Processes in which a thread names the places where the main thread waits."""


def name_places(note: Callable[[str, bytes], None]) -> None:
    """Start a thread that notes the place in the user's code where the calling thread waits.

    Called in a forked worker, for each batch; only the first call starts the thread. The kernel
    says whether a thread waits; the frame says where. A thread that computes in Python is caught
    while it hands over its GIL, which looks like waiting for a lock, so those looks do not count if
    the GIL came late.
    """
    if os.getpid() in _naming:
        return
    _naming.add(os.getpid())
    ident, tid = threading.get_ident(), threading.get_native_id()
    path = Path(f"/proc/self/task/{tid}/syscall")

    def watch() -> None:
        while True:
            began = time.perf_counter()
            time.sleep(PERIOD)
            if time.perf_counter() - began > PERIOD + GIL_FREE:
                continue
            try:
                kind = kind_of(path.read_text(), "S", lambda _: "", platform.machine())
            except OSError:
                return
            place = (
                "" if kind in ("running", "idle") else place_of(sys._current_frames().get(ident))
            )
            if place:
                note("places", place.encode() + b"\n")

    threading.Thread(target=watch, name="penstock-places", daemon=True).start()


GIL_FREE = 0.002
"""A thread that wakes up later than this had to wait for the GIL."""

_OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARY = (
    f"{os.sep}threading.py",
    f"{os.sep}queue.py",
    "site-packages",
    f"{os.sep}lib{os.sep}python",
)


def place_of(frame: object) -> str:
    """The innermost place of the user's code on the stack, as ``function (file.py:12)``, or empty.

    Code of Penstock, of torch and of the standard library is skipped.
    """
    at = frame
    while at is not None:
        code = at.f_code  # type: ignore[attr-defined]
        name = code.co_filename
        if not (_OURS in name or any(part in name for part in _LIBRARY) or name.startswith("<")):
            function = getattr(code, "co_qualname", code.co_name)
            return f"{function} ({os.path.basename(name)}:{at.f_lineno})"  # type: ignore[attr-defined]
        at = at.f_back  # type: ignore[attr-defined]
    return ""


def _tasks(pid: int, *, all_threads: bool) -> list[int]:
    if not all_threads:
        return [pid]  # the threads beside the main one only pass on batches
    try:
        return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
