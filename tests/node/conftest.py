"""A node for each test, in its own directory."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.service import Service


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def own_node(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDirectory]:
    """The directory of a node for tests. The node, if it still runs, is ended on exit."""
    # The place itself may be too long for a socket.
    path = Path(f"/tmp/penstock-test-{os.getpid()}-{place.name[-40:]}")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(place))
    directory = NodeDirectory(path)
    yield directory
    status = request_status(directory)
    if status is not None:
        request_end(directory)
        assert wait_for_exit(status["pid"]), "the node did not end"
    # Killed members have left their published status there.
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def node_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDirectory]:
    """The directory of this test's node."""
    with own_node(tmp_path, monkeypatch) as directory:
        yield directory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(node_directory: NodeDirectory, clock: Clock) -> Iterator[Service]:
    """A node in this process, so that a test can look inside. Its clock stands still."""
    node_directory.create()
    claim = node_directory.claim()
    assert claim is not None
    service = Service(node_directory, workers=2, staging=1 << 26, idle=60.0, clock=clock)
    service.listen()
    thread = threading.Thread(target=service.run)
    thread.start()
    yield service
    request_end(node_directory)
    thread.join()
    os.close(claim)
