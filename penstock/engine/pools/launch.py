"""Starts worker processes: as programs of their own, or by fork.

The kernel kills a worker when the *thread* that started it ends (see ``die_with_parent``), so a
worker must be started by a thread that lives as long as the worker: ``outlives_workers``.
"""

from __future__ import annotations

import _imp
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import penstock
from penstock.engine.pools.orphan import die_with_parent
from penstock.engine.pools.worker import serve

StartMethod = Literal["program", "fork"]

ChooseStart = Callable[[], StartMethod]
"""Called each time that a pool starts: what can be forked safely changes while a program runs."""


def as_program() -> StartMethod:
    """Start workers as programs of their own."""
    return "program"


def as_fork() -> StartMethod:
    """Fork workers from this process."""
    return "fork"


_BOOT = (
    "import sys; sys.path[0] = sys.argv[3]; "
    "from penstock.engine.pools.orphan import die_with_parent; die_with_parent(int(sys.argv[2])); "
    "import importlib; importlib.import_module('penstock.engine.pools.' + sys.argv[4]).main()"
)


IMPORT_LIMIT = 10.0
"""Seconds that a fork waits for the imports of other threads."""


class WorkerProcess(Protocol):
    """A worker process that was started.

    Known after its end: ``error``: why there was none; ``declined``: no worker of this pipeline can
    be started in this way; ``innocent``: it ended with the process that forked it, so no task is
    the reason.
    """

    error: str
    declined: bool
    innocent: bool

    @property
    def pid(self) -> int | None: ...

    def end(self, patience: float) -> int | None:
        """Wait up to ``patience`` seconds for the process, then kill it. Returns its exit code."""


class Program:
    """A worker, or the zygote that forks workers, as a program of its own.

    ``socket_fd``: its end of the socket.
    """

    def __init__(
        self, socket_fd: int, parent: int, module: Literal["worker", "zygote"] = "worker"
    ) -> None:
        self.error, self.declined, self.innocent = "", False, False
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
                [sys.executable, "-c", _BOOT, str(socket_fd), str(parent), root, module],
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
    """A worker that was forked. ``close_others``: closes what it must not keep of its parent."""

    def __init__(self, sock: Any, close_others: Callable[[], None], *args: Any) -> None:
        self.error, self.declined, self.innocent = "", False, False
        context = multiprocessing.get_context("fork")
        child = (sock, close_others, *args)
        self._process = context.Process(target=_forked, args=child, daemon=True)
        # The parent's handlers must not run in the worker: signals wait until it has its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            with no_imports(), warnings.catch_warnings():
                # Python 3.12 and later warn if there are other threads, such as ours.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def end(self, patience: float) -> int | None:
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


@contextlib.contextmanager
def no_imports(limit: float = IMPORT_LIMIT) -> Iterator[None]:
    """Wait until no other thread imports a module, and let none begin.

    The lock of a module that another thread imports during a fork stays locked in the child, which
    then waits forever if it imports the module too. Python itself does not prevent this.
    """
    # Nothing public shows these locks. One exists from before it is taken until after the import.
    locks: dict[str, Any] = getattr(importlib._bootstrap, "_module_locks", {})
    here, give_up = threading.get_ident(), time.monotonic() + limit
    while True:
        _imp.acquire_lock()
        found = [lock for lock in [ref() for ref in list(locks.values())] if lock is not None]
        busy = any(lock.owner != here for lock in found)
        del found
        if not busy or time.monotonic() > give_up:
            break
        _imp.release_lock()
        time.sleep(0.001)
    try:
        yield
    finally:
        _imp.release_lock()


def _forked(sock: Any, close_others: Callable[[], None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):
        _imp.release_lock()  # of no_imports, which the parent is in
    die_with_parent(args[-1])
    signal.set_wakeup_fd(-1)  # an event loop of the parent reads from it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    close_others()
    try:
        serve(sock, *args, forked=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Skip the interpreter's shutdown: it would run what the parent registered for its own.
    sys.stdout.flush()
    sys.stderr.flush()
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
