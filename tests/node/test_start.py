"""Starting a node: killed while it starts, and a full disk under its directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import WorkerError
from penstock.node import client
from penstock.node.client import connect_or_start, request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory

KILLED_BEFORE_FORK = "import os; os.kill(os.getpid(), 9)"
KILLED_AFTER_FORK = "import os; os.fork() and os._exit(0); os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("killed", [KILLED_BEFORE_FORK, KILLED_AFTER_FORK])
def test_a_node_killed_while_it_starts_is_replaced(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    boot, launch, boots = client._BOOT, client._launch, [killed, killed]

    def launch_next(directory: NodeDirectory) -> int:
        monkeypatch.setattr(client, "_BOOT", boots.pop() if boots else boot)
        return launch(directory)

    monkeypatch.setattr(client, "_launch", launch_next)
    pauses: list[float] = []
    connect_or_start(node_directory, sleep=pauses.append).close()
    assert pauses == [0.1, 0.2]
    assert request_status(node_directory) is not None


@pytest.mark.parametrize("killed", [KILLED_BEFORE_FORK, KILLED_AFTER_FORK])
def test_nodes_that_are_all_killed_become_an_error(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr(client, "_BOOT", killed)
    pauses: list[float] = []
    with pytest.raises(WorkerError, match="4 in a row were killed while they started"):
        connect_or_start(node_directory, sleep=pauses.append)
    assert len(pauses) == 3


@pytest.fixture
def full_disk(node_directory: NodeDirectory) -> Iterator[Path]:
    """The node's directory is on a file system of its own. Fill ``fill`` there to make it full."""
    path = node_directory.path
    path.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        path.rmdir()
        pytest.skip("mounting a file system is not permitted")
    yield path / "fill"
    status = request_status(node_directory)
    if status is not None:
        request_end(node_directory)
        assert wait_for_exit(status["pid"], 100)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def prints(value: Any) -> Any:
    print("x" * 5000, flush=True)  # noqa: T201
    print("y" * 5000, file=sys.stderr, flush=True)  # noqa: T201
    return value


def test_a_full_disk_ends_no_training(
    node_directory: NodeDirectory, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "60")
    pipeline = ps.from_dataset(np.arange(64.0)).batch(4)
    talkative = ps.from_dataset(np.arange(64.0)).map(prints, random=False, version="1").batch(4)
    with pipeline.loader(seed=0, share="a") as loader:
        epoch = iter(loader)
        next(epoch)
        fill(full_disk)
        before = request_status(node_directory)
        for number in range(20):
            # Members that come and go are logged.
            with pipeline.loader(seed=0, share=f"other {number}") as other:
                assert next(iter(other)).shape == (4,)
        with talkative.loader(seed=0, share="talkative") as other:
            assert len(list(other)) == 16
        assert len(list(epoch)) == 15
        after = request_status(node_directory)
        assert loader.stats().pool.restarts == 0
    assert before is not None
    assert after is not None
    assert before["pid"] == after["pid"]


def test_a_node_starts_on_a_full_disk_or_says_that_it_is_full(
    node_directory: NodeDirectory, full_disk: Path
) -> None:
    fill(full_disk)
    try:
        with ps.from_dataset(np.arange(8.0)).batch(4).loader(seed=0, share="a") as loader:
            assert len(list(loader)) == 2
    except WorkerError as error:
        assert "No space left on device" in str(error)  # noqa: PT017
        assert "PENSTOCK_RUNTIME_DIR" in str(error)  # noqa: PT017


def test_a_socket_that_cannot_be_made_is_an_error_that_says_why(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason comes without the log, which is on the same full disk."""
    failing = client._BOOT.replace(
        "main()",
        "from penstock.node.directory import NodeDirectory as D; import errno;"
        "D.listen = lambda self: (_ for _ in ()).throw(OSError(28, os.strerror(28)));"
        "main()",
    )
    monkeypatch.setattr(client, "_BOOT", failing)
    monkeypatch.setattr(client, "_open_log", lambda _: os.open(os.devnull, os.O_WRONLY))
    with pytest.raises(WorkerError, match=r"(?s)disk of that directory is full.*No space left"):
        connect_or_start(node_directory)
