"""A member's end: to a loader it is the engine, and what it hands out the node has prepared."""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.build import Recipe
from penstock.engine.feed import Queue, Ready
from penstock.engine.pools.messages import unpack_error
from penstock.engine.pools.wire import Wire
from penstock.engine.slots import shared_file
from penstock.errors import PenstockError, PipelineError, WorkerError
from penstock.node.line import Leases, Line
from penstock.node.place import Place
from penstock.node.protocol import (
    RELEASE,
    VERSION,
    VOCABULARY,
    BatchFailed,
    BatchGiven,
    BeginEpoch,
    Broken,
    Code,
    First,
    Join,
    Rewind,
    Want,
    Welcome,
)
from penstock.node.start import connect
from penstock.node.state import WINDOW, Lag, Name
from penstock.order.plan import BatchKeys
from penstock.serialize import pack, unpack
from penstock.stats import BadSample, Meter

DEPTH = 4
"""Batches that are asked for ahead: the node prepares them while this job is busy."""

KEPT = 4
"""Batches that a loop may keep as they are. Of more it gets copies, so that a job that collects
batches does not take the others' room."""

TRIES = 3
"""How often in a row a node may die before one batch has come of it."""


@dataclass(frozen=True)
class Membership:
    """What is shared, with whom: ``description`` must be the same for all members.

    ``part`` tells ranks apart, ``size`` is that of this member's batches, ``cuts`` says that it can
    make them of batches of another size, and ``keeps`` that the pipeline has stages that keep
    samples.
    """

    group: str
    recipe: Recipe
    description: Mapping[str, Any]
    part: str
    size: int
    cuts: bool
    lag: Lag
    keeps: bool = False


@dataclass(slots=True)
class _Arrived:
    value: Any
    rows: int
    nbytes: int
    bad: list[Any]
    error: BaseException | None = None


class Attached:
    """Has batches prepared by the node. It is used like an ``Engine``, from one thread at a time.

    A node that dies is started again, and asked for what was not handed out yet.
    """

    def __init__(
        self,
        membership: Membership,
        meter: Meter,
        place: Place | None = None,
        *,
        prefetch: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.restarts = 0
        self.unit: int | None = None
        """How many samples the group's batches have, once it is known."""
        self._part = ""
        self._membership = membership
        self._place = place or Place()
        self._meter = meter
        self._depth = prefetch or DEPTH
        self._timeout = timeout
        self._line: Line | None = None
        self._plans: Iterator[BatchKeys] = iter(())
        self._starts = 0
        self._wants: deque[tuple[Name, BatchKeys]] = deque()
        self._arrived: dict[Name, _Arrived] = {}
        self._leases: Leases = {}
        self._begun: tuple[int, int | None, int] | None = None
        self._done = 0
        self._first: int | None = None
        self._deaths = 0

    # What the loader calls.

    def join(self) -> None:
        """Become a member now, rather than when the first batch is asked for."""
        self._attached()

    def start(self, batches: Iterator[BatchKeys]) -> None:
        """Ask for these batches from now on, and forget what was asked for before."""
        self._starts += 1
        self._arrived.clear()
        self._wants.clear()
        self._plans = batches
        self._begun = None
        if self._line is not None:
            self._send(Rewind())

    def settled(self) -> bool:
        """Whether the next epoch may be begun early. After a first epoch, the node has most of the
        samples that it will keep."""
        return self._starts > 0 or not self._membership.keeps

    def queue(self) -> Queue:
        """How many batches wait, and how many the loop holds."""
        wanted, arrived = len(self._wants), len(self._arrived)
        ready = bool(self._wants) and self._wants[0][0] in self._arrived
        return Queue(arrived, wanted - arrived, ready, len(self._leases))

    def next(self) -> Ready | None:
        """The next batch, or ``None`` after the last. Waits for it."""
        started = self._meter.clock()
        self._meter.start()
        # Others may wait for this core with the batch that this job has had: theirs comes first,
        # for the next ones were asked for long ago.
        os.sched_yield()
        try:
            self._ask()
            self._flush()
            if not self._wants:
                return None
            name, plan = self._wants[0]
            while name not in self._arrived:
                self._attached().tidy()
                self._hear()
            self._wants.popleft()
            return self._hand_out(name, plan, self._arrived.pop(name))
        finally:
            self._meter.waited(self._meter.clock() - started)

    def begin(self, epoch: int, length: int | None, first: int | None = None, done: int = 0) -> int:
        """Begin an epoch: with which batch, if that is left to the node."""
        self._first = first
        self._begun, self._done = (epoch, length, first or 0), done
        self._send(BeginEpoch(epoch, length, first, done))
        while self._first is None:
            self._hear()
        self._begun = (epoch, length, self._first)
        return self._first

    def begin_at_start(
        self, epoch: int, length: int | None, first: int | None = None, done: int = 0
    ) -> int:
        """Begin an epoch with its first batch, wherever the others are."""
        return self.begin(epoch, length, first or 0, done)

    def refresh(self) -> None:
        """A dataset that changes between epochs is not seen to change by a node."""

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    # Asking.

    def _ask(self) -> None:
        while len(self._wants) < self._depth:
            plan = next(self._plans, None)
            if plan is None:
                return
            if self._begun is None or self._begun[0] != plan.epoch:
                self.begin(plan.epoch, None, 0)
            line, want = self._attached(), Want.of(plan)
            self._wants.append((want.named(self._part), plan))
            line.later(want)

    def _send(self, message: tuple[Any, ...]) -> None:
        self._attached().later(message)
        self._flush()

    def _flush(self) -> None:
        try:
            self._attached().flush()
        except OSError:
            self._lost()

    def _attached(self) -> Line:
        line = self._line
        while line is None:
            line = Line(Wire(connect(self._place), VOCABULARY))
            try:
                self._join(line)
                line.wire.socket.settimeout(self._timeout)
            except (ConnectionResetError, BrokenPipeError):
                line.close()
                self._died()
                line = None
            except BaseException:
                line.close()
                raise
        self._line = line
        return line

    def _join(self, line: Line) -> None:
        mine = self._membership
        line.wire.send(
            Join(
                VERSION,
                RELEASE,
                mine.group,
                dict(mine.description),
                mine.part,
                mine.size,
                mine.cuts,
                self.unit,
                mine.lag,
            )
        )
        received = line.wire.receive()
        if received is None:
            raise ConnectionResetError
        answer, _ = received
        if isinstance(answer, Broken):
            raise unpack_error(answer.error)
        if not isinstance(answer, Welcome):
            raise PipelineError(f"share={mine.group!r}: {answer.reason}")
        self.unit, self._part = answer.unit, answer.part
        if answer.needs_code:
            fd = _code(mine.recipe)
            try:
                line.wire.send(Code(_path(), os.getcwd()), [fd])
            finally:
                os.close(fd)

    def _lost(self) -> None:
        """The node is gone. Go on with another, from where this job stands."""
        while True:
            self.close()
            self._died()
            self.restarts += 1
            try:
                line = self._attached()
                if self._begun is not None:
                    epoch, length, first = self._begun
                    asked = first if self._first is not None else None
                    line.wire.send(BeginEpoch(epoch, length, asked, self._done))
                for name, plan in self._wants:
                    if name not in self._arrived:
                        line.wire.send(Want.of(plan))
                return
            except (ConnectionResetError, BrokenPipeError):
                continue

    def _died(self) -> None:
        self._deaths += 1
        if self._deaths > TRIES:
            raise WorkerError(
                f"the node has died {self._deaths} times before it could prepare a batch. What it "
                f"said last is in {self._place.log}."
            )

    # Hearing.

    def _hear(self) -> None:
        line = self._attached()
        try:
            received = line.wire.receive()
        except TimeoutError:
            raise WorkerError(
                f"the node has sent nothing for {self._timeout:g} s. See `penstock status`, and "
                f"its log, {self._place.log}."
            ) from None
        except OSError:
            received = None
        if received is None:
            self._lost()
            return
        message, fds = received
        if isinstance(message, BatchGiven):
            self._deaths = 0
            self._batch(line, message, fds)
        elif isinstance(message, BatchFailed):
            name = Name(self._part, message.epoch, message.number, message.digest)
            self._arrived[name] = _Arrived(None, 0, 0, [], unpack_error(message.error))
        elif isinstance(message, First):
            if self._begun is not None and self._begun[0] == message.epoch:
                self._first = message.first
        elif isinstance(message, Broken):
            self.close()
            raise unpack_error(message.error)
        else:
            self.close()
            raise PenstockError(f"share={self._membership.group!r}: {message.reason}")

    def _batch(self, line: Line, given: BatchGiven, fds: list[int]) -> None:
        name = Name(self._part, given.epoch, given.number, given.digest)
        value = line.value(name, given, fds, self._leases)
        if any(name == wanted for wanted, _ in self._wants):
            self._arrived[name] = _Arrived(value, given.rows, given.nbytes, given.bad)

    def _hand_out(self, name: Name, plan: BatchKeys, arrived: _Arrived) -> Ready:
        if arrived.error is not None:
            raise arrived.error
        if self._begun is not None and plan.epoch == self._begun[0]:
            self._done += 1
        value = arrived.value
        if len(self._leases) > KEPT + WINDOW:
            value = _copied(value)
        self._attached().taken(name)
        if not self._wants:
            self._flush()
        for one in arrived.bad:
            self._meter.bad(BadSample(*one))
        if arrived.rows:
            self._meter.delivered(arrived.rows, arrived.nbytes)
        return Ready(plan, value, arrived.rows, arrived.nbytes)


def _copied(value: Any) -> Any:
    """The same value in memory of its own."""
    return unpack(pack(value).tobytes())


def _code(recipe: Recipe) -> int:
    """The recipe as one file of shared memory."""
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


def _path() -> list[str]:
    return [os.path.abspath(place) for place in sys.path]
