"""Nodes on the machines of a real Ray cluster: two raylets on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.node.client import request_status
from penstock.node.directory import NodeDirectory

LIMIT = 150.0

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


class RayMachines:
    """Two machines of Ray, each with a directory for its node, and commands on them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.directories = [NodeDirectory(place / f"machine-{number}") for number in range(2)]
        token = place / "ray-token"
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray notes its newest cluster there; other clusters of this user are left alone.
            "RAY_TMPDIR": str(place),
            "PENSTOCK_CLUSTER_SECRET": str(place / "secret"),
            "PENSTOCK_RUNTIME_DIR": str(place / "command"),
            "PENSTOCK_NODE_IDLE": "0.3",
        }
        with (place / "ray.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ray_machines", str(place)],
                env=self.environment,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def begin(self) -> None:
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        assert address, (self.place / "ray.log").read_text()
        self.environment["RAY_ADDRESS"] = address

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "cluster", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def placed(self) -> list[dict[str, Any]]:
        return list(json.loads(self.run("status", "--ray", "--json"))["machines"])

    def node(self, number: int) -> dict[str, Any] | None:
        return request_status(self.directories[number])

    def processes(self) -> list[int]:
        """Processes of this cluster that run: their arguments or variables name its directory."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(self.place).encode() in said and state != "Z":
                found.append(int(entry.name))
        return found

    def close(self) -> None:
        try:
            self._process.communicate(timeout=LIMIT)
        finally:
            left = self.processes()
            for pid in left:  # all of them were started by this test
                os.kill(pid, signal.SIGKILL)
        assert left == []


@pytest.fixture
def ray_machines() -> Iterator[RayMachines]:
    # A path of pytest may be too long for a socket.
    place = Path(f"/tmp/penstock-test-{os.getpid()}-ray")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    made = RayMachines(place)
    try:
        made.begin()
        yield made
    finally:
        made.close()
        shutil.rmtree(place, ignore_errors=True)


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nodes_are_placed_on_all_machines_kept_there_and_ended(ray_machines: RayMachines) -> None:
    ray = ray_machines
    ray.run("start", "--ray", "--cache", "1MB")
    placed = ray.placed()
    assert [entry["state"] for entry in placed] == ["in", "in"]
    statuses = [ray.node(number) for number in range(2)]
    pids = [status["pid"] for status in statuses if status is not None]
    assert sorted(pids) == sorted(entry["pid"] for entry in placed)
    assert [status["held_by"] for status in statuses if status is not None] == [["Ray"], ["Ray"]]

    # A loader in a process without Ray finds the node of its machine, and stays without Ray.
    code = (
        "import sys; from penstock.node.share import _enter; found = _enter('auto'); "
        "print(found.address, found.cache_bytes, 'ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ray.environment, capture_output=True, text=True
    )
    address, *others = done.stdout.split()
    assert address in {entry["address"] for entry in placed}, done.stderr
    assert others == ["1000000", "False"]

    os.kill(pids[1], signal.SIGKILL)

    def healed() -> bool:
        status = ray.node(1)
        return status is not None and status["pid"] != pids[1] and status["held_by"] == ["Ray"]

    wait_for(healed)
    status = ray.node(1)
    assert status is not None
    entry = next(entry for entry in placed if entry["pid"] == pids[1])
    assert status["cluster"]["address"] == entry["address"]
    wait_for(lambda: len((ray.node(0) or {})["cluster"]["machines"]) == 2)

    ray.run("leave", "--ray")
    wait_for(lambda: ray.node(0) is None and ray.node(1) is None)
    assert ray.place.joinpath("secret", "token").exists()
    wait_for(lambda: not [pid for pid in ray.processes() if is_node(pid)])


def is_node(pid: int) -> bool:
    with suppress(OSError):
        return b"penstock.node" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
