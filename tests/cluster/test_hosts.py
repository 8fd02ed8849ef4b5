"""The transport between hosts whose links are slow, cut, reset or truncated."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.harness.processes import end_node
from penstock.cluster.find import PORT
from penstock.cluster.protocol import GetMachineStatus
from penstock.cluster.secrets import TOKEN, make_secrets
from penstock.cluster.transport import PeerFault, PeerLost
from tests.cluster.conftest import TIMEOUT, OverFlight
from tests.cluster.test_transport import gotten, held, wanted
from tests.support import ROOT
from tests.support.hosts import Host, hosts
from tests.support.keeper import Keeper, hello
from tests.support.machine import VALUES, RemoteMachine
from tests.support.proxy import Disturbance, Proxy


@pytest.fixture
def pair() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def directory(secret_directory: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    make_secrets(secret_directory)
    return secret_directory


@pytest.fixture
def machines(pair: list[Host], directory: Path) -> Iterator[list[RemoteMachine]]:
    """A machine on each of two hosts. The first is connected to the second."""
    one, two = pair
    with (
        RemoteMachine(one, directory, "one") as first,
        RemoteMachine(two, directory, "two") as second,
    ):
        assert first.call("connect", second.address, TIMEOUT, 1.0) == "two"
        yield [first, second]


def open_ports(host: Host, address: str) -> list[int]:
    """The ports that accept connections from this host."""
    found = []
    with host.entered():
        for port in range(1, 1 << 16):
            with socket.socket() as sock:
                sock.settimeout(TIMEOUT)
                if sock.connect_ex((address, port)) == 0:
                    found.append(port)
    return found


def test_hosts_reach_each_other_and_nothing_else(pair: list[Host]) -> None:
    one, two = pair
    before = Path("/proc/thread-self/ns/net").readlink()
    with two.entered():
        listener = socket.create_server((two.address, 0))
    port = listener.getsockname()[1]
    with listener, one.entered(), socket.create_connection((two.address, port), timeout=TIMEOUT):
        connection, (address, _) = listener.accept()
        connection.close()
        assert address == one.address
    with one.entered(), pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("192.0.2.1", 80), timeout=TIMEOUT)
    assert Path("/proc/thread-self/ns/net").readlink() == before


def test_a_scan_finds_only_the_port_of_the_node(
    pair: list[Host], machines: list[RemoteMachine]
) -> None:
    assert open_ports(pair[0], pair[1].address) == [machines[1].port]


@pytest.fixture
def node(pair: list[Host], directory: Path) -> Iterator[str]:
    """The address of a real node on the second host."""
    # A path of pytest may be too long for a socket.
    with TemporaryDirectory(prefix="scan-") as place:
        address = f"{pair[1].address}:{PORT}"
        settings = {
            "PENSTOCK_RUNTIME_DIR": place,
            "PENSTOCK_CLUSTER_SECRET": str(directory),
            "PENSTOCK_CLUSTER_RECIPES": str(directory.parent / "recipes"),
        }
        start = [sys.executable, "-m", "penstock", "cluster", "start", "--address", address]
        try:
            begun = pair[1].start(
                *start,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                cwd=ROOT,
            )
            said, _ = begun.communicate()
            assert begun.returncode == 0, said
            yield address
        finally:
            end_node(Path(place))


def test_a_scan_of_a_node_finds_one_port_that_answers_nobody_without_the_secrets(
    pair: list[Host], node: str, directory: Path, tmp_path: Path
) -> None:
    one, two = pair
    assert open_ports(one, two.address) == [PORT]
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname = False
    stranger.verify_mode = ssl.CERT_NONE
    stranger.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    answers = [b"", b""]
    with one.entered():
        # The connection may end with an alert, a reset, or without a word.
        with suppress(OSError), socket.create_connection((two.address, PORT), TIMEOUT) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            answers[0] = plain.recv(100)
        with (
            suppress(OSError),
            socket.create_connection((two.address, PORT), TIMEOUT) as plain,
            stranger.wrap_socket(plain) as secure,
        ):
            secure.sendall(preface)
            answers[1] = secure.recv(100)
    assert b"HTTP" not in answers[0]
    assert answers[1] == b""
    # Machines of another cluster, and of one with the same certificate and another token.
    make_secrets(tmp_path / "others")
    shutil.copytree(directory, tmp_path / "token")
    shutil.copy(tmp_path / "others" / TOKEN, tmp_path / "token" / TOKEN)
    for name, problem in (("others", "another certificate"), ("token", "token")):
        with RemoteMachine(one, tmp_path / name, "one") as machine:
            kind, reason = machine.call("connect", node, TIMEOUT, TIMEOUT)
            assert (kind, problem in reason) == ("PeerRefused", True)
    with RemoteMachine(one, directory, "one") as machine:
        assert isinstance(machine.call("connect", node, TIMEOUT, TIMEOUT), str)


def test_values_arrive_over_a_slow_link(pair: list[Host], machines: list[RemoteMachine]) -> None:
    pair[1].limit("200mbit")
    assert machines[0].call("get", TIMEOUT) == VALUES


def test_a_cut_link_is_noticed_before_the_deadline_and_mended_later(
    pair: list[Host], machines: list[RemoteMachine]
) -> None:
    one = machines[0]
    pair[1].cut()
    # The deadline is far away: the silence of the other machine ends the call.
    assert one.call("status", 120.0)[0] == "PeerLost"
    pair[1].mend()
    while isinstance(found := one.call("status", TIMEOUT), list):
        assert found[0] == "PeerLost"  # until it is connected again
    assert found == VALUES
    assert one.call("get", TIMEOUT) == VALUES


def test_a_link_that_is_cut_while_values_arrive_ends_the_call(
    pair: list[Host], machines: list[RemoteMachine]
) -> None:
    pair[1].limit("1mbit")  # 6.4 MB take a minute
    machines[0].begin("get", 3.0)
    pair[1].cut()
    assert machines[0].end()[0] in ("PeerLost", "PeerSlow")


def test_a_killed_machine_is_lost_at_once(machines: list[RemoteMachine]) -> None:
    one, two = machines
    two.process.kill()
    two.process.wait()
    assert one.call("status", 120.0)[0] == "PeerLost"


def test_no_namespace_is_left_behind() -> None:
    with hosts(1) as made:
        holder = made[0]._space.pid
        assert Path(f"/proc/{holder}").exists()
        with pytest.raises(ZeroDivisionError), hosts(1):
            raise ZeroDivisionError
    assert not Path(f"/proc/{holder}").exists()


# ----------------------------------------------------------------- a disturbed connection


@pytest.fixture
def proxied(over_flight: OverFlight) -> Iterator[Proxy]:
    keeper = Keeper(held(**{f"_{index}": bytes([index]) * 100_000 for index in range(64)}))
    with Proxy(over_flight.serve(keeper, hello("server"))) as proxy:
        yield proxy


ALL = wanted(*range(64))


def test_a_reset_connection_is_lost_and_the_next_call_connects_again(
    over_flight: OverFlight, proxied: Proxy
) -> None:
    link = over_flight.connect(proxied.address, hello("client"))
    for disturbance in (Disturbance(resets_after=500_000), Disturbance(ends_after=500_000)):
        proxied.disturbance = disturbance
        with pytest.raises(PeerLost):
            gotten(link, ALL)
        proxied.disturbance = Disturbance()
        while True:
            try:
                assert link.control(GetMachineStatus(), timeout=TIMEOUT)
                break
            except PeerLost:
                pass  # gRPC waits a little before it connects again
    assert len(gotten(link, ALL)) == 64


def test_nothing_is_sent_again_without_the_node_knowing(
    over_flight: OverFlight, proxied: Proxy
) -> None:
    link = over_flight.connect(proxied.address, hello("client"))
    proxied.disturbance = Disturbance(resets_after=0)
    before = proxied.connections
    with pytest.raises(PeerLost):
        link.control(GetMachineStatus(), timeout=TIMEOUT)
    assert proxied.connections <= before + 1


def test_a_connection_that_falls_silent_ends_at_the_deadline(
    over_flight: OverFlight, proxied: Proxy
) -> None:
    link = over_flight.connect(proxied.address, hello("client"))
    proxied.disturbance = Disturbance(silent_after=500_000)
    # Which fault it is depends on whether the deadline finds half a record of TLS.
    with pytest.raises(PeerFault):
        gotten_within(link, 0.5)


def gotten_within(link: object, timeout: float) -> int:
    return len(list(link.get(ALL, timeout=timeout)))  # type: ignore[attr-defined]


def test_values_arrive_over_a_delayed_and_throttled_connection(
    over_flight: OverFlight, proxied: Proxy
) -> None:
    link = over_flight.connect(proxied.address, hello("client"))
    proxied.disturbance = Disturbance(delay=0.0002, rate=50e6)
    assert {value for _, value, _ in gotten(link, ALL).values()} == {
        bytes([index]) * 100_000 for index in range(64)
    }


def test_a_host_without_a_way_to_the_outside_has_an_address_for_others(pair: list[Host]) -> None:
    code = "from penstock.cluster.find import default_host; print(default_host())"
    for host in pair:
        job = host.start(sys.executable, "-c", code, stdout=subprocess.PIPE, cwd=ROOT)
        assert job.communicate(timeout=TIMEOUT)[0] == f"{host.address}\n"
