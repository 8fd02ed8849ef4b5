"""Sizes, limits and directories of this machine. Only this module reads environment variables."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from penstock.errors import PipelineError
from penstock.host import cgroup

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

_MAX_PIXELS = 178_956_970
"""Twice PIL's MAX_IMAGE_PIXELS, where PIL raises DecompressionBombError."""

SMALL_SHM = 1 << 30
"""Smallest usable memory file system, in bytes. A container's default ``/dev/shm`` (64 MB) is not
meant for data."""


def size(value: int | str, what: str = "size") -> int:
    """A number of bytes, given as an integer or as text with a unit. ``what`` names it in errors.

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
    """A number of bytes as text with a decimal unit.

    >>> show_size(32_000_000_000), show_size(1536), show_size(12)
    ('32.0 GB', '1.5 KB', '12 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def cores() -> int:
    """Number of cores this process may use: its CPU mask, limited by the quota of its cgroups."""
    affinity = getattr(os, "sched_getaffinity", None)
    found = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cgroup.cpu_limit()
    return max(1, min(found, math.ceil(quota)) if quota is not None else found)


def memory() -> int:
    """Bytes of memory this process may use: the machine's, limited by the limit of its cgroups."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit()
    return found if limit is None else min(found, limit)


def no_kernel() -> bool:
    """Whether the user has disabled the compiled kernel."""
    return os.environ.get("PENSTOCK_NO_KERNEL", "") not in ("", "0")


def opencv_log_level() -> str:
    """How much OpenCV is to print; empty if the user has not said."""
    return os.environ.get("OPENCV_LOG_LEVEL", "")


def jpeg_index() -> int:
    """Bytes in which a process may remember where the rows of JPEGs begin.

    By default a thousandth of the memory: with 24 GB that is enough for 45,000 photographs of
    500 x 375.
    """
    # PENSTOCK_LANDMARKS is the earlier name of PENSTOCK_JPEG_INDEX.
    for name in ("PENSTOCK_JPEG_INDEX", "PENSTOCK_LANDMARKS"):
        if given := os.environ.get(name, ""):
            return size(given, name)
    return memory() >> 10


def max_pixels() -> int:
    """The most pixels of a picture that ``decode`` reads, unless it is given another limit.

    By default as many as PIL: a file of a few hundred bytes can state four billion pixels, and a
    picture at the limit takes half a gigabyte.
    """
    named = os.environ.get("PENSTOCK_MAX_PIXELS", "")
    if not named:
        return _MAX_PIXELS
    if not named.isdecimal() or int(named) < 1:
        raise PipelineError(f"PENSTOCK_MAX_PIXELS is {named!r}; give a whole number, 1 or more.")
    return int(named)


def shm_dir() -> Path | None:
    """The memory file system; ``None`` if there is none, or it is too small for data."""
    place = Path(os.environ.get("PENSTOCK_SHM_DIR", "/dev/shm"))
    try:
        if shutil.disk_usage(place).total >= SMALL_SHM and os.access(place, os.W_OK):
            return place
    except OSError:
        pass
    return None


def memory_dir() -> Path:
    """Directory of the memory stores of this user, on the memory file system.

    If that is too small, it is in the temporary directory: the page cache serves it from memory as
    long as there is room.
    """
    place = shm_dir() or Path(tempfile.gettempdir())
    return place / f"penstock-{os.getuid()}"


def disk_dir() -> Path:
    """Parent directory of the disk stores, unless the user names another place."""
    named = os.environ.get("PENSTOCK_CACHE_DIR")
    if named:
        return Path(named)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home directory, as in some containers
        return Path(tempfile.gettempdir()) / f"penstock-cache-{os.getuid()}"
    return home / "penstock"


def runtime_dir() -> Path:
    """Directory of the socket, the lock and the log of this user's node."""
    named = os.environ.get("PENSTOCK_RUNTIME_DIR")
    if named:
        return Path(named)
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session) / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-node-{os.getuid()}"


def live() -> bool:
    """Whether loaders publish their status for ``penstock top`` and ``penstock watch``."""
    return os.environ.get("PENSTOCK_LIVE", "") != "0"


def node_workers() -> int:
    """Number of workers of a node, for all its groups together."""
    named = os.environ.get("PENSTOCK_NODE_WORKERS", "")
    if not named:
        return cores()
    if not named.isdecimal() or int(named) < 1:
        raise PipelineError(f"PENSTOCK_NODE_WORKERS is {named!r}; give a whole number, 1 or more.")
    return int(named)


def node_staging() -> int:
    """Bytes of batches that a node may hold for all its groups together.

    By default an eighth of the memory: a staged batch is needed within seconds, or never.
    """
    named = os.environ.get("PENSTOCK_NODE_STAGING", "")
    return size(named, "PENSTOCK_NODE_STAGING") if named else memory() // 8


def node_idle() -> float:
    """Seconds that a node without members waits before it exits."""
    named = os.environ.get("PENSTOCK_NODE_IDLE", "")
    try:
        return float(named) if named else 10.0
    except ValueError:
        raise PipelineError(f"PENSTOCK_NODE_IDLE is {named!r}; give a number of seconds.") from None


def cluster_patience() -> float:
    """Multiplies the times after which another machine of a cluster counts as slow or lost."""
    named = os.environ.get("PENSTOCK_CLUSTER_PATIENCE", "")
    try:
        patience = float(named) if named else 1.0
    except ValueError:
        patience = 0.0
    if not 0.0 < patience <= 1000.0:
        raise PipelineError(
            f"PENSTOCK_CLUSTER_PATIENCE is {named!r}; give a number above 0, up to 1000."
        )
    return patience


def cluster_secret() -> Path:
    """Directory of the token and the certificate of this user's cluster.

    The variable has the path, not the secret: others can see the environment of a process more
    easily than a file of mode 0600.
    """
    named = os.environ.get("PENSTOCK_CLUSTER_SECRET", "")
    if named:
        return Path(named)
    try:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:  # a user without a home directory, as in some containers
        home = Path(tempfile.gettempdir()) / f"penstock-config-{os.getuid()}"
    return home / "penstock" / "cluster"


def cluster_recipes(secret: Path) -> Path:
    """Directory of the pipelines that machines give to each other; ``secret``: of their secrets."""
    named = os.environ.get("PENSTOCK_CLUSTER_RECIPES", "")
    return Path(named) if named else secret / "recipes"


def quiet_grpc() -> None:
    """Keep gRPC from writing to stderr: every process that connects to the port of a node could
    fill its log. What fails is raised as an exception too. Call this before gRPC is used."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def cluster() -> str:
    """The machines that loaders with ``cluster="auto"`` work with; empty if not given."""
    return os.environ.get("PENSTOCK_CLUSTER", "").strip()


def ray_address() -> str:
    """The Ray cluster that Ray's own tools connect to; empty if not given. Jobs of Ray have it."""
    return os.environ.get("RAY_ADDRESS", "").strip()


def cluster_address() -> str:
    """Where other machines reach the node of this one; empty if it is to be found out."""
    return os.environ.get("PENSTOCK_CLUSTER_ADDRESS", "").strip()


def master_machine() -> str | None:
    """The first machine of a job that torchrun has started on several machines."""
    env = os.environ
    try:
        here, world = int(env.get("LOCAL_WORLD_SIZE", "")), int(env.get("WORLD_SIZE", ""))
    except ValueError:
        return None
    return env.get("MASTER_ADDR") or None if world > here else None


def slurm_hosts() -> str:
    """The machines of this Slurm job, in Slurm's compact form."""
    return os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")


class LaunchedRank(NamedTuple):
    """What a launcher says in the environment: ``rank`` of ``world`` processes, by ``names``.

    ``rank`` is ``None`` if the launcher gives only the number of processes.
    """

    rank: int | None
    world: int
    names: str


LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    # Before Slurm: mpirun uses Slurm to start one daemon on each machine.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # Set by srun only. SLURM_NTASKS is set in a batch script too, which is one process.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Variables for the rank and the number of processes, of torchrun, Open MPI and Slurm."""


def launched_rank() -> LaunchedRank | None:
    """The rank that the launcher of this process gave it; ``None`` if there is no launcher."""
    for rank_name, world_name in LAUNCHERS:
        world = _whole_variable(world_name)
        if world is None:
            continue
        rank = _whole_variable(rank_name)
        if rank is None and rank_name == "RANK" and _whole_variable("NODE_RANK") == 0:
            # Lightning sets no RANK. On the first machine it is the local one.
            rank_name = "LOCAL_RANK"
            rank = _whole_variable(rank_name)
        if rank is None:
            return LaunchedRank(None, world, f"{world_name}={world}")
        names = f"{rank_name}={rank}, {world_name}={world}"
        if rank >= world:
            raise PipelineError(
                f"the environment says {names}, and ranks go from 0 to {world - 1}. Start the "
                "script with its launcher, such as torchrun, or give rank= and world=."
            )
        return LaunchedRank(rank, world, names)
    return None


def _whole_variable(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise PipelineError(
            f"the environment variable {name} is {text!r}; a launcher sets it to a whole number. "
            "Unset it, or give rank= and world=."
        )
    return int(text)
