"""Results of benchmarks: tables to print, and JSON with a description of the machine."""

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
"""Width of tables in characters where the output is not a terminal."""

NAME, HEAD = 40, 12
"""Maximum line width in characters: of the first column, and of headings."""

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
    """A title, column headings and rows. All columns but the first are right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row has {len(row)} cells, the table {len(self.columns)} columns: {row}"
                )


@dataclass(frozen=True)
class Result:
    """The result of a benchmark. ``wrong``: reasons why it is invalid, if any; ``environments``:
    versions of Python and packages that the peers ran with."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    environments: dict[str, Any] = field(default_factory=dict)


def show(result: Result, console: Console | None = None) -> None:
    """Print tables, notes and errors."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    wide = min(NAME, console.width // 4)
    for table in result.tables:
        drawn = RichTable(title=table.title, title_justify="left", title_style="bold")
        for place, column in enumerate(table.columns):
            # The name identifies the row, so the other columns wrap first.
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
    for line in result.notes:
        console.print(line, markup=False)
    for line in result.wrong:
        console.print(f"WRONG: {line}", markup=False)


def write_json(path: Path, name: str, options: dict[str, Any], result: Result) -> None:
    """Write the result with the options, the command and the machine that produced it."""
    content = {
        "benchmark": name,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks", *sys.argv[1:]]),
        "options": options,
        "machine": machine(),
        "environments": result.environments,
        "data": result.data,
        "tables": [
            {"title": table.title, "columns": table.columns, "rows": table.rows}
            for table in result.tables
        ],
        "notes": result.notes,
        "wrong": result.wrong,
    }
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def machine() -> dict[str, Any]:
    """Hardware and software of this machine, and its current load."""
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
    """Versions of those packages that are installed."""
    installed = {}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
