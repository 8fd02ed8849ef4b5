"""Every test leaves nothing behind: no process, no thread of ours, no file in shared memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.pools.processes import ProcessPool

SHM = Path("/dev/shm") / f"penstock-{os.getuid()}"


def _workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "penstock" in " ".join(_command(child))
    ]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _leftovers() -> list[str]:
    found = [f"process {p.pid}: {_command(p)[:3]}" for p in _workers()]
    found += [t.name for t in threading.enumerate() if t.name.startswith("penstock")]
    mine = f"run-{os.getpid()}-"
    if SHM.exists():
        found += [
            str(store)
            for run in SHM.iterdir()
            if run.name.startswith(mine)
            for store in run.iterdir()
            if store.is_dir()
        ]
    return found


@pytest.fixture
def no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all work done in worker processes, also while they start."""
    monkeypatch.setattr(ProcessPool, "help", lambda self: False)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    # A killed process takes a moment to be gone; what is really left does not go.
    deadline = time.monotonic() + 10
    while (left := _leftovers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
