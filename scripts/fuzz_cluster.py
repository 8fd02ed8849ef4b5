"""Fuzz the port of a node: scripts/fuzz-cluster [--messages 100000] [--seed 0].

Starts a node's Flight server in a process of its own and sends it messages of these kinds:

- raw bytes, before and after the TLS handshake, and HTTP/2 frames with random content;
- gRPC calls to every method of Flight, with random, mutated and oversized bodies, wrong tokens and
  wrong introductions;
- DoPut streams whose Arrow data, descriptors and lengths are mutated.

The first kind has no secrets; the others have the certificate, and most have the token: a machine
of the cluster gone mad. Fails if the server ends, if it stops serving a good machine, or if its
memory grows by more than GROWTH after a warm-up. A message depends on --seed and its number only.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgpack  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
from pyarrow import flight  # noqa: E402

from penstock.cluster.flight import connect  # noqa: E402
from penstock.cluster.protocol import (  # noqa: E402
    LARGEST_RECORD,
    VOCABULARY,
    GetGroupPosition,
    GetKeptSamples,
    GetMachineStatus,
    HeartbeatSent,
    Kept,
    Offered,
    RemoteTask,
    Spilled,
    WantedBatch,
    WantedValues,
    encode,
)
from penstock.cluster.secrets import (  # noqa: E402
    CERTIFICATE,
    KEY,
    SERVER_NAME,
    make_secrets,
    read_secrets,
)
from penstock.cluster.transport import PeerSlow  # noqa: E402
from tests.support.keeper import hello  # noqa: E402
from tests.support.machine import FINGERPRINT, SIZE, VALUES, RemoteMachine  # noqa: E402

GROWTH = 192 << 20
"""Bytes by which the memory of the server may grow from the warm-up to the end. The
largest body that is sent has 32 MB; gRPC receives it whole, and the allocator keeps some of what
was freed. With 100,000 messages a leak of 2 KB in each is found."""

WARM_UP = 0.2
"""The part of all messages after which memory is measured first."""

PER_CONNECTION = 50
"""Calls on one connection. Each connection is closed in the middle of something."""

OVERSIZED_FIRST = 20
"""Oversized bodies before the other messages, so that memory is at its level when it is measured
first."""

CHECK_EVERY = 2000
PATIENCE = 60.0
"""Seconds for a good machine's calls: a server that hangs is a finding, a busy machine is not."""

METHODS = [*("DoAction", "DoGet", "DoPut", "DoExchange", "ListFlights", "ListActions")]
METHODS += ["GetFlightInfo", "GetSchema", "PollFlightInfo", "Handshake", "Nonsense"]
LARGEST_BODY = 8 * LARGEST_RECORD


class Report(NamedTuple):
    """What was sent, and the server's memory in bytes: after the warm-up, at the end, at most."""

    sent: dict[str, int]
    before: int
    after: int
    most: int


# ------------------------------------------------------------------------------ what is sent


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def ipc(message: Any) -> tuple[bytes, bytes]:
    """Header and body of an Arrow message."""
    data = message.serialize().to_pybytes()
    (length,) = struct.unpack_from("<i", data, 4)
    return data[8 : 8 + length], data[8 + length :]


def flight_data(
    header: bytes, body: bytes, descriptor: bytes = b"", metadata: bytes = b""
) -> bytes:
    parts = field(1, b"\x08\x02" + field(2, descriptor)) if descriptor else b""
    return parts + field(2, header) + field(3, metadata) + field(1000, body)


KEYS = np.arange(3, dtype=np.int64)
SCHEMA = pa.schema([pa.field("buffers", pa.binary_view(), nullable=False)])
VALUES_SENT = [b"v" * 5, b"w" * 40, b"x" * 700]
STATUS, WANTED = GetMachineStatus(), WantedValues.of(FINGERPRINT, KEYS)
OFFERED = Offered.of(FINGERPRINT, KEYS * 2, None, [len(value) for value in VALUES_SENT])
RANKS, GROUPS = [["ab", "cd", [0, 3]]], [["search", "ab", 8, 120, ["0/1"]]]
MACHINE = ["fuzzer", "127.0.0.1:1", 5, 8, 1 << 40, 1, "trains", RANKS, GROUPS]
PACKED = KEYS.tobytes()
BATCH = WantedBatch(
    *("ab" * 16, "0/1", 1, 1, "cd" * 16, PACKED, PACKED, None, 1 << 20, 0.01, 2, [1, 0, 9, 3])
)
RECORDS = [
    hello("fuzzer"),
    STATUS,
    HeartbeatSent(MACHINE, [2, 1, 7], "", 3, [1, 0.5], [["b", 3]], False),
    Spilled("ab", PACKED, None, ["a", "", "b"]),
    GetKeptSamples(FINGERPRINT),
    GetGroupPosition("group", "part", 1),
    WANTED,
    WantedValues.of(FINGERPRINT, KEYS, KEYS),
    RemoteTask("recipe", 1, PACKED, PACKED, 1 << 20, ["cache"], bytes(len(PACKED) // 8)),
    BATCH,
    OFFERED,
    Kept(b"\0\1"),
]


def record(rng: random.Random) -> bytes:
    """The bytes of a record: good, mutated, or with fields of another record."""
    one = rng.choice(RECORDS)
    if rng.random() < 0.3:
        packed = VOCABULARY.pack(one)
        packed[rng.randrange(len(packed))] = rng.choice(
            [None, -1, 1 << 63, "x" * 300, b"", b"y" * 9, [], {}, [[[]]], 1.5, True, KEYS.tobytes()]
        )
        return bytes(msgpack.packb(packed, use_bin_type=True))
    return mutated(rng, encode(one))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data, or the data with bytes changed, cut off, repeated or inserted."""
    out = bytearray(data)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice([0, 1, 127, 128, 255])
        elif kind == 2:
            del out[at : at + rng.randrange(1, 64)]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 32))
        else:
            out[at:at] = out[at : at + rng.randrange(1, 64)]
    return bytes(out)


def put_messages(rng: random.Random) -> list[bytes]:
    """The messages of a DoPut: a schema with a descriptor, then values."""
    types = [pa.binary_view(), pa.binary_view(), pa.binary_view(), pa.binary(), pa.int64()]
    kind = rng.choice(types)
    schema = pa.schema([pa.field("buffers", kind, nullable=False)])
    values: list[Any] = [1, 2, 3] if kind == pa.int64() else VALUES_SENT
    batch = pa.record_batch([pa.array(values, kind)], schema=schema)
    offered = record(rng) if rng.random() < 0.3 else encode(OFFERED)
    header, body = ipc(schema)
    first = flight_data(mutated(rng, header), body, descriptor=offered)
    header, body = ipc(batch)
    rest = [
        flight_data(mutated(rng, header), mutated(rng, body), metadata=rng.randbytes(3))
        for _ in range(rng.randrange(3))
    ]
    return [mutated(rng, message) if rng.random() < 0.2 else message for message in [first, *rest]]


def request(rng: random.Random, method: str) -> list[bytes]:
    """The messages of a call."""
    if rng.random() < 0.1:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(3))]
    if method == "DoAction":
        name = b"control" if rng.random() < 0.9 else rng.randbytes(9)
        return [field(1, name) + field(2, record(rng))]
    if method in ("DoPut", "DoExchange"):
        return put_messages(rng)
    return [mutated(rng, field(1, record(rng)))]


# ----------------------------------------------------------------------------- how it is sent


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def headers(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """HPACK, without its tables."""
    return b"".join(b"\0" + hpack(name) + hpack(value) for name, value in pairs)


def hpack(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    return b"\x7f" + varint(len(text) - 127) + text


class Attacker:
    """Connections to the server that send calls as raw HTTP/2."""

    def __init__(self, port: int, directory: Path) -> None:
        self._port = port
        self._bearer = b"Bearer " + read_secrets(directory).token.hex().encode()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self._context.load_verify_locations(directory / CERTIFICATE)
        self._context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
        self._context.set_alpn_protocols(["h2"])
        secrets = read_secrets(directory)
        self._client = flight.FlightClient(
            f"grpc+tls://127.0.0.1:{port}",
            tls_root_certs=secrets.certificate,
            cert_chain=secrets.certificate,
            private_key=secrets.key,
            override_hostname=SERVER_NAME,
        )
        self._stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._stranger.check_hostname = False
        self._stranger.verify_mode = ssl.CERT_NONE
        self._stranger.set_alpn_protocols(["h2"])
        self._socket: ssl.SSLSocket | None = None
        self._stream = 1
        self.sent: Counter[str] = Counter()

    def send(self, rng: random.Random) -> None:
        """Send one message, of any kind."""
        kind = rng.random()
        # The server closes connections as it likes: that is not a finding.
        with suppress(OSError):
            if kind < 0.02:
                self.sent["raw bytes"] += 1
                self._raw(rng)
            elif kind < 0.03:
                self.sent["TLS without the certificate"] += 1
                self._without_certificate(rng)
            elif kind < 0.08:
                self.sent["HTTP/2 frames"] += 1
                self._frames(rng)
            elif kind < 0.082:
                self.sent["oversized bodies"] += 1
                self.oversized(rng)
            else:
                self._call(rng)

    def _raw(self, rng: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self._port), PATIENCE) as plain:
            plain.sendall(rng.choice([b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"]))
            plain.sendall(rng.randbytes(rng.choice([1, 10, 1000, 100_000])))

    def _without_certificate(self, rng: random.Random) -> None:
        plain = socket.create_connection(("127.0.0.1", self._port), PATIENCE)
        with plain, self._stranger.wrap_socket(plain) as secure:
            secure.sendall(PREFACE + rng.randbytes(1000))
            if secure.recv(1):
                raise AssertionError("the server answers without the certificate")

    def _frames(self, rng: random.Random) -> None:
        secure = self._connected()
        for _ in range(rng.randrange(1, 5)):
            payload = rng.randbytes(rng.randrange(40))
            secure.sendall(frame(rng.randrange(12), rng.randrange(256), rng.randrange(9), payload))
        self._end()

    def oversized(self, rng: random.Random) -> None:
        """A call with a large body. gRPC sends it: a raw one would break the flow control."""
        body = bytes(rng.randrange(LARGEST_RECORD, LARGEST_BODY))
        given = [(b"authorization", self._bearer)]
        given.append((b"penstock-hello-bin", encode(hello("fuzzer"))))
        options = flight.FlightCallOptions(timeout=PATIENCE, headers=given)
        descriptor = flight.FlightDescriptor.for_command(rng.choice([body, encode(OFFERED)]))
        batch = pa.record_batch([pa.array([body], pa.binary_view())], schema=SCHEMA)
        with suppress(flight.FlightError, pa.ArrowException):
            kind = rng.randrange(3)
            if kind == 0:
                list(self._client.do_action(("control", body), options))
            elif kind == 1:
                self._client.do_get(flight.Ticket(body), options).read_all()
            else:
                writer, _ = self._client.do_put(descriptor, SCHEMA, options)
                try:
                    writer.write_batch(batch)
                finally:
                    writer.close()

    def _call(self, rng: random.Random) -> None:
        method = rng.choice(METHODS[:3]) if rng.random() < 0.8 else rng.choice(METHODS)
        self.sent[method] += 1
        secure = self._connected()
        token, introduction = self._bearer, encode(hello("fuzzer"))
        if rng.random() < 0.05:
            token = mutated(rng, token)[:100].translate(None, b"\0\n\r")
        if rng.random() < 0.05:
            introduction = mutated(rng, introduction)
        out = self._head(method, token, introduction)
        messages = request(rng, method)
        for number, message in enumerate(messages):
            length = len(message) if rng.random() < 0.99 else rng.randrange(1 << 12)
            last = number == len(messages) - 1 and rng.random() < 0.95
            out += self._body(message, length, last=last)
        if not messages:
            out += frame(0, 1, self._stream, b"")
        self._stream += 2
        secure.sendall(out)
        self._drain(secure)
        if self._stream > 2 * PER_CONNECTION:
            self._end()

    def check(self) -> None:
        """Raise an error if good calls, made in the same way, do not reach the server."""
        good = {
            "DoAction": field(1, b"control") + field(2, encode(STATUS)),
            "DoGet": field(1, encode(WANTED)),
            "DoPut": flight_data(*ipc(SCHEMA), descriptor=encode(OFFERED)),
        }
        batch = pa.record_batch([pa.array(VALUES_SENT, pa.binary_view())], schema=SCHEMA)
        for method, message in good.items():
            secure = self._connected()
            secure.sendall(self._head(method, self._bearer, encode(hello("fuzzer"))))
            put = method == "DoPut"
            secure.sendall(self._body(message, len(message), last=not put))
            if put:
                values = flight_data(*ipc(batch))
                secure.sendall(self._body(values, len(values), last=True))
            received = b""
            while b"grpc-status" not in received:
                received += (piece := secure.recv(1 << 16))
                if not piece:
                    break
            if b"grpc-status\x010" not in received:
                raise AssertionError(f"a good {method} of the fuzzer fails: {received[-500:]!r}")
            self._end()

    def _head(self, method: str, token: bytes, introduction: bytes) -> bytes:
        pairs = [
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":path", b"/arrow.flight.protocol.FlightService/" + method.encode()),
            (b":authority", SERVER_NAME.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"authorization", token),
            (b"penstock-hello-bin", base64.b64encode(introduction).rstrip(b"=")),
        ]
        return frame(1, 4, self._stream, headers(pairs))

    def _body(self, message: bytes, length: int, *, last: bool) -> bytes:
        """A gRPC message that states ``length`` as its length, in frames."""
        data = b"\0" + struct.pack(">I", length) + message
        pieces = [data[at : at + 16384] for at in range(0, len(data), 16384)]
        return b"".join(
            frame(0, int(last and number == len(pieces) - 1), self._stream, piece)
            for number, piece in enumerate(pieces)
        )

    def _connected(self) -> ssl.SSLSocket:
        if self._socket is None:
            plain = socket.create_connection(("127.0.0.1", self._port), PATIENCE)
            self._socket = self._context.wrap_socket(plain, server_hostname=SERVER_NAME)
            # A large window, so that answers are not held back.
            settings = struct.pack(">HI", 4, (1 << 31) - 1)
            self._socket.sendall(PREFACE + frame(4, 0, 0, settings))
            self._socket.sendall(frame(8, 0, 0, struct.pack(">I", (1 << 31) - 65536)))
            self._stream = 1
        return self._socket

    def _drain(self, secure: ssl.SSLSocket) -> None:
        """Read what the server has sent by now."""
        secure.settimeout(0.0)
        try:
            while secure.recv(1 << 16):
                pass
            self._end()
        except (ssl.SSLWantReadError, BlockingIOError):
            secure.settimeout(PATIENCE)
        except OSError:
            self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._client.close()
        self._end()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


# ----------------------------------------------------------------------------- the server


class _Here:
    """This machine, as a host of ``RemoteMachine``."""

    address = "127.0.0.1"

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        # What the handler of the tests logs about nonsense would hide the findings.
        return subprocess.Popen(command, text=True, stderr=subprocess.DEVNULL, **options)


def memory(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(pid)


def check_served(port: int, directory: Path) -> None:
    """Raise an error if a good machine is not served."""
    deadline = time.monotonic() + PATIENCE
    link = connect(f"127.0.0.1:{port}", read_secrets(directory), hello("good"), timeout=PATIENCE)
    try:
        while True:
            try:
                wanted = WantedValues.of(FINGERPRINT, np.arange(VALUES, dtype=np.int64))
                answers = list(link.get(wanted, timeout=PATIENCE))
                break
            except PeerSlow:  # the fuzzer's calls are still being served
                if time.monotonic() > deadline:
                    raise
    finally:
        link.close()
    if any(bytes(answer.value) != bytes([answer.place]) * SIZE for answer in answers):
        raise AssertionError("a good machine gets wrong values")


def fuzz(messages: int, seed: int, show: Callable[[str], None] = lambda _: None) -> Report:
    """Send this many messages. Raises AssertionError or PeerFault for a finding."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "secrets"
        make_secrets(directory)
        with (
            RemoteMachine(_Here(), directory, "target") as machine,  # type: ignore[arg-type]
            closing(Attacker(machine.port, directory)) as attacker,
        ):
            pid = machine.process.pid
            attacker.check()
            for number in range(OVERSIZED_FIRST):
                attacker.oversized(random.Random(f"{seed}-oversized-{number}"))
            before = 0
            for number in range(messages):
                if number == int(messages * WARM_UP):
                    check_served(machine.port, directory)
                    before = memory(pid, "VmRSS")
                try:
                    attacker.send(random.Random(f"{seed}-{number}"))
                except AssertionError as error:
                    raise AssertionError(f"message {number}: {error}") from None
                if machine.process.poll() is not None:
                    code = machine.process.returncode
                    raise AssertionError(f"the server ended with code {code}, message {number}")
                if number % CHECK_EVERY == CHECK_EVERY - 1:
                    check_served(machine.port, directory)
                    show(f"{number + 1:,} messages, {memory(pid, 'VmRSS') >> 20} MB")
            check_served(machine.port, directory)
            after, most = memory(pid, "VmRSS"), memory(pid, "VmHWM")
            return Report(dict(attacker.sent), before, after, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    report = fuzz(options.messages, options.seed, print)
    for kind, count in sorted(report.sent.items()):
        print(f"{count:>9,}  {kind}")
    print(
        f"memory of the server: {report.before >> 20} MB after the warm-up, "
        f"{report.after >> 20} MB at the end, {report.most >> 20} MB at most"
    )
    if report.after - report.before > GROWTH:
        sys.exit(f"FOUND: its memory has grown by more than {GROWTH >> 20} MB")
    print("nothing found")


if __name__ == "__main__":
    main()
