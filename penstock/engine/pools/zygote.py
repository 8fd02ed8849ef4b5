"""The zygote: a program that loads the pipeline once, and forks the workers of one pool.

To start Python and to import torch takes seconds, a fork milliseconds. Like a worker program, the
zygote never imports the user's main module. It has one thread, so that a fork is safe: a pipeline
whose imports start threads gets worker programs instead.

The kernel ends the zygote with the training process, and the workers with the zygote. The zygote is
the parent of the workers, so it reports to the pool how each of them ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.engine.pools import launch, messages
from penstock.engine.pools.orphan import die_with_parent
from penstock.engine.pools.runner import Work, WorkerInfo, WorkerInit
from penstock.engine.pools.wire import Vocabulary, Wire
from penstock.engine.pools.worker import load_work, serve

REPORT_LIMIT = 5.0
"""Seconds that a zygote may take to report the end of a worker that was killed. It takes less than
a millisecond, unless the zygote is stopped: then it is killed as well."""

SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that do not make a fork unsafe: their library prepares itself for forks. The one
of jemalloc comes with pyarrow and pandas."""


class LoadWork(NamedTuple):
    """To a new zygote: load the work, whose descriptor comes along.

    ``path``: ``sys.path`` of the training process.
    """

    path: list[str]


class ForkWorker(NamedTuple):
    """To the zygote: fork a worker. Its end of its socket comes along.

    ``number``: of its first thread; ``threads``: how many it has.
    """

    ticket: int
    number: int
    threads: int
    workers: int
    seed: int


class WorkerForked(NamedTuple):
    """From the zygote: the process id of a worker."""

    ticket: int
    pid: int


class WorkerEnded(NamedTuple):
    """From the zygote: the exit code of a worker; or why it could not be forked.

    ``with_zygote``: made by the pool: the worker ended because the zygote did.
    """

    ticket: int
    code: int
    error: str = ""
    with_zygote: bool = False


class HasThreads(NamedTuple):
    """From the zygote: it cannot fork safely, because the pipeline's imports started threads."""

    names: list[str]


VOCABULARY = Vocabulary(
    load=LoadWork,
    fork=ForkWorker,
    forked=WorkerForked,
    ended=WorkerEnded,
    threads=HasThreads,
)


# In the training process.


class Zygote:
    """A zygote as the pool sees it. ``work_fd``: the descriptor of the packed work."""

    def __init__(self, work_fd: int) -> None:
        ours, theirs = Wire.pair()
        try:
            self._program = launch.Program(theirs.fileno(), os.getpid(), "zygote")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.threads: list[str] = []
        """Names of the threads because of which it does not fork."""
        self._wire = Wire(ours, VOCABULARY)
        self._lock = threading.RLock()
        self._pids: dict[int, int] = {}
        self._ends: dict[int, WorkerEnded] = {}
        self._tickets = 0
        self._loaded = False
        self._closed = False
        self._send(LoadWork(list(sys.path)), work_fd)

    @property
    def pid(self) -> int | None:
        return self._program.pid

    @property
    def gone(self) -> bool:
        """Whether it has ended, or is about to."""
        with self._lock:
            self._read()
            return self._closed

    def fork(
        self, number: int, threads: int, workers: int, seed: int, sock: socket.socket
    ) -> ForkedWorker:
        """Ask for a worker. If the zygote has died, the worker has ended as the zygote did."""
        with self._lock:
            self._tickets += 1
            request = ForkWorker(self._tickets, number, threads, workers, seed)
            self._send(request, sock.fileno())
            return ForkedWorker(self, self._tickets)

    def _send(self, message: tuple[Any, ...], fd: int) -> None:
        with contextlib.suppress(ConnectionError):  # it died at once, which its workers notice
            self._wire.send(message, [fd])

    def pid_of(self, ticket: int) -> int | None:
        """The process id of a worker; that of the zygote if the worker is not forked yet."""
        with self._lock:
            self._read()
            return self._pids.get(ticket) or self._program.pid

    def end_of(self, ticket: int, patience: float) -> WorkerEnded:
        """Wait up to ``patience`` seconds for the end of a worker, then kill it."""
        with self._lock:
            ended = self._wait(ticket, patience)
            if ended is None:
                _kill(self._pids.get(ticket) or self._program.pid)
                ended = self._wait(ticket, REPORT_LIMIT)
            if ended is None:
                _kill(self._program.pid)
                self._closed = True
                ended = self._ended_with_it(ticket)
            return ended

    def _wait(self, ticket: int, patience: float) -> WorkerEnded | None:
        """The end of a worker, once it is known; ``None`` after ``patience`` seconds."""
        give_up = time.monotonic() + patience
        while True:
            self._read()
            if ticket in self._ends:
                self._pids.pop(ticket, None)
                return self._ends.pop(ticket)
            if self._closed:
                return self._ended_with_it(ticket)
            left = give_up - time.monotonic()
            if left <= 0.0:
                return None
            self._waiting(left)

    def _ended_with_it(self, ticket: int) -> WorkerEnded:
        """The end of a worker whose zygote has ended."""
        code = self._program.end(REPORT_LIMIT)
        if self._pids.pop(ticket, None) is not None:
            return WorkerEnded(ticket, -signal.SIGKILL, with_zygote=True)  # by the kernel
        return WorkerEnded(ticket, 1 if code is None else code)

    def _waiting(self, seconds: float) -> bool:
        """Whether there is a message, or comes one within this time."""
        poll = select.poll()
        poll.register(self._wire.socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def _read(self) -> None:
        """Take in the messages that have come."""
        while not self._closed and self._waiting(0.0):
            received = self._wire.receive()
            if received is None:
                self._closed = True
                return
            message, _ = received
            if isinstance(message, WorkerForked):
                self._loaded = True
                self._pids[message.ticket] = message.pid
            elif isinstance(message, WorkerEnded):
                self._ends[message.ticket] = message
            elif isinstance(message, HasThreads):
                self.threads = message.names

    def end(self) -> None:
        """End it, with the workers that are left."""
        with self._lock:
            self._closed = True
            # It ends when its socket closes. One that still loads the pipeline is killed.
            self._wire.close()
            self._program.end(2.0 if self._loaded else 0.0)


class ForkedWorker:
    """A worker that a zygote forks."""

    def __init__(self, zygote: Zygote, ticket: int) -> None:
        self.error = ""
        self.declined = False
        self.innocent = False
        self._zygote = zygote
        self._ticket = ticket
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        return self._zygote.pid_of(self._ticket)

    def end(self, patience: float) -> int | None:
        if self._code is None:
            ended = self._zygote.end_of(self._ticket, patience)
            self._code, self.error = ended.code, ended.error
            self.declined = bool(self._zygote.threads)
            self.innocent = ended.with_zygote
        return self._code


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# In the zygote.


class _Nursery:
    """Forks workers on request, and reports how they end."""

    def __init__(self, wire: Wire, work: Work, init: WorkerInit | None) -> None:
        self._wire = wire
        self._work = work
        self._init = init
        self._pid = os.getpid()
        self._children: dict[int, int] = {}
        self._wake = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)

    def run(self) -> None:
        """Answer requests until the pool closes the socket."""
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._wire.socket, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake[0] in ready:
                os.read(self._wake[0], 4096)
                self._reap()
            if self._wire.socket.fileno() in ready:
                received = self._wire.receive()
                if received is None:
                    return
                request, fds = received
                self._fork(request, fds[0])

    def _reap(self) -> None:
        # Only our workers: the pipeline may have started processes of its own.
        for pid, ticket in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                self._wire.send(WorkerEnded(ticket, os.waitstatus_to_exitcode(status)))

    def _fork(self, request: ForkWorker, fd: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            self._wire.send(WorkerEnded(request.ticket, 1, f"cannot create a process: {error}"))
            os.close(fd)
            return
        if not pid:
            self._become_worker(request, fd)
        os.close(fd)
        self._children[pid] = request.ticket
        self._wire.send(WorkerForked(request.ticket, pid))

    def _become_worker(self, request: ForkWorker, fd: int) -> NoReturn:
        code = 1
        try:
            die_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._wire.close()
            for other in self._wake:
                os.close(other)
            np.random.seed()  # otherwise all workers have the state of the zygote
            infos = [
                WorkerInfo(request.number + thread, request.workers, request.seed, process=True)
                for thread in range(request.threads)
            ]
            sock = socket.socket(fileno=fd)
            serve(sock, self._work, infos, self._init, self._pid, forked=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        leave(code)


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown.

    Libraries with threads of their own may hang in it, and a fork would run its parent's hooks.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def other_threads() -> list[str]:
    """Names of the threads of this process, besides the first, that make a fork unsafe."""
    try:
        tasks = [
            task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()
        ]
        names = [(task / "comm").read_text().strip() for task in tasks]
    except OSError:  # no /proc, or a thread that has just ended
        names = [thread.name for thread in threading.enumerate()[1:]]
    return [name for name in names if name not in SAFE_THREADS]


def _refuse(wire: Wire, details: str) -> None:
    """Answer the requests that have come: workers cannot start."""
    wire.socket.setblocking(False)
    while True:
        try:
            received = wire.receive()
        except BlockingIOError:
            return
        if received is None:
            return
        request, fds = received
        with contextlib.suppress(OSError), socket.socket(fileno=fds[0]) as sock:
            Wire(sock, messages.VOCABULARY).send(messages.CannotStart(details))
        wire.send(WorkerEnded(request.ticket, 0))


def main() -> None:
    """Run as a program. Arguments: the descriptor of the socket, the parent's process id."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    wire = Wire(sock, VOCABULARY)
    received = wire.receive()
    if received is None:
        return
    setup, fds = received
    sys.path[:] = setup.path
    try:
        work, init = load_work(fds[0])
    except BaseException:
        _refuse(wire, traceback.format_exc())
        leave(0)
    threads = other_threads()
    if threads:
        wire.send(HasThreads(threads))
        leave(0)
    gc.collect()
    gc.freeze()
    _Nursery(wire, work, init).run()
    leave(0)
