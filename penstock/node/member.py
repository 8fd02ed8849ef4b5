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
from penstock.engine.open_batch import Ready
from penstock.engine.pools.answer import unpack_error
from penstock.engine.pools.wire import Wire
from penstock.engine.slots import shared_file
from penstock.errors import PenstockError, PipelineError, WorkerError
from penstock.node.line import Leases, Line
from penstock.node.place import Place
from penstock.node.protocol import RELEASE, VERSION, keys_out, named
from penstock.node.start import connect
from penstock.node.state import WINDOW, Lag, Name
from penstock.order.deal import BatchKeys
from penstock.order.streams import Rotation
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

    ``part`` tells ranks apart, ``size`` is that of this member's batches, and ``cuts`` says that it
    can make them of batches of another size.
    """

    group: str
    recipe: Recipe
    description: Mapping[str, Any]
    part: str
    size: int
    cuts: bool
    lag: Lag


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

    def start(self, plans: Iterator[BatchKeys], rotation: Rotation | None = None) -> None:
        """Have these batches from now on; whatever was asked for before is forgotten."""
        self._arrived.clear()
        self._wants.clear()
        self._plans = plans
        self._begun = None
        if self._line is not None:
            self._send("rewind")

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
        self._send("begin", epoch, length, first, done)
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
            line, keys = self._attached(), keys_out(plan)
            self._wants.append((named(self._part, keys), plan))
            line.later(["want", *keys])

    def _send(self, *message: Any) -> None:
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
            line = Line(Wire(connect(self._place)))
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
        about = dict(mine.description)
        line.wire.send(
            [
                "join",
                VERSION,
                RELEASE,
                mine.group,
                about,
                mine.part,
                mine.size,
                mine.cuts,
                self.unit,
                mine.lag,
            ]
        )
        received = line.wire.receive()
        if received is None:
            raise ConnectionResetError
        (word, *said), _ = received
        if word == "broken":
            raise unpack_error(said[0])
        if word != "welcome":
            raise PipelineError(f"share={mine.group!r}: {said[0]}")
        self.unit, self._part = said[1:]
        if said[0]:
            fd = _code(mine.recipe)
            try:
                line.wire.send(["code", _path(), os.getcwd()], [fd])
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
                    line.wire.send(["begin", epoch, length, asked, self._done])
                for name, plan in self._wants:
                    if name not in self._arrived:
                        line.wire.send(["want", *keys_out(plan)])
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
        (word, *said), fds = received
        if word == "batch":
            self._deaths = 0
            self._batch(line, said, fds)
        elif word == "failed":
            name = Name(self._part, *said[:3])
            self._arrived[name] = _Arrived(None, 0, 0, [], unpack_error(said[3]))
        elif word == "first":
            if self._begun is not None and self._begun[0] == said[0]:
                self._first = said[1]
        elif word == "broken":
            self.close()
            raise unpack_error(said[0])
        else:
            self.close()
            raise PenstockError(f"share={self._membership.group!r}: {said[0]}")

    def _batch(self, line: Line, said: list[Any], fds: list[int]) -> None:
        name = Name(self._part, *said[:3])
        value = line.value(name, said[3:], fds, self._leases)
        *_, rows, nbytes, _, bad = said
        if any(name == wanted for wanted, _ in self._wants):
            self._arrived[name] = _Arrived(value, rows, nbytes, bad)

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
