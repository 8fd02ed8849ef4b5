"""A group: the jobs that share one pipeline, and the engine that prepares for all of them."""

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
from penstock.node.directory import InDirectory, looks_around
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
from penstock.node.staging import Crew, FailedBatch, Plans, Staged, StagingEngine
from penstock.node.state import Decision, Drop, Fail, Give, Lag, Name, State
from penstock.order.plan import BatchKeys
from penstock.serialize import pack, unpack
from penstock.stats import Meter
from penstock.store.shared import SharedStores


class Peer:
    """One member's end of the line."""

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
        # A member that is gone is noticed where its messages are read.
        with contextlib.suppress(OSError):
            self.wire.send(message, fds or [])

    def give(self, name: Name, staged: Staged) -> None:
        """Send a batch: where it lies, and what of that the member does not know yet."""
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
    """Prepares batches for its members in a thread of its own, until ``close``.

    ``description`` says what it prepares: members must have the same. ``unit`` is how many samples
    make a batch here; members may have batches that divide it, or are multiples of it.
    """

    def __init__(
        self,
        name: str,
        description: Mapping[str, Any],
        unit: int,
        budget: int,
        crew: Crew,
        commons: SharedStores,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.description = description
        self.unit = unit
        self.peers: dict[int, Peer] = {}
        self.broken: bytes | None = None
        self.coded = False
        self.state = State(budget)
        self.meter: Meter | None = None
        self.assembly: Assembly | None = None
        self._crew = crew
        self._commons = commons
        self._clock = clock
        self.lock = threading.Lock()
        self._wake = threading.Condition(self.lock)
        self._engine: StagingEngine | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._events = 0
        self._seen = -1
        """How many events there were when there was last nothing to prepare."""
        self._hungry = True
        """The engine would prepare more. If not, it asks by itself when it has done something."""
        self._wanted: dict[Name, BatchKeys] = {}
        self._names: dict[int, tuple[Name, BatchKeys]] = {}
        self._staged: dict[Name, Staged] = {}

    # What members say.

    def join(self, peer: Peer, part: str, lag: Lag) -> None:
        peer.group, peer.part = self, part
        with self.lock:
            self.peers[peer.number] = peer
            self.state.join(peer.number, part, lag, self._clock())

    def leave(self, peer: Peer) -> None:
        self._on(lambda now: self.state.leave(peer.number, now))
        with self.lock:
            self.peers.pop(peer.number, None)

    def begin(self, peer: Peer, said: BeginEpoch) -> None:
        with self.lock:
            now = self._clock()
            found, made = self.state.begin(
                peer.number, said.epoch, said.length, said.first, said.done, now
            )
            if said.first is None:
                peer.send(First(said.epoch, found))
            self._carry_out(made)

    def hear(self, peer: Peer, messages: Sequence[tuple[Any, ...]]) -> None:
        """Messages about batches that a member sent together."""

        def all_of(now: float) -> list[Decision]:
            return [one for message in messages for one in self._decide(peer, now, message)]

        self._on(all_of)

    def _decide(self, peer: Peer, now: float, message: tuple[Any, ...]) -> list[Decision]:
        member, state = peer.number, self.state
        if isinstance(message, Want):
            name = message.named(peer.part)
            keys = self._wanted.get(name) or message.keys()
            made = state.want(member, name, now)
            if state.is_open(name):
                self._wanted[name] = keys
            return made
        if isinstance(message, Took):
            return state.took(member, Name(peer.part, *message), now)
        if isinstance(message, Released):
            return state.released(member, Name(peer.part, *message), now)
        if isinstance(message, Rewind):
            return state.rewind(member, now)
        raise TypeError(f"{type(message).__name__} is not about batches")

    def code(self, said: Code, fd: int) -> None:
        """Begin to prepare: the pipeline has come."""
        if self.coded:
            os.close(fd)
            return
        self.coded = True
        self._thread = threading.Thread(
            target=self._run,
            args=(said.path, said.directory, fd),
            name=f"penstock-{self.name}",
            daemon=True,
        )
        self._thread.start()

    def _on(self, event: Callable[[float], list[Decision]]) -> None:
        with self.lock:
            made = event(self._clock())
            self._carry_out(made)
            for name in [one for one in self._wanted if not self.state.is_open(one)]:
                del self._wanted[name]
            if not self._hungry or (
                not self._wanted and not any(isinstance(one, Drop) for one in made)
            ):
                return
            self._events += 1
            self._wake.notify_all()
            engine = self._engine
        if engine is not None:
            # Without the lock: an engine that looks for the next batch takes its own first.
            engine.wake()

    # Preparing.

    def _run(self, path: list[str], directory: str, fd: int) -> None:
        try:
            engine = self._make(path, directory, fd)
            while not self._closing:
                ready = engine.next()
                if ready is None:
                    self._idle()
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

    def _make(self, path: list[str], directory: str, fd: int) -> StagingEngine:
        # What the pipeline is made of must be importable here as it is there.
        sys.path.extend(place for place in path if place not in sys.path)
        with_code = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        os.close(fd)
        recipe: Recipe = unpack(with_code)
        choice = recipe.choice(self._crew.size)
        if looks_around(recipe.pipeline) and directory != os.getcwd():
            # A directory is a process's, so threads of this one will not do.
            recipe = replace(recipe, init=InDirectory(directory, recipe.init))
            choice = Choice(
                "processes", max(1, choice.workers), "it runs in a directory of its own"
            )
        assembly = Assembly(recipe, choice, self._commons)
        engine = assembly.engine(StagingEngine, staged=True, crew=self._crew, deliver=self._deliver)
        if not isinstance(engine, StagingEngine):
            raise TypeError("a group needs an engine that stages")
        with self.lock:
            self.assembly, self.meter, self._engine = assembly, assembly.meter, engine
        engine.start(Plans(self))
        return engine

    def _idle(self) -> None:
        with self.lock:
            if not self._closing and self._events == self._seen:
                self._wake.wait(timeout=1.0)
            self._carry_out(self.state.tick(self._clock()))

    def next_plan(self) -> BatchKeys | None:
        """The batch to prepare next. The engine's lock is held here, so no engine is called."""
        with self.lock:
            name, made = self.state.choose(self._clock())
            self._carry_out(made)
            self._hungry = name is None
            if name is None:
                self._seen = self._events
                return None
            keys = self._wanted.pop(name)
            # A copy of its own: it is known by where it lies for as long as it is prepared.
            plan = keys._replace(indices=keys.indices)
            self._names[id(plan)] = (name, plan)
            return plan

    def _deliver(self, ready: Ready) -> None:
        with self.lock:
            name, _ = self._names.pop(id(ready.batch_keys))
            self._carry_out(self._came(name, ready.value))

    def _came(self, name: Name, value: Staged | FailedBatch) -> list[Decision]:
        if isinstance(value, FailedBatch):
            return self.state.failed(name, pack_error(value.error), self._clock())
        self._staged[name] = value
        return self.state.prepared(name, value.size, self._clock())

    def _carry_out(self, decisions: list[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Give):
                self.peers[one.member].give(one.name, self._staged[one.name])
            elif isinstance(one, Fail):
                _, epoch, number, digest = one.name
                self.peers[one.member].send(BatchFailed(epoch, number, digest, one.error))
            elif isinstance(one, Drop):
                staged = self._staged.pop(one.name, None)
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
