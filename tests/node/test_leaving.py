"""A member that leaves while workers prepare its batches gives their places back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.node.client import request_end
from penstock.node.directory import NodeDirectory
from penstock.node.service import Service
from tests.support.contract import WaitsForFile


@pytest.fixture
def service(node_directory: NodeDirectory) -> Iterator[Service]:
    """A node in this process, so that a test can look inside."""
    node_directory.create()
    claim = node_directory.claim()
    assert claim is not None
    service = Service(node_directory, workers=2, staging=1 << 26, idle=60.0)
    thread = threading.Thread(target=service.run)
    thread.start()
    while not node_directory.socket.exists():
        time.sleep(0.01)
    yield service
    request_end(node_directory)
    thread.join()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_one_that_leaves_with_work_in_hand_blocks_nobody(
    service: Service, kind: Any, tmp_path: Path
) -> None:
    source = ps.from_dataset(np.arange(64.0), random=False, version="1")
    for number in range(3):
        file = tmp_path / f"go on {number}"
        waits = WaitsForFile(file, first=8)
        pipeline = source.map(waits, random=False, version="1").batch(4)
        with pipeline.loader(share=f"group {number}", kind=kind, shuffle=False) as loader:
            epoch = iter(loader)
            assert [next(epoch)[0] for _ in range(2)] == [0.0, 4.0]
            while service.workers._busy == 0:  # the next batch is on its way to the workers
                time.sleep(0.01)
        if kind == "threads":
            file.touch()  # threads cannot be killed
        # The node ends the workers of a group without members in another thread.
        deadline = time.monotonic() + 60
        while (service.groups or service.workers._busy) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert service.workers._busy == 0
