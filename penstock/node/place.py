"""Where a node lives: its directory, and the files in it that only its user can open."""

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

# A path to a Unix socket must fit into 108 bytes, with the zero at its end.
_LONGEST = 107

_CREDENTIALS = struct.Struct("3i")


class Place:
    """The directory of this user's node."""

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

    def make(self) -> None:
        own_directory(self.path)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Held by the one process that starts a node; others wait."""
        self.make()
        fd = _open(self.path / STARTING)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            _close(fd)

    def claim(self) -> int | None:
        """The lock that a node holds for as long as it lives; ``None`` if another has it."""
        self.make()
        fd = _open(self.path / LOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def connect(self) -> sockets.socket | None:
        """A line to the node; ``None`` where there is no node."""
        try:
            # Whoever else could put a socket there could send anything.
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
        """Be the node: the caller holds the claim, so whatever lies there is a dead one's."""
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
    """The process number and the user of whoever is at the other end, as the kernel has it."""
    told = sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return pid, uid


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _close(fd: int) -> None:
    # Closing alone would leave the lock with a child that was forked meanwhile.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
