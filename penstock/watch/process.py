"""Telling processes apart: a number is used again, a number with a start time is not."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path

from penstock.node.procfs import stat_of

LONGEST = 500
"""Characters of a command line that are shown; some have thousands."""


def started(pid: int) -> int | None:
    """When a process was started, in the system's own count; ``None`` if there is none.

    One that has ended and that nobody has asked for its exit code is none any more.
    """
    words = stat_of(pid)
    return None if words is None or words[0] in "ZX" else int(words[19])


def alive(pid: int, since: int | None) -> bool:
    """Whether the process that had this number, and was started then, is still there."""
    found = started(pid)
    if found is not None:
        return since is None or found == since
    if Path("/proc/self/stat").exists():
        return False
    # A system without /proc: the number is all there is to go by.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def command() -> str:
    """The command line of this process, as one would type it."""
    shown = shlex.join(sys.orig_argv)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 3] + "..."
