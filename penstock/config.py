"""Sizes, limits and places: what this machine offers, and the only reader of the environment."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from penstock.errors import PipelineError

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}

SMALL_SHM = 1 << 30
"""Below this, ``/dev/shm`` is a container's default (64 MB) and not meant for data."""


def size(value: int | str, what: str = "size") -> int:
    """A number of bytes, written as people write them.

    >>> size("32GB"), size("1.5 GiB"), size(4096)
    (32000000000, 1610612736, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise PipelineError(f'{what} is {value!r}; give bytes, or text such as "32GB" or "8GiB".')
    if isinstance(value, int):
        found = value
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?\s*", value.upper())
        if match is None or match[2] not in _UNITS:
            raise PipelineError(
                f'{what} is {value!r}; give bytes, or text such as "32GB" or "8GiB".'
            )
        found = int(float(match[1]) * _UNITS[match[2]])
    if found < 0:
        raise PipelineError(f"{what} is {value!r}; it cannot be negative.")
    return found


def show_size(nbytes: float) -> str:
    """Bytes as people read them.

    >>> show_size(32_000_000_000), show_size(1536), show_size(12)
    ('32.0 GB', '1.5 KB', '12 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def cores() -> int:
    """The cores this process may use: its CPU mask, cut to the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    found = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, min(found, quota) if quota is not None else found)


def _cgroup_cores() -> int | None:
    try:
        words = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if len(words) == 2 and words[0] != "max":
            return -(-int(words[0]) // int(words[1]))
    except (OSError, ValueError):
        pass
    return None


def memory() -> int:
    """Bytes of memory this process may use: the machine's, cut to the container's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found = min(found, int(limit))
    except (OSError, ValueError):
        pass
    return found


def no_kernel() -> bool:
    """The user wants to do without the compiled kernel."""
    return os.environ.get("PENSTOCK_NO_KERNEL", "") not in ("", "0")


def jpeg_index() -> int:
    """Bytes in which a process may keep where the rows of JPEGs begin.

    A thousandth of the memory: with 24 GB that is enough for 45,000 photographs of 500 x 375.
    """
    # PENSTOCK_LANDMARKS is its earlier name.
    for name in ("PENSTOCK_JPEG_INDEX", "PENSTOCK_LANDMARKS"):
        if given := os.environ.get(name, ""):
            return size(given, name)
    return memory() >> 10


def shm_dir() -> Path | None:
    """The memory file system, or ``None`` where there is none or it is too small for data."""
    place = Path(os.environ.get("PENSTOCK_SHM_DIR", "/dev/shm"))
    try:
        if shutil.disk_usage(place).total >= SMALL_SHM and os.access(place, os.W_OK):
            return place
    except OSError:
        pass
    return None


def memory_dir() -> Path:
    """Where memory stores live: this user's own folder on the memory file system.

    Where that is too small the temporary directory takes its place: the page cache serves it from
    memory as long as there is room.
    """
    place = shm_dir() or Path(tempfile.gettempdir())
    return place / f"penstock-{os.getuid()}"


def disk_dir() -> Path:
    """Where disk stores live unless the user names a place."""
    named = os.environ.get("PENSTOCK_CACHE_DIR")
    if named:
        return Path(named)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as containers have them
        return Path(tempfile.gettempdir()) / f"penstock-cache-{os.getuid()}"
    return home / "penstock"


def runtime_dir() -> Path:
    """Where the node of this user has its socket, its lock and its log."""
    named = os.environ.get("PENSTOCK_RUNTIME_DIR")
    if named:
        return Path(named)
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session) / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-node-{os.getuid()}"


def live() -> bool:
    """Whether running loaders say how they are, for ``penstock top`` and ``penstock watch``."""
    return os.environ.get("PENSTOCK_LIVE", "") != "0"


def node_workers() -> int:
    """How many workers a node has for all its groups together."""
    named = os.environ.get("PENSTOCK_NODE_WORKERS", "")
    if not named:
        return cores()
    if not named.isdecimal() or int(named) < 1:
        raise PipelineError(f"PENSTOCK_NODE_WORKERS is {named!r}; give a number from 1 on.")
    return int(named)


def node_staging() -> int:
    """Bytes of batches that a node may hold for all its groups together.

    An eighth of the memory: what is staged is needed within seconds, or not at all.
    """
    named = os.environ.get("PENSTOCK_NODE_STAGING", "")
    return size(named, "PENSTOCK_NODE_STAGING") if named else memory() // 8


def node_idle() -> float:
    """Seconds that a node without members waits before it ends."""
    named = os.environ.get("PENSTOCK_NODE_IDLE", "")
    try:
        return float(named) if named else 10.0
    except ValueError:
        raise PipelineError(f"PENSTOCK_NODE_IDLE is {named!r}; give seconds.") from None
