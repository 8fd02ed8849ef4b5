"""Several hosts on one machine: network namespaces, joined by a bridge in a namespace of its own.

Each host has one link to the bridge, whose rate can be limited and which can be cut. Nothing
outside these namespaces is changed. They vanish with the processes that hold them open: one child
for each namespace, which the kernel kills when the process that made it ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_HOLDER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that made it
if libc.unshare(0x40000000):  # CLONE_NEWNET
    sys.exit(os.strerror(ctypes.get_errno()))
print("ready", flush=True)
sys.stdin.read()
"""


class NoHostsError(Exception):
    """Network namespaces cannot be made here. The message says why."""


class _Namespace:
    """A network namespace without a name, held open by a child process."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            _, errors = self._holder.communicate()
            raise PermissionError(errors.strip())

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *words]

    def ip(self, *words: str) -> None:
        self.run("ip", *words)

    def run(self, *words: str) -> None:
        done = subprocess.run(self.command(*words), capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")

    def close(self) -> None:
        # Its virtual interfaces vanish with the namespace.
        with self._holder:
            self._holder.kill()


class Host:
    """A host with an address and one link. ``start`` runs programs on it."""

    def __init__(self, network: _Namespace, number: int) -> None:
        self.address = f"10.199.0.{number}"
        self._network = network
        self._port = f"port{number}"
        """The other end of its link, at the bridge."""
        self._space = _Namespace()
        try:
            self._space.ip("link", "set", "lo", "up")
            peer = ["peer", "name", "eth0", "netns", str(self._space.pid)]
            network.ip("link", "add", self._port, "type", "veth", *peer)
            network.ip("link", "set", self._port, "master", "bridge", "up")
            self._space.ip("address", "add", f"{self.address}/24", "dev", "eth0")
            self._space.ip("link", "set", "eth0", "up")
        except BaseException:
            self._space.close()
            raise

    def processes(self) -> list[int]:
        """The processes that run on this host."""
        here, found = os.readlink(f"/proc/{self._space.pid}/ns/net"), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self._space.pid:
                with suppress(OSError):  # it has just ended
                    if os.readlink(entry / "ns" / "net") == here:
                        found.append(int(entry.name))
        return found

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a program on this host."""
        return subprocess.Popen(self._space.command(*command), text=True, **options)

    def limit(self, rate: str) -> None:
        """Limit the rate at which this host sends and receives, such as ``"100mbit"``."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        self._space.run("tc", "qdisc", "replace", "dev", "eth0", *shape)
        self._network.run("tc", "qdisc", "replace", "dev", self._port, *shape)

    def cut(self) -> None:
        """Detach the link from the bridge: packets are lost, and neither end notices."""
        self._network.ip("link", "set", self._port, "nomaster")

    def mend(self) -> None:
        self._network.ip("link", "set", self._port, "master", "bridge")

    def sent_bytes(self) -> int:
        """Bytes that this host has sent over its link."""
        lines = Path(f"/proc/{self._space.pid}/net/dev").read_text().splitlines()
        [counts] = [line.partition(":")[2].split() for line in lines if "eth0:" in line]
        return int(counts[8])

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the calling thread be on this host. Sockets that it makes are this host's."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/proc/{self._space.pid}/ns/net", os.O_RDONLY)
        try:
            _set_namespace(there)
            yield
        finally:
            _set_namespace(here)
            os.close(there)
            os.close(here)

    def close(self) -> None:
        self._space.close()


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, 0x40000000):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """This many hosts. Raises NoHostsError where they are not permitted."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(
            f"{', '.join(missing)} not installed: iproute2 and util-linux are needed"
        )
    if os.getuid() != 0:
        raise NoHostsError("only root may make network namespaces")
    made: list[Host] = []
    try:
        network = _Namespace()
    except PermissionError as error:
        raise NoHostsError(f"may not make network namespaces: {error}") from None
    try:
        try:
            network.ip("link", "add", "bridge", "type", "bridge")
            network.ip("link", "set", "bridge", "up")
            for number in range(count):
                made.append(Host(network, number + 1))
        except OSError as error:
            raise NoHostsError(f"may not make virtual networks: {error}") from None
        yield made
    finally:
        for host in made:
            host.close()
        network.close()
