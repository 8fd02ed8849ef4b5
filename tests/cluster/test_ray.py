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
from tests.support.scripts import remote_job

LIMIT = 150.0
SAMPLES, SECONDS = 96, 0.02

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

on_request = pytest.mark.skipif(
    os.environ.get("PENSTOCK_TEST_RAY") != "1",
    reason="trains on a real Ray, which needs an idle machine: set PENSTOCK_TEST_RAY=1",
)
"""Whether a machine is helped depends on measured speeds, and Ray Train starts slowly: on a busy
machine these tests take longer than any limit."""


class RayMachines:
    """Two machines of Ray, each with a directory for its node, and commands on them."""

    def __init__(self, place: Path, *, token: bool) -> None:
        self.place = place
        self.directories = [NodeDirectory(place / f"machine-{number}") for number in range(2)]
        token_path = place / "ray-token"
        token_path.write_text("0123456789abcdef" * 4)
        token_path.chmod(0o600)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_AUTH_TOKEN_PATH": str(token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray notes its newest cluster there; other clusters of this user are left alone.
            "RAY_TMPDIR": str(place),
            "PENSTOCK_CLUSTER_SECRET": str(place / "secret"),
            "PENSTOCK_RUNTIME_DIR": str(place / "command"),
            "PENSTOCK_NODE_IDLE": "0.3",
            "PENSTOCK_NODE_WORKERS": "1",
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

    def train(self) -> subprocess.Popen[str]:
        """A job on the first machine that waits until the file "go on" is there."""
        command = [sys.executable, remote_job.__file__, str(SAMPLES), str(SECONDS)]
        return subprocess.Popen(
            [*command, str(self.place)],
            env={**self.environment, "PENSTOCK_RUNTIME_DIR": str(self.directories[0].path)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def placed(self) -> list[dict[str, Any]]:
        return list(json.loads(self.run("status", "--ray", "--json"))["machines"])

    def node(self, number: int) -> dict[str, Any] | None:
        return request_status(self.directories[number])

    def processes(self) -> dict[int, str]:
        """Processes of this cluster that run: their arguments or variables name its directory."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                said = command + (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(self.place).encode() in said and state != "Z":
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def close(self) -> None:
        try:
            self._process.communicate(timeout=LIMIT)
            # Nodes and their workers end by themselves, on a busy machine a little later.
            wait_for(lambda: not self.processes())
        finally:
            left = self.processes()
            for pid in left:  # all of them were started by this test
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert left == {}


@pytest.fixture(params=[True])
def ray_machines(request: pytest.FixtureRequest) -> Iterator[RayMachines]:
    """Two machines of Ray; the parameter: whether Ray asks for a token."""
    # A path of pytest may be too long for a socket.
    place = Path(f"/tmp/penstock-test-{os.getpid()}-ray")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    made = RayMachines(place, token=request.param)
    try:
        made.begin()
        yield made
    finally:
        try:
            made.close()
        finally:
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


@on_request
def test_a_pipeline_goes_through_ray_to_a_machine_that_prepares_it(
    ray_machines: RayMachines,
) -> None:
    ray = ray_machines
    ray.run("start", "--ray", "--cores", "1")
    job = ray.train()
    try:
        wait_for(lambda: (ray.place / "helped").exists() or job.poll() is not None)
        status = ray.node(1)
        (ray.place / "go on").touch()
        out, errors = job.communicate(timeout=LIMIT)
    finally:
        job.kill()
    assert job.returncode == 0, errors
    assert status is not None
    [guest] = status["cluster"]["guests"]
    assert guest["tiny_batches"] > 0
    found = json.loads(out.splitlines()[-1])
    [prepared] = found["helpers"].values()
    assert prepared["samples"] >= prepared["tiny_batches"] > 0
    with remote_job.pipeline(SAMPLES, 0.0).loader(seed=1, workers=0) as loader:
        alone = [remote_job.digests(loader) for _ in found["batches"]]
    assert found["batches"] == alone
    # No file brought it: the other machine has another directory, which stays empty.
    assert not list(ray.place.glob("recipes-1/*"))
    assert not list(ray.place.glob("secret/recipes/*"))
    ray.run("leave", "--ray")


@pytest.mark.parametrize("ray_machines", [False], indirect=True)
def test_a_ray_without_tokens_carries_no_pipeline_and_says_what_to_do(
    ray_machines: RayMachines,
) -> None:
    ray = ray_machines
    ray.run("start", "--ray", "--cores", "1")

    def refusals() -> list[str]:
        groups = (ray.node(0) or {}).get("groups", [])
        remote = groups[0]["remote"] if groups else None
        machines = remote["machines"].values() if remote else []
        return [machine["reason"] for machine in machines if machine["reason"]]

    job = ray.train()
    try:
        # On a busy machine the keeper may be late at first, and is asked again.
        wait_for(
            lambda: any("RAY_AUTH_MODE" in one for one in refusals()) or job.poll() is not None
        )
        [refusal] = refusals()
        (ray.place / "go on").touch()
        out, errors = job.communicate(timeout=LIMIT)
    finally:
        job.kill()
    assert job.returncode == 0, errors
    assert "RAY_AUTH_MODE=token" in refusal
    [machine] = json.loads(out.splitlines()[-1])["helpers"].values()
    assert machine["tiny_batches"] == 0
    ray.run("leave", "--ray")


@on_request
def test_workers_of_ray_train_get_every_sample_once_and_have_nodes_placed(
    ray_machines: RayMachines,
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ray = ray_machines
    command = [sys.executable, "-m", "tests.support.scripts.ray_train_job", str(SAMPLES)]
    done = subprocess.run(
        [*command, str(ray.place)],
        env=ray.environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((ray.place / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["world"] for rank in ranks] == [2, 2]
    first, second = zip(*(rank["epochs"] for rank in ranks), strict=True)
    assert [len(part) for part in (*first, *second)] == [SAMPLES // 2] * 4
    assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == list(range(SAMPLES))
    assert first[0] != second[0]
    # The loaders have had nodes placed on the machines of both workers.
    assert [entry["state"] for entry in ray.placed()] == ["in", "in"]
    ray.run("leave", "--ray")


def is_node(pid: int) -> bool:
    with suppress(OSError):
        return b"penstock.node" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
