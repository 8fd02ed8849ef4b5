"""A job that the node of another machine helps: two real nodes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.secrets import make_secrets
from penstock.errors import ClusterError
from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from tests.support.ports import free_port
from tests.support.scripts import remote_job

SAMPLES, SECONDS = 192, 0.02
LIMIT = 240.0


class TrainerAndHelper:
    """The node of a job with one worker, and a node that lends three."""

    def __init__(self, place: Path) -> None:
        self.place = place
        make_secrets(place / "secret")
        self.address = f"127.0.0.1:{free_port()}"
        self.directories = {name: place / name for name in ("trainer", "helper")}

    def environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(self.directories[name]),
            "PENSTOCK_CLUSTER": self.address,
            "PENSTOCK_CLUSTER_ADDRESS": self.address if name == "trainer" else "127.0.0.1:0",
            "PENSTOCK_CLUSTER_SECRET": str(self.place / "secret"),
            "PENSTOCK_NODE_WORKERS": "1",
            "PENSTOCK_NODE_IDLE": "1",
            # A helper that is late, because this machine is busy, would make samples be read again.
            "PENSTOCK_CLUSTER_PATIENCE": "30",
        }

    def join(self) -> None:
        command = [sys.executable, "-m", "penstock", "cluster", "join", self.address]
        command += ["--cores", "3", "--address", "127.0.0.1:0"]
        subprocess.run(command, env=self.environment("helper"), check=True, timeout=LIMIT)

    def train(self, seconds: float = SECONDS, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, remote_job.__file__, str(SAMPLES), str(seconds)]
        return subprocess.Popen(
            [*command, str(self.place), *more],
            env=self.environment("trainer"),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def status(self, name: str) -> dict[str, Any]:
        status = request_status(NodeDirectory(self.directories[name]))
        assert status is not None
        return status

    def wait_until_helped(self, job: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + LIMIT
        while not (self.place / "helped").exists():
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline, self.status("trainer")
            time.sleep(0.02)

    def close(self) -> None:
        for path in self.directories.values():
            directory = NodeDirectory(path)
            status = request_status(directory)
            if status is not None:
                request_end(directory)
                assert wait_for_exit(status["pid"], 100)


@pytest.fixture
def machines() -> Iterator[TrainerAndHelper]:
    # A path of pytest may be too long for a socket.
    place = Path(f"/tmp/penstock-test-{os.getpid()}-remote")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        made = TrainerAndHelper(place)
    except ClusterError as error:
        shutil.rmtree(place)
        pytest.skip(str(error))
    yield made
    made.close()
    shutil.rmtree(place, ignore_errors=True)


def result_of(job: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, errors
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_a_helper_changes_no_bit_also_when_it_is_killed(machines: TrainerAndHelper) -> None:
    machines.join()
    job = machines.train()
    try:
        machines.wait_until_helped(job)
        helper = machines.status("helper")
        [guest] = helper["cluster"]["guests"]
        assert guest["tiny_batches"] > 0
        os.kill(helper["pid"], signal.SIGKILL)
        (machines.place / "go on").touch()
        found = result_of(job)
    finally:
        job.kill()
    pipeline = remote_job.pipeline(SAMPLES, 0.0)
    with pipeline.loader(seed=1, workers=0) as loader:
        alone = [remote_job.digests(loader) for _ in found["batches"]]
    assert found["batches"] == alone
    [prepared] = found["helpers"].values()
    assert prepared["samples"] >= prepared["tiny_batches"] > 0
    assert prepared["bytes"] == 24 * prepared["samples"]
    assert list((machines.place / "secret" / "recipes").iterdir()) == []


def test_samples_are_read_once_also_if_another_machine_prepares_them(
    machines: TrainerAndHelper,
) -> None:
    machines.join()
    # Until the helper has begun, the first epoch takes this long for each sample.
    job = machines.train(0.3, "cached")
    try:
        machines.wait_until_helped(job)
        (machines.place / "go on").touch()
        found = result_of(job)
    finally:
        job.kill()
    reads = Counter(map(int, (machines.place / "reads").read_text().split()))
    assert reads == dict.fromkeys(range(SAMPLES), 1)
    again = remote_job.cached_pipeline(SAMPLES, 0.0, machines.place)
    with again.loader(seed=1, workers=0) as loader:
        alone = [remote_job.digests(loader) for _ in found["batches"]]
    assert found["batches"] == alone
    [(name, prepared)] = found["helpers"].items()
    assert prepared["samples"] > 0
    # Batches that are prepared ahead are counted by the node, and not by a loader that has ended.
    assert 0 < found["elsewhere"][name] <= prepared["samples"]
