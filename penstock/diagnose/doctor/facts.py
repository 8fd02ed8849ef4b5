"""Facts about this machine and its packages, as plain values. ``checks`` judges them.

Each package is imported in its own process. If a library crashes or hangs during its import, for
example because of a broken driver, the doctor reports that and goes on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import penstock
from penstock import config, native
from penstock.errors import PenstockError
from penstock.host import cgroup

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Numeric libraries size their thread pools by these variables; worker processes inherit them."""

IMPORT_TIMEOUT = 120.0
"""Seconds until an import counts as hung: torch on a cold network disk may take a minute."""

OPENCV = (
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python-headless",
    "opencv-contrib-python",
)
"""The distributions of OpenCV: each installs the same ``cv2`` folder over that of the others."""

_SETTINGS = (
    *THREAD_SETTINGS,
    "CUDA_VISIBLE_DEVICES",
    "PENSTOCK_CACHE_DIR",
    "PENSTOCK_RUNTIME_DIR",
    "PENSTOCK_SHM_DIR",
    "PYTHON_GIL",
    "TMPDIR",
)
_PROBE_PROGRAM = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; "
    "from penstock.diagnose.doctor.probe import main; main(a['module'], a['distributions'])"
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The running Python. ``free_threaded``: its build; ``gil``: whether the GIL is on."""

    version: tuple[int, int, int]
    executable: str
    free_threaded: bool
    gil: bool


@dataclass(frozen=True, slots=True)
class Cores:
    """Numbers of cores: of the ``machine``, in the CPU ``mask`` of this process, ``usable`` ones.

    ``usable`` is the mask cut to the container's quota. A loader uses this number.
    """

    usable: int
    mask: int
    machine: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory. ``usable``: the machine's memory, cut to the container's limit."""

    usable: int
    machine: int
    available: int | None


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory and its file system.

    For a directory that does not exist yet, the values are those of its nearest parent.
    """

    path: str
    exists: bool
    writable: bool
    total: int
    free: int
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource limit of the system; ``None`` means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Run directories that killed runs left in ``place``, as (path, bytes).

    ``tried``: removal was tried. ``collected``: removed ones. ``error``: why ``place`` cannot be
    read or cleaned.
    """

    place: str
    found: tuple[tuple[str, int], ...] = ()
    collected: tuple[tuple[str, int], ...] = ()
    tried: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator that torch can use; ``memory`` in bytes, 0 if unknown."""

    kind: str
    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Package:
    """One package. ``extra``: the extra of Penstock that installs it, ``""`` if none does.

    ``core`` packages come with every install. ``said``: the warnings that its import raised.
    ``gil``: whether the GIL was on after the import. Only OpenCV fills in ``threads`` and
    ``stays_single``; only torch fills in ``cuda``, ``rocm`` and ``devices``.
    """

    name: str
    module: str
    extra: str = ""
    core: bool = False
    minimum: str = ""
    state: Literal["present", "absent", "broken"] = "absent"
    version: str = ""
    error: str = ""
    gil: bool = True
    said: tuple[str, ...] = ()
    threads: str = "none"
    stays_single: bool = True
    cuda: str = ""
    rocm: str = ""
    devices: tuple[Accelerator, ...] = field(default=())


PACKAGES = (
    Package("numpy", "numpy", core=True),
    Package("lmdb", "lmdb", core=True),
    Package("xxhash", "xxhash", core=True),
    Package("msgpack", "msgpack", core=True),
    Package("cloudpickle", "cloudpickle", core=True),
    Package("rich", "rich", core=True),
    Package("simplejpeg", "simplejpeg", extra="image"),
    Package("opencv-python-headless", "cv2", extra="image"),
    Package("pillow", "PIL"),
    Package("pyarrow", "pyarrow", extra="parquet"),
    Package("scipy", "scipy", extra="audio"),
    Package("soundfile", "soundfile", extra="audio"),
    Package("obstore", "obstore", extra="cloud"),
    Package("fsspec", "fsspec", extra="cloud"),
    Package("zstandard", "zstandard", extra="shards"),
    Package("ray", "ray", extra="cluster"),
    Package("torch", "torch", extra="torch"),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The input of the checks."""

    penstock: str
    system: str
    container: bool
    python: Interpreter
    cores: Cores
    memory: Memory
    shm: Directory
    memory_stores: str
    memfd: bool
    temporary: Directory | None
    disk: Directory | None
    files: Limit
    processes: Limit
    nvidia: bool
    leftovers: Leftovers
    packages: dict[str, Package] = field(default_factory=dict)
    opencv: tuple[str, ...] = ()
    no_kernel: str = ""
    """Why the compiled kernel is not used; empty if it is used."""
    no_node: str = ""
    """Why no node can be started; empty if one can."""
    settings: dict[str, str] = field(default_factory=dict)


def gather() -> Facts:
    """Gather the facts about this machine. Takes seconds if torch is installed; changes nothing."""
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    temporary = _path_or_none(tempfile.gettempdir)
    memory_stores = _path_or_none(config.memory_dir)
    disk = _path_or_none(config.disk_dir)
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
        shm=look_at_directory(Path(settings.get("PENSTOCK_SHM_DIR", "/dev/shm"))),
        memory_stores=str(memory_stores or ""),
        memfd=_memfd(),
        temporary=None if temporary is None else look_at_directory(temporary),
        disk=None if disk is None else look_at_directory(disk),
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_process_limit(),
        nvidia=_nvidia(),
        leftovers=look_for_leftovers(memory_stores),
        packages=look_at_packages(),
        opencv=installed_opencv(),
        no_kernel=native.why_no_kernel(),
        no_node=find_node_fault(),
        settings=settings,
    )


def look_at_directory(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Directory:
    """Describe a directory, or the nearest parent of one that does not exist."""
    path = Path(os.path.abspath(path))
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        usage = shutil.disk_usage(nearest)
        total, free = usage.total, usage.free
    except OSError:
        total = free = 0
    return Directory(
        path=str(path),
        exists=path.is_dir(),
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        total=total,
        free=free,
        filesystem=_filesystem(nearest, _read(mounts)),
    )


def look_for_leftovers(place: Path | None) -> Leftovers:
    """Find what killed runs left in the directory of the memory stores."""
    if place is None:
        return Leftovers("")
    try:
        from penstock.store import stale

        return Leftovers(str(place), tuple((str(path), size) for path, size in stale(place)))
    except ImportError:
        return Leftovers(str(place))  # another check reports the missing package by name
    except (PenstockError, OSError) as error:
        return Leftovers(str(place), error=str(error))


def collect_leftovers(before: Leftovers) -> Leftovers:
    """Remove the leftovers that were found, and look again."""
    if not before.found:
        return before
    from penstock.store import collect_stale

    place = Path(before.place)
    try:
        removed = {str(path) for path in collect_stale(place)}
    except (PenstockError, OSError) as error:
        return replace(before, tried=True, error=str(error))
    after = look_for_leftovers(place)
    collected = tuple((path, size) for path, size in before.found if path in removed)
    return replace(after, collected=collected, tried=True)


def find_node_fault() -> str:
    """Why the directory of the node's socket cannot be used; empty if it can."""
    try:
        from penstock.host.private_dir import check_own
        from penstock.node.directory import NodeDirectory

        path = NodeDirectory().path
        if path.exists():
            check_own(path)
    except (ImportError, OSError):
        return ""  # another check reports the missing package or temporary directory by name
    except PenstockError as error:
        return str(error)
    return "" if look_at_directory(path).writable else f"{path} cannot be written to."


def look_at_packages(
    wanted: tuple[Package, ...] = PACKAGES, timeout: float = IMPORT_TIMEOUT
) -> dict[str, Package]:
    """Import all packages at the same time; return their states by module name."""
    minimums = required_versions(_requirements())
    deadline = time.monotonic() + timeout
    running: list[tuple[Package, subprocess.Popen[str]]] = []
    try:
        for package in wanted:
            known = replace(package, minimum=minimums.get(package.name, ""))
            running.append((known, _start(known)))
        return {p.module: _outcome(p, process, deadline, timeout) for p, process in running}
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def installed_opencv() -> tuple[str, ...]:
    """The installed distributions of OpenCV."""
    return tuple(name for name in OPENCV if _is_installed(name))


def required_versions(requirements: list[str]) -> dict[str, str]:
    """The minimum version of each package, from Penstock's own requirements.

    >>> required_versions(["lmdb>=1.4", 'pyarrow>=14; extra == "parquet"', "rich"])
    {'lmdb': '1.4', 'pyarrow': '14'}
    """
    minimums = {}
    for line in requirements:
        match = re.match(r"([\w.-]+)\s*\(?>=\s*([\d.]+)", line)
        if match:
            minimums[match[1].lower()] = match[2]
    return minimums


def _path_or_none(find: Callable[[], str | Path]) -> Path | None:
    try:
        return Path(find())
    except (OSError, RuntimeError):  # nowhere to write temporary files, or no home
        return None


def _cores() -> Cores:
    machine = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(usable=config.cores(), mask=mask, machine=machine)


def _memory() -> Memory:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    line = re.search(r"^MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    available = int(line[1]) * 1024 if line else None
    return Memory(
        usable=config.memory(),
        machine=machine,
        available=_smaller(available, cgroup.memory_available()),
    )


def _memfd() -> bool:
    # Call it: a container's system call filter may refuse memfd_create although Python has it.
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
    group = cgroup.process_limit()
    return Limit(soft=_smaller(own.soft, group), hard=_smaller(own.hard, group))


def _smaller(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _in_container() -> bool:
    return (
        os.path.exists("/.dockerenv")
        or os.path.exists("/run/.containerenv")
        or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _nvidia() -> bool:
    # WSL has the driver of its Windows host at the second path.
    return any(map(os.path.exists, ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")))


def _filesystem(path: Path, mounts: str) -> str:
    """The type of the file system that holds a path, from the kernel's list of mounts."""
    longest, kind = "", ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[1])
        # If a path is mounted twice, the later mount hides the earlier one.
        if len(point) >= len(longest) and Path(point) in (path, *path.parents):
            longest, kind = point, words[2]
    return kind


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("penstock") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return []


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _start(package: Package) -> subprocess.Popen[str]:
    names = OPENCV if package.module == "cv2" else (package.name,)
    task = {"path": sys.path, "module": package.module, "distributions": names}
    return subprocess.Popen(
        [sys.executable, "-c", _PROBE_PROGRAM, json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _outcome(
    package: Package, process: subprocess.Popen[str], deadline: float, timeout: float
) -> Package:
    try:
        out, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return replace(
            package, state="broken", error=f"its import did not finish in {timeout:.0f} seconds"
        )
    try:
        answer: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return replace(package, state="broken", error=_crash(process.returncode, errors))
    answer["said"] = tuple(answer["said"])
    devices = answer.get("devices", ())
    answer["devices"] = tuple(Accelerator(**device) for device in devices)
    return replace(package, **answer)


def _crash(code: int, errors: str) -> str:
    """How the importing process ended, from its exit code and its error stream."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its import was killed by {name}"
    last = errors.strip().rpartition("\n")[2]
    return f"its import ended the process with code {code}" + (f": {last}" if last else "")
