"""The processes of a run, found by their environment: which are alive, what they take, and where
they are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

NODE_PROGRAM = b"penstock.node.program"

STACK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals on which a process may write its Python stacks: SIGUSR1 a member, SIGUSR2 a node."""


def processes_of(runtime: Path) -> list[int]:
    """The living processes that were started with this runtime directory; no zombies."""
    wanted = b"PENSTOCK_RUNTIME_DIR=" + os.fsencode(runtime)
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def nodes_of(runtime: Path) -> list[int]:
    """The nodes of this runtime directory, also those that have not opened their socket yet."""
    return [pid for pid in processes_of(runtime) if NODE_PROGRAM in command_of(pid)]


def command_of(pid: int) -> bytes:
    """The command line of a process, its arguments separated by zeros; empty if it has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_none(find: Callable[[], list[int]], seconds: float) -> list[int]:
    """Wait until ``find`` finds no process. Returns those that it still finds after ``seconds``."""
    give_up = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < give_up:
        time.sleep(0.1)
    return left


def shown(pids: Iterable[int]) -> str:
    """Processes for a message: their ids and command lines."""
    return "; ".join(
        f"{pid}: {command_of(pid).replace(bytes(1), b' ').decode(errors='replace')[:160]}"
        for pid in pids
    )


@dataclass(frozen=True)
class Footprint:
    """Memory and descriptors of a process: resident bytes, bytes of memfds, open descriptors."""

    resident: int
    memfd: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint | None:
        """The footprint of a process now; ``None`` if it has ended."""
        place = PROC / str(pid)
        try:
            resident = int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            descriptors = list((place / "fd").iterdir())
            memfds = _mapped_memfds(place / "maps")
        except OSError:
            return None
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith("/memfd:"):
                    status = descriptor.stat()
                    memfds[status.st_ino] = status.st_blocks * 512
        return cls(resident, sum(memfds.values()), len(descriptors))


def _mapped_memfds(maps: Path) -> dict[int, int]:
    """The bytes that a process has mapped of each memfd, by inode."""
    mapped: dict[int, int] = {}
    for line in maps.read_text(errors="replace").splitlines():
        words = line.split()
        if len(words) > 5 and words[5].startswith("/memfd:"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            mapped[int(words[4])] = mapped.get(int(words[4]), 0) + end - begin
    return mapped


def request_stacks(pids: Iterable[int]) -> None:
    """Let those processes that can do so write their Python stacks to their standard error."""
    for pid in pids:
        caught = _caught_signals(pid)
        for number in STACK_SIGNALS:
            if caught >> (number - 1) & 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def kernel_stacks(pids: Iterable[int]) -> str:
    """Where the threads of processes wait in the kernel, as far as this user may know."""
    lines = []
    for pid in pids:
        lines.append(shown([pid]))
        for thread in sorted((PROC / str(pid) / "task").glob("*")):
            with contextlib.suppress(OSError):
                name = (thread / "comm").read_text().strip()
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
                lines.append(f"  thread {thread.name} {name}, state {state}")
            with contextlib.suppress(OSError):
                calls = (thread / "stack").read_text().splitlines()
                lines.extend(f"    {call}" for call in calls[:8])
    return "\n".join(lines)


def _caught_signals(pid: int) -> int:
    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16)
    return 0
