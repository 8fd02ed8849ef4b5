"""``penstock cluster``: start, join, status and leave."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cluster.secrets import make_secrets
from penstock.commands import cluster
from penstock.commands.cluster import guest_lines
from penstock.errors import ClusterError, WorkerError
from penstock.node import client
from penstock.node.client import enter_cluster, request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.protocol import EnterCluster
from tests.support.ports import free_port


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of this test's node and secrets."""
    path = Path(f"/tmp/penstock-test-{os.getpid()}-command")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path / "node"))
    monkeypatch.setenv("PENSTOCK_CLUSTER_SECRET", str(path / "secret"))
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    yield path
    directory = NodeDirectory(path / "node")
    status = request_status(directory)
    if status is not None:
        request_end(directory)
        assert wait_for_exit(status["pid"], 100)
    shutil.rmtree(path, ignore_errors=True)


def test_a_cluster_is_started_shown_and_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "600")
    address = f"127.0.0.1:{free_port()}"
    assert main(["cluster", "start", "--address", address, "--cache", "1MB"]) == 0
    out = capsys.readouterr().out
    assert f"penstock cluster join {address}" in out
    assert str(place / "secret") in out
    assert main(["cluster", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["address"] == address
    [machine] = status["machines"]
    assert (machine["address"], machine["cache_bytes"]) == (address, 1_000_000)
    assert main(["cluster", "status"]) == 0
    assert address in capsys.readouterr().out
    pid = request_status(NodeDirectory(place / "node"))
    assert pid is not None
    # A job may ask for it by name. A launcher names machines as it likes.
    directory = NodeDirectory(place / "node")
    job = EnterCluster([address.replace("127.0.0.1", "localhost")], "", "", 0, 0, stay=False)
    for request in (job, job._replace(seeds=["127.0.0.2:1"], found=True)):
        assert enter_cluster(directory, request).address == address
    with pytest.raises(WorkerError, match=f"is in the cluster of {address}"):
        enter_cluster(directory, job._replace(seeds=["127.0.0.2:1"]))
    capsys.readouterr()
    monkeypatch.setattr(client, "wait_for_exit", partial(wait_for_exit, timeout=300))
    assert main(["cluster", "leave"]) == 0
    assert capsys.readouterr().out == "This machine has left the cluster.\n"
    assert wait_for_exit(pid["pid"], timeout=0.0)


def test_joining_without_secrets_says_what_to_copy(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "join", "127.0.0.1:1"]) == 1
    assert "Copy the secrets of the cluster" in capsys.readouterr().err


def test_an_address_that_is_none_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        make_secrets(place / "secret")
    except ClusterError as error:
        pytest.skip(str(error))
    assert main(["cluster", "join", "no address"]) == 1
    assert "'no address' is not an address" in capsys.readouterr().err
    assert request_status(NodeDirectory(place / "node")) is None


def test_status_without_a_cluster_says_how_to_begin_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "status"]) == 1
    assert "penstock cluster start" in capsys.readouterr().err


def test_status_says_what_was_prepared_for_other_machines() -> None:
    guest = {"recipe": "ab12", "tiny_batches": 7, "samples": 140, "refused": "it is full"}
    [line] = guest_lines({"guests": [guest], "groups": []})
    assert "7 tiny-batches of 140 samples prepared here for other machines; refused" in line
    assert guest_lines({"guests": [], "groups": []}) == []


def test_status_says_why_another_machine_prepares_nothing() -> None:
    counts = dict.fromkeys(("tiny_batches", "samples", "bytes", "again", "rate"), 0)
    reason = "this machine does not have the pipeline"
    helper = {"state": "lacks the pipeline", "cores": 4, "reason": reason, **counts}
    group = {"name": "g", "remote": {"withheld": "", "machines": {"b": helper}}, "span": None}
    [line] = guest_lines({"guests": [], "groups": [group]})
    assert line.startswith("group g  helped by b (4 cores, lacks the pipeline): 0 tiny-batches")
    assert reason in line


@pytest.mark.parametrize("by", ["option", "environment", "file"])
def test_a_ray_that_does_not_run_is_named_at_once(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    ray = pytest.importorskip("ray")
    # What would try for two minutes must not be reached.
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("tried to connect"))
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    command = ["cluster", "status", "--ray"]
    if by == "option":
        command.append(address)
    elif by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        (place / "ray").mkdir()
        (place / "ray" / "ray_current_cluster").write_text(f"{address}\n")
    assert main(command) == 1
    said = capsys.readouterr().err
    assert f"nothing listens at {address}" in said
    assert "ray start --head" in said


def test_a_machine_does_not_join_itself(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_secrets(place / "secret")
    assert main(["cluster", "join", f"127.0.0.1:{free_port()}"]) == 1
    said = capsys.readouterr().err
    assert "is an address of this machine" in said
    assert "penstock cluster start" in said
    assert request_status(NodeDirectory(place / "node")) is None


def test_a_machine_that_nobody_answers_says_so_and_goes_on_trying(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_secrets(place / "secret")
    monkeypatch.setattr(cluster, "MEET", 0.0)
    seed = f"127.0.0.1:{free_port()}"
    assert main(["cluster", "join", seed, "--address", "127.0.0.1:0"]) == 0
    out = capsys.readouterr().out
    assert f"No machine has answered at {seed} so far" in out
    # Once it is in a cluster, `join` may change what it lends, whatever address is given.
    capsys.readouterr()
    assert main(["cluster", "join", seed, "--cores", "1"]) == 0
    recipes = f"{place / 'secret' / 'recipes'}: other machines must see this directory"
    assert f"lends 1 core to jobs whose pipeline it finds in {recipes}" in capsys.readouterr().out


def test_an_address_that_others_cannot_reach_is_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "start", "--address", f"127.0.0.1:{free_port()}"]) == 0
    assert "Other machines cannot reach 127.0.0.1" in capsys.readouterr().out
