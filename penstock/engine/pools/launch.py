"""Starts worker processes: as a program of their own, or by fork if the user asks for it.

The kernel kills a worker when the *thread* that started it ends (see ``die_with_parent``), so a
worker must be started by a thread that lives as long as the worker: ``outlives_workers``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal, Protocol

import penstock
from penstock.engine.pools.orphan import die_with_parent
from penstock.engine.pools.worker import serve

StartMethod = Literal["program", "fork"]

_BOOT = (
    "import sys; sys.path[0] = sys.argv[3]; "
    "from penstock.engine.pools.orphan import die_with_parent; die_with_parent(int(sys.argv[2])); "
    "from penstock.engine.pools.worker import main; main()"
)


class WorkerProcess(Protocol):
    """A worker process that was started."""

    @property
    def pid(self) -> int | None: ...

    def end(self, patience: float) -> int | None:
        """Wait up to ``patience`` seconds for the process, then kill it. Returns its exit code."""


class Program:
    """A worker that runs as a program. ``socket_fd``: its end of the socket."""

    def __init__(self, socket_fd: int, parent: int) -> None:
        root = str(Path(penstock.__file__).resolve().parents[1])
        one_thread = {
            name: os.environ.get(name, "1")
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        }
        # Ctrl-C reaches all processes of the foreground group. Blocked here, the signal stays
        # pending in the worker until the worker ignores it, even if it comes during the start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(socket_fd), str(parent), root],
                pass_fds=[socket_fd],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **one_thread},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int | None:
        return self._popen.pid

    def end(self, patience: float) -> int | None:
        try:
            return self._popen.wait(patience)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()


class Fork:
    """A worker that was forked. ``inherited``: sockets that it must close."""

    def __init__(self, sock: Any, inherited: list[Any], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_forked, args=(sock, inherited, *args), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def end(self, patience: float) -> int | None:
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _forked(sock: Any, inherited: list[Any], *args: Any) -> None:
    die_with_parent(args[-1])
    for other in inherited:
        other.close()
    serve(sock, *args)
    os._exit(0)


def outlives_workers() -> bool:
    """Whether the calling thread lives as long as the process: it is the first one of it."""
    return threading.get_native_id() == os.getpid()


def how_it_ended(code: int | None) -> str:
    """The exit code of a process in words."""
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"ended with exit code {code}"
