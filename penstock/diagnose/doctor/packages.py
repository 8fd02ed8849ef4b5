"""Which packages there are, found out by importing each in a process of its own.

A library that crashes or hangs while it is imported, as a broken driver makes them do, is then a
finding and not the end of the doctor.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

PATIENCE = 120.0
"""Seconds until an import counts as hung: torch on a cold network disk may take a minute."""

OPENCV = (
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python-headless",
    "opencv-contrib-python",
)
"""The distributions of OpenCV: each installs the same ``cv2`` folder over that of the others."""

_BOOT = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; "
    "from penstock.diagnose.doctor.probe import main; main(a['module'], a['distributions'])"
)


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator that torch can use."""

    kind: str
    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Package:
    """One package; ``extra`` is the extra of Penstock's that brings it, ``""`` for none.

    ``core`` packages come with every install. ``said`` are the warnings of its import, and ``gil``
    whether the GIL was on after it. The last lines are told by OpenCV and by torch alone.
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
    devices: tuple[Device, ...] = field(default=())


WANTED = (
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
    Package("torch", "torch", extra="torch"),
)


def look_at_packages(
    wanted: tuple[Package, ...] = WANTED, patience: float = PATIENCE
) -> dict[str, Package]:
    """Import every package, all at the same time, and say by module how it went."""
    minimums = required_versions(_requirements())
    end = time.monotonic() + patience
    running: list[tuple[Package, subprocess.Popen[str]]] = []
    try:
        for package in wanted:
            known = replace(package, minimum=minimums.get(package.name, ""))
            running.append((known, _start(known)))
        return {p.module: _outcome(p, process, end, patience) for p, process in running}
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def installed_opencv() -> tuple[str, ...]:
    """The distributions of OpenCV that are installed side by side."""
    return tuple(name for name in OPENCV if _is_installed(name))


def required_versions(requirements: list[str]) -> dict[str, str]:
    """The least version of each package that Penstock's own metadata asks for.

    >>> required_versions(["lmdb>=1.4", 'pyarrow>=14; extra == "parquet"', "rich"])
    {'lmdb': '1.4', 'pyarrow': '14'}
    """
    found = {}
    for line in requirements:
        match = re.match(r"([\w.-]+)\s*\(?>=\s*([\d.]+)", line)
        if match:
            found[match[1].lower()] = match[2]
    return found


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
        [sys.executable, "-c", _BOOT, json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _outcome(
    package: Package, process: subprocess.Popen[str], end: float, patience: float
) -> Package:
    try:
        out, complaints = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return replace(
            package, state="broken", error=f"its import did not finish in {patience:.0f} seconds"
        )
    try:
        told: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return replace(package, state="broken", error=_crash(process.returncode, complaints))
    told["said"] = tuple(told["said"])
    told["devices"] = tuple(Device(**one) for one in told.get("devices", ()))
    return replace(package, **told)


def _crash(code: int, complaints: str) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its import was killed by {name}"
    last = complaints.strip().rpartition("\n")[2]
    return f"its import ended the process with code {code}" + (f": {last}" if last else "")
