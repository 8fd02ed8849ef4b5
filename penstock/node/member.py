"""A member of a group: a feed for a loader whose batches the node prepares."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.build import Recipe
from penstock.engine.feed import Queue, Ready
from penstock.engine.pools.messages import unpack_error
from penstock.engine.pools.restarts import FailedStarts
from penstock.engine.pools.wire import Wire
from penstock.engine.slots import Register, shared_file
from penstock.errors import PenstockError, PipelineError, WorkerError
from penstock.node.client import connect_or_start
from penstock.node.connection import Connection, Leases
from penstock.node.copy_desk import NodeCopyDesk
from penstock.node.directory import NodeDirectory, peer_of
from penstock.node.patience import ANSWER, SILENT, Patience
from penstock.node.protocol import (
    MOST_WANTED,
    RELEASE,
    VERSION,
    VOCABULARY,
    AskProgress,
    BatchFailed,
    BatchGiven,
    BeginEpoch,
    Broken,
    Code,
    EnterCluster,
    Entered,
    First,
    Join,
    Progress,
    Rewind,
    Want,
    Welcome,
)
from penstock.node.state import WINDOW, BatchName, Lag
from penstock.node.worker_setup import runs_user_code
from penstock.order.plan import BatchKeys
from penstock.serialize import pack, unpack
from penstock.stats import BadSample, Meter

_log = logging.getLogger("penstock.share")

DEPTH = 4
"""Batches that a member asks for in advance: the node prepares them while the job is busy."""

DEPTH_IN_CLUSTER = 16
"""The same where other machines may help, whose batches are on their way for a while; at most half
an epoch. A sample of the next epoch that is wanted before its owner has it is read once more."""


def depth_in_cluster(batches: int | None) -> int:
    """Batches to ask for in advance, with this many in an epoch.

    >>> depth_in_cluster(6), depth_in_cluster(20), depth_in_cluster(5000), depth_in_cluster(None)
    (4, 10, 16, 4)
    """
    return max(DEPTH, min(DEPTH_IN_CLUSTER, (batches or 0) // 2))


KEPT = 4
"""Batches of shared memory that a training loop may keep. Further batches are copied, so that a job
that collects batches does not take the memory of the others."""


@dataclass(frozen=True)
class Membership:
    """What a member tells the node when it joins a group.

    ``description``: what the group prepares; it must be equal for all members. ``part``: rank and
    world. ``size``: this member's batch size. ``cuts``: it can make its batches from batches of
    another size. ``keeps``: the pipeline has stages that keep samples. ``enter``: makes the node
    work with other machines. ``dealt``: the rank that gets each sample in the first epoch, packed.
    """

    group: str
    recipe: Recipe
    description: Mapping[str, Any]
    part: str
    size: int
    cuts: bool
    lag: Lag
    keeps: bool = False
    enter: EnterCluster | None = None
    dealt: bytes | None = None


@dataclass(slots=True)
class _ArrivedBatch:
    value: Any
    rows: int
    nbytes: int
    bad: list[Any]
    error: BaseException | None = None
    elsewhere: Mapping[str, int] = field(default_factory=dict)


class NodeFeed:
    """A feed of batches that the node prepares. It is used from one thread at a time.

    If the node dies, the feed starts another and asks it for the batches not delivered yet.
    ``register``: see ``Connection``.
    """

    def __init__(
        self,
        membership: Membership,
        meter: Meter,
        directory: NodeDirectory | None = None,
        *,
        prefetch: int | None = None,
        timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        register: Register | None = None,
    ) -> None:
        self.restarts = 0
        self.unit: int | None = None
        """Samples in a batch of the group; ``None`` before joining."""
        self._part = ""
        self._membership = membership
        self._directory = directory or NodeDirectory()
        self._meter = meter
        self._depth = min(prefetch or DEPTH, MOST_WANTED)
        self._timeout = timeout
        self._clock = clock
        self._register = register
        self._connection: Connection | None = None
        self._plans: Iterator[BatchKeys] = iter(())
        self._starts = 0
        self._wants: deque[tuple[BatchName, BatchKeys]] = deque()
        self._arrived: dict[BatchName, _ArrivedBatch] = {}
        self._leases: Leases = {}
        self._begun: tuple[int, int | None, int] | None = None
        """Number, length and first batch of the epoch that was begun last."""
        self._done = 0
        """Batches of that epoch that were delivered."""
        self._first: int | None = None
        """First batch of that epoch; ``None`` while the node has not answered."""
        self._deaths = FailedStarts()
        """Nodes that died since the last batch came. User code runs in the workers of a node, so
        nodes are killed from outside, as a rule."""

    # What the loader calls (see ``Feed``).

    def join(self) -> None:
        """Join the group now, and not with the first request for a batch."""
        self._connected()

    def start(
        self,
        batches: Iterator[BatchKeys],
        *,
        any_thread: bool = False,
        most_ahead: int | None = None,
    ) -> None:
        """Ask for these batches from now on, and withdraw earlier requests."""
        self._starts += 1
        self._arrived.clear()
        self._wants.clear()
        self._plans = batches
        self._begun = None
        if self._connection is not None:
            self._send(Rewind())

    def settled(self) -> bool:
        """Whether the next epoch may be begun early.

        After a first epoch the node has most of the samples that it will keep.
        """
        return self._starts > 0 or not self._membership.keeps

    def ready(self) -> bool:
        """Whether ``next`` would return at once."""
        return bool(self._wants) and self._wants[0][0] in self._arrived

    def queue(self) -> Queue:
        """How many batches wait, and how many the training loop holds."""
        wanted, arrived = len(self._wants), len(self._arrived)
        return Queue(arrived, wanted - arrived, self.ready(), len(self._leases))

    def next(self) -> Ready | None:
        """The next batch, or ``None`` after the last. Waits for it."""
        started = self._meter.clock()
        self._meter.start()
        # Another job may be waiting for this core with the batch that this job has just used. Let
        # it run first: the batches this job needs next were asked for long ago.
        os.sched_yield()
        try:
            self._ask()
            self._flush()
            if not self._wants:
                return None
            name, plan = self._wants[0]
            patience = self._patience(f"batch {name.number} of epoch {name.epoch}")
            while name not in self._arrived:
                self._connected().tidy()
                self._receive(patience)
            self._wants.popleft()
            return self._hand_out(name, plan, self._arrived.pop(name))
        finally:
            self._meter.waited(self._meter.clock() - started)

    def begin(self, epoch: int, length: int | None, first: int | None = None, done: int = 0) -> int:
        """Begin an epoch. Returns its first batch: ``first``, or the node's choice if ``None``."""
        self._first = first
        self._begun, self._done = (epoch, length, first or 0), done
        self._send(BeginEpoch(epoch, length, first, done))
        patience = self._patience(f"the node's choice of the first batch of epoch {epoch}")
        while self._first is None:
            self._receive(patience)
        self._begun = (epoch, length, self._first)
        return self._first

    def begin_at_start(
        self, epoch: int, length: int | None, first: int | None = None, done: int = 0
    ) -> int:
        """Begin an epoch with batch 0 (or ``first``), wherever the other members are."""
        return self.begin(epoch, length, first or 0, done)

    def refresh(self) -> None:
        """Nothing: the node does not see changes of a dataset between epochs."""

    def copy_desk(self) -> NodeCopyDesk:
        """See ``SharedFeed``. Called after ``join``."""
        return NodeCopyDesk(self._membership.group, self._part, self._directory)

    def close(self) -> None:
        # Batches that nobody will take must not count as batches that this process still uses.
        self._arrived.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave()

    # Sending.

    def _ask(self) -> None:
        while len(self._wants) < self._depth:
            plan = next(self._plans, None)
            if plan is None:
                return
            if self._begun is None or self._begun[0] != plan.epoch:
                self.begin(plan.epoch, None, 0)
            connection, want = self._connected(), Want.of(plan)
            self._wants.append((want.named(self._part), plan))
            connection.queue(want)

    def _send(self, message: tuple[Any, ...]) -> None:
        self._connected().queue(message)
        self._flush()

    def _flush(self) -> None:
        try:
            self._connected().flush()
        except OSError:
            self._reconnect()

    def _connected(self) -> Connection:
        """The connection to the node; connects, and joins the group, if there is none."""
        connection = self._connection
        while connection is None:
            wire = Wire(connect_or_start(self._directory), VOCABULARY)
            connection = Connection(wire, self._register)
            try:
                self._join(connection)
            except (ConnectionResetError, BrokenPipeError):
                connection.close()
                self._count_death()
                connection = None
            except BaseException:
                connection.close()
                raise
        self._connection = connection
        return connection

    def _join(self, connection: Connection) -> None:
        mine = self._membership
        if mine.enter is not None:
            connection.wire.send(mine.enter)
            answer = self._answer(connection, "the node to find the other machines")
            if not isinstance(answer, Entered):
                raise PipelineError(f"cluster: {answer.reason}")
        request = Join(
            VERSION,
            RELEASE,
            mine.group,
            dict(mine.description),
            mine.part,
            mine.size,
            mine.cuts,
            self.unit,
            mine.lag,
            mine.enter is not None,
            mine.dealt,
        )
        with contextlib.suppress(BrokenPipeError):  # it may have said why before it closed
            connection.wire.send(request)
        answer = self._answer(connection, "the node to let it join")
        if isinstance(answer, Broken):
            raise unpack_error(answer.error)
        if not isinstance(answer, Welcome):
            raise PipelineError(f"share={mine.group!r}: {answer.reason}")
        self.unit, self._part = answer.unit, answer.part
        if answer.needs_code:
            fd = _packed_file(mine.recipe)
            try:
                code = Code(_import_path(), os.getcwd(), runs_user_code(mine.recipe.pipeline))
                connection.wire.send(code, [fd])
            finally:
                os.close(fd)

    def _answer(self, connection: Connection, what: str) -> Any:
        """The answer of the node to a message that has just been sent."""
        self._wait(connection, self._patience(what))
        received = connection.wire.receive()
        if received is None:
            raise ConnectionResetError
        return received[0]

    def _reconnect(self) -> None:
        """The node has died: connect to another, and ask it for the batches still missing."""
        while True:
            self._disconnect()
            self._count_death()
            self.restarts += 1
            try:
                connection = self._connected()
                if self._begun is not None:
                    epoch, length, first = self._begun
                    known = first if self._first is not None else None
                    connection.wire.send(BeginEpoch(epoch, length, known, self._done))
                for name, plan in self._wants:
                    if name not in self._arrived:
                        connection.wire.send(Want.of(plan))
                return
            except (ConnectionResetError, BrokenPipeError):
                continue

    def _count_death(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """A node has died: wait before another is asked for. Raises WorkerError."""
        pause = self._deaths.pause(0, outside=True)
        if pause is None:
            raise WorkerError(
                f"the node has died {self._deaths.count(0)} times before it could prepare a batch. "
                f"Its last messages are in {self._directory.log}."
            )
        sleep(pause)

    # Receiving.

    def _wait(self, connection: Connection, patience: Patience) -> None:
        """Wait until the node has sent something. Says what it waits for if that takes long."""
        arrived = select.poll()
        arrived.register(connection.wire.socket, select.POLLIN)
        while True:
            now = self._clock()
            due = patience.due(now)
            if due == "timeout":
                raise WorkerError(
                    f"share={self._membership.group!r} waits for {patience.what}, and the node "
                    "does not answer when asked what it is doing (this is an error because the "
                    f"loader has timeout={self._timeout:g}). See `penstock status`, and its log, "
                    f"{self._directory.log}."
                )
            if due == "ask" and self._connection is connection:
                connection.queue(AskProgress())
                self._flush()
            elif due == "unanswered":
                self._complain(connection, patience, f"no answer within {ANSWER:g} s, it may hang")
            else:
                seconds = patience.seconds(now)
                if arrived.poll(None if seconds is None else 1000.0 * seconds + 1.0):
                    return

    def _patience(self, what: str) -> Patience:
        return Patience(what, self._clock(), self._timeout)

    def _complain(self, connection: Connection, patience: Patience, doing: str) -> None:
        """Log what this member waits for, and what the node says about it."""
        pid, _ = peer_of(connection.wire.socket)
        _log.warning(
            "share=%r has waited for %s for more than %.0f s. The node (process %d): %s. See "
            "`penstock status`, and its log, %s.",
            self._membership.group,
            patience.what,
            SILENT,
            pid,
            doing,
            self._directory.log,
        )

    def _receive(self, patience: Patience) -> None:
        connection = self._connected()
        try:
            self._wait(connection, patience)
            if self._connection is not connection:  # the node has died while it was asked
                patience.heard(self._clock())
                return
            received = connection.wire.receive()
        except OSError:
            received = None
        if received is None:
            self._reconnect()
            # What the last node was asked, the new one does not answer.
            patience.heard(self._clock())
            return
        message, fds = received
        if isinstance(message, Progress):
            if patience.answered(self._clock()):
                self._complain(connection, patience, message.text)
            return
        patience.heard(self._clock())
        if isinstance(message, BatchGiven):
            self._deaths.ready(0)
            self._accept(connection, message, fds)
        elif isinstance(message, BatchFailed):
            name = BatchName(self._part, message.epoch, message.number, message.digest)
            self._arrived[name] = _ArrivedBatch(None, 0, 0, [], unpack_error(message.error))
        elif isinstance(message, First):
            if self._begun is not None and self._begun[0] == message.epoch:
                self._first = message.first
        elif isinstance(message, Broken):
            self.close()
            raise unpack_error(message.error)
        else:
            self.close()
            raise PenstockError(f"share={self._membership.group!r}: {message.reason}")

    def _accept(self, connection: Connection, given: BatchGiven, fds: list[int]) -> None:
        name = BatchName(self._part, given.epoch, given.number, given.digest)
        value = connection.value(name, given, fds, self._leases)
        if any(name == wanted for wanted, _ in self._wants):
            self._arrived[name] = _ArrivedBatch(
                value, given.rows, given.nbytes, given.bad, elsewhere=given.elsewhere
            )

    def _hand_out(self, name: BatchName, plan: BatchKeys, arrived: _ArrivedBatch) -> Ready:
        if arrived.error is not None:
            raise arrived.error
        if self._begun is not None and plan.epoch == self._begun[0]:
            self._done += 1
        value = arrived.value
        if len(self._leases) > KEPT + WINDOW:
            value = _copied(value)
        self._connected().taken(name)
        if not self._wants:
            self._flush()
        for sample in arrived.bad:
            self._meter.bad(BadSample(*sample))
        if arrived.rows:
            self._meter.delivered(arrived.rows, arrived.nbytes, arrived.elsewhere)
        return Ready(plan, value, arrived.rows, arrived.nbytes)


def _copied(value: Any) -> Any:
    """A copy of the value that does not use shared memory."""
    return unpack(pack(value).tobytes())


def _packed_file(recipe: Recipe) -> int:
    """A descriptor of shared memory that holds the packed recipe."""
    try:
        packed = pack(recipe, by_value=True)
    except Exception as error:
        raise PipelineError(
            f"the pipeline cannot be sent to the node: {type(error).__name__}: {error}. Open "
            "files, locks and connections when first needed (leave them out in __getstate__)."
        ) from error
    fd = shared_file(packed.nbytes)
    with mmap.mmap(fd, packed.nbytes) as target:
        view = memoryview(target)
        packed.write_into(view)
        view.release()
    return fd


def _import_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]
