"""The pool that joins the workers of this machine with those of other machines.

The workers of this machine take tasks as ever. What they leave goes to other machines as
``Lending`` decides: a thread takes the tasks, and each call to another machine waits in a thread of
its own. The rows of an answer are copied into the slots here, so an answer that comes too late can
be dropped: its samples were dealt again, and randomness is keyed, so both results are the same.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.lending import (
    LARGEST_CALL,
    Call,
    Failure,
    Lender,
    Lending,
    Measured,
)
from penstock.cluster.protocol import LARGEST_VALUE, READ, RemoteTask, integers
from penstock.cluster.transport import (
    PeerDeadly,
    PeerFailed,
    PeerFault,
    PeerLacks,
    PeerLost,
    PeerNonsense,
    PeerRefused,
    PeerSlow,
    RemoteRows,
)
from penstock.engine.pools.joined import JoinedPool
from penstock.engine.pools.pool import Desk, Pool
from penstock.engine.pools.runner import Outcome, Task, TaskReport, Work
from penstock.engine.pools.wire import pack_integers
from penstock.engine.slots import Layout
from penstock.errors import ClusterError
from penstock.keyed import Keys
from penstock.stops.road import Road
from penstock.stops.stop import Offer

_log = logging.getLogger("penstock.node.cluster")

MOST_CALLS = 64
"""Calls of one pipeline to all machines at the same time. Each waits in a thread."""

LOOK = 0.5
"""Seconds between two looks at the machines of the cluster."""

STARVED = 0.02
"""Seconds after which tasks that had no slot are asked for again."""

GRACE = 5.0
"""Seconds after which a call ends that was given up because it was late."""


class Lenders(Protocol):
    """The machines that lend their cores, and how they are called."""

    def lenders(self) -> Sequence[Lender]:
        """The machines that lend cores at present, without this one."""

    def ask_rows(self, machine: str, task: RemoteTask, *, timeout: float) -> Iterator[RemoteRows]:
        """Let a machine prepare a tiny-batch. Raises PeerFault."""


class PublishedRecipe(Protocol):
    """The pipeline of a pool, for other machines."""

    def publish(self) -> str:
        """Make it available, if that was not done yet, and return its name. Raises ClusterError."""

    def missing(self) -> bool:
        """A machine cannot get it. Returns whether another try may succeed."""

    @property
    def ways(self) -> int:
        """Changes when there is another way to give it to machines."""

    def withdraw(self) -> None:
        """No machine needs it any more."""


class HeldSamples(Protocol):
    """What the caches of the pipeline have on this machine. See ``Keepers``.

    The samples of a batch were claimed before it was opened: each is here, or this machine reads
    it. So another machine that prepares some of them has nobody to wait for.
    """

    @property
    def contents(self) -> Sequence[str]: ...

    @property
    def full(self) -> bool: ...

    @property
    def stays_here(self) -> str: ...

    def held(self, indices: Sequence[int]) -> Sequence[int]: ...

    def keep_read(self, number: int, index: int, value: memoryview) -> Offer | None: ...

    def some_here(self, count: int) -> Sequence[int] | None: ...

    def discard(self, offers: Sequence[Offer]) -> None: ...


class _OpenCall(NamedTuple):
    call: Call
    tasks: list[Task]
    keys: Keys


class RemotePool(JoinedPool):
    """A pool with the workers of ``local`` and those that other machines lend. See ``Pool``.

    ``kept``: the samples that go to other machines instead of being read there. ``clock`` and
    ``cpu_clock``: seconds, and CPU seconds of the calling thread.
    """

    kind: ClassVar[str] = "remote"

    def __init__(
        self,
        local: Pool,
        work: Work,
        lenders: Lenders,
        recipe: PublishedRecipe,
        kept: HeldSamples,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(local)
        self._work = work
        self._lenders = lenders
        self._recipe = recipe
        self._kept = kept
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lending = Lending()
        self._calls: dict[int, _OpenCall] = {}
        self._copying = 0
        """Answers whose rows are being copied into slots."""
        self._round = 0
        """Counts the starts: a call of an earlier one is not wanted any more."""
        self._callers: ThreadPoolExecutor | None = None
        self._looked = -math.inf
        self._ways = recipe.ways
        self._withheld = ""
        """Why no tiny-batch leaves this machine; empty if they may."""
        self._said = False
        self._rehearsed = 0
        self._faults: dict[str, str] = {}
        """By machine: the last fault in the log."""

    # What the engine calls.

    @property
    def size(self) -> int:
        return self.local.size + self._lending.cores

    def start(self, desk: Desk) -> None:
        self.local.start(desk)
        if self._thread is not None:
            return
        self._desk = weakref.ref(desk)
        self._closing = False
        self._round += 1
        self._callers = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="penstock-remote-call")
        self._thread = threading.Thread(
            target=self._deal_often, name="penstock-remote", daemon=True
        )
        self._thread.start()

    def close(self, limit: float | None = None) -> set[int]:
        with self._wake:
            self._closing = True
            self._calls.clear()
            self._lending.forget_calls()
            self._wake.notify_all()
            thread, self._thread = self._thread, None
            callers, self._callers = self._callers, None
            while self._copying:
                # An answer that is being copied ends in a moment; nothing may be written later.
                self._wake.wait()
        if thread is not None:
            thread.join()
        if callers is not None:
            # Without waiting: what these threads wait for has a limit, and is dropped.
            callers.shutdown(wait=False, cancel_futures=True)
            self._recipe.withdraw()
        return self.local.close(limit)

    def status(self) -> dict[str, Any]:
        """What other machines have prepared, as plain data."""
        with self._wake:
            found = self._lending.stats()
            return {
                "withheld": self._withheld,
                "machines": {
                    name: {
                        "state": stats.state,
                        "cores": stats.cores,
                        "tiny_batches": stats.calls,
                        "samples": stats.samples,
                        "bytes": stats.nbytes,
                        "again": stats.again,
                        "rate": round(stats.rate, 1),
                        "reason": stats.reason,
                    }
                    for name, stats in found.items()
                },
            }

    # Dealing, in a thread of its own.

    def _deal_often(self) -> None:
        while not self._closing:
            with self._wake:
                self._notified = False
            starved = False
            try:
                self._look_for_machines()
                self._give_up_late()
                starved = self._deal()
            except Exception:  # the workers of this machine go on; the next round may succeed
                _log.exception("dealing to other machines has failed")
            with self._wake:
                if not self._notified and not self._closing:
                    due = self._lending.next_late(self._clock())
                    self._wake.wait(STARVED if starved else max(1e-3, min(LOOK, due or LOOK)))

    def _look_for_machines(self) -> None:
        now, ways = self._clock(), self._recipe.ways
        if ways == self._ways and (self._withheld or now - self._looked < LOOK):
            return
        self._looked = now
        lenders = self._lenders.lenders()
        desk = self._desk()
        left = desk.left_over() if desk is not None and lenders else 0
        with self._wake:
            self._lending.left(left, now)
            if ways != self._ways:
                self._ways, self._withheld = ways, ""
                self._lending.ways_changed()
            lost = self._lending.machines(lenders, now)
            calls = [self._calls.pop(number) for number in lost if number in self._calls]
        self._deal_again(calls, "its machine has left the cluster")

    def _give_up_late(self) -> None:
        with self._wake:
            late = self._lending.late(self._clock())
            calls = [self._calls.pop(number) for number in late if number in self._calls]
        for open_call in calls:
            self._log_fault(open_call.call.lender, "late", "it did not answer in time")
        self._deal_again(calls, "its machine did not answer in time")

    def _deal(self) -> bool:
        """Make calls while machines take them. Returns whether tasks wait for a slot."""
        while not self._withheld:
            desk = self._desk()
            with self._wake:
                if self._closing or desk is None:
                    return False
                call = self._lending.next_call(self._clock())
            if call is None:
                return False
            if call.rehearsal:
                keys = self._rehearsal_keys(call.samples)
                if not len(keys):
                    return False  # the caches will soon have samples that need not be read
                self._send(_OpenCall(call, [], keys))
                continue
            tasks = self._take(desk, call.samples)
            if not tasks:
                return desk.starved
            if any(not _can_travel(task) for task in tasks):
                self._withhold(tasks)
                return False
            joined = Keys(tasks[0].keys.epoch, [], None)
            for task in tasks:
                joined = _join(joined, task.keys)
            self._send(_OpenCall(call, tasks, joined))
        return False

    def _take(self, desk: Desk, samples: int) -> list[Task]:
        """Tasks of one epoch with at most this many samples."""
        tasks: list[Task] = []
        while samples > 0:
            try:
                task = desk.take(self.local.size, away=samples)
            except Exception as error:
                desk.broken(error)
                break
            if task is None:
                break
            if tasks and task.keys.epoch != tasks[0].keys.epoch:
                desk.lost(task.id, guilty=False, reason="it is of another epoch")
                break
            tasks.append(task)
            samples -= len(task.keys)
        return tasks

    def _rehearsal_keys(self, samples: int) -> Keys:
        """Samples from all over the data, other ones each time: one of them may be bad.

        Samples of a cache, if there is one: others would be read once more than they have to.
        """
        kept = self._kept.some_here(samples)
        if kept is not None:
            return Keys(0, list(kept))
        count = len(self._work.road.source)
        self._rehearsed += 1
        step = max(1, count // max(1, samples))
        return Keys(0, [(self._rehearsed + i * step) % count for i in range(min(samples, count))])

    def _withhold(self, tasks: Sequence[Task]) -> None:
        with self._wake:
            self._withheld = "a tiny-batch has more bytes than one message may have"
        _log.info("no other machine prepares samples: %s", self._withheld)
        self._give_back(tasks, self._withheld)

    def _send(self, open_call: _OpenCall) -> None:
        call = open_call.call
        with self._wake:
            callers = self._callers
            if self._closing or callers is None:
                return
            self._lending.sent(call, len(open_call.keys), self._clock())
            self._calls[call.number] = open_call
            started = self._round
        with suppress(RuntimeError):  # the pool is being closed
            callers.submit(self._make_call, open_call, started)

    # Calls, each in a thread.

    def _make_call(self, open_call: _OpenCall, started: int) -> None:
        try:
            cpu = self._cpu_clock()
            rows = self._ask(open_call)
            self._use(open_call, rows, cpu, started)
        except PeerFault as fault:
            self._failed(open_call, fault, started)
        except ClusterError as error:
            with self._wake:
                self._withheld = str(error)
            _log.warning("no other machine prepares samples: %s", error)
            self._failed(open_call, PeerLacks(str(error)), started)
        except BaseException as error:
            _log.exception("a call to %s has failed", open_call.call.lender)
            self._failed(open_call, PeerNonsense(type(error).__name__), started)

    def _ask(self, open_call: _OpenCall) -> _ReceivedRows:
        call, keys = open_call.call, open_call.keys
        why = self._kept.stays_here
        if why:
            raise ClusterError(why)
        self._say_that_objects_are_fetched_twice(call.lender)
        name = self._recipe.publish()
        with self._wake:
            deadline = self._lending.deadline(call.number)
        if deadline is None:
            raise PeerSlow("the call was given up before it was made")
        caches = list(self._kept.contents)
        held = b""
        if caches:
            # Samples that no machine has room for are not sent back.
            read = READ if self._kept.full else 0
            places = self._kept.held(keys.indices)
            held = bytes(read if number < 0 else 1 + number for number in places)
        task = RemoteTask(
            name,
            keys.epoch,
            pack_integers(np.array(keys.indices, np.int64)) or b"",
            None if keys.replicas is None else pack_integers(np.array(keys.replicas, np.int64)),
            LARGEST_VALUE,
            caches,
            held,
        )
        timeout = max(0.1, deadline - self._clock()) + GRACE
        parts = list(self._lenders.ask_rows(call.lender, task, timeout=timeout))
        return _ReceivedRows(parts, keys.indices, self._work.road)

    def _say_that_objects_are_fetched_twice(self, lender: str) -> None:
        """Once: an object that another machine prepares may have been fetched ahead here, too."""
        with self._wake:
            said, self._said = self._said, True
        if not said and self._work.road.source.objects is not None:
            _log.warning(
                "%s prepares samples of this job and fetches their objects itself, also those that "
                "this machine has fetched ahead: such objects are requested twice. A cache() "
                "avoids that from the second epoch on.",
                lender,
            )

    def _use(self, open_call: _OpenCall, rows: _ReceivedRows, cpu: float, started: int) -> None:
        """Copy the rows into their slots, and report the tasks as done."""
        for task in open_call.tasks:
            if task.layout is not None:
                rows.check(task.layout)
        with self._wake:
            if not self._is_wanted(open_call, started):
                return
            self._calls.pop(open_call.call.number)
            self._copying += 1
        try:
            outcomes = list(rows.split(open_call.tasks, self._kept, open_call.call.lender))
        finally:
            with self._wake:
                self._copying -= 1
                self._wake.notify_all()
        with self._wake:
            measured = Measured(
                len(open_call.keys),
                rows.nbytes + int(rows.borrowed),
                rows.busy,
                # Samples that it has borrowed are sent by other threads.
                max(0.0, self._cpu_clock() - cpu) * (1 + rows.borrowed / max(1, rows.nbytes)),
                rows.idle,
            )
            self._lending.answered(open_call.call.number, measured, self._clock())
            closed = self._closing or started != self._round
        desk = self._desk()
        for task, outcome in zip(open_call.tasks, outcomes, strict=True):
            if closed or desk is None:
                self._kept.discard(outcome.report.offers)
            else:
                desk.done(task.id, outcome)
        self._ring()

    def _is_wanted(self, open_call: _OpenCall, started: int) -> bool:
        """Whether a call was not given up. The caller holds the lock."""
        number = open_call.call.number
        return not self._closing and started == self._round and number in self._calls

    def _failed(self, open_call: _OpenCall, fault: PeerFault, started: int) -> None:
        call = open_call.call
        failure = _failure_of(fault)
        # Another machine may have removed the pipeline; then this one writes it again.
        if failure == "recipe" and not self._withheld and self._recipe.missing():
            failure = "busy"
        with self._wake:
            if not self._is_wanted(open_call, started):
                return
            self._calls.pop(call.number)
            self._lending.failed(call.number, failure, str(fault), self._clock())
        self._log_fault(call.lender, failure, str(fault))
        guilty = isinstance(fault, PeerDeadly)
        self._give_back(open_call.tasks, str(fault), guilty=guilty)
        self._ring()

    def _deal_again(self, calls: Sequence[_OpenCall], reason: str) -> None:
        for open_call in calls:
            self._give_back(open_call.tasks, reason)

    def _give_back(self, tasks: Sequence[Task], reason: str, *, guilty: bool = False) -> None:
        desk = self._desk()
        if desk is None or not tasks:
            return
        # The last one first: each becomes the next that is dealt.
        for task in reversed(tasks):
            desk.lost(task.id, guilty=guilty, reason=reason)
        self.local.notify()

    def _log_fault(self, lender: str, kind: str, reason: str) -> None:
        with self._wake:
            new = self._faults.get(lender) != kind
            self._faults[lender] = kind
        if new:  # and not again for every tiny-batch
            _log.warning("%s prepares no samples for now: %s", lender, reason)


class _ReceivedRows:
    """The rows of an answer, as it came from another machine: nothing in it is trusted."""

    def __init__(self, parts: Sequence[RemoteRows], indices: Sequence[int], road: Road) -> None:
        samples = len(indices)
        if len(parts) != 1 or (parts[0].first, parts[0].rows) != (0, samples):
            raise PeerNonsense("rows of another tiny-batch")
        [part] = parts
        report = part.report
        self._leaves = list(part.leaves)
        self._described = report.get("layout")
        self._rows = samples
        self._indices = indices
        self._read = self._split_read(report.get("read"), road.holds)
        self.borrowed = _number(report.get("borrowed", 0))
        self.busy = _number(report.get("busy"))
        self.idle = _number(report.get("idle"))
        self._tally = _tally_of(report.get("tally"), len(road.stages), road.holds)
        self._objects = report.get("objects")
        self.nbytes = sum(map(len, part.leaves))

    def _split_read(self, read: Any, holds: int) -> list[tuple[int, int, memoryview]]:
        """The samples that were read for caches here: (number of the cache, place, value)."""
        if read is None:
            return []
        if not isinstance(read, bytes) or len(read) % 24 or not self._leaves:
            raise PeerNonsense("samples that were read, without their places")
        values, first, found = memoryview(self._leaves.pop()), 0, []
        for number, place, size in integers(read).reshape(-1, 3).tolist():
            if not (0 <= number < holds and 0 <= place < self._rows and size >= 0):
                raise PeerNonsense("samples of another cache or tiny-batch")
            found.append((number, place, values[first : first + size]))
            first += size
        if first != len(values):
            raise PeerNonsense("more or fewer bytes than its samples have")
        return found

    def check(self, layout: Layout) -> None:
        """Raises PeerNonsense if the rows are not those of this layout."""
        if self._described != describe(layout):
            raise PeerNonsense(f"rows of {self._described}, and not of {describe(layout)}")
        sizes = [leaf.nbytes * self._rows for leaf in layout.leaves if leaf.dtype is not None]
        if list(map(len, self._leaves)) != sizes:
            raise PeerNonsense("rows of another size")
        for number in _object_leaves(layout):
            found = self._objects.get(str(number)) if isinstance(self._objects, dict) else None
            if not isinstance(found, list) or len(found) != self._rows:
                raise PeerNonsense("another number of texts than of rows")
            if not all(isinstance(value, (str, bytes)) for value in found):
                raise PeerNonsense("values that are neither text nor bytes")

    def split(self, tasks: Sequence[Task], kept: HeldSamples, machine: str) -> Iterator[Outcome]:
        """Write the rows of each task to their place, and return its outcome.

        ``kept``: gets the samples that were read for it. ``machine``: it has prepared them.
        """
        first = 0
        for task in tasks:
            count, layout = len(task.keys), task.layout
            if layout is None:
                raise TypeError("rows without a layout")
            self._write(task, layout, first, count)
            objects = {
                number: self._objects[str(number)][first : first + count]
                for number in _object_leaves(layout)
                if self._objects is not None
            }
            busy = self.busy * count / self._rows
            tally = self._tally if first == 0 else []
            offers = [
                kept.keep_read(number, self._indices[place], value)
                for number, place, value in self._read
                if first <= place < first + count
            ]
            kept_here = [offer for offer in offers if offer is not None]
            yield Outcome(
                TaskReport(
                    count,
                    busy=busy,
                    tally=tally,
                    offers=kept_here,
                    objects=objects,
                    machine=machine,
                )
            )
            first += count

    def _write(self, task: Task, layout: Layout, first: int, count: int) -> None:
        buffers = iter(self._leaves)
        for leaf, column in zip(layout.leaves, task.columns, strict=True):
            if leaf.dtype is None:
                continue
            rows: NDArray[Any] = np.frombuffer(next(buffers), np.uint8)
            rows = rows.view(leaf.dtype).reshape(self._rows, *leaf.shape)
            column[task.first : task.first + count] = rows[first : first + count]


def describe(layout: Layout) -> list[Any]:
    """The fields of a layout as plain data, to compare it with that of another machine.

    >>> from penstock.engine.slots import Leaf
    >>> leaves = (Leaf((2, 3), np.dtype("uint8")), Leaf((), None))
    >>> describe(Layout((0, 1), leaves, rows=8))
    [['|u1', 2, 3], ['']]
    """
    return [["" if leaf.dtype is None else leaf.dtype.str, *leaf.shape] for leaf in layout.leaves]


def _object_leaves(layout: Layout) -> list[int]:
    return [number for number, leaf in enumerate(layout.leaves) if leaf.dtype is None]


def _can_travel(task: Task) -> bool:
    """Whether the rows of a task fit into one message. A single row may be too large."""
    return task.layout is not None and task.layout.row_nbytes <= LARGEST_CALL


def _join(keys: Keys, more: Keys) -> Keys:
    """Keys of one epoch, one after the other."""
    if keys.replicas is None and more.replicas is None:
        return Keys(keys.epoch, [*keys.indices, *more.indices])
    replicas = [*(keys.replicas or [0] * len(keys)), *(more.replicas or [0] * len(more))]
    return Keys(keys.epoch, [*keys.indices, *more.indices], replicas)


def _tally_of(found: Any, stages: int, holds: int) -> list[Any]:
    """The counters of the stages, if the other machine has the same stages; otherwise none.

    >>> _tally_of([[8, 8], [0.1, 0.2], 800, [], [], 0], 2, 0)
    [[8, 8], [0.1, 0.2], 800, [], [], 0]
    >>> _tally_of([[8], [0.1], "no number", [], [], 0], 1, 0)
    []
    """
    if not isinstance(found, list) or len(found) != 6:
        return []
    for counters, length in zip(found, (stages, stages, None, holds, holds, None), strict=True):
        numbers = [counters] if length is None else counters
        if not isinstance(numbers, list) or length not in (None, len(numbers)):
            return []
        if not all(type(number) in (int, float) and 0 <= number < 1e15 for number in numbers):
            return []
    return found


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise PeerNonsense("a report without times")
    return float(value)


def _failure_of(fault: PeerFault) -> Failure:
    kinds: tuple[tuple[type[PeerFault], Failure], ...] = (
        (PeerLacks, "recipe"),
        (PeerFailed, "sample"),
        (PeerLost, "lost"),
        (PeerSlow, "busy"),
        (PeerRefused, "lost"),
    )
    return next((failure for kind, failure in kinds if isinstance(fault, kind)), "nonsense")
