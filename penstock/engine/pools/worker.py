"""The worker program: a process that prepares tasks for the training process that started it.

It is a program of its own and never imports the user's main module, so scripts without a
``__main__`` guard, notebooks and lambdas all work. It ends when its socket closes or its parent
process is gone.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.engine.pools.messages import (
    VOCABULARY,
    CannotStart,
    EndWorker,
    Started,
    TaskSent,
    done_message,
)
from penstock.engine.pools.orphan import watch_parent
from penstock.engine.pools.runner import Outcome, Runner, Task, Work, WorkerInfo, WorkerInit
from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.slots import Layout, Slot, map_shared
from penstock.keyed import GlobalPeek, Keys
from penstock.serialize import pack, unpack


class WorkerSlot(Slot):
    """A slot of the training process, mapped in this process."""

    __slots__ = ()

    def __init__(self, number: int, fd: int) -> None:
        self.id = number
        self.fd = fd
        self._register = None
        self.size = os.fstat(fd).st_size
        self.map = map_shared(fd, self.size)

    def grow(self, nbytes: int) -> None:
        """Make the slot at least ``nbytes`` long."""
        # Another worker may have made it longer, and may write to all of it again: to shorten it
        # would kill that worker.
        self.refresh()
        if self.size < nbytes:
            os.ftruncate(self.fd, nbytes)
            self.refresh()

    def close(self) -> None:
        os.close(self.fd)


class _TaskLoop:
    """Receives tasks, runs them and sends their outcomes.

    With one runner, tasks run in this thread. With several (a crew), each has a thread of its own,
    and this thread only receives: threads begin tasks in the order in which they came.
    """

    def __init__(self, wire: Wire, runners: Sequence[Runner]) -> None:
        self.wire = wire
        self.runners = runners
        self.layout: Layout | None = None
        self.slots: dict[int, WorkerSlot] = {}
        self.columns: dict[int, tuple[Layout, Any]] = {}
        self.mapped = MappedSlots()
        self._waiting: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._serve, args=(runner,), name=f"penstock-{number}")
            for number, runner in enumerate(self.runners if len(self.runners) > 1 else ())
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        while (tasks := self._receive()) is not None:
            for task in tasks:
                if threads:
                    self._waiting.put(task)
                elif not self._run(self.runners[0], task):
                    return

    def _receive(self) -> list[Task] | None:
        """The next tasks; ``None``: end."""
        received = self.wire.receive()
        if received is None or isinstance(received[0], EndWorker):
            return None
        message, fds = received
        for freed in message.freed:
            if self.mapped.forget(freed):
                self._unmap(freed)
        new = iter(fds)
        return [self._task(TaskSent(*fields), new) for fields in message.tasks]

    def _serve(self, runner: Runner) -> None:
        while (task := self._waiting.get()) is not None:
            self._run(runner, task)

    def _run(self, runner: Runner, task: Task) -> bool:
        """Run a task and send its outcome. Returns false if nobody receives it."""
        try:
            outcome = runner.run(task)
        except BaseException:
            if len(self.runners) == 1:
                raise
            # Code that calls sys.exit() ends a worker process; a thread would end unnoticed.
            traceback.print_exc()
            os._exit(1)
        nbytes = self._write_into_slot(task, outcome)
        try:
            self.wire.send(done_message(task.id, outcome, nbytes))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _task(self, message: TaskSent, fds: Iterator[int]) -> Task:
        if message.layout is not None:
            self.layout = unpack(message.layout)
        slot = None
        slot_id = message.slot
        columns: Any = ()
        if slot_id is not None:
            _, unmapped = self.mapped.touch(slot_id)
            if message.new_slot:
                self.slots[slot_id] = WorkerSlot(slot_id, next(fds))
            if unmapped is not None:
                self._unmap(unmapped)
            slot = self.slots[slot_id]
            if message.kind == "rows" and self.layout is not None:
                made = self.columns.get(slot_id)
                if made is None or made[0] is not self.layout:
                    slot.refresh()
                    made = (self.layout, self.layout.columns(slot.map))
                    self.columns[slot_id] = made
                columns = made[1]
        keys = Keys(message.epoch, message.indices, message.replicas)
        return Task(
            message.id,
            message.kind,
            keys,
            message.first,
            slot,
            self.layout,
            columns,
            message.batch,
            resumed=message.resumed,
        )

    def _unmap(self, slot: int) -> None:
        self.slots.pop(slot).close()
        self.columns.pop(slot, None)

    def _write_into_slot(self, task: Task, outcome: Outcome) -> int | None:
        """Pack a collated batch into its slot. Returns its size in bytes."""
        if outcome.value is None or not isinstance(task.slot, WorkerSlot):
            return None
        try:
            packed = pack(outcome.value)
            if packed.nbytes > task.slot.size:
                self.columns.pop(task.slot.id, None)
                task.slot.grow(packed.nbytes)
            packed.write_into(memoryview(task.slot.map))
        except Exception as error:  # a user's collate may return values that cannot be pickled
            outcome.error = error
            return None
        return packed.nbytes


def serve(
    sock: socket.socket,
    work: Work,
    infos: Sequence[WorkerInfo],
    init: WorkerInit | None,
    parent: int,
    *,
    forked: bool = False,
) -> None:
    """Prepare tasks until the socket closes, with a thread for each of ``infos``.

    ``forked``: most objects here are the parent's.
    """
    # The parent ends the workers on Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    wire = Wire(sock, VOCABULARY)
    wire.send(Started())
    if not forked:  # a collection would copy the memory of the parent's objects, and finalize some
        gc.collect()
    gc.freeze()
    GlobalPeek.watch()
    runners = [Runner(work, info, init) for info in infos]
    if len(runners) == 1:  # in a crew each thread does it for itself
        runners[0].set_up()
    _TaskLoop(wire, runners).run()


def load_work(fd: int) -> tuple[Work, WorkerInit | None]:
    """The work in the shared memory of this descriptor, which is closed. Runs user code."""
    # A private mapping: a dataset may change its arrays, which are copied on write, and all workers
    # share the memory of arrays that are only read.
    packed = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    os.close(fd)
    work, init = unpack(packed)
    return work, init


def main() -> None:
    """Run as a program. Arguments: the descriptor of the socket, the parent's process id."""
    parent = int(sys.argv[2])
    sock = socket.socket(fileno=int(sys.argv[1]))
    wire = Wire(sock, VOCABULARY)
    received = wire.receive()
    if received is None:
        return
    setup, fds = received
    sys.path[:] = setup.path
    try:
        work, init = load_work(fds[0])
    except BaseException:
        wire.send(CannotStart(traceback.format_exc()))
        return
    infos = [
        WorkerInfo(setup.number + thread, setup.workers, setup.seed, process=True)
        for thread in range(setup.threads)
    ]
    serve(sock, work, infos, init, parent)
    # Skip the interpreter's shutdown: libraries with threads of their own may hang in it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
