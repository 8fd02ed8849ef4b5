"""A node of each test's own, and a look at what it leaves behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.node.look import look, stop
from penstock.node.place import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Where the node of this test lives. It is gone, with all of its processes, afterwards."""
    # A path to a socket is short.
    path = Path(f"/tmp/penstock-test-{os.getpid()}-{tmp_path.name[-40:]}")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    found = Place(path)
    yield found
    status = look(found)
    if status is not None:
        stop(found)
        assert gone(status["pid"]), "the node did not end"
    # A killed member leaves what it had published.
    shutil.rmtree(path, ignore_errors=True)


def gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
