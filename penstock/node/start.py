"""Finding this user's node, and starting it where there is none."""

from __future__ import annotations

import json
import os
import select
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import WorkerError
from penstock.node.place import Place

PATIENCE = 60.0
"""Seconds that a node may take to start: a machine on which eight jobs load torch is a busy one."""

_LOG = 10 << 20
"""A log that has grown beyond this is begun anew by the next node."""

# The program forks once more, so that a node is nobody's child and leaves nobody a zombie.
_BOOT = (
    "import json, os, sys; os.fork() and os._exit(0); sys.path[:] = json.loads(sys.argv[2]); "
    "from penstock.node.program import main; main()"
)


def connect(
    place: Place, clock: Callable[[], float] = time.monotonic, *, patience: float = PATIENCE
) -> sockets.socket:
    """A line to the node, which is started if need be. Any number of processes may ask at once."""
    sock = place.connect()
    if sock is not None:
        return sock
    with place.starting():
        sock = place.connect()
        if sock is None:
            alive = _launch(place)
            try:
                sock = _await(place, alive, clock, patience)
            finally:
                os.close(alive)
    return sock


def _await(place: Place, alive: int, clock: Callable[[], float], patience: float) -> sockets.socket:
    """The first line to a node that is just starting; ``alive`` ends when the node does."""
    deadline = clock() + patience
    watched = select.poll()
    watched.register(alive, select.POLLIN)
    while True:
        ended = bool(watched.poll(10))
        sock = place.connect()
        if sock is not None:
            return sock
        if ended or clock() > deadline:
            raise WorkerError(
                f"no node could be started in {place.path}"
                + ("" if ended else f" within {patience:g} s")
                + f". The end of its log, {place.log}:\n{_tail(place.log)}"
            )


def _launch(place: Place) -> int:
    """Start a node, and return the end of a pipe that closes when it is gone."""
    root = str(Path(__file__).resolve().parents[2])
    path = [root, *(os.path.abspath(one) for one in sys.path)]
    one_thread = {
        name: os.environ.get(name, "1")
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND
    log = os.open(place.log, flags, 0o600)
    alive, held = os.pipe()
    try:
        if os.fstat(log).st_size > _LOG:
            os.ftruncate(log, 0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            subprocess.run(
                [sys.executable, "-c", _BOOT, str(place.path), json.dumps(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[held],
                env={**os.environ, **one_thread},
                start_new_session=True,
                check=True,
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


def _tail(path: Path, lines: int = 20) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)
