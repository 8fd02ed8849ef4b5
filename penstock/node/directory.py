"""The directory of a node: its socket, locks and log, which only its user can open."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket as sockets
import struct
from collections.abc import Iterator
from pathlib import Path

from penstock import config
from penstock.errors import StoreError
from penstock.host.private_dir import check_own, own_directory

SOCKET, LOCK, STARTING, LOG = "node.sock", "node.lock", "starting.lock", "node.log"

# The path of a Unix socket must fit into 108 bytes, including the terminating zero.
_LONGEST = 107

_CREDENTIALS = struct.Struct("3i")


class NodeDirectory:
    """The directory of this user's node; ``path`` is ``config.runtime_dir()`` by default."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or config.runtime_dir()
        if len(os.fsencode(self.socket)) > _LONGEST:
            raise StoreError(
                f"{self.socket} is too long for a socket ({_LONGEST} bytes at most). Set "
                "PENSTOCK_RUNTIME_DIR to a shorter directory."
            )

    @property
    def socket(self) -> Path:
        return self.path / SOCKET

    @property
    def log(self) -> Path:
        return self.path / LOG

    def create(self) -> None:
        own_directory(self.path)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Hold the lock of the process that starts a node; wait while another process holds it."""
        self.create()
        fd = _open(self.path / STARTING)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            _unlock_and_close(fd)

    def claim(self) -> int | None:
        """Lock the directory for one node, for as long as that node lives.

        Returns the descriptor that holds the lock, or ``None`` if another process holds it.
        """
        self.create()
        fd = _open(self.path / LOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def connect(self) -> sockets.socket | None:
        """Connect to the node. Returns ``None`` if no node is listening."""
        try:
            # A user who could put a socket here could send us anything.
            check_own(self.path)
        except FileNotFoundError:
            return None
        sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        try:
            sock.connect(str(self.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def listen(self) -> sockets.socket:
        """Listen as the node of this directory, which the caller must have claimed."""
        # The claim is ours, so a socket that is here belongs to a dead node.
        self.socket.unlink(missing_ok=True)
        sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        before = os.umask(0o177)
        try:
            sock.bind(str(self.socket))
        finally:
            os.umask(before)
        sock.listen(128)
        return sock


def peer_of(sock: sockets.socket) -> tuple[int, int]:
    """Process id and user id of the other end of a socket, as the kernel reports them."""
    credentials = sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _unlock_and_close(fd: int) -> None:
    # A child forked in the meantime has a copy of the descriptor: closing ours alone would leave
    # the lock with that child.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
