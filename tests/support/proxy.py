"""A TCP proxy that disturbs: it delays, throttles, resets and truncates what passes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Disturbance:
    """What happens to bytes on their way back to the client.

    ``delay``: seconds before each piece. ``rate``: bytes in a second, 0 without a limit.
    ``resets_after`` and ``ends_after``: bytes after which the connection is reset, or ends as if
    everything had been sent. ``silent_after``: bytes after which nothing passes any more.
    """

    delay: float = 0.0
    rate: float = 0.0
    resets_after: int | None = None
    ends_after: int | None = None
    silent_after: int | None = None


class Proxy:
    """Passes connections on to ``target`` (host:port), with a disturbance that may be changed."""

    def __init__(
        self, target: str, *, sleep: Callable[[float], None] = time.sleep, host: str = "127.0.0.1"
    ) -> None:
        self.disturbance = Disturbance()
        self.connections = 0
        self._target = target.rpartition(":")
        self._sleep = sleep
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def reset(self) -> None:
        """Reset all connections."""
        for one in list(self._sockets):
            _reset(one)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="penstock-test-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(client)
            try:
                server = socket.create_connection((self._target[0], int(self._target[2])))
            except OSError:
                _reset(client)
                continue
            self._sockets.append(server)
            self._begin(self._forward, client, server)
            self._begin(self._backward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _backward(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 14):
                now = self.disturbance
                if now.delay:
                    self._sleep(now.delay)
                if now.rate:
                    self._sleep(len(piece) / now.rate)
                if now.resets_after is not None and passed + len(piece) > now.resets_after:
                    target.sendall(piece[: max(0, now.resets_after - passed)])
                    _reset(target)
                    return
                if now.ends_after is not None and passed + len(piece) > now.ends_after:
                    target.sendall(piece[: max(0, now.ends_after - passed)])
                    break
                if now.silent_after is not None and passed + len(piece) > now.silent_after:
                    continue
                target.sendall(piece)
                passed += len(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def _reset(one: socket.socket) -> None:
    """Close a connection with a reset instead of an orderly end."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # shutdown wakes threads that read from it; close alone would not.
        one.shutdown(socket.SHUT_RD)
        one.close()
