"""The checks of memory and of what lives in it: facts in, findings out, no looking around."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from penstock.config import SMALL_SHM, show_size
from penstock.diagnose.doctor.facts import Facts, Place
from penstock.diagnose.doctor.finding import Finding, Level, Remedy

LITTLE_ROOM = 1 << 30
"""Less than this is not enough for a store worth having."""


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


MEMORY_CHECKS = (memory, shared_memory, memfd, leftovers)
