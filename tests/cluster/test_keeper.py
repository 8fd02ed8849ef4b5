"""The keeper of a node: secrets, address, the hold on the node, and recipes for other machines."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cluster.find import find_cluster
from penstock.cluster.mailbox import KeeperCourier, Mailbox, PublishedRecipes
from penstock.cluster.placing import KeeperReport, PlacementOptions
from penstock.cluster.secrets import Secrets, export_secrets, fingerprint_of, read_secrets
from penstock.errors import ClusterError
from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.keeper import NodeKeeper

LIMIT = 120.0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A path of pytest may be too long for a socket.
    path = Path(f"/tmp/penstock-test-{os.getpid()}-keeper")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    monkeypatch.setenv("PENSTOCK_CLUSTER_SECRET", str(path / "none"))
    yield path
    status = request_status(NodeDirectory(path / "node"))
    if status is not None:
        request_end(NodeDirectory(path / "node"))
        assert wait_for_exit(status["pid"], 100)
    shutil.rmtree(path, ignore_errors=True)


def no_recipe(digest: str, timeout: float) -> bytes | None:
    return None


def keeper(place: Path, fingerprint: str) -> NodeKeeper:
    options = PlacementOptions(0, 1_000_000, True, str(place / "elsewhere"), fingerprint)
    return NodeKeeper(options, "127.0.0.1", no_recipe, NodeDirectory(place / "node"))


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until(
    kept: NodeKeeper, seeds: tuple[str, ...], secrets: Secrets | None, state: str
) -> KeeperReport:
    """Tend a keeper until it reports this state."""
    reports = [kept.tend(seeds, secrets)]

    def reached() -> bool:
        reports.append(kept.tend(seeds, None))
        return reports[-1].state == state

    wait_for(reached)
    return reports[-1]


def test_a_keeper_writes_the_secrets_it_is_given_and_keeps_the_node_in_the_cluster(
    place: Path, secrets: Secrets
) -> None:
    kept = keeper(place, fingerprint_of(secrets))
    seeds = (kept.tend((), None).address,)
    report = until(kept, seeds, secrets, "in")
    assert read_secrets(Path(report.secret)) == secrets
    assert Path(report.secret).parent == place / "node"
    status = request_status(NodeDirectory(place / "node"))
    assert status is not None
    assert (status["pid"], status["held_by"]) == (report.pid, ["Ray"])
    assert (report.address, status["cluster"]["address"]) == (seeds[0], seeds[0])
    assert status["cluster"]["machines"][0]["cache_bytes"] == 1_000_000

    os.kill(report.pid, signal.SIGKILL)
    wait_for(lambda: kept.tend(seeds, None).pid not in (0, report.pid))
    again = kept.tend(seeds, None)
    assert (again.state, again.address, again.machine) == ("in", report.address, report.machine)

    # A keeper that takes its place finds the node, and gives the others no other address.
    successor = keeper(place, fingerprint_of(secrets))
    assert successor.tend((), None).address == report.address
    assert until(successor, seeds, secrets, "in").pid == again.pid
    successor.leave()

    kept.leave()
    assert wait_for_exit(again.pid, LIMIT)
    assert not Path(report.secret).exists()
    # The first keeper may have started one more node when the second one left. It ends when idle.
    wait_for(lambda: not list((place / "node").glob("*.sock")))


def test_a_machine_without_secrets_says_what_to_do(place: Path, secrets: Secrets) -> None:
    kept = keeper(place, fingerprint_of(secrets))
    report = until(kept, (kept.tend((), None).address,), None, "failed")
    assert "RAY_AUTH_MODE=token" in report.reason
    assert "penstock cluster secrets --export" in report.reason
    assert str(place / "elsewhere") in report.reason
    assert request_status(NodeDirectory(place / "node")) is None
    kept.leave()


def test_secrets_of_another_cluster_are_not_used(place: Path, secrets: Secrets) -> None:
    kept = keeper(place, "another")
    report = until(kept, (kept.tend((), None).address,), secrets, "failed")
    assert "those of another cluster" in report.reason
    kept.leave()


def test_reports_and_exports_show_no_secrets(secrets: Secrets) -> None:
    assert secrets.token.hex() not in repr(secrets)
    assert secrets.key.decode() not in export_secrets(secrets)  # encoded, and for pipes only
    assert secrets.token.hex() not in fingerprint_of(secrets)


def test_a_taken_port_is_not_chosen(place: Path, secrets: Secrets) -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 7411))
        except OSError:
            pytest.skip("port 7411 is used by another program")
        taken.listen()
        kept = keeper(place, fingerprint_of(secrets))
        address = kept.tend((), None).address
        kept.leave()
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":7411")


@pytest.mark.parametrize("freed", [False, True])
def test_a_port_that_is_taken_while_the_node_is_down_is_given_up_after_some_time(
    place: Path, secrets: Secrets, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    monkeypatch.setattr("penstock.node.keeper.PORT_PATIENCE", 2 * LIMIT if freed else 0.1)
    kept = keeper(place, fingerprint_of(secrets))
    seeds = (kept.tend((), None).address,)
    report = until(kept, seeds, secrets, "in")
    host, _, port = report.address.rpartition(":")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def take() -> bool:
            with suppress(ProcessLookupError):
                os.kill(kept.tend(seeds, None).pid or report.pid, signal.SIGKILL)
            try:
                taken.bind((host, int(port)))
            except OSError:
                return False
            taken.listen()
            return True

        wait_for(take)
        if freed:
            wait_for(lambda: kept.tend(seeds, None).state == "failed")
            taken.close()
        else:
            wait_for(lambda: kept.tend(seeds, None).address != report.address)
        address = kept.tend(seeds, None).address
        again = until(kept, (address,), None, "in")
        assert (again.address == report.address) is freed
        assert again.address == address
        kept.leave()
    assert wait_for_exit(again.pid, LIMIT)


# ----------------------------------------------------------------- recipes


def test_recipes_go_from_one_keeper_to_another(place: Path) -> None:
    here, there = place / "here.sock", place / "there.sock"
    published = PublishedRecipes(no_recipe)
    fetching = PublishedRecipes(lambda digest, timeout: published.content(digest))
    boxes = [Mailbox(here, published), Mailbox(there, fetching)]
    content = os.urandom(3 << 20)
    publisher, fetcher = KeeperCourier("Ray", str(here)), KeeperCourier("Ray", str(there))
    publisher.publish("ab", content)
    assert fetcher.fetch("ab", timeout=LIMIT) == content
    assert fetcher.fetch("cd", timeout=LIMIT) is None
    publisher.withdraw("ab")
    assert fetcher.fetch("ab", timeout=LIMIT) is None
    for box in boxes:
        box.close()
    assert not here.exists()
    with pytest.raises(ClusterError, match="does not answer"):
        fetcher.fetch("ab", timeout=LIMIT)


def test_a_fetch_that_is_refused_says_why(place: Path) -> None:
    def refuse(digest: str, timeout: float) -> bytes | None:
        raise ClusterError("Ray accepts clients without a token")

    box = Mailbox(place / "box.sock", PublishedRecipes(refuse))
    with pytest.raises(ClusterError, match="without a token"):
        KeeperCourier("Ray", str(place / "box.sock")).fetch("ab", timeout=LIMIT)
    box.close()


# ----------------------------------------------------------------- finding


def test_ray_is_found_before_the_variables_that_its_workers_have_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_CLUSTER", raising=False)
    for name, value in (
        ("MASTER_ADDR", "10.0.0.1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert find_cluster("auto").seeds == ("10.0.0.1:7411",)
    assert find_cluster("ray").by_ray
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_cluster("auto").by_ray
    monkeypatch.setenv("PENSTOCK_CLUSTER", "10.0.0.9")
    assert find_cluster("auto").seeds == ("10.0.0.9:7411",)
