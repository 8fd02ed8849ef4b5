"""The checks of the machine: facts in, findings out, no looking around."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config import show_size
from penstock.diagnose.doctor.facts import THREAD_SETTINGS, Facts, Limit
from penstock.diagnose.doctor.finding import Finding, Level, Remedy
from penstock.diagnose.doctor.memory_checks import LITTLE_ROOM, MEMORY_CHECKS
from penstock.diagnose.doctor.package_checks import PACKAGE_CHECKS

FEW_FILES = 4096
"""Every worker, slot and store holds descriptors, and so do torch and the files being read."""

FEW_PROCESSES = 1024
"""Threads count too: a few dozen workers with their libraries' pools pass 500."""

NETWORK = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "wekafs",
    }
)
"""File systems on which LMDB's locks and maps cannot be relied on."""


def check(facts: Facts) -> list[Finding]:
    """Every finding, in the order in which they are read."""
    return [finding for one in CHECKS for finding in one(facts)]


def python(facts: Facts) -> Iterator[Finding]:
    found = facts.python
    version = ".".join(map(str, found.version))
    if found.version < (3, 10):
        yield Finding(
            Level.PROBLEM,
            "Python",
            "python",
            f"{version} is too old",
            why="Penstock needs Python 3.10 or later.",
            remedies=(Remedy("make an environment with a newer one:", "uv venv --python 3.12"),),
        )
    elif found.free_threaded and found.gil:
        yield Finding(
            Level.WARNING,
            "Python",
            "python",
            f"{version}, free-threaded, but its GIL is on",
            why="Python code in worker threads runs one at a time.",
            remedies=(Remedy("keep it off:", "export PYTHON_GIL=0"),),
        )
    elif found.free_threaded:
        text = f"{version}, free-threaded: workers are threads"
        yield Finding(Level.OK, "Python", "python", text)
    else:
        text = f"{version}, with the GIL: Python code runs in worker processes"
        yield Finding(Level.OK, "Python", "python", text)
    yield Finding(Level.OK, "Python", "penstock", facts.penstock)


def cores(facts: Facts) -> Iterator[Finding]:
    usable, mask, machine = facts.cores.usable, facts.cores.mask, facts.cores.machine
    if usable == machine:
        alone = usable == 1
        yield Finding(
            Level.NOTE if alone else Level.OK,
            "Machine",
            "cores",
            "1: data is prepared on the core that trains" if alone else f"{usable}, all usable",
        )
        return
    level = Level.WARNING if usable == 1 else Level.NOTE
    if usable < mask:
        text = f"{usable} of {machine}: the container's quota allows no more"
        remedy = Remedy("allow it more:", f"docker run --cpus={machine} ...")
    else:
        text = f"{usable} of {machine}: this process is bound to them"
        remedy = Remedy("ask for more, under Slurm by", f"#SBATCH --cpus-per-task={machine}")
    yield Finding(level, "Machine", "cores", text, remedies=(remedy,))


def thread_settings(facts: Facts) -> Iterator[Finding]:
    usable = facts.cores.usable
    for name in THREAD_SETTINGS:
        value = facts.settings.get(name)
        if value is None:
            continue
        # OpenMP takes a list, one number for each level of nesting; the first is what counts.
        first = value.split(",")[0].strip()
        if not first.isdecimal() or first == "0":
            yield Finding(
                Level.WARNING,
                "Machine",
                name,
                f"{value!r} is not a number of threads",
                remedies=(Remedy("leave it to Penstock:", f"unset {name}"),),
            )
        elif int(first) > 1 and usable > 1:
            yield Finding(
                Level.WARNING,
                "Machine",
                name,
                f"{first}: {usable} worker processes would run {usable * int(first)} threads",
                why=f"Worker processes inherit it, and there are {usable} cores. Where it is not "
                "set, Penstock gives each worker one thread and the training process keeps its "
                "own default.",
                remedies=(Remedy("leave it to Penstock:", f"unset {name}"),),
            )
        else:
            yield Finding(Level.OK, "Machine", name, first)


def temporary_directory(facts: Facts) -> Iterator[Finding]:
    place = facts.temporary
    elsewhere = (Remedy("use another place:", "export TMPDIR=/path/with/room"),)
    if place is None:
        yield Finding(
            Level.PROBLEM,
            "Disk",
            "temporary",
            "no directory that can be written to",
            why="Tried are TMPDIR, TEMP, TMP, /tmp, /var/tmp, /usr/tmp and the current one.",
            remedies=elsewhere,
        )
    elif place.free < LITTLE_ROOM:
        here = facts.memory_stores.startswith(place.path + "/")
        yield Finding(
            Level.WARNING,
            "Disk",
            "temporary",
            f"{show_size(place.free)} free on {place.path}",
            why="Memory caches live here, and will be small." if here else "",
            remedies=elsewhere,
        )
    else:
        text = f"{show_size(place.free)} free on {place.path}"
        yield Finding(Level.OK, "Disk", "temporary", text)


def disk_stores(facts: Facts) -> Iterator[Finding]:
    place = facts.disk
    remedies = (Remedy("use another place:", "export PENSTOCK_CACHE_DIR=/path/on/local/disk"),)
    if place is None:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            "no place: this user has no home directory",
            why='Pipelines with .cache(..., where="disk") will fail.',
            remedies=remedies,
        )
    elif not place.writable:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            f"{place.path} cannot be written to",
            why='Pipelines with .cache(..., where="disk") will fail.',
            remedies=remedies,
        )
    elif place.filesystem in NETWORK:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            f"{place.path} is on {place.filesystem}, a network file system",
            why="Caches are LMDB databases, which need the locks and memory maps of a local disk.",
            remedies=remedies,
        )
    elif place.free < LITTLE_ROOM:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            f"{show_size(place.free)} free on {place.path}",
            why="A disk cache holds what there is room for; the rest is prepared in every epoch.",
            remedies=remedies,
        )
    else:
        text = f"{show_size(place.free)} free on {place.path}"
        yield Finding(Level.OK, "Disk", "disk caches", text)


def node(facts: Facts) -> Iterator[Finding]:
    if facts.no_node:
        yield Finding(
            Level.WARNING,
            "Disk",
            "node",
            'jobs with share="..." will fail',
            why=facts.no_node,
            remedies=(
                Remedy("use another place:", "export PENSTOCK_RUNTIME_DIR=/short/path/of/your/own"),
            ),
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    yield _limit(facts, "open files", facts.files, FEW_FILES, 65536, "ulimit -n", "nofile")


def processes(facts: Facts) -> Iterator[Finding]:
    yield _limit(facts, "processes", facts.processes, FEW_PROCESSES, 32768, "ulimit -u", "nproc")


def _limit(
    facts: Facts, name: str, limit: Limit, few: int, enough: int, ulimit: str, key: str
) -> Finding:
    if limit.soft is None or limit.soft >= few:
        return Finding(
            Level.OK, "Limits", name, "no limit" if limit.soft is None else str(limit.soft)
        )
    reach = enough if limit.hard is None else min(enough, limit.hard)
    remedies = []
    if reach > limit.soft:
        remedies.append(Remedy("raise it in the shell that trains:", f"{ulimit} {reach}"))
    if reach < few and facts.container:
        flag = "--pids-limit=-1" if key == "nproc" else f"--ulimit nofile={enough}:{enough}"
        remedies.append(Remedy("start the container with", f"docker run {flag} ..."))
    elif reach < few:
        line = f"echo '* - {key} {enough}' | sudo tee -a /etc/security/limits.conf"
        remedies.append(Remedy("raise it for good, then log in again:", line))
    return Finding(
        Level.WARNING,
        "Limits",
        name,
        f"{limit.soft}: few for many workers",
        why="Workers, slots and stores hold descriptors; a long run may end in 'Too many open "
        "files'."
        if key == "nofile"
        else "Threads count too; workers may fail to start.",
        remedies=tuple(remedies),
    )


CHECKS = (
    python,
    cores,
    thread_settings,
    *MEMORY_CHECKS,
    temporary_directory,
    disk_stores,
    node,
    open_files,
    processes,
    *PACKAGE_CHECKS,
)
