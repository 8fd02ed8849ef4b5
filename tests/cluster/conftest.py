"""Secrets for the tests of a cluster, and both bodies of its transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.flight import FlightServer, connect
from penstock.cluster.protocol import Hello
from penstock.cluster.secrets import Secrets, make_secrets
from penstock.cluster.transport import Handler, Limits, Link
from penstock.errors import ClusterError
from tests.support.fabric import Fabric

TIMEOUT = 60.0
"""Seconds for calls that are expected to succeed."""


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    try:
        return make_secrets(tmp_path_factory.mktemp("cluster") / "secrets")
    except ClusterError as error:
        pytest.skip(str(error))


class InProcess:
    """Machines of ``Fabric``."""

    def __init__(self) -> None:
        self.fabric = Fabric()

    def serve(self, handler: Handler, me: Hello) -> str:
        return self.fabric.serve(handler, me)

    def connect(self, address: str, me: Hello, *, token: bytes | None = None) -> Link:
        return self.fabric.connect(address, me, timeout=TIMEOUT, token=token or b"token")

    def stop(self, address: str) -> None:
        self.fabric.stop(address)

    def stall(self, address: str) -> None:
        """Let no call to this machine be answered."""
        for (_, machine), path in self.fabric.paths.items():
            if address.startswith(machine):
                path.state = "silent"

    def close(self) -> None:
        pass


class OverFlight:
    """Servers and connections of Arrow Flight, over loopback."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._servers: dict[str, tuple[FlightServer, _Stalling]] = {}
        self._links: list[Link] = []

    def serve(self, handler: Handler, me: Hello, limits: Limits | None = None) -> str:
        stalling = _Stalling(handler)
        server = FlightServer(
            stalling, me, self._secrets, host="127.0.0.1", limits=limits or Limits()
        )
        self._servers[server.address] = server, stalling
        return server.address

    def connect(self, address: str, me: Hello, *, token: bytes | None = None) -> Link:
        secrets = self._secrets if token is None else replace(self._secrets, token=token)
        link = connect(address, secrets, me, timeout=TIMEOUT)
        self._links.append(link)
        return link

    def stop(self, address: str) -> None:
        server, stalling = self._servers.pop(address)
        stalling.go.set()
        assert server.close(TIMEOUT)

    def stall(self, address: str) -> None:
        self._servers[address][1].go.clear()

    def close(self) -> None:
        for link in self._links:
            link.close()
        for address in list(self._servers):
            self.stop(address)


class _Stalling:
    """A handler that serves nothing while ``go`` is not set."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.go = threading.Event()
        self.go.set()

    def control(self, peer: str, message: Any) -> Any:
        self.go.wait()
        return self._handler.control(peer, message)

    def get(self, peer: str, wanted: Any) -> Iterator[Any]:
        self.go.wait()
        yield from self._handler.get(peer, wanted)

    def put(self, peer: str, offered: Any, values: Any) -> list[bool]:
        self.go.wait()
        return self._handler.put(peer, offered, values)

    def run(self, peer: str, task: Any) -> Iterator[Any]:
        self.go.wait()
        yield from self._handler.run(peer, task)

    def batch(self, peer: str, wanted: Any) -> tuple[Any, list[Any]]:
        self.go.wait()
        return self._handler.batch(peer, wanted)


Body = InProcess | OverFlight


@pytest.fixture(params=["in-process", "flight"])
def body(request: pytest.FixtureRequest) -> Iterator[Body]:
    made: Body
    if request.param == "flight":
        made = OverFlight(request.getfixturevalue("secrets"))
    else:
        made = InProcess()
    yield made
    made.close()


@pytest.fixture
def over_flight(secrets: Secrets) -> Iterator[OverFlight]:
    made = OverFlight(secrets)
    yield made
    made.close()


@pytest.fixture
def secret_directory(tmp_path: Path) -> Path:
    return tmp_path / "secrets"
