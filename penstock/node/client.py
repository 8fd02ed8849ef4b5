"""Connect to this user's node, start it, ask for its status, and end it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.engine.pools.wire import Wire
from penstock.errors import WorkerError
from penstock.node import patience
from penstock.node.directory import NodeDirectory, peer_of
from penstock.node.log import trim
from penstock.node.protocol import (
    VOCABULARY,
    EndNode,
    EnterCluster,
    Entered,
    GetStatus,
    LeaveCluster,
    Refused,
)

_log = logging.getLogger("penstock.share")

START_TIMEOUT = 60.0
"""Seconds a node may take to start: eight jobs that load torch at the same time keep a machine
busy."""

ANSWER_TIMEOUT = 30.0
"""Seconds a node may take to answer or to end: it may be waiting for the disk."""

_POLL_INTERVAL = 0.05

START_TRIES, FIRST_PAUSE = 4, 0.1
"""How many nodes in a row may be killed while they start, and seconds to wait before the second
one; the pause doubles each time."""

# The program forks once more, so the node is not our child and never becomes our zombie.
_BOOT = (
    "import json, os, sys; os.fork() and os._exit(0); sys.path[:] = json.loads(sys.argv[2]); "
    "from penstock.node.program import main; main()"
)


def connect_or_start(
    directory: NodeDirectory,
    clock: Callable[[], float] = time.monotonic,
    *,
    timeout: float = START_TIMEOUT,
    sleep: Callable[[float], None] = time.sleep,
) -> sockets.socket:
    """Connect to the node, and start it if none is running.

    Any number of processes may call this at the same time: only one of them starts a node. A node
    that is killed while it starts is replaced by another.
    """
    with _reported_if_slow(directory):
        return _connect_or_start(directory, clock, timeout, sleep)


@contextlib.contextmanager
def _reported_if_slow(directory: NodeDirectory) -> Iterator[None]:
    """Log that this process waits, if that takes long: the kernel waits for locks in silence."""
    timer = threading.Timer(
        patience.SILENT,
        _log.warning,
        (
            "this process has waited for more than %.0f s to connect to a node in %s. Another "
            "process may be starting one, or hang while it holds the lock. See `penstock status`, "
            "and the log, %s.",
            patience.SILENT,
            directory.path,
            directory.log,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _connect_or_start(
    directory: NodeDirectory,
    clock: Callable[[], float],
    timeout: float,
    sleep: Callable[[float], None],
) -> sockets.socket:
    sock = directory.connect()
    if sock is not None:
        return sock
    with _readable_errors(directory), directory.starting():
        sock, pause = directory.connect(), FIRST_PAUSE
        for tries in range(1, START_TRIES + 1):
            if sock is None:
                alive = _launch(directory)
                try:
                    sock = _wait_for_start(directory, alive, clock, timeout)
                finally:
                    os.close(alive)
            if sock is not None:
                return sock
            if tries < START_TRIES:
                sleep(pause)
                pause *= 2
                sock = directory.connect()
    raise WorkerError(
        f"no node could be started in {directory.path}: {START_TRIES} in a row were killed while "
        f"they started. The end of the log, {directory.log}:\n{_tail(directory.log)}"
    )


@contextlib.contextmanager
def _readable_errors(directory: NodeDirectory) -> Iterator[None]:
    """Turn errors of the operating system into a WorkerError that says what to do."""
    try:
        yield
    except OSError as error:
        raise WorkerError(
            f"no node could be started in {directory.path}: {error}.{_advice(str(error))}"
        ) from error


def _advice(reason: str) -> str:
    if os.strerror(errno.ENOSPC) in reason or os.strerror(errno.EDQUOT) in reason:
        return (
            " The disk of that directory is full: free some space, or set PENSTOCK_RUNTIME_DIR to "
            "a directory on another one."
        )
    return ""


def request_status(
    directory: NodeDirectory | None = None, *, timeout: float = ANSWER_TIMEOUT
) -> dict[str, Any] | None:
    """The status of this user's node, see ``status_of``; ``None`` if no node is running."""
    return _request(directory or NodeDirectory(), GetStatus(), timeout)


def request_end(
    directory: NodeDirectory | None = None, *, timeout: float = ANSWER_TIMEOUT
) -> dict[str, Any] | None:
    """Ask the node to end, and return its last status; ``None`` if no node is running.

    Members that are still attached start another node.
    """
    return _request(directory or NodeDirectory(), EndNode(), timeout)


def wait_for_exit(pid: int, timeout: float = ANSWER_TIMEOUT) -> bool:
    """Wait until a process has ended; false if it has not ended within ``timeout`` seconds.

    A node that has ended has released its lock. Trying to take that lock instead could stop a new
    node that members are starting at this moment.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # an old kernel or Python, or a container that forbids it
        return _poll_for_exit(pid, timeout)
    try:
        ended, _, _ = select.select([fd], [], [], timeout)
        return bool(ended)
    finally:
        os.close(fd)


def _poll_for_exit(pid: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(_POLL_INTERVAL)
    return False


def enter_cluster(
    directory: NodeDirectory, message: EnterCluster, *, timeout: float = ANSWER_TIMEOUT
) -> Entered:
    """Let the node of this machine work with others; it is started if none is running."""
    answer = _ask(directory, connect_or_start(directory), message, timeout)
    if not isinstance(answer, Entered):
        raise WorkerError(f"the node has ended while it started. Its log is {directory.log}.")
    return answer


def leave_cluster(
    directory: NodeDirectory | None = None, *, timeout: float = ANSWER_TIMEOUT
) -> dict[str, Any] | None:
    """Ask the node to leave its cluster, and return its status; ``None`` if no node is running.

    A node that no job uses ends.
    """
    return _request(directory or NodeDirectory(), LeaveCluster(), timeout)


def _request(
    directory: NodeDirectory, message: GetStatus | EndNode | LeaveCluster, timeout: float
) -> dict[str, Any] | None:
    sock = directory.connect()
    if sock is None:
        return None
    answer = _ask(directory, sock, message, timeout)
    return None if answer is None else answer.status


def _ask(
    directory: NodeDirectory, sock: sockets.socket, message: tuple[Any, ...], timeout: float
) -> Any | None:
    """Send one message; returns the answer, or ``None`` if the node has gone."""
    pid, _ = peer_of(sock)
    sock.settimeout(timeout)
    wire = Wire(sock, VOCABULARY)
    try:
        with contextlib.suppress(BrokenPipeError):  # it may have said why before it closed
            wire.send(message)
        received = wire.receive()
    except (BrokenPipeError, ConnectionResetError):
        return None
    except TimeoutError:
        raise WorkerError(
            f"the node (process {pid}) did not answer within {timeout:g} s. Its log is "
            f"{directory.log}. If it hangs, end it with `kill -9 {pid}`: attached jobs start "
            "another node and lose nothing."
        ) from None
    finally:
        wire.close()
    if received is None:
        return None
    answer, _ = received
    if isinstance(answer, Refused):
        raise WorkerError(f"the node (process {pid}) refused: {answer.reason}")
    return answer


def _wait_for_start(
    directory: NodeDirectory, alive: int, clock: Callable[[], float], timeout: float
) -> sockets.socket | None:
    """Connect to a node that is starting; ``None`` if it was killed.

    ``alive``: a pipe that closes when that node ends. If the node cannot start, it says why there.
    """
    deadline = clock() + timeout
    watched = select.poll()
    watched.register(alive, select.POLLIN)
    while True:
        changed = bool(watched.poll(10))
        sock = directory.connect()
        if sock is not None:
            return sock
        if changed:
            reason = _read_all(alive)
            if not reason:
                return None
            raise WorkerError(
                f"no node could be started in {directory.path}.{_advice(reason)} Its last words:\n"
                f"{reason}"
            )
        if clock() > deadline:
            raise WorkerError(
                f"no node could be started in {directory.path} within {timeout:g} s. The end of "
                f"its log, {directory.log}:\n{_tail(directory.log)}"
            )


def _read_all(fd: int) -> str:
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def _launch(directory: NodeDirectory) -> int:
    """Start a node. Returns the read end of a pipe that closes when the node ends."""
    root = str(Path(__file__).resolve().parents[2])
    path = [root, *(os.path.abspath(entry) for entry in sys.path)]
    one_thread = {
        name: os.environ.get(name, "1")
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    }
    trim(directory.log)
    log = _open_log(directory)
    alive, held = os.pipe()
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Killed or not, whether a node runs is seen at the pipe and the socket.
            subprocess.run(
                [sys.executable, "-c", _BOOT, str(directory.path), json.dumps(path), str(held)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[held],
                env={**os.environ, **one_thread},
                start_new_session=True,
                check=False,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException:
        os.close(alive)
        raise
    finally:
        os.close(held)
        os.close(log)
    return alive


def _open_log(directory: NodeDirectory) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND
    try:
        return os.open(directory.log, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A node without a log is better than none.
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _tail(path: Path, lines: int = 20) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)
