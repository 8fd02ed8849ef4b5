"""Values from one process to another over loopback: the transport of a cluster, and a socket."""

from __future__ import annotations

import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.cluster.protocol import VERSION, Hello, WantedValues
from penstock.cluster.secrets import CERTIFICATE, KEY, SERVER_NAME, make_secrets, read_secrets
from penstock.cluster.transport import KeyAnswer
from penstock.node.protocol import RELEASE

FINGERPRINT = "ab" * 16
TIMEOUT = 60.0
WARM_UP = 3
"""Requests before the first that counts."""


class _Values:
    """A handler that has every value."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = values

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        yield [KeyAnswer(place, "present", value) for place, value in enumerate(self._values)]

    def control(self, peer: str, message: Any) -> Any:
        raise NotImplementedError

    def put(self, peer: str, offered: Any, values: Any) -> list[bool]:
        raise NotImplementedError

    def run(self, peer: str, task: Any) -> Iterator[Any]:
        raise NotImplementedError

    def batch(self, peer: str, wanted: Any) -> tuple[Any, list[Any]]:
        raise NotImplementedError


def serve(kind: str, directory: Path, values: int, size: int) -> None:
    """Print a port and serve until the input ends. Runs in a process of its own."""
    content = [os.urandom(size) for _ in range(values)]
    if kind == "flight":
        from penstock.cluster.flight import FlightServer

        me = Hello(VERSION, RELEASE, "server", 1)
        secrets = read_secrets(directory)
        server = FlightServer(_Values(content), me, secrets, host="127.0.0.1")
        _say(server.port)
        sys.stdin.read()
        server.close()
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _say(listener.getsockname()[1])
        plain, _ = listener.accept()
    if kind == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
        plain = context.wrap_socket(plain, server_side=True)
    with plain:
        while plain.recv(1):
            for value in content:
                plain.sendall(len(value).to_bytes(4, "little"))
                plain.sendall(value)


def _say(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


class _Case:
    """A server process of one kind, and a function that requests all its values."""

    def __init__(self, kind: str, directory: Path, values: int, size: int) -> None:
        code = "import sys; from pathlib import Path; from benchmarks.machines import serve; "
        code += f"serve({kind!r}, Path({str(directory)!r}), {values}, {size})"
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True
        )
        assert self._server.stdout is not None
        port = int(self._server.stdout.readline())
        self._values = values
        self.get: Callable[[], int] = (
            self._flight(port, directory)
            if kind == "flight"
            else self._socket(port, directory, kind)
        )
        self.wall: list[float] = []
        self.client: list[float] = []
        self.server: list[float] = []

    def _flight(self, port: int, directory: Path) -> Callable[[], int]:
        from penstock.cluster.flight import connect

        me = Hello(VERSION, RELEASE, "client", 1)
        link = connect(f"127.0.0.1:{port}", read_secrets(directory), me, timeout=TIMEOUT)
        wanted = WantedValues.of(FINGERPRINT, np.arange(self._values, dtype=np.int64))
        self._end = link.close
        return lambda: sum(len(answer.value) for answer in link.get(wanted, timeout=TIMEOUT))

    def _socket(self, port: int, directory: Path, kind: str) -> Callable[[], int]:
        plain = socket.create_connection(("127.0.0.1", port))
        if kind == "tls":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(directory / CERTIFICATE)
            plain = context.wrap_socket(plain, server_hostname=SERVER_NAME)
        self._end = plain.close

        def fill(view: memoryview) -> None:
            got = 0
            while got < len(view):
                got += plain.recv_into(view[got:])

        def get() -> int:
            plain.sendall(b"?")
            head, kept = bytearray(4), []
            for _ in range(self._values):
                fill(memoryview(head))
                kept.append(bytearray(int.from_bytes(head, "little")))
                fill(memoryview(kept[-1]))
            return sum(map(len, kept))

        return get

    def measure(self) -> int:
        wall, client, server = time.perf_counter(), time.process_time(), self._server_cpu()
        nbytes = self.get()
        self.wall.append(time.perf_counter() - wall)
        self.client.append(time.process_time() - client)
        self.server.append(self._server_cpu() - server)
        return nbytes

    def _server_cpu(self) -> float:
        # In nanoseconds; the times in /proc/pid/stat have ticks of 10 ms.
        threads = Path(f"/proc/{self._server.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def __enter__(self) -> _Case:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        with self._server:
            self._server.kill()


CASES = {"plain socket": "plain", "socket with TLS": "tls", "cluster transport": "flight"}


def run(options: Namespace) -> Result:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = Path(scratch) / "secrets"
        make_secrets(directory)
        cases = {
            title: stack.enter_context(_Case(kind, directory, options.values, options.size))
            for title, kind in CASES.items()
        }
        progress("machines: requests to all servers in turn")
        wrong = []
        for number in range(WARM_UP + options.requests):
            for title, case in cases.items():
                if number == WARM_UP:
                    for times in (case.wall, case.client, case.server):
                        times.clear()
                if case.measure() != options.values * options.size:
                    wrong.append(f"machines: {title} did not deliver everything")
        nbytes = options.values * options.size
        rows = tuple(_row(title, case, nbytes) for title, case in cases.items())
        data: dict[str, object] = {title: case.wall for title, case in cases.items()}
    heads = ("transport", "MB/s, median", "MB/s, best", "client CPU ms", "server CPU ms")
    title = f"machines: requests for {options.values} values of {options.size:,} bytes, loopback"
    return Result((Table(title, heads, rows),), (), tuple(wrong), data)


def _row(title: str, case: _Case, nbytes: int) -> tuple[str, ...]:
    median = statistics.median
    speeds = (nbytes / median(case.wall) / 1e6, nbytes / min(case.wall) / 1e6)
    cpu = (1e3 * median(case.client), 1e3 * median(case.server))
    return (title, *(f"{speed:,.0f}" for speed in speeds), *(f"{ms:.1f}" for ms in cpu))


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--values", type=count, default=64, help="values of a request (64)")
    parser.add_argument("--size", type=count, default=110_000, help="bytes of a value (110,000)")
    parser.add_argument("--requests", type=count, default=50, help="requests of each (50)")


BENCHMARK = Benchmark("machines", "values from another machine's node", run, _arguments)
