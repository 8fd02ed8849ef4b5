"""A node for each test, in its own directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory


@pytest.fixture
def node_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDirectory]:
    """The directory of this test's node. The node, if it still runs, is ended after the test."""
    # tmp_path itself may be too long for a socket.
    path = Path(f"/tmp/penstock-test-{os.getpid()}-{tmp_path.name[-40:]}")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    directory = NodeDirectory(path)
    yield directory
    status = request_status(directory)
    if status is not None:
        request_end(directory)
        assert wait_for_exit(status["pid"]), "the node did not end"
    # Killed members have left their published status there.
    shutil.rmtree(path, ignore_errors=True)
