"""Limits of the control groups (cgroups) that this process belongs to: of versions 1 and 2.

A container, a batch system or systemd sets them, for a group or for a group around it: the smallest
limit on the way up counts. ``root`` is the directory that stands for ``/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

Controller = Literal["cpu", "memory", "pids"]

ROOT = Path("/")

NO_LIMIT = 1 << 62
"""Version 1 writes the largest number of whole pages where memory has no limit."""


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """A mounted tree of cgroups. ``top``: the cgroup that is visible at ``point``.

    ``controllers``: what a tree of version 1 controls; empty for version 2, which has one tree.
    """

    version: Literal[1, 2]
    top: PurePosixPath
    point: PurePosixPath
    controllers: frozenset[str]


def mounts(mountinfo: str) -> list[CgroupMount]:
    """The trees of cgroups in the text of ``/proc/self/mountinfo``.

    >>> mounts("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")[0].version
    2
    """
    found = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if not separator or len(words) < 5 or len(kind) < 3:
            continue
        top, point = PurePosixPath(_unescaped(words[3])), PurePosixPath(_unescaped(words[4]))
        if kind[0] == "cgroup2":
            found.append(CgroupMount(2, top, point, frozenset()))
        elif kind[0] == "cgroup":
            found.append(CgroupMount(1, top, point, frozenset(kind[2].split(","))))
    return found


def _unescaped(text: str) -> str:
    """A path of ``mountinfo``, in which blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def paths(cgroup: str) -> dict[str, PurePosixPath]:
    """The cgroup of a process for each controller, from the text of ``/proc/self/cgroup``.

    That of version 2 is at ``""``.

    >>> paths("4:cpu,cpuacct:/job\\n0::/user")["cpu"], paths("0::/user")[""]
    (PurePosixPath('/job'), PurePosixPath('/user'))
    """
    found = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            for controller in controllers.split(","):
                found[controller] = PurePosixPath(path)
    return found


def directories(controller: Controller, root: Path = ROOT) -> Iterator[Path]:
    """The directories of the cgroups that limit this process: its own, and all around it."""
    own = paths(_read(root / "proc/self/cgroup"))
    for mount in mounts(_read(root / "proc/self/mountinfo")):
        path = own.get("" if mount.version == 2 else controller)
        if path is None or (mount.version == 1 and controller not in mount.controllers):
            continue
        point = root / mount.point.relative_to("/")
        yield from _upwards(point, _below(path, mount.top))


def _below(path: PurePosixPath, top: PurePosixPath) -> PurePosixPath:
    """The path of a cgroup below the mount that shows ``top``.

    A container may see only its own cgroup, and its path as that of the machine, or as ``/``, or,
    if the process came from another one, as ``/..``: then the mount itself is all there is.
    """
    if ".." in path.parts:
        return PurePosixPath()
    try:
        return path.relative_to(top)
    except ValueError:
        return path.relative_to("/") if top == PurePosixPath("/") else PurePosixPath()


def _upwards(point: Path, below: PurePosixPath) -> Iterator[Path]:
    for depth in range(len(below.parts), -1, -1):
        yield point.joinpath(*below.parts[:depth])


def cpu_limit(root: Path = ROOT) -> float | None:
    """Number of cores whose time this process may use; ``None``: no limit."""
    return min(filter(None, map(_cpu_limit_of, directories("cpu", root))), default=None)


def _cpu_limit_of(directory: Path) -> float | None:
    words = _read(directory / "cpu.max").split()
    if not words:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [_read(directory / name).strip() for name in names]
    quota, period = (_number(word) for word in words) if len(words) == 2 else (None, None)
    return quota / period if quota and period else None


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process may use together with its cgroup; ``None``: no limit.

    Above ``memory.high`` the kernel slows a process down, so that counts as a limit as well.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    return _smallest("memory", names, root)


def process_limit(root: Path = ROOT) -> int | None:
    """Number of processes that the cgroup of this process may have; ``None``: no limit."""
    return _smallest("pids", ("pids.max",), root)


def memory_available(root: Path = ROOT) -> int | None:
    """Bytes of memory that are left within the limits; ``None``: there is no limit."""
    left = []
    for directory in directories("memory", root):
        limits = [_file_number(directory, name) for name in ("memory.max", "memory.limit_in_bytes")]
        limit = min((limit for limit in limits if limit is not None), default=None)
        used = _file_number(directory, "memory.current")
        if used is None:
            used = _file_number(directory, "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        # The page cache of files counts as used, but the kernel frees it on demand.
        lines = _read(directory / "memory.stat").splitlines()
        stat = dict(line.partition(" ")[::2] for line in lines)
        files = stat.get("total_inactive_file") or stat.get("inactive_file", "")
        left.append(max(0, limit - used + (_number(files) or 0)))
    return min(left, default=None)


def _smallest(controller: Controller, names: tuple[str, ...], root: Path) -> int | None:
    found = [
        _file_number(directory, name)
        for directory in directories(controller, root)
        for name in names
    ]
    return min((limit for limit in found if limit is not None), default=None)


def _file_number(directory: Path, name: str) -> int | None:
    return _number(_read(directory / name).strip())


def _number(text: str) -> int | None:
    """A limit; ``None`` for none: ``max`` in version 2, -1 or a huge number in version 1."""
    return int(text) if text.isdecimal() and int(text) < NO_LIMIT else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):  # it does not exist, or is not readable for us
        return ""
