"""A group: the jobs that share one pipeline, and the engine that prepares batches for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cluster.recipes import Publication, RecipeContent
from penstock.cluster.remote_pool import RemotePool
from penstock.engine.build import Assembly
from penstock.engine.feed import Ready
from penstock.engine.keepers import Keepers
from penstock.engine.pools.messages import pack_error
from penstock.engine.pools.pool import Pool
from penstock.errors import PenstockError, WorkerError
from penstock.fingerprint import fingerprint
from penstock.host.text import many
from penstock.node.load import choose_workers, load_recipe
from penstock.node.peer import Peer
from penstock.node.protocol import (
    MOST_WANTED,
    BatchFailed,
    BeginEpoch,
    Broken,
    Code,
    First,
    Refused,
    Released,
    Rewind,
    Took,
    Want,
)
from penstock.node.span import GroupSpan
from penstock.node.staging import (
    LACKING,
    ChosenBatches,
    FailedBatch,
    StagedBatch,
    StagingEngine,
    WorkerLimit,
)
from penstock.node.state import BatchName, Decision, Drop, Fail, Give, GroupState, Lag
from penstock.node.trial import TrialError
from penstock.node.watchdog import Observation, Watchdog
from penstock.order.plan import BatchKeys
from penstock.stats import Meter
from penstock.store.shared import SharedStores

if TYPE_CHECKING:
    from penstock.cluster.service import ClusterService

_log = logging.getLogger("penstock.node")


FETCH_AHEAD = 8
"""Batches of a group whose samples may be on their way from other machines at the same time."""


class _Stalled(Exception):
    """Makes the group's thread restart its workers."""


class Group:
    """Prepares batches for its members in its own thread, until ``close``.

    ``description``: what it prepares; it must be equal for all members. ``unit``: samples in a
    batch; a member's batch size may also be a divisor or a multiple of it. ``budget``: bytes that
    staged batches may take. ``cluster``: other machines, whose workers help, and which may have
    members of this group.
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
        cluster: ClusterService | None = None,
    ) -> None:
        self.name = name
        self.description = description
        self.unit = unit
        self.peers: dict[int, Peer] = {}
        self.broken: bytes | None = None
        """The packed error that ended this group."""
        self.broken_text = ""
        self.coded = False
        """A member has sent the pipeline."""
        self.state = GroupState(budget)
        self.meter: Meter | None = None
        self.assembly: Assembly | None = None
        self._workers = workers
        self._shared_stores = shared_stores
        self._clock = clock
        self._cluster = cluster
        self._identity = ""
        """Of what it prepares, equal on all machines."""
        self.remote: RemotePool | None = None
        """The workers of other machines."""
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
        self._kept_by_leavers: set[BatchName] = set()
        """Batches that processes which have left may still read. Their slots are not used again."""
        self._keepers: Keepers | None = None
        """What the pipeline keeps, if several machines divide that."""
        self._dealt = b""
        """The rank of each sample in the first epoch, packed; empty if not known."""
        self._ranks: set[int] = set()
        self._fetching: dict[BatchName, BatchKeys] = {}
        """Batches whose samples are on their way from other machines."""
        self._fetched: deque[BatchName] = deque()
        """Those of them whose samples are here, or will not come."""
        self._last_remote = 0
        self.span = None if cluster is None else GroupSpan(self, cluster, clock)
        """The part of the group that is on other machines."""
        self._watchdog = Watchdog()
        self.stalls = 0
        """How many times the watchdog found that the group stood still."""
        self.trouble = ""
        """What the watchdog found and did last, in words."""

    # Messages from members.

    def join(self, peer: Peer, part: str, lag: Lag) -> None:
        peer.group, peer.part = self, part
        with self.lock:
            self.peers[peer.number] = peer
            self.state.join(peer.number, part, lag, self._clock())
        if self.span is not None:
            self.span.changed()

    def leave(
        self, peer: Peer, used: Sequence[BatchName] | None = None
    ) -> dict[BatchName, tuple[int, int]]:
        """Remove a member. Returns the batches that its process may still read.

        The values are how many times it was given the batch, and the size of the batch. ``used``:
        the batches that it says it uses; without this, all that it was given and has not released.
        """
        kept = {}
        with self.lock:
            member = self.state.members.get(peer.number)
            for name, times in member.held.items() if member is not None else ():
                times = times if used is None else min(times, used.count(name))
                if times and name in self._staged:
                    kept[name] = (times, self._staged[name].size)
            self._kept_by_leavers.update(kept)
        self._apply(lambda now: self.state.leave(peer.number, now))
        with self.lock:
            self.peers.pop(peer.number, None)
        if self.span is not None:
            self.span.changed()
        return kept

    def host(self, dealt: bytes, rank: int) -> None:
        """A member is this rank. ``dealt``: the rank of each sample in the first epoch, packed."""
        with self.lock:
            self._dealt = self._dealt or dealt
            if dealt == self._dealt:
                self._ranks.add(rank)
            self._tell_ranks()

    def _tell_ranks(self) -> None:
        if self._keepers is None or self.assembly is None or not self._dealt:
            return
        deal = self.assembly.recipe.deal
        for division in self._keepers.divisions:
            division.host(self._dealt, frozenset(self._ranks), None if deal is None else deal.ranks)

    def begin(self, peer: Peer, message: BeginEpoch) -> None:
        span = self.span
        if message.first is None and message.length is not None and span is not None:
            with self.lock:
                goes_along = self.state.is_live(peer.part, message.epoch, beside=peer.number)
            length = message.length

            def found(first: int) -> None:
                self._begin(peer, message, first if first < length else 0)

            # No member on this machine is in this epoch. Members on other machines may be.
            if not goes_along and span.find_position(peer.part, message.epoch, found):
                return
        self._begin(peer, message, message.first)

    def _begin(self, peer: Peer, message: BeginEpoch, first: int | None) -> None:
        with self.lock:
            if self.peers.get(peer.number) is not peer:
                return  # it has left meanwhile
            first, decisions = self.state.begin(
                peer.number, message.epoch, message.length, first, message.done, self._clock()
            )
            if message.first is None:
                peer.send(First(message.epoch, first))
            self._carry_out(decisions)

    def handle(self, peer: Peer, messages: Sequence[tuple[Any, ...]]) -> None:
        """Handle messages about batches that a member sent together."""

        def decide_all(now: float) -> list[Decision]:
            made: list[Decision] = []
            for message in messages:
                try:
                    made += self._decide(peer, now, message)
                except PenstockError as error:  # what was decided before it must still be done
                    peer.send(Refused(str(error)))
            return made

        self._apply(decide_all)

    def _decide(self, peer: Peer, now: float, message: tuple[Any, ...]) -> list[Decision]:
        member, state = peer.number, self.state
        if isinstance(message, Want):
            name = message.named(peer.part)
            if len(state.members[member].wants) >= MOST_WANTED:
                raise PenstockError(f"a member may want {MOST_WANTED} batches at the same time")
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
            args=(message, fd),
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
            if self.span is not None:
                self.span.ask_others()
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

    def _run(self, code: Code, fd: int) -> None:
        try:
            engine = self._build(code, fd)
            while not self._closing:
                try:
                    ready = engine.next()
                except _Stalled:
                    self._restart(engine)
                    continue
                except OSError as error:
                    if error.errno not in LACKING:
                        raise
                    with self.lock:
                        self._wake.wait(timeout=1.0)  # until members release batches
                    continue
                if ready is None:
                    self._wait()
                    continue
                self._deliver(ready)
        except TrialError as error:
            self._end_with(error.frame, str(error))
        except BaseException as error:
            self._end_with(pack_error(error), str(error))
        finally:
            self._free()

    def _end_with(self, error: bytes, text: str) -> None:
        with self.lock:
            self.broken, self.broken_text = error, text
            for peer in self.peers.values():
                peer.send(Broken(error))

    def _build(self, code: Code, fd: int) -> StagingEngine:
        recipe, packed = load_recipe(
            fd,
            code.path,
            code.directory,
            user_code=code.user_code,
            closing=lambda: self._closing,
        )
        # The node's budget bounds the batches of a group, and not the memory= of one member.
        recipe = replace(recipe, options=replace(recipe.options, memory=None))
        recipe, choice = choose_workers(recipe, self._workers.size, code.directory)
        assembly = Assembly(recipe, choice, self._shared_stores)
        content = RecipeContent(tuple(code.path), code.directory, code.user_code, b"")
        if self._cluster is not None:
            content = replace(content, frame=bytes(packed))
        engine = assembly.engine(
            StagingEngine,
            staged=True,
            join=self._join_remote(assembly, content),
            limit=self._workers,
            deliver=self._deliver,
            clock=self._clock,
        )
        if not isinstance(engine, StagingEngine):
            raise TypeError(f"a group needs a StagingEngine, not {type(engine).__name__}")
        with self.lock:
            self.assembly, self.meter, self._engine = assembly, assembly.meter, engine
            self._keepers = assembly.keepers if assembly.keepers.divisions else None
            self._tell_ranks()
        engine.start(ChosenBatches(self))
        return engine

    def _join_remote(
        self, assembly: Assembly, content: RecipeContent
    ) -> Callable[[Pool], Pool] | None:
        """Returns a function that joins a pool with workers of other machines, if they may help.

        Not for a batch with a collate function, which is made as a whole, and not for samples that
        refurbish keeps: they are on this machine.
        """
        cluster, generations = self._cluster, assembly.keepers.generations
        if cluster is None:
            return None
        self._identity = fingerprint(self.description)
        cluster.recipes.add_own(self._identity, content)
        if assembly.work.collate is not None or generations is not None:
            return None

        def join(pool: Pool) -> Pool:
            recipe = Publication(cluster.recipes, self._identity, content)
            self.remote = RemotePool(
                pool, assembly.work, cluster, recipe, assembly.keepers, self._clock
            )
            return self.remote

        return join

    def _restart(self, engine: StagingEngine) -> None:
        """Prepare with other workers, and begin with the batches that were being prepared."""
        engine.end_workers()
        with self.lock:
            self._hungry = True
            for name, keys in [*self._names.values(), *self._fetching.items()]:
                # Another machine may have sent it meanwhile.
                if self.state.is_preparing(name) and self.state.interrupted(name):
                    self._wanted[name] = keys
                self._return_borrowed(name)
            self._forget_batches()
        engine.start(ChosenBatches(self))

    def _free(self) -> None:
        """End the workers and free the memory of all batches, now and not at some later time."""
        engine = self._engine
        if self._cluster is not None and self._identity:
            self._cluster.recipes.remove_own(self._identity)
        if engine is None:
            return
        engine.close()
        with self.lock:
            for name in [*self._fetching, *(name for name, _ in self._names.values())]:
                self._return_borrowed(name)
            self._staged.clear()
            self._forget_batches()
            self._wanted.clear()
            self._engine = None

    def _forget_batches(self) -> None:
        """No batch is being prepared any more, nor are its samples on their way."""
        self._names.clear()
        self._fetching.clear()
        self._fetched.clear()

    # Watching.

    def watch(self) -> None:
        """Find out whether the group stands still, and mend that. Called again and again."""
        with self.lock:
            engine, now = self._engine, self._clock()
            if engine is None or self._closing or self.broken is not None:
                return
            starving = self.state.is_starving()
            prepared = self.state.prepared_batches + self.state.received_batches
            fetching = bool(self._fetching) or (self.span is not None and self.span.waits)
        busy = bool(engine.load or engine.away) or engine.starting or engine.occupied or fetching
        seen = Observation(starving, busy, engine.moves + prepared)
        step = self._watchdog.look(seen, now)
        if step is None:
            return
        self.stalls += 1
        found = (
            f"no batch was prepared for {self._watchdog.patience:g} s, although members wait and "
            "workers are idle"
        )
        if step == "nudge":
            leaked = self._workers.recount()
            with self.lock:
                self._hungry = True
                self._events += 1
                self._wake.notify_all()
            done = "woke the workers" + (
                f" and corrected the count of busy ones, which was {leaked:g} too high"
                if leaked > 0
                else ""
            )
            engine.nudge()
            self._workers.notify(engine)
        elif step == "restart":
            done = "started other workers, which prepare the batches again"
            engine.broken(_Stalled())
        else:
            done = "gave up"
            engine.broken(
                WorkerError(
                    f"share={self.name!r}: {found}, and starting other workers did not help. This "
                    "is a defect of Penstock's node. `penstock stop --now` ends the node; the next "
                    "job starts another."
                )
            )
        self.trouble = f"{found}; the node {done}"
        _log.warning("%s: %s", self.name, self.trouble)

    def doing(self, peer: Peer) -> str:
        """What the node is doing for a member that waits, in words."""
        with self.lock:
            engine, now = self._engine, self._clock()
            if self.broken is not None:
                return f"the group cannot go on: {self.broken_text}"
            if not self.coded:
                return "it waits until a member has sent the pipeline"
            if engine is None:
                return "the pipeline is being set up"
            member = self.state.members.get(peer.number)
            wanted = None if member is None else self.state.next_wanted(peer.number)
            if wanted is None:
                return "it knows of no batch that this member wants"
            waits_for = self.state.waits_for(wanted[0]) if wanted[1] == "wanted" else []
            pids = [str(self.peers[number].pid) for number in waits_for if number in self.peers]
            trouble = self.trouble if self._watchdog.since is not None else ""
            fetching = wanted[0] in self._fetching
            elsewhere = self.span is not None and self.span.spanning.is_asked(wanted[0])
        if pids:
            return (
                f"the memory for batches is full, and it waits until process {', '.join(pids)} "
                "(lag='wait') has taken its batches"
            )
        if elsewhere:
            return "another machine prepares it"
        if fetching:
            return "its samples are on their way from other machines"
        if engine.starting:
            return "worker processes are starting"
        tasks = engine.in_hand()
        if tasks:
            busy = many(len({task.worker for task in tasks}), "worker is", "workers are")
            samples = ", ".join(map(str, tasks[0].indices[:8]))
            return f"{busy} busy, longest {now - tasks[0].since:.0f} s on samples [{samples}]"
        if engine.starved:
            return "there is no memory for another batch until members release some"
        if engine.occupied:
            return "all workers of the node are busy for other groups"
        return trouble or "workers are idle; the node will notice that and start others"

    @property
    def memory(self) -> int:
        """Bytes of all slots of the group."""
        engine = self._engine
        return 0 if engine is None else engine.memory

    @property
    def ended(self) -> bool:
        """Whether its workers have ended, and its memory is free."""
        return self._thread is None or not self._thread.is_alive()

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
            most = 1 if self._keepers is None else FETCH_AHEAD
            while len(self._fetching) < most:
                chosen = self._choose()
                if chosen is None:
                    break
                name, keys = chosen
                # A copy, because it is known by its ``id`` while it is being prepared.
                keys = self._fetching[name] = keys._replace()
                if self._borrow(name, keys):
                    self._fetched.append(name)
            self._hungry = not self._fetched
            if self._hungry:
                self._events_seen = self._events
                return None
            name = self._fetched.popleft()
            keys = self._fetching.pop(name)
            self._names[id(keys)] = (name, keys)
            return keys

    def _choose(self) -> tuple[BatchName, BatchKeys] | None:
        """The batch that this machine prepares next."""
        span = self.span
        again = None if span is None else span.next_again()
        if again is not None:
            return again
        fits = None if span is None else span.is_here
        name, decisions = self.state.choose(self._clock(), fits)
        self._carry_out(decisions)
        return None if name is None else (name, self._wanted.pop(name))

    def _borrow(self, name: BatchName, keys: BatchKeys) -> bool:
        """Fetch the samples that other machines keep. Returns whether the batch can begin now."""
        if self._keepers is None:
            return True

        def fetched() -> None:
            with self.lock:
                if self._fetching.get(name) is not keys:
                    return  # it was dropped meanwhile
                self._fetched.append(name)
                self._events += 1
                self._wake.notify_all()
                engine = self._engine
            if engine is not None:
                engine.wake()

        return self._keepers.fetch((self.name, name), keys, fetched)

    def _return_borrowed(self, name: BatchName) -> None:
        if self._keepers is not None:
            self._keepers.release((self.name, name))

    def _deliver(self, ready: Ready) -> None:
        with self.lock:
            name, _ = self._names.pop(id(ready.batch_keys))
            self._return_borrowed(name)
            self._carry_out(self._finish(name, ready.value))

    def _finish(self, name: BatchName, value: StagedBatch | FailedBatch) -> list[Decision]:
        span, local = self.span, False
        if span is not None and not self.state.is_preparing(name):
            # Another machine was late, and then faster.
            if isinstance(value, StagedBatch) and value.slot is not None and self._engine:
                self._engine.ring.release(value.slot)
            return []
        if isinstance(value, FailedBatch):
            if span is not None:
                span.failed(name)
            return self.state.failed(name, pack_error(value.error), self._clock())
        if span is not None:
            times = [] if self.meter is None else self.meter.batch_times()
            busy = times[-1] if times else 0.0
            local = span.prepared(name, value, busy, self._workers.size)
        self._staged[name] = value
        return self.state.prepared(name, value.size, self._clock(), local=local)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, (Give, Fail)) and decision.member < 0:
                if self.span is not None:
                    self.span.carry_out(decision)
            elif isinstance(decision, Give):
                staged = self._staged.get(decision.name)
                if staged is not None:  # none is left in a group that cannot go on
                    self.peers[decision.member].give(decision.name, staged)
            elif isinstance(decision, Fail):
                _, epoch, number, digest = decision.name
                failed = BatchFailed(epoch, number, digest, decision.error)
                self.peers[decision.member].send(failed)
            elif isinstance(decision, Drop):
                self._drop(decision.name)
                if self.span is not None:
                    self.span.carry_out(decision)

    def _drop(self, name: BatchName) -> None:
        staged = self._staged.pop(name, None)
        kept = name in self._kept_by_leavers
        self._kept_by_leavers.discard(name)
        if staged is None or staged.slot is None or self._engine is None:
            return
        if kept:
            # Another batch in this slot would change the arrays of a process that has left.
            self._engine.ring.forget_later(staged.slot)
        else:
            self._engine.ring.release(staged.slot)

    # What ``GroupSpan`` needs. The caller holds the lock, except for ``kick``.

    @property
    def can_receive(self) -> StagingEngine | None:
        """The engine, if batches of other machines can be staged."""
        return None if self._closing or self.broken is not None else self._engine

    def carry_out(self, decisions: list[Decision]) -> None:
        self._carry_out(decisions)

    def staged(self, name: BatchName) -> StagedBatch | None:
        return self._staged.get(name)

    def take_wanted(self, name: BatchName) -> BatchKeys:
        """The samples of a batch that is not prepared here for now."""
        return self._wanted.pop(name)

    def has_samples(self, keys: BatchKeys) -> bool:
        """Whether the data has these samples, as far as is known."""
        if self.assembly is None:
            return True
        count = len(self.assembly.recipe.pipeline.source)
        return len(keys.indices) > 0 and int(keys.indices.max()) < count

    def next_remote(self) -> int:
        """The number of a member that stands for another machine: below 0."""
        self._last_remote -= 1
        return self._last_remote

    def want_remote(self, number: int, name: BatchName, keys: BatchKeys, ahead: int) -> None:
        """Another machine wants a batch."""
        self._carry_out(self.state.want(number, name, self._clock(), ahead))
        if self.state.is_open(name):
            self._wanted.setdefault(name, keys)

    def received(self, name: BatchName, staged: StagedBatch) -> bool:
        """A batch came from another machine. Returns whether it is still needed."""
        if not self.state.is_preparing(name) or self._engine is None:
            return False
        if name in self._fetching:
            del self._fetching[name]
            self._return_borrowed(name)
            if name in self._fetched:
                self._fetched.remove(name)
        self._staged[name] = staged
        now = self._clock()
        self._carry_out(self.state.prepared(name, staged.size, now, received=True, local=True))
        return True

    def kick(self, *, if_hungry: bool = False) -> None:
        """Let the engine look for batches. Not under the lock."""
        with self.lock:
            if if_hungry and not self._hungry:
                return
            self._events += 1
            self._wake.notify_all()
            engine = self._engine
        if engine is not None:
            engine.wake()

    # Ending.

    def close(self) -> None:
        if self.span is not None:
            self.span.close()
        with self.lock:
            self._closing = True
            self._wake.notify_all()
            engine, thread = self._engine, self._thread
        if engine is not None:
            engine.stop()
            engine.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=30)
