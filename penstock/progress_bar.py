"""A progress bar with the speed and the share of time that training waited for data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from penstock.loader import Loader


def progress(
    loader: Loader, description: str = "", *, console: Console | None = None
) -> Iterator[Any]:
    """Iterate one epoch of a loader and show a progress bar on stderr.

    >>> import numpy as np
    >>> import penstock as ps
    >>> loader = ps.from_dataset(np.arange(8)).batch(4).loader(workers=0)
    >>> sum(len(batch) for batch in ps.progress(loader))
    8
    """
    try:
        total: int | None = len(loader)
    except TypeError:
        total = None
    before = loader.stats()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    )
    with bar:
        name = description or f"epoch {loader.epoch}"
        task = bar.add_task(name, total=total, speed="")
        for batch in loader:
            yield batch
            now = loader.stats()
            seconds = now.elapsed - (before.elapsed if before.samples else 0.0)
            if seconds > 0:
                rate = (now.samples - before.samples) / seconds
                stall = (now.wait - before.wait) / seconds
                bar.update(
                    task,
                    advance=1,
                    speed=f"{rate:,.0f} samples/s, waited {min(1.0, stall):.0%}",
                )


@contextmanager
def counting(description: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr for (done, total), if stderr is a terminal; else ``None``."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
