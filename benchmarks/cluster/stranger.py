"""Sends garbage to the port of a node for some seconds, as a program on a host of its own.

Arguments: the address of the node, the directory of the cluster's secrets, seconds. A third of the
messages has no secrets: random bytes, and TLS without the certificate. A third has the certificate
and no token. The rest has both, as a machine of the cluster gone mad: records that are random
bytes, and bodies of up to 32 MB. Prints how many messages of each kind were sent, as JSON. Fails if
one of them is answered with anything other than an error.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from penstock.cluster.protocol import LARGEST_RECORD, VERSION, Hello, encode
from penstock.cluster.secrets import SERVER_NAME, read_secrets
from penstock.engine.pools.wire import RELEASE

TIMEOUT = 5.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of a client of HTTP/2, which gRPC uses."""

LARGEST_BODY = 8 * LARGEST_RECORD


class Stranger:
    """Sends messages to one node."""

    def __init__(self, address: str, secrets: Path, seed: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host, int(port))
        self._rng = random.Random(seed)
        found = read_secrets(secrets)
        hello = encode(Hello(VERSION, RELEASE, "stranger", 1))
        self._headers = [(b"penstock-hello-bin", hello)]
        self._token = (b"authorization", b"Bearer " + found.token.hex().encode())
        self._client = flight.FlightClient(
            f"grpc+tls://{address}",
            tls_root_certs=found.certificate,
            cert_chain=found.certificate,
            private_key=found.key,
            override_hostname=SERVER_NAME,
        )
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE
        self._tls.set_alpn_protocols(["h2"])
        self.sent: Counter[str] = Counter()

    def send(self) -> None:
        """Send one message of any kind. Raises AssertionError if it is served."""
        kinds = (self.raw, self.without_certificate, self.without_token, self.mad)
        [kind] = self._rng.choices(kinds, (1, 1, 2, 2))
        kind()

    def raw(self) -> None:
        self.sent["raw bytes"] += 1
        with suppress(OSError), socket.create_connection(self._place, TIMEOUT) as plain:
            plain.sendall(self._rng.choice([b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"]))
            plain.sendall(self._rng.randbytes(self._rng.choice([1, 1000, 100_000])))

    def without_certificate(self) -> None:
        self.sent["TLS without the certificate"] += 1
        answer = b""
        with (
            suppress(OSError),
            socket.create_connection(self._place, TIMEOUT) as plain,
            self._tls.wrap_socket(plain) as secure,
        ):
            secure.sendall(PREFACE + self._rng.randbytes(1000))
            answer = secure.recv(1)
        if answer:
            raise AssertionError("the node answers without the certificate")

    def without_token(self) -> None:
        self.sent["calls without the token"] += 1
        self._call(self._rng.randbytes(100), self._headers)

    def mad(self) -> None:
        oversized = self._rng.random() < 0.1
        self.sent["oversized calls" if oversized else "random calls"] += 1
        size = self._rng.randrange(LARGEST_RECORD, LARGEST_BODY) if oversized else 100
        body = bytes(size) if oversized else self._rng.randbytes(size)
        self._call(body, [*self._headers, self._token])

    def _call(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        options = flight.FlightCallOptions(timeout=TIMEOUT, headers=headers)
        answer: Any = None
        with suppress(flight.FlightError, pa.ArrowException, OSError):
            if self._rng.random() < 0.5:
                answer = list(self._client.do_action(("control", body), options))
            else:
                answer = self._client.do_get(flight.Ticket(body), options).read_all()
        if answer is not None:
            raise AssertionError(f"the node answers a call of garbage: {answer}")

    def close(self) -> None:
        self._client.close()


def main(address: str, secrets: str, seconds: str) -> None:
    stranger, end = Stranger(address, Path(secrets)), time.monotonic() + float(seconds)
    try:
        while time.monotonic() < end:
            stranger.send()
    finally:
        stranger.close()
    sys.stdout.write(json.dumps(stranger.sent) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
