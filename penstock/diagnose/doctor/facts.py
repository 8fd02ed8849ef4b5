"""What this machine offers, as plain values: gathered here, judged elsewhere."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import penstock
from penstock import config, native
from penstock.diagnose.doctor.packages import Package, installed_opencv, look_at_packages
from penstock.errors import PenstockError

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""What numeric libraries read to size their thread pools, and worker processes inherit."""

_SETTINGS = (
    *THREAD_SETTINGS,
    "CUDA_VISIBLE_DEVICES",
    "PENSTOCK_CACHE_DIR",
    "PENSTOCK_RUNTIME_DIR",
    "PENSTOCK_SHM_DIR",
    "PYTHON_GIL",
    "TMPDIR",
)
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that runs; ``free_threaded`` is how it was built, ``gil`` whether it is on."""

    version: tuple[int, int, int]
    executable: str
    free_threaded: bool
    gil: bool


@dataclass(frozen=True, slots=True)
class Cores:
    """``usable`` is what a loader uses: ``mask`` (of ``machine``), cut to the container's quota."""

    usable: int
    mask: int
    machine: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; ``usable`` is the machine's, cut to the container's limit."""

    usable: int
    machine: int
    available: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A directory; of one that does not exist yet, what its nearest parent offers."""

    path: str
    exists: bool
    writable: bool
    total: int
    free: int
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the system; ``None`` is no limit."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Run directories of killed runs; those ``collected``, if that was ``tried``; what failed."""

    place: str
    found: tuple[tuple[str, int], ...] = ()
    collected: tuple[tuple[str, int], ...] = ()
    tried: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks are given."""

    penstock: str
    system: str
    container: bool
    python: Interpreter
    cores: Cores
    memory: Memory
    shm: Place
    memory_stores: str
    memfd: bool
    temporary: Place | None
    disk: Place | None
    files: Limit
    processes: Limit
    nvidia: bool
    leftovers: Leftovers
    packages: dict[str, Package] = field(default_factory=dict)
    opencv: tuple[str, ...] = ()
    no_kernel: str = ""
    """Why the compiled kernel is not used; empty if it is."""
    no_node: str = ""
    """Why no node could be started; empty if one could."""
    settings: dict[str, str] = field(default_factory=dict)


def gather() -> Facts:
    """Look at this machine. Takes seconds where torch is installed; changes nothing."""
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    temporary = _or_none(tempfile.gettempdir)
    memory_stores = _or_none(config.memory_dir)
    disk = _or_none(config.disk_dir)
    return Facts(
        penstock=penstock.__version__,
        system=platform.system(),
        container=_in_container(),
        python=Interpreter(
            version=sys.version_info[:3],
            executable=sys.executable,
            free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            gil=bool(getattr(sys, "_is_gil_enabled", lambda: True)()),
        ),
        cores=_cores(),
        memory=_memory(),
        shm=look_at_place(Path(settings.get("PENSTOCK_SHM_DIR", "/dev/shm"))),
        memory_stores=str(memory_stores or ""),
        memfd=_memfd(),
        temporary=None if temporary is None else look_at_place(temporary),
        disk=None if disk is None else look_at_place(disk),
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_process_limit(),
        nvidia=_nvidia(),
        leftovers=look_for_leftovers(memory_stores),
        packages=look_at_packages(),
        opencv=installed_opencv(),
        no_kernel=native.why_no_kernel(),
        no_node=look_at_node(),
        settings=settings,
    )


def look_at_place(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Place:
    """What a directory offers, or would offer if it were made."""
    path = Path(os.path.abspath(path))
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        usage = shutil.disk_usage(nearest)
        total, free = usage.total, usage.free
    except OSError:
        total = free = 0
    return Place(
        path=str(path),
        exists=path.is_dir(),
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        total=total,
        free=free,
        filesystem=_filesystem(nearest, _read(mounts)),
    )


def look_for_leftovers(place: Path | None) -> Leftovers:
    """What killed runs have left behind where memory stores live."""
    if place is None:
        return Leftovers("")
    try:
        from penstock.store import stale

        return Leftovers(str(place), tuple((str(path), size) for path, size in stale(place)))
    except ImportError:
        return Leftovers(str(place))  # the missing package is reported by name
    except (PenstockError, OSError) as error:
        return Leftovers(str(place), error=str(error))


def collect_leftovers(before: Leftovers) -> Leftovers:
    """Remove what was found, and look again."""
    if not before.found:
        return before
    from penstock.store import collect_stale

    place = Path(before.place)
    try:
        removed = {str(path) for path in collect_stale(place)}
    except (PenstockError, OSError) as error:
        return replace(before, tried=True, error=str(error))
    after = look_for_leftovers(place)
    collected = tuple(one for one in before.found if one[0] in removed)
    return replace(after, collected=collected, tried=True)


def look_at_node() -> str:
    """What is amiss with the directory in which a node has its socket; empty if nothing is."""
    try:
        from penstock.host.private_dir import check_own
        from penstock.node.place import Place as NodePlace

        place = NodePlace()
        if place.path.exists():
            check_own(place.path)
    except (ImportError, OSError):
        return ""  # the missing package, or directory for temporary files, is reported by name
    except PenstockError as error:
        return str(error)
    if look_at_place(place.path).writable:
        return ""
    return f"{place.path} cannot be written to."


def _or_none(place: Callable[[], str | Path]) -> Path | None:
    try:
        return Path(place())
    except (OSError, RuntimeError):  # nowhere to write temporary files, or no home
        return None


def _cores() -> Cores:
    machine = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(usable=config.cores(), mask=mask, machine=machine)


def _memory() -> Memory:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    available = int(found[1]) * 1024 if found else None
    left = _left_in_container()
    if left is not None:
        available = left if available is None else min(left, available)
    return Memory(usable=config.memory(), machine=machine, available=available)


def _left_in_container() -> int | None:
    limit = _number(_read(_CGROUP / "memory.max"))
    used = _number(_read(_CGROUP / "memory.current"))
    if limit is None or used is None:
        return None
    # What files occupy counts as used, and is given back when memory is asked for.
    files = re.search(r"^inactive_file (\d+)", _read(_CGROUP / "memory.stat"), re.MULTILINE)
    return max(0, limit - used + (int(files[1]) if files else 0))


def _memfd() -> bool:
    # Asked for rather than looked up: a container's filter may refuse what Python has.
    try:
        os.close(os.memfd_create("penstock-doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


def _limit(which: int) -> Limit:
    soft, hard = resource.getrlimit(which)
    return Limit(
        soft=None if soft == resource.RLIM_INFINITY else soft,
        hard=None if hard == resource.RLIM_INFINITY else hard,
    )


def _process_limit() -> Limit:
    own = _limit(resource.RLIMIT_NPROC)
    container = _number(_read(_CGROUP / "pids.max"))
    return Limit(soft=_smaller(own.soft, container), hard=_smaller(own.hard, container))


def _smaller(one: int | None, other: int | None) -> int | None:
    given = [limit for limit in (one, other) if limit is not None]
    return min(given) if given else None


def _in_container() -> bool:
    return (
        os.path.exists("/.dockerenv")
        or os.path.exists("/run/.containerenv")
        or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _nvidia() -> bool:
    # The second is where Windows passes the driver of its host to Linux.
    return any(map(os.path.exists, ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")))


def _filesystem(path: Path, mounts: str) -> str:
    """The type of the file system that holds a path, as the kernel's list of mounts names it."""
    best, kind = "", ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[1])
        # Of two mounts on one point the later hides the earlier.
        if len(point) >= len(best) and Path(point) in (path, *path.parents):
            best, kind = point, words[2]
    return kind


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None
