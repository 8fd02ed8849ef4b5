"""The checks of the machine: facts in, findings out, no looking around."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from penstock.config import SMALL_SHM, show_size
from penstock.doctor.facts import THREAD_SETTINGS, Facts, Limit, Place
from penstock.doctor.finding import Finding, Level, Remedy
from penstock.doctor.package_checks import PACKAGE_CHECKS

LITTLE_ROOM = 1 << 30
"""Less than this is not enough for a store worth having."""

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


def memory(facts: Facts) -> Iterator[Finding]:
    usable, machine, available = (
        facts.memory.usable,
        facts.memory.machine,
        facts.memory.available,
    )
    free = "" if available is None else f", {show_size(available)} free"
    text = show_size(usable) + free
    if available is not None and available < max(LITTLE_ROOM, usable // 20):
        yield Finding(
            Level.WARNING,
            "Memory",
            "memory",
            text,
            why="A memory cache or many batches in flight may not fit.",
            remedies=(
                Remedy("see who holds it:", "ps aux --sort=-rss | head"),
                Remedy("give loaders less:", '.loader(memory="256MB")'),
            ),
        )
    elif usable < machine:
        yield Finding(
            Level.NOTE,
            "Memory",
            "memory",
            f"{show_size(usable)} of {show_size(machine)} by the container's limit{free}",
            remedies=(Remedy("allow it more:", "docker run --memory=... ..."),),
        )
    else:
        yield Finding(Level.OK, "Memory", "memory", text)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    shm = facts.shm
    wrong = _wrong_with_shm(shm)
    if not wrong:
        text = f"{show_size(shm.free)} free of {show_size(shm.total)} on {shm.path}"
        yield Finding(Level.OK, "Memory", "shared memory", text)
        return
    level = Level.WARNING if facts.system == "Linux" else Level.NOTE
    full = shm.exists and shm.writable and shm.total >= SMALL_SHM
    if full:
        why = "Memory caches live there: what finds no room is prepared again in every epoch."
        remedies: tuple[Remedy, ...] = (Remedy("see what fills it:", f"du -sh {shm.path}/*"),)
    else:
        why = (
            "Memory caches move to the temporary directory, and are as fast only while the page "
            "cache holds them."
        )
        remedies = _remedies_for_shm(facts) if facts.system == "Linux" else ()
    why += " Batches use memfd and are not limited by it." if facts.memfd else ""
    yield Finding(level, "Memory", "shared memory", wrong, why=why, remedies=remedies)


def _wrong_with_shm(shm: Place) -> str:
    if not shm.exists:
        return f"there is no {shm.path}"
    if shm.total < SMALL_SHM:
        return f"{shm.path} has {show_size(shm.total)}: too small for data"
    if not shm.writable:
        return f"{shm.path} cannot be written to"
    if shm.free < LITTLE_ROOM:
        return f"{show_size(shm.free)} free of {show_size(shm.total)} on {shm.path}"
    return ""


def _remedies_for_shm(facts: Facts) -> tuple[Remedy, ...]:
    if "PENSTOCK_SHM_DIR" in facts.settings:
        return (Remedy("go back to /dev/shm:", "unset PENSTOCK_SHM_DIR"),)
    if facts.shm.exists and not facts.shm.writable:
        return (Remedy("let everybody write there:", f"sudo chmod 1777 {facts.shm.path}"),)
    half = max(2, facts.memory.usable // 2 >> 30)
    if facts.container:
        return (
            Remedy("start the container with", f"docker run --shm-size={half}g ..."),
            Remedy("or share the host's:", "docker run --ipc=host ..."),
        )
    mount = "remount," if facts.shm.exists else ""
    kind = "" if facts.shm.exists else "-t tmpfs tmpfs "
    return (Remedy("make it larger:", f"sudo mount -o {mount}size={half}G {kind}{facts.shm.path}"),)


def memfd(facts: Facts) -> Iterator[Finding]:
    if facts.memfd:
        yield Finding(Level.OK, "Memory", "memfd", "available: batches share memory by it")
    else:
        yield Finding(
            Level.WARNING if facts.system == "Linux" else Level.NOTE,
            "Memory",
            "memfd",
            "not available: batches pass through temporary files",
            why="Python lacks it, or the container's system call filter refuses memfd_create.",
            remedies=(Remedy("point TMPDIR at memory:", "export TMPDIR=/dev/shm"),)
            if facts.shm.exists and facts.shm.writable
            else (),
        )


def leftovers(facts: Facts) -> Iterator[Finding]:
    found, collected = facts.leftovers.found, facts.leftovers.collected
    if facts.leftovers.error:
        yield Finding(
            Level.PROBLEM,
            "Memory",
            "leftovers",
            f"{facts.leftovers.place} cannot be used",
            why=f"{facts.leftovers.error.rstrip('.')}. Memory caches will fail to open.",
            remedies=(Remedy("use another place:", "export PENSTOCK_SHM_DIR=/path/on/tmpfs"),),
        )
    if collected:
        yield Finding(
            Level.OK,
            "Memory",
            "leftovers",
            f"{_runs(collected)}, {_bytes(collected)}: collected",
            details=_listed(collected),
        )
    if found:
        yield Finding(
            Level.WARNING,
            "Memory",
            "leftovers",
            f"{_runs(found)}, {_bytes(found)}",
            why="They hold memory until the next memory cache is opened.",
            details=_listed(found),
            remedies=(_remedy_for_leftovers(facts),),
        )
    if not (found or collected or facts.leftovers.error):
        yield Finding(Level.OK, "Memory", "leftovers", "none of killed runs")


def _remedy_for_leftovers(facts: Facts) -> Remedy:
    if not facts.leftovers.tried:
        return Remedy("collect them:", "penstock doctor --fix")
    # Each by its name: what live runs hold lies beside them.
    paths = " ".join(shlex.quote(path) for path, _ in facts.leftovers.found)
    return Remedy("they could not be removed; as root:", f"sudo rm -rf {paths}")


def _runs(found: tuple[tuple[str, int], ...]) -> str:
    return "1 killed run" if len(found) == 1 else f"{len(found)} killed runs"


def _bytes(found: tuple[tuple[str, int], ...]) -> str:
    return show_size(sum(size for _, size in found))


def _listed(found: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    return tuple(f"{show_size(size):>9}  {path}" for path, size in found)


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
    memory,
    shared_memory,
    memfd,
    leftovers,
    temporary_directory,
    disk_stores,
    open_files,
    processes,
    *PACKAGE_CHECKS,
)
