"""Facts about processes: whether one is alive, when it started, its command line."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path

LONGEST = 500
"""Longest command line shown, in characters. Some have thousands."""


def stat_of(pid: int | str) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from the state on; ``None`` if the process is gone."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # The second field is the process name, which may contain spaces and brackets.
    return text.rpartition(")")[2].split()


def started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; ``None`` if it is gone or a zombie.

    Process numbers are reused; a number together with its start time is unique.
    """
    words = stat_of(pid)
    return None if words is None or words[0] in "ZX" else int(words[19])


def alive(pid: int, since: int | None) -> bool:
    """Whether the process with this number and start time is still running."""
    found = started(pid)
    if found is not None:
        return since is None or found == since
    if Path("/proc/self/stat").exists():
        return False
    # Without /proc only the process number is available.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def command() -> str:
    """The command line of this process, quoted for a shell."""
    shown = shlex.join(sys.orig_argv)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 3] + "..."
