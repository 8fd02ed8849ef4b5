"""The port of a node answers nothing without the secrets, and survives nonsense."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from penstock.cluster import protocol
from penstock.cluster.flight import FlightServer, connect
from penstock.cluster.protocol import (
    CONTROL,
    REPLIES,
    VOCABULARY,
    AnswersHead,
    BatchHead,
    BatchPiece,
    GetMachineStatus,
    Kept,
    MachineStatus,
    Offered,
    Refusal,
    RemoteTask,
    RowsHead,
    WantedBatch,
    WantedValues,
    encode,
)
from penstock.cluster.secrets import SERVER_NAME, Secrets, make_secrets
from penstock.cluster.transport import PeerLost, PeerNonsense, PeerRefused
from penstock.errors import ClusterError, PenstockError
from scripts import fuzz_cluster
from tests.cluster.conftest import TIMEOUT, OverFlight
from tests.cluster.test_transport import wanted
from tests.support import ROOT
from tests.support.keeper import Keeper, hello

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def client_of(address: str, secrets: Secrets) -> Any:
    """A Flight client with the certificate of the cluster, but without the token."""
    return flight.FlightClient(
        f"grpc+tls://{address}",
        tls_root_certs=secrets.certificate,
        cert_chain=secrets.certificate,
        private_key=secrets.key,
        override_hostname=SERVER_NAME,
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """The secrets of another cluster."""
    return make_secrets(tmp_path_factory.mktemp("other") / "secrets")


DESCRIPTOR = flight.FlightDescriptor.for_command(b"x")
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "action": lambda client, options: list(client.do_action(("control", b""), options)),
    "actions": lambda client, options: list(client.list_actions(options)),
    "flights": lambda client, options: list(client.list_flights(b"", options)),
    "get": lambda client, options: client.do_get(flight.Ticket(b"x"), options).read_all(),
    "info": lambda client, options: client.get_flight_info(DESCRIPTOR, options),
    "put": lambda client, options: client.do_put(DESCRIPTOR, pa.schema([]), options)[0].close(),
    "handshake": lambda client, options: client.authenticate_basic_token("a", "b", options),
    "exchange": lambda client, options: client.do_exchange(DESCRIPTOR, options)[0].close(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("token", [None, "Bearer", "Bearer " + "0" * 64, "Basic YTpi"])
def test_no_call_is_served_without_the_token(
    over_flight: OverFlight, secrets: Secrets, call: str, token: str | None
) -> None:
    keeper = Keeper()
    client = client_of(over_flight.serve(keeper, hello("server")), secrets)
    given = [(b"penstock-hello-bin", encode(hello("client")))]
    if token is not None:
        given.append((b"authorization", token.encode()))
    options = flight.FlightCallOptions(timeout=TIMEOUT, headers=given)
    with client, pytest.raises(flight.FlightUnauthenticatedError, match="token"):
        CALLS[call](client, options)
    assert keeper.seen == []


@pytest.mark.parametrize("call", ["actions", "flights", "info", "exchange"])
def test_calls_that_a_node_does_not_have_are_refused(
    over_flight: OverFlight, secrets: Secrets, call: str
) -> None:
    client = client_of(over_flight.serve(Keeper(), hello("server")), secrets)
    given = [
        (b"penstock-hello-bin", encode(hello("client"))),
        (b"authorization", b"Bearer " + secrets.token.hex().encode()),
    ]
    options = flight.FlightCallOptions(timeout=TIMEOUT, headers=given)
    with client, pytest.raises(flight.FlightServerError, match="no such call"):
        CALLS[call](client, options)


def test_the_port_answers_nothing_to_a_client_without_the_certificate(
    over_flight: OverFlight,
) -> None:
    host, _, port = over_flight.serve(Keeper(), hello("server")).rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # as gRPC does; the port closes other connections anyway
    # The connection may end with an alert, a reset, or without a word.
    with (
        suppress(OSError),
        socket.create_connection((host, int(port)), TIMEOUT) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert secure.recv(1) == b""
    with suppress(OSError), socket.create_connection((host, int(port)), TIMEOUT) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in plain.recv(100)


def test_the_token_is_worth_nothing_without_the_certificate(
    over_flight: OverFlight, secrets: Secrets
) -> None:
    keeper = Keeper()
    address = over_flight.serve(keeper, hello("server"))
    given = [
        (b"penstock-hello-bin", encode(hello("client"))),
        (b"authorization", b"Bearer " + secrets.token.hex().encode()),
    ]
    options = flight.FlightCallOptions(timeout=TIMEOUT, headers=given)
    action = ("control", encode(GetMachineStatus()))
    stranger = flight.FlightClient(
        f"grpc+tls://{address}", tls_root_certs=secrets.certificate, override_hostname=SERVER_NAME
    )
    with stranger, pytest.raises(flight.FlightUnavailableError):
        list(stranger.do_action(action, options))
    assert keeper.seen == []
    with client_of(address, secrets) as client:
        assert len(list(client.do_action(action, options))) == 1


def test_another_certificate_is_refused_with_the_remedy(
    over_flight: OverFlight, others: Secrets
) -> None:
    address = over_flight.serve(Keeper(), hello("server"))
    with pytest.raises(PeerRefused, match=r"another certificate.*PENSTOCK_CLUSTER_SECRET") as found:
        connect(address, others, hello("client"), timeout=TIMEOUT)
    assert isinstance(found.value, ClusterError)
    assert isinstance(found.value, PenstockError)


def test_a_service_that_is_not_a_node_is_refused_with_the_remedy(secrets: Secrets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    connection.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerRefused, match=r"not a node of a cluster.*Check the address"):
            connect(address, secrets, hello("client"), timeout=TIMEOUT)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_nobody_at_an_address_is_lost_not_refused(secrets: Secrets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLost, match="cannot be reached"):
        connect(address, secrets, hello("client"), timeout=TIMEOUT)


def test_an_address_in_use_is_named(secrets: Secrets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ClusterError, match=f"cannot listen at 127.0.0.1:{port}"):
            FlightServer(Keeper(), hello("server"), secrets, host="127.0.0.1", port=port)


class Oversized(Keeper):
    def control(self, peer: str, message: Any) -> Any:
        return MachineStatus({"x": "y" * (5 << 20)})


def test_an_oversized_reply_is_nonsense(
    over_flight: OverFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A node that does not keep to the limits.
    monkeypatch.setattr("penstock.cluster.flight.encode", VOCABULARY.encode)
    link = over_flight.connect(over_flight.serve(Oversized(), hello("server")), hello("client"))
    with pytest.raises(PeerNonsense, match="a record of"):
        link.control(GetMachineStatus(), timeout=TIMEOUT)


def test_messages_larger_than_the_limit_are_not_received(
    over_flight: OverFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.flight._LARGEST_MESSAGE", 1 << 20)
    values = {("ab" * 16, 0, 0): bytes(2 << 20)}
    address = over_flight.serve(Keeper(values), hello("server"))
    link = over_flight.connect(address, hello("client"))
    with pytest.raises(PeerNonsense):
        list(link.get(wanted(0), timeout=TIMEOUT))
    assert link.control(GetMachineStatus(), timeout=TIMEOUT).status["values"] == 1


def test_the_token_is_in_no_error_and_no_log(
    over_flight: OverFlight, secrets: Secrets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")

    class Failing(Keeper):
        def control(self, peer: str, message: Any) -> Any:
            raise RuntimeError("a bug")

    link = over_flight.connect(over_flight.serve(Failing(), hello("server")), hello("client"))
    with pytest.raises(PeerNonsense) as found:
        link.control(GetMachineStatus(), timeout=TIMEOUT)
    assert "a bug" in caplog.text
    for text in (str(found.value), caplog.text, repr(link), repr(secrets)):
        assert secrets.token.hex() not in text


def test_a_missing_pyarrow_names_its_extra() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; import penstock.cluster.flight"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert 'cluster= needs pyarrow: pip install "penstock[cluster]"' in done.stderr


def test_the_fuzzer_sends_every_record_that_a_node_accepts() -> None:
    accepted = {*CONTROL, WantedValues, RemoteTask, WantedBatch, Offered}
    known = set(protocol._LIMITS)
    answers = {*REPLIES, Refusal, AnswersHead, Kept, RowsHead, BatchHead, BatchPiece}
    assert known == accepted | answers  # a new record belongs to one of them
    assert {type(record) for record in fuzz_cluster.RECORDS} >= accepted


def test_nonsense_neither_ends_the_server_nor_takes_its_memory() -> None:
    """A few of the messages of ``scripts/fuzz-cluster``."""
    report = fuzz_cluster.fuzz(1200, seed=1)
    assert report.sent.keys() >= {"raw bytes", "HTTP/2 frames", "DoAction", "DoGet", "DoPut"}
    assert report.after - report.before < fuzz_cluster.GROWTH
