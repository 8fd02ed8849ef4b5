"""A machine of a cluster as a program, for tests on several hosts: serves values, and calls others.

Arguments: the directory of the secrets, the address to listen at, the name of the machine. Prints
the port, then the result of each command that it reads: lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cluster.flight import FlightLink, FlightServer, connect
from penstock.cluster.protocol import GetMachineStatus, Offered, WantedValues
from penstock.cluster.secrets import read_secrets
from penstock.cluster.transport import PeerFault
from tests.support import ROOT
from tests.support.keeper import Keeper, hello

if TYPE_CHECKING:
    from tests.support.hosts import Host

FINGERPRINT, VALUES, SIZE = "ab" * 16, 64, 100_000


class RemoteMachine:
    """Starts the program on a host."""

    def __init__(self, host: Host, directory: Path, name: str) -> None:
        module = "tests.support.machine"
        words = [sys.executable, "-m", module, str(directory), host.address, name]
        pipe = subprocess.PIPE
        self.process = host.start(*words, stdin=pipe, stdout=pipe, cwd=ROOT)
        self.port: int = self._result()
        self.address = f"{host.address}:{self.port}"

    def __enter__(self) -> RemoteMachine:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()

    def call(self, command: str, *arguments: Any) -> Any:
        """The result of a command."""
        self.begin(command, *arguments)
        return self.end()

    def begin(self, command: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        return self._result()

    def _result(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the machine has ended"
        return json.loads(line)


class _Frugal(Keeper):
    """A handler that keeps nothing: a fuzzer measures the memory of this program."""

    def control(self, peer: str, message: Any) -> Any:
        self.seen.clear()
        return super().control(peer, message)

    def put(self, peer: str, offered: Offered, values: Iterator[memoryview]) -> list[bool]:
        return [len(value) > 0 for value in values]


class _Program:
    def __init__(self, directory: Path, host: str, name: str) -> None:
        self._secrets = read_secrets(directory)
        self._me = hello(name)
        self._link: FlightLink | None = None
        values = {(FINGERPRINT, index, 0): bytes([index]) * SIZE for index in range(VALUES)}
        self.server = FlightServer(_Frugal(values), self._me, self._secrets, host=host)

    def connect(self, address: str, timeout: float, silence: float) -> str:
        self._link = connect(address, self._secrets, self._me, timeout=timeout, silence=silence)
        return self._link.machine

    def status(self, timeout: float) -> Any:
        assert self._link is not None
        return self._link.control(GetMachineStatus(), timeout=timeout).status["values"]

    def get(self, timeout: float) -> int:
        """The number of values that arrived as they should."""
        assert self._link is not None
        wanted = WantedValues.of(FINGERPRINT, np.arange(VALUES, dtype=np.int64))
        answers = self._link.get(wanted, timeout=timeout)
        return sum(bytes(answer.value) == bytes([answer.place]) * SIZE for answer in answers)


def main() -> None:
    program = _Program(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    _write(program.server.port)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            _write(getattr(program, command)(*arguments))
        except PeerFault as fault:
            _write([type(fault).__name__, str(fault)])


def _write(result: Any) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
