"""The machine during a phase: load of others, limits, pressure, the pace of the cores.

``snapshot`` reads counters of Linux; ``use_between`` computes the use of the machine from two of
them, and is pure. On other systems, and where a file is missing, the counters are 0.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock import config
from penstock.diagnose.analyze.report import MachineUse

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

WORK = 1 << 20
"""Bytes whose checksum is computed to see the pace of a core: takes about a third of a ms."""

REPEATS = 3
"""Measurements of a core's pace. The fastest one counts, because an idle core starts slowly."""


@dataclass(frozen=True, slots=True)
class MachineCounters:
    """Counters since the start of the machine, in seconds unless stated otherwise.

    ``busy``, ``stolen``: of all cores together. ``own``: CPU time of the job's processes.
    ``queueing``: time that the loop's thread waited for a core. ``work``: CPU seconds of a fixed
    piece of work. ``memory``: bytes available.
    """

    at: float
    busy: float = 0.0
    stolen: float = 0.0
    own: float = 0.0
    queueing: float = 0.0
    throttled: float = 0.0
    pressure: float = 0.0
    memory: int | None = None
    work: float = 0.0


def use_between(
    before: MachineCounters, after: MachineCounters, phase: str, cores: int, spare: int = 0
) -> MachineUse:
    """The use of the machine between two moments. ``pace`` is that of ``work``, not yet relative.

    ``spare``: cores beyond those of the job's limit, which others may use without harm.

    >>> before = MachineCounters(0.0, busy=10.0, own=4.0)
    >>> use = use_between(before, MachineCounters(2.0, busy=13.0, own=5.0), "replay", 2)
    >>> use.own, use.others
    (0.5, 1.0)
    >>> use_between(before, MachineCounters(2.0, busy=13.0, own=5.0), "replay", 2, spare=1).others
    0.0
    """
    seconds = max(1e-9, after.at - before.at)

    def part(name: str) -> float:
        grown: float = getattr(after, name) - getattr(before, name)
        return max(0.0, grown / seconds)

    own = part("own")
    work = (before.work + after.work) / 2
    known = [memory for memory in (before.memory, after.memory) if memory is not None]
    return MachineUse(
        phase=phase,
        seconds=seconds,
        cores=cores,
        own=own,
        others=max(0.0, part("busy") - own - spare),
        stolen=part("stolen"),
        queueing=min(1.0, part("queueing")),
        throttled=min(1.0, part("throttled")),
        pressure=min(1.0, part("pressure")),
        memory=min(known, default=None),
        pace=1 / work if work > 0 else 0.0,
    )


def merged(uses: Iterable[MachineUse]) -> tuple[MachineUse, ...]:
    """One entry for each phase, the mean of its turns; paces relative to the fastest turn."""
    by_phase: dict[str, list[MachineUse]] = {}
    for use in uses:
        by_phase.setdefault(use.phase, []).append(use)
    fastest = max((use.pace for turns in by_phase.values() for use in turns), default=0.0)
    return tuple(_mean(turns, fastest) for turns in by_phase.values())


def _mean(turns: list[MachineUse], fastest: float) -> MachineUse:
    seconds = sum(turn.seconds for turn in turns)

    def mean(name: str) -> float:
        return sum(float(getattr(turn, name)) * turn.seconds for turn in turns) / seconds

    known = [turn.memory for turn in turns if turn.memory is not None]
    return MachineUse(
        phase=turns[0].phase,
        seconds=seconds,
        cores=turns[0].cores,
        own=mean("own"),
        others=mean("others"),
        stolen=mean("stolen"),
        queueing=mean("queueing"),
        throttled=mean("throttled"),
        pressure=mean("pressure"),
        memory=min(known, default=None),
        pace=mean("pace") / fastest if fastest else 1.0,
    )


class MachineWatch:
    """Takes snapshots. ``root``: the process of which all descendants belong to the job.

    ``thread``: the thread of the training loop.
    """

    def __init__(self, root: int | None = None) -> None:
        self.cores = config.cores()
        affinity = getattr(os, "sched_getaffinity", None)
        self._cpus = frozenset(affinity(0)) if affinity is not None else frozenset()
        self.spare = max(0, len(self._cpus) - self.cores)
        self._root = root or os.getpid()
        self._thread = threading.get_native_id()
        self._payload = bytes(WORK)

    def snapshot(self) -> MachineCounters:
        busy, stolen = _cores_busy(_text(PROC / "stat"), self._cpus)
        queue = _text(PROC / f"self/task/{self._thread}/schedstat").split()
        return MachineCounters(
            at=time.perf_counter(),
            busy=busy,
            stolen=stolen,
            own=self.job_cpu(),
            queueing=int(queue[1]) / 1e9 if len(queue) > 1 else 0.0,
            throttled=_throttled(),
            pressure=_pressure(_text(PROC / "pressure/memory")),
            memory=_available(_text(PROC / "meminfo")),
            work=self._work(),
        )

    def job_cpu(self) -> float:
        """CPU seconds of the job's processes so far, ended children included."""
        return sum(_cpu(_text(PROC / f"{pid}/stat")) for pid in (self._root, *below(self._root)))

    def _work(self) -> float:
        took = []
        for _ in range(REPEATS):
            before = time.thread_time()
            zlib.crc32(self._payload)
            took.append(time.thread_time() - before)
        return min(took)


def below(root: int) -> list[int]:
    """The ids of all descendants of a process."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            tasks = os.listdir(PROC / f"{pid}/task")
        except OSError:
            continue
        for task in tasks:
            children = [int(child) for child in _text(PROC / f"{pid}/task/{task}/children").split()]
            found += children
            waiting += children
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cores_busy(stat: str, cpus: Collection[int] = ()) -> tuple[float, float]:
    """Seconds in which these cores were busy and stolen, of ``/proc/stat``; of all without any.

    >>> lines = ["cpu 150 0 50 800 9 0 1 3", "cpu0 100 0 50 0 9 0 1 3", "cpu1 50 0 0 0 0 0 0 0"]
    >>> _cores_busy("\\n".join(lines)), _cores_busy("\\n".join(lines), {1})
    ((2.01, 0.03), (0.5, 0.0))
    """
    wanted = {f"cpu{cpu}" for cpu in cpus}
    busy = gone = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name not in (wanted or {"cpu"}) or len(fields) < 8:
            continue
        user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
        busy += user + nice + system + irq + softirq
        gone += stolen
    return busy / TICKS, gone / TICKS


def _cpu(stat: str) -> float:
    """CPU seconds of a process and its ended children, of ``/proc/PID/stat``."""
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS if len(fields) > 14 else 0.0


def _pressure(text: str) -> float:
    """Seconds in which some process waited.

    >>> _pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000")
    2.5
    """
    _, _, total = text.partition("\n")[0].partition("total=")
    return int(total) / 1e6 if total.strip().isdigit() else 0.0


def _available(meminfo: str) -> int | None:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _throttled() -> float:
    """Seconds in which the limit of this process's control groups stopped it, so far."""
    paths = []
    for line in _text(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths.append(GROUPS / path.lstrip("/"))
        elif "cpu" in controllers.split(","):
            paths.append(GROUPS / "cpu" / path.lstrip("/"))
    # In a container the files of its own group are at the top.
    paths += [GROUPS, GROUPS / "cpu"]
    counters = (_counters(_text(path / "cpu.stat")) for path in paths)
    return max(
        (
            max(found.get("throttled_usec", 0) / 1e6, found.get("throttled_time", 0) / 1e9)
            for found in counters
        ),
        default=0.0,
    )


def _counters(text: str) -> Mapping[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
