"""What a benchmark found: tables for people, JSON with the facts of the machine for later."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table as RichTable

WIDTH = 170
"""Of a table that goes to a file, where there is no terminal to ask."""

NAME, HEAD = 40, 12
"""Letters in a line of the first column, and of a heading."""

PACKAGES = (
    "penstock",
    "numpy",
    "torch",
    "torchvision",
    "grain",
    "opencv-python-headless",
    "opencv-python",
    "simplejpeg",
    "pillow",
    "lmdb",
)


@dataclass(frozen=True)
class Table:
    """Rows under a title; everything but the first column is set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells in a table of {len(self.columns)}: {row}")


@dataclass(frozen=True)
class Found:
    """The outcome of a benchmark. ``wrong`` says what makes it worthless, if anything does;
    ``environments`` are the versions that peers ran with."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    environments: dict[str, Any] = field(default_factory=dict)


def show(found: Found, console: Console | None = None) -> None:
    """Print it."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    wide = min(NAME, console.width // 4)
    for table in found.tables:
        drawn = RichTable(title=table.title, title_justify="left", title_style="bold")
        for place, column in enumerate(table.columns):
            # Names are what rows are found by, so that numbers fold before they do.
            drawn.add_column(
                "\n".join(textwrap.wrap(column, HEAD)),
                justify="right" if place else "left",
                overflow="fold",
                no_wrap=not place,
            )
        for name, *cells in table.rows:
            lines = (line for part in name.splitlines() for line in textwrap.wrap(part, wide))
            drawn.add_row("\n".join(lines), *cells)
        console.print(drawn)
    for line in found.notes:
        console.print(line, markup=False)
    for line in found.wrong:
        console.print(f"WRONG: {line}", markup=False)


def write_json(path: Path, name: str, options: dict[str, Any], found: Found) -> None:
    """Everything that was found, and where."""
    content = {
        "benchmark": name,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks", *sys.argv[1:]]),
        "options": options,
        "machine": machine(),
        "environments": found.environments,
        "data": found.data,
        "tables": [
            {"title": table.title, "columns": table.columns, "rows": table.rows}
            for table in found.tables
        ],
        "notes": found.notes,
        "wrong": found.wrong,
    }
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers were made on; load says how busy it was with other things."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory": psutil.virtual_memory().total,
        "load": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
