"""A node for each test, in its own directory."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.service import Service
from tests.support.warm_programs import real_programs, warm_programs  # noqa: F401


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
        assert wait_for_exit(status["pid"], 100), "the node did not end"
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


@contextmanager
def service_here(
    directory: NodeDirectory, *, workers: int, clock: Callable[[], float]
) -> Iterator[Service]:
    """A node in a thread of this process."""
    directory.create()
    claim = directory.claim()
    assert claim is not None
    service = Service(directory, workers=workers, staging=1 << 26, idle=60.0, clock=clock)
    service.listen()
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        request_end(directory)
        thread.join()
        os.close(claim)


@pytest.fixture
def service(node_directory: NodeDirectory, clock: Clock) -> Iterator[Service]:
    """A node in this process, so that a test can look inside. Its clock stands still."""
    with service_here(node_directory, workers=2, clock=clock) as service:
        yield service


@pytest.fixture
def node_here(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NodeDirectory]:
    """The directory of a node in this process. It loads pipelines without a trial.

    Two processes fewer for each test, where the test is about batches and not about the node.
    """
    monkeypatch.setattr("penstock.node.load.load_on_trial", lambda *_: None)
    with service_here(node_directory, workers=2, clock=time.monotonic):
        yield node_directory
