"""A group: the jobs that share one pipeline, and the engine that prepares batches for them."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engine.build import Assembly, Recipe
from penstock.engine.feed import Ready
from penstock.engine.pools.choose import Choice
from penstock.engine.pools.messages import pack_error
from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.slots import Layout
from penstock.node.protocol import (
    BatchFailed,
    BatchGiven,
    BeginEpoch,
    Broken,
    Code,
    First,
    Released,
    Rewind,
    Took,
    Want,
)
from penstock.node.staging import (
    ChosenBatches,
    FailedBatch,
    StagedBatch,
    StagingEngine,
    WorkerLimit,
)
from penstock.node.state import BatchName, Decision, Drop, Fail, Give, GroupState, Lag
from penstock.node.working_directory import InDirectory, may_open_relative_paths
from penstock.order.plan import BatchKeys
from penstock.serialize import pack, unpack
from penstock.stats import Meter
from penstock.store.shared import SharedStores


class Peer:
    """The node's end of a connection: to a member, or to a process that is none yet."""

    def __init__(self, number: int, wire: Wire, pid: int) -> None:
        self.number = number
        self.wire = wire
        self.pid = pid
        self.part = ""
        self.group: Group | None = None
        self.since = time.time()
        self._known = MappedSlots()
        self._layout: Layout | None = None

    def send(self, message: tuple[Any, ...], fds: list[int] | None = None) -> None:
        # That a member has gone is noticed where its messages are read.
        with contextlib.suppress(OSError):
            self.wire.send(message, fds or [])

    def give(self, name: BatchName, staged: StagedBatch) -> None:
        """Send a batch, with its slot and layout if the member does not know them yet."""
        fds: list[int] = []
        slot = layout = None
        if staged.slot is not None:
            slot = staged.slot.id
            known, _ = self._known.touch(slot)
            if not known:
                fds = [staged.slot.fd]
        if staged.layout is not None and staged.layout is not self._layout:
            self._layout = staged.layout
            layout = bytes(pack(staged.layout).tobytes())
        whole = staged.layout is None
        _, epoch, number, digest = name
        given = BatchGiven(
            epoch,
            number,
            digest,
            slot,
            layout,
            whole,
            staged.rows,
            staged.nbytes,
            staged.beside,
            staged.bad,
        )
        self.send(given, fds)


class Group:
    """Prepares batches for its members in its own thread, until ``close``.

    ``description``: what it prepares; it must be equal for all members. ``unit``: samples in a
    batch; a member's batch size may also be a divisor or a multiple of it. ``budget``: bytes that
    staged batches may take.
    """

    def __init__(
        self,
        name: str,
        description: Mapping[str, Any],
        unit: int,
        budget: int,
        workers: WorkerLimit,
        shared_stores: SharedStores,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.description = description
        self.unit = unit
        self.peers: dict[int, Peer] = {}
        self.broken: bytes | None = None
        """The packed error that ended this group."""
        self.coded = False
        """A member has sent the pipeline."""
        self.state = GroupState(budget)
        self.meter: Meter | None = None
        self.assembly: Assembly | None = None
        self._workers = workers
        self._shared_stores = shared_stores
        self._clock = clock
        self.lock = threading.Lock()
        self._wake = threading.Condition(self.lock)
        self._engine: StagingEngine | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._events = 0
        self._events_seen = -1
        """Value of ``_events`` when there was last no batch to prepare."""
        self._hungry = True
        """The engine has asked for a batch and got none. Otherwise it asks again by itself."""
        self._wanted: dict[BatchName, BatchKeys] = {}
        self._names: dict[int, tuple[BatchName, BatchKeys]] = {}
        """The batches in preparation, by the ``id`` of their keys."""
        self._staged: dict[BatchName, StagedBatch] = {}

    # Messages from members.

    def join(self, peer: Peer, part: str, lag: Lag) -> None:
        peer.group, peer.part = self, part
        with self.lock:
            self.peers[peer.number] = peer
            self.state.join(peer.number, part, lag, self._clock())

    def leave(self, peer: Peer) -> None:
        self._apply(lambda now: self.state.leave(peer.number, now))
        with self.lock:
            self.peers.pop(peer.number, None)

    def begin(self, peer: Peer, message: BeginEpoch) -> None:
        with self.lock:
            now = self._clock()
            first, decisions = self.state.begin(
                peer.number, message.epoch, message.length, message.first, message.done, now
            )
            if message.first is None:
                peer.send(First(message.epoch, first))
            self._carry_out(decisions)

    def handle(self, peer: Peer, messages: Sequence[tuple[Any, ...]]) -> None:
        """Handle messages about batches that a member sent together."""

        def decide_all(now: float) -> list[Decision]:
            return [made for message in messages for made in self._decide(peer, now, message)]

        self._apply(decide_all)

    def _decide(self, peer: Peer, now: float, message: tuple[Any, ...]) -> list[Decision]:
        member, state = peer.number, self.state
        if isinstance(message, Want):
            name = message.named(peer.part)
            keys = self._wanted.get(name) or message.keys()
            decisions = state.want(member, name, now)
            if state.is_open(name):
                self._wanted[name] = keys
            return decisions
        if isinstance(message, Took):
            return state.took(member, BatchName(peer.part, *message), now)
        if isinstance(message, Released):
            return state.released(member, BatchName(peer.part, *message), now)
        if isinstance(message, Rewind):
            return state.rewind(member, now)
        raise TypeError(f"{type(message).__name__} is not a message about batches")

    def load(self, message: Code, fd: int) -> None:
        """Load the pipeline from this shared file, and begin to prepare batches."""
        if self.coded:
            os.close(fd)
            return
        self.coded = True
        self._thread = threading.Thread(
            target=self._run,
            args=(message.path, message.directory, fd),
            name=f"penstock-{self.name}",
            daemon=True,
        )
        self._thread.start()

    def _apply(self, event: Callable[[float], list[Decision]]) -> None:
        """Apply an event to the state, carry out the decisions, and wake the engine for them."""
        with self.lock:
            decisions = event(self._clock())
            self._carry_out(decisions)
            for name in [name for name in self._wanted if not self.state.is_open(name)]:
                del self._wanted[name]
            if not self._hungry or (
                not self._wanted and not any(isinstance(made, Drop) for made in decisions)
            ):
                return
            self._events += 1
            self._wake.notify_all()
            engine = self._engine
        if engine is not None:
            # Without our lock: an engine that asks for the next batch takes its own lock first.
            engine.wake()

    # Preparing.

    def _run(self, path: list[str], directory: str, fd: int) -> None:
        try:
            engine = self._build(path, directory, fd)
            while not self._closing:
                ready = engine.next()
                if ready is None:
                    self._wait()
                    continue
                self._deliver(ready)
        except BaseException as error:
            with self.lock:
                self.broken = pack_error(error)
                for peer in self.peers.values():
                    peer.send(Broken(self.broken))
        finally:
            if self._engine is not None:
                self._engine.close()

    def _build(self, path: list[str], directory: str, fd: int) -> StagingEngine:
        # The modules of the job's pipeline must be importable in this process too.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        packed = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        os.close(fd)
        recipe: Recipe = unpack(packed)
        choice = recipe.choice(self._workers.size)
        if may_open_relative_paths(recipe.pipeline) and directory != os.getcwd():
            # All threads of a process share one working directory, so this needs processes.
            recipe = replace(recipe, init=InDirectory(directory, recipe.init))
            choice = Choice(
                "processes", max(1, choice.workers), "user code runs in the job's directory"
            )
        assembly = Assembly(recipe, choice, self._shared_stores)
        engine = assembly.engine(
            StagingEngine, staged=True, limit=self._workers, deliver=self._deliver
        )
        if not isinstance(engine, StagingEngine):
            raise TypeError(f"a group needs a StagingEngine, not {type(engine).__name__}")
        with self.lock:
            self.assembly, self.meter, self._engine = assembly, assembly.meter, engine
        engine.start(ChosenBatches(self))
        return engine

    def _wait(self) -> None:
        """Wait for an event, but not longer than a second: kept batches must be dropped in time."""
        with self.lock:
            if not self._closing and self._events == self._events_seen:
                self._wake.wait(timeout=1.0)
            self._carry_out(self.state.tick(self._clock()))

    def next_batch(self) -> BatchKeys | None:
        """Choose the batch to prepare next; ``None`` if there is none now.

        The caller holds the engine's lock, so this must not call the engine.
        """
        with self.lock:
            name, decisions = self.state.choose(self._clock())
            self._carry_out(decisions)
            self._hungry = name is None
            if name is None:
                self._events_seen = self._events
                return None
            # A copy, because it is known by its ``id`` while it is being prepared.
            keys = self._wanted.pop(name)._replace()
            self._names[id(keys)] = (name, keys)
            return keys

    def _deliver(self, ready: Ready) -> None:
        with self.lock:
            name, _ = self._names.pop(id(ready.batch_keys))
            self._carry_out(self._finish(name, ready.value))

    def _finish(self, name: BatchName, value: StagedBatch | FailedBatch) -> list[Decision]:
        if isinstance(value, FailedBatch):
            return self.state.failed(name, pack_error(value.error), self._clock())
        self._staged[name] = value
        return self.state.prepared(name, value.size, self._clock())

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Give):
                self.peers[decision.member].give(decision.name, self._staged[decision.name])
            elif isinstance(decision, Fail):
                _, epoch, number, digest = decision.name
                failed = BatchFailed(epoch, number, digest, decision.error)
                self.peers[decision.member].send(failed)
            elif isinstance(decision, Drop):
                staged = self._staged.pop(decision.name, None)
                if staged is not None and staged.slot is not None and self._engine is not None:
                    self._engine.ring.release(staged.slot)

    # Ending.

    def close(self) -> None:
        with self.lock:
            self._closing = True
            self._wake.notify_all()
            engine, thread = self._engine, self._thread
        if engine is not None:
            engine.stop()
            engine.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=30)
