"""What the system says of a process."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid: int | str) -> list[str] | None:
    """The words of its ``stat`` from its state on; ``None`` where there is no such process."""
    try:
        told = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # A process may have any name, with brackets in it too; what follows has fixed places.
    return told.rpartition(")")[2].split()
