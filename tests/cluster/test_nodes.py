"""Jobs with ``cluster=`` on two nodes: their batches, and what the nodes say about them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cluster.secrets import make_secrets
from penstock.errors import ClusterError, PipelineError
from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.member import depth_in_cluster
from tests.support.ports import free_port
from tests.support.scripts import cluster_job, cluster_kinds_job, spanning_job

SAMPLES, SIZE = 96, 20_000
LIMIT = 150.0


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(SAMPLES):
        (folder / f"{number:04}.bin").write_bytes(bytes([number]) * SIZE)
    return folder


class TwoHosts:
    """Two nodes on this machine, each with its own directory and port."""

    def __init__(self, place: Path, files: Path) -> None:
        self.files = files
        self.place = place
        self.secret = place / "secret"
        make_secrets(self.secret)
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.directories = [place / "node-0", place / "node-1"]

    def start(
        self,
        rank: int,
        epochs: int,
        pause_after: int = 0,
        *,
        patience: int = 1,
        where: str = "memory",
        seed: int = 1,
    ) -> subprocess.Popen[str]:
        script = [cluster_job.__file__, str(self.files), str(rank), str(epochs)]
        script += [str(self.place), str(pause_after), where, str(seed)]
        return self.run(rank, *script, patience=patience)

    def run(self, rank: int, *script: str, patience: int = 1) -> subprocess.Popen[str]:
        """Run a script on one of the hosts."""
        environment = {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(self.directories[rank]),
            "PENSTOCK_CLUSTER": self.addresses[0],
            "PENSTOCK_CLUSTER_ADDRESS": self.addresses[rank],
            "PENSTOCK_CLUSTER_SECRET": str(self.secret),
            "PENSTOCK_NODE_IDLE": "1",
            "PENSTOCK_CLUSTER_PATIENCE": str(patience),
            "PENSTOCK_CACHE_DIR": str(self.place / f"disk-{rank}"),
        }
        command = [sys.executable, *script]
        return subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def forget_meetings(self) -> None:
        """Let the jobs of another run wait for each other."""
        for path in [*self.place.glob("epoch *"), *self.place.glob("end-*")]:
            path.unlink()

    def status(self, rank: int) -> dict[str, Any] | None:
        return request_status(NodeDirectory(self.directories[rank]))

    def close(self) -> None:
        for path in self.directories:
            directory = NodeDirectory(path)
            status = request_status(directory)
            if status is not None:
                request_end(directory)
                assert wait_for_exit(status["pid"], 100)


@pytest.fixture
def hosts(files: Path) -> Iterator[TwoHosts]:
    # A path of pytest may be too long for a socket.
    place = Path(f"/tmp/penstock-test-{os.getpid()}-cluster")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        made = TwoHosts(place, files)
    except ClusterError as error:
        shutil.rmtree(place)
        pytest.skip(str(error))
    yield made
    made.close()
    shutil.rmtree(place, ignore_errors=True)


def results_of(jobs: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What the jobs print. They wait for each other, so if one fails, the others are ended."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and any(job.poll() is None for job in jobs):
        if any(job.poll() for job in jobs):
            break
        time.sleep(0.01)
    for job in jobs:
        job.kill()
    printed = [job.communicate() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), [err for _, err in printed]
    return [dict(json.loads(out.splitlines()[-1])) for out, _ in printed]


def alone(files: Path, rank: int, epochs: int, seed: int = 1) -> list[list[list[Any]]]:
    """The batches of the same loader without a cluster."""
    pipeline = cluster_job.pipeline(files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ranks without a node do not share what they keep
        loader = pipeline.loader(rank=rank, world=2, seed=seed, workers=0)
    with loader:
        batches = [
            [[column.tolist() for column in columns] for _, *columns in loader]
            for _ in range(epochs)
        ]
    lines_of(files.with_name("reads"))
    return batches


def lines_of(log: Path) -> Counter[str]:
    """The lines of a log; empties it."""
    lines = Counter(log.read_text().splitlines())
    log.write_text("")
    return lines


def test_jobs_on_two_nodes_get_the_batches_that_they_get_alone(hosts: TwoHosts) -> None:
    epochs = 4
    # With patience: on a busy machine the nodes must not take each other for slow.
    jobs = [hosts.start(rank, epochs, patience=100, where="disk") for rank in range(2)]
    results = results_of(jobs)
    # Storage is read once for each sample, by both machines together.
    reads = lines_of(hosts.files.with_name("reads"))
    assert reads == Counter(str(index) for index in range(SAMPLES))
    # Each version of a sample is prepared by one machine.
    prepared = lines_of(hosts.files.with_name("prepared"))
    assert set(prepared.values()) == {1}
    versions = SAMPLES + (epochs - 1) * SAMPLES // cluster_job.REUSE
    assert len(prepared) >= versions
    for rank in range(2):
        assert results[rank]["batches"] == alone(hosts.files, rank, epochs)
    assert all(found["refurbish"]["requests"] > 0 for found in results)
    # Loaders may have begun an epoch more.
    fresh = sum(found["refurbish"]["storage"] for found in results)
    assert versions <= fresh <= versions + SAMPLES // cluster_job.REUSE
    assert sum(found["cache"]["storage"] for found in results) == SAMPLES
    assert sum(found["cache"]["samples"] for found in results) == SAMPLES
    # A later run with another seed deals the samples to other machines. None is read from storage.
    hosts.close()
    hosts.forget_meetings()
    jobs = [hosts.start(rank, 2, patience=100, where="disk", seed=2) for rank in range(2)]
    again = results_of(jobs)
    assert lines_of(hosts.files.with_name("reads")) == Counter()
    for rank in range(2):
        assert again[rank]["batches"] == alone(hosts.files, rank, 2, seed=2)
    assert sum(found["cache"]["storage"] for found in again) == 0
    assert sum(found["cache"]["samples"] for found in again) == SAMPLES


def test_mixtures_echo_and_length_budgets_divide_their_caches_too(hosts: TwoHosts) -> None:
    place = hosts.place
    script = [cluster_kinds_job.__file__, str(place)]
    results = results_of([hosts.run(rank, *script, str(rank), patience=100) for rank in range(2)])
    for kind, pipeline in cluster_kinds_job.pipelines(place).items():
        reads = lines_of(place / kind)
        assert reads == dict.fromkeys(reads, 1), kind
        for rank in range(2):
            with pipeline.loader(rank=rank, world=2, seed=1, workers=0) as loader:
                epochs = range(cluster_kinds_job.EPOCHS)
                expected = [[batch.tolist() for batch in loader] for _ in epochs]
            assert results[rank][kind] == expected, kind
        assert len(lines_of(place / kind)) == len(reads), kind


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda: ps.from_dataset(lambda: iter(range(9)), version="1").batch(2), "on a stream"),
        (lambda: ps.from_dataset(np.arange(9)).echo("auto").batch(2), 'with "auto"'),
    ],
)
def test_a_refusal_names_the_argument_that_was_given(
    made: Callable[[], ps.Pipeline], found: str
) -> None:
    with pytest.raises(PipelineError, match=rf"cluster='auto' {found}"):
        made().loader(seed=1, cluster="auto")


def test_a_node_that_is_killed_changes_no_batch(hosts: TwoHosts) -> None:
    jobs = [hosts.start(rank, 4, pause_after=2) for rank in range(2)]
    deadline = time.monotonic() + LIMIT
    while not all((hosts.place / f"epoch 2-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    status = hosts.status(1)
    assert status is not None
    os.kill(status["pid"], signal.SIGKILL)
    (hosts.place / "go on").touch()
    results = results_of(jobs)
    for rank in range(2):
        assert results[rank]["batches"] == alone(hosts.files, rank, 4)
    assert results[1]["node"] != status["pid"]


def wait_for_files(*paths: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def search(hosts: TwoHosts, epochs: int, pause_after: int) -> list[subprocess.Popen[str]]:
    """A job on each host, both in the group "search". They wait after ``pause_after`` batches."""
    jobs = []
    for number in range(2):
        arguments = [str(hosts.place), str(number), str(epochs), str(pause_after)]
        jobs.append(hosts.run(number, spanning_job.__file__, *arguments))
    return jobs


def search_alone(epochs: int) -> list[list[Any]]:
    with spanning_job.pipeline().loader(seed=3, workers=0) as loader:
        return [spanning_job.record(batch) for _ in range(epochs) for batch in loader]


def test_jobs_of_a_search_on_two_nodes_share_one_preparation(hosts: TwoHosts) -> None:
    jobs = search(hosts, 3, pause_after=1)
    wait_for_files(*(hosts.place / f"paused-{number}" for number in range(2)))
    (hosts.place / "go on").touch()
    results = results_of(jobs)
    expected = search_alone(3)
    assert [found["batches"] for found in results] == [expected, expected]
    spans = [found["group"]["span"] for found in results]
    assert all(len(span["machines"]) == 2 for span in spans)
    assert min(span["received"] for span in spans) > 0
    # What each prepared before it knew of the other, or because the other was late.
    depth = depth_in_cluster(spanning_job.SAMPLES // spanning_job.BATCH)
    twice = 2 * (1 + 2 * depth) + sum(span["again"] + span["local"] for span in spans)
    assert sum(span["prepared"] for span in spans) <= len(expected) + twice
    at_end = [found["at_end"]["span"] for found in results]
    received = sum(span["received"] + span["late"] for span in at_end)
    assert received <= sum(span["sent"] for span in spans)


def test_a_search_goes_on_when_a_node_is_killed(hosts: TwoHosts) -> None:
    jobs = search(hosts, 3, pause_after=30)
    wait_for_files(*(hosts.place / f"paused-{number}" for number in range(2)))
    status = hosts.status(1)
    assert status is not None
    os.kill(status["pid"], signal.SIGKILL)
    (hosts.place / "go on").touch()
    results = results_of(jobs)
    expected = search_alone(3)
    assert [found["batches"] for found in results] == [expected, expected]
    assert results[1]["node"] != status["pid"]


def test_cluster_auto_without_a_cluster_says_how_to_begin_one(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = Path(f"/tmp/penstock-test-{os.getpid()}-alone")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(place))
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    monkeypatch.delenv("PENSTOCK_CLUSTER", raising=False)
    try:
        with (
            cluster_job.pipeline(files).loader(cluster="auto", seed=1) as loader,
            pytest.raises(PipelineError, match="penstock cluster start"),
        ):
            next(iter(loader))
    finally:
        status = request_status(NodeDirectory(place))
        if status is not None:
            assert wait_for_exit(status["pid"], 100)
        shutil.rmtree(place, ignore_errors=True)
