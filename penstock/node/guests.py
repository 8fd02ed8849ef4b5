"""Guests: pipelines of jobs on other machines, whose tiny-batches this node prepares.

A tiny-batch of another machine is one batch of an engine here, so its samples are divided among the
workers, and workers that die are replaced as ever. A sample that cannot be prepared here is left to
the machine that asked: it may be that only this machine does not see the data.

Caches are those of the machine that asked. Before that machine opens a batch it claims its samples:
each is there, or that machine is to read it. A tiny-batch says which is which. Samples of the first
kind come from the cache of this machine, if it has them, or else from the machine that asked, which
sends them at once or not at all. The others are read here, and go back with the rows; the machine
that asked keeps them, or passes them on, as if its own worker had read them. A guest claims nothing
and waits for no claim, so machines cannot wait for each other in a circle.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from penstock.cluster.protocol import LARGEST_RECORD, RefusalKind, RemoteTask, integers
from penstock.cluster.recipes import CourierLate, RecipeContent, RecipeName, Recipes
from penstock.cluster.remote_pool import describe
from penstock.cluster.transport import PeerFault, Refuse, RemoteRows
from penstock.engine.build import Assembly
from penstock.engine.feed import Ready
from penstock.engine.pools.wire import pack_integers
from penstock.engine.slots import shared_file
from penstock.errors import ClusterError, DeadlySampleError
from penstock.node.load import choose_workers, load_recipe
from penstock.node.loan import LentCache, Loan
from penstock.node.staging import LACKING, ChosenBatches, FailedBatch, StagingEngine, WorkerLimit
from penstock.order.plan import BatchKeys
from penstock.serialize import unpack
from penstock.stops.hold import keeps_samples

_log = logging.getLogger("penstock.node.cluster")

UNUSED = 60.0
"""Seconds after which the workers of a guest end that was not asked for anything."""

AGAIN = 30.0
"""Seconds after which a guest that could not be started is tried again."""

MOST_GUESTS = 8
"""Pipelines of other machines at the same time. Each has workers of its own."""

MOST_TASKS, MOST_TASKS_OF_ONE = 64, 16
"""Tiny-batches that wait or are being prepared, for all machines and for one of them."""

MEMORY = 512 << 20
"""Bytes of rows of one guest that are being prepared, or wait to be sent."""

LONGEST_WAIT = 120.0
"""Seconds after which the answer to a machine is that this one is busy. Long before that, the
machine prepares the samples itself."""

LARGEST_TEXTS = LARGEST_RECORD // 2
"""Bytes of text in one answer: it is part of the record."""


class LentValues(Protocol):
    """The samples of caches, as packed values; ``None`` for those that are not there."""

    def lent_here(self, content: str, indices: Sequence[int]) -> list[Any]:
        """Those that this machine has itself."""

    def ask_lent(self, machine: str, content: str, indices: Sequence[int]) -> list[Any]:
        """Those that another machine has. It answers at once. Raises PeerFault."""


class Guests:
    """Serves tiny-batches of other machines with workers that this machine's jobs leave.

    ``values``: the samples of their caches. ``cores``: how many cores, at most.
    """

    def __init__(
        self,
        recipes: Recipes,
        values: LentValues,
        workers: WorkerLimit,
        cores: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipes = recipes
        self._values = values
        self._workers = workers
        self._clock = clock
        self._lock = threading.Lock()
        self._guests: dict[str, _Guest] = {}
        self._tasks: Counter[str] = Counter()
        self._closed = False
        self._ending: list[_Guest] = []
        self.cores = 0
        self.lend(cores)

    def lend(self, cores: int) -> None:
        """Lend this many cores from now on. Workers that were started for others end."""
        with self._lock:
            if cores == self.cores:
                return
            self.cores = cores
            ended = list(self._guests.values())
            self._guests.clear()
            self._ending += ended
        # The user may lend more than the node was started with.
        self._workers.size = max(self._workers.size, cores)
        self._workers.lent = cores
        for guest in ended:
            guest.end("this machine lends another number of cores")

    def idle_cores(self) -> float:
        """See ``TaskServer``."""
        return min(float(self.cores), self._workers.idle())

    def run(self, peer: str, task: RemoteTask) -> Iterator[RemoteRows]:
        """See ``Handler.run``."""
        try:
            name = RecipeName.parse(task.recipe)
        except ValueError as error:
            raise Refuse("nonsense", str(error)) from None
        if self.idle_cores() < 1:
            raise Refuse("busy", "its own jobs use its cores")
        with self._lock:
            if self._closed:
                raise Refuse("busy", "the node ends")
            full = self._tasks.total() >= MOST_TASKS or self._tasks[peer] >= MOST_TASKS_OF_ONE
            if full:
                raise Refuse("busy", f"it has {self._tasks.total()} tiny-batches")
            guest = self._guest(name)
            self._tasks[peer] += 1
        try:
            found = guest.prepare(peer, task)
        finally:
            with self._lock:
                self._tasks[peer] -= 1
                if not self._tasks[peer]:
                    del self._tasks[peer]
        found.report["idle"] = float(self.idle_cores())
        yield found

    def _guest(self, name: RecipeName) -> _Guest:
        """The guest with this recipe, started if there is none. The caller holds the lock."""
        guest = self._guests.get(str(name))
        if guest is None:
            if len(self._guests) >= MOST_GUESTS:
                refused = [key for key, found in self._guests.items() if found.has_ended]
                if not refused:
                    raise Refuse("busy", f"it prepares for {len(self._guests)} pipelines")
                self._ending.append(self._guests.pop(refused[0]))
            guest = _Guest(
                name, self._recipes, self._values, self._workers, self.cores, self._clock
            )
            self._guests[str(name)] = guest
        return guest

    def tick(self) -> None:
        """End guests that nobody has asked for a while. Called again and again."""
        now = self._clock()
        with self._lock:
            ended = {key: guest for key, guest in self._guests.items() if guest.is_over(now)}
            for key, guest in ended.items():
                del self._guests[key]
                self._ending.append(guest)
            self._ending = [guest for guest in self._ending if guest.is_alive]
        for guest in ended.values():
            guest.end("nobody has asked for its samples")

    def status(self) -> list[dict[str, Any]]:
        """The guests as plain data."""
        with self._lock:
            guests = list(self._guests.values())
        return [guest.status() for guest in guests]

    def close(self) -> None:
        """End all guests, and wait for their workers to end."""
        with self._lock:
            self._closed = True
            guests = [*self._guests.values(), *self._ending]
            self._guests.clear()
        for guest in guests:
            guest.end("the node ends")
        for guest in guests:
            guest.join()


@dataclass(slots=True)
class _GuestTask:
    """A tiny-batch of another machine. ``rows``: the answer.

    ``samples``: place and ``RemoteTask.held`` by index, if there are caches. ``borrowed``: bytes of
    samples that the other machine has sent.
    """

    keys: BatchKeys
    rows: Future[RemoteRows]
    samples: dict[int, tuple[int, int]]
    borrowed: int


class _Guest:
    """One pipeline of other machines, with an engine of its own in a thread of its own."""

    def __init__(
        self,
        name: RecipeName,
        recipes: Recipes,
        values: LentValues,
        workers: WorkerLimit,
        cores: int,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._recipes = recipes
        self._values = values
        self._loans: list[Loan] = []
        """The samples of each cache of the pipeline."""
        self._built = threading.Event()
        """It can prepare, or never will."""
        self._workers = workers
        self._cores = cores
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._waiting: deque[_GuestTask] = deque()
        self._orders: dict[int, _GuestTask] = {}
        """The orders that are being prepared, by the ``id`` of their keys."""
        self._engine: StagingEngine | None = None
        self._used = clock()
        self._number = 0
        self._closing = False
        self._refusal: Refuse | None = None
        """Why it prepares nothing more."""
        self._batches = self._samples = 0
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-guest-{name.digest[:8]}", daemon=True
        )
        self._thread.start()

    # What other machines ask.

    def prepare(self, peer: str, task: RemoteTask) -> RemoteRows:
        """The rows of a tiny-batch. Waits for them. Raises Refuse."""
        with self._lock:
            # Calls that are refused do not keep it: a reason that may pass is looked at again.
            if self._refusal is None:
                self._used = self._clock()
        self._built.wait(LONGEST_WAIT)
        if len(task.caches) != len(self._loans) and self._refusal is None:
            raise Refuse("failed", f"the pipeline has {len(self._loans)} caches here")
        begun: list[Loan] = []
        try:
            rows = self._rows(task, self._borrow(peer, task, begun))
        finally:
            for loan in begun:
                loan.end(integers(task.indices).tolist())
        if sum(memoryview(leaf).nbytes for leaf in rows.leaves) > task.most_bytes:
            raise Refuse("sample", f"the answer has more than {task.most_bytes} bytes")
        return rows

    def _rows(self, task: RemoteTask, borrowed: int) -> RemoteRows:
        indices, replicas = integers(task.indices), None
        if task.replicas is not None:
            replicas = integers(task.replicas)
        pairs = zip(indices.tolist(), task.held, strict=False)
        samples = {index: (place, held) for place, (index, held) in enumerate(pairs)}
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._number += 1
            keys = BatchKeys(task.epoch, self._number, indices, replicas)
            order = _GuestTask(keys, Future(), samples, borrowed)
            self._waiting.append(order)
            self._used = self._clock()
            self._wake.notify_all()
            engine = self._engine
        if engine is not None:
            engine.wake()
        try:
            return order.rows.result(LONGEST_WAIT)
        except FutureTimeout:
            with self._lock, suppress(ValueError):
                self._waiting.remove(order)
            raise Refuse("busy", f"no worker was free for {LONGEST_WAIT:g} s") from None

    def _borrow(self, peer: str, task: RemoteTask, begun: list[Loan]) -> int:
        """Get the samples that the caches of the other machine have. Returns the bytes it sent.

        ``begun``: becomes the loans that are to be ended. Raises Refuse: a sample that the other
        machine has must not be read from storage.
        """
        indices, sent = integers(task.indices).tolist(), 0
        for number, (loan, content) in enumerate(zip(self._loans, task.caches, strict=False), 1):
            wanted = list(
                dict.fromkeys(
                    index for index, held in zip(indices, task.held, strict=True) if held == number
                )
            )
            lent = dict(zip(wanted, self._values.lent_here(content, wanted), strict=True))
            missing = [index for index, value in lent.items() if value is None]
            if missing:
                try:
                    values = self._values.ask_lent(peer, content, missing)
                except PeerFault as fault:
                    raise Refuse("busy", f"it cannot get samples from {peer}: {fault}") from None
                if any(value is None for value in values):
                    raise Refuse("sample", "samples of the cache were not sent with it")
                sent += sum(map(len, values))
                lent.update(zip(missing, values, strict=True))
            begun.append(loan)
            if not loan.begin(indices, lent):
                raise Refuse("busy", "it has no room for the samples of the cache")
        return sent

    def is_over(self, now: float) -> bool:
        """Whether it has not been used for long, or could not be started and may be tried again."""
        with self._lock:
            limit = UNUSED if self._refusal is None else AGAIN
            return not self._orders and not self._waiting and now - self._used > limit

    @property
    def has_ended(self) -> bool:
        """Whether it prepares nothing any more, or never did."""
        return self._refusal is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, reason: str) -> None:
        """End the workers, without waiting for it."""
        with self._lock:
            self._closing = True
            self._refusal = self._refusal or Refuse("busy", reason)
            self._wake.notify_all()
            engine = self._engine
        if engine is not None:
            engine.stop()
            engine.wake()

    def join(self) -> None:
        self._thread.join(timeout=30)

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "recipe": self._name.identity[:12],
                "waiting": len(self._waiting),
                "preparing": len(self._orders),
                "tiny_batches": self._batches,
                "samples": self._samples,
                "refused": "" if self._refusal is None else self._refusal.reason,
            }

    # Preparing.

    def next_batch(self) -> BatchKeys | None:
        """See ``Chooser``. The caller holds the engine's lock."""
        with self._lock:
            if not self._waiting or self._closing:
                return None
            order = self._waiting.popleft()
            self._orders[id(order.keys)] = order
            return order.keys

    def _run(self) -> None:
        refusal: Refuse | None = None
        try:
            engine = self._build()
            self._built.set()
            engine.start(ChosenBatches(self))
            while not self._closing:
                try:
                    ready = engine.next()
                except OSError as error:
                    if error.errno not in LACKING:
                        raise
                    ready = None
                if ready is not None:
                    self._deliver(ready)
                else:
                    self._wait()
        except Refuse as found:
            refusal = found
        except BaseException as error:
            _log.warning("a pipeline of another machine cannot be prepared: %s", error)
            refusal = Refuse("failed", f"{type(error).__name__}: {error}")
        finally:
            self._free(refusal or Refuse("busy", "the pipeline is being closed"))

    def _wait(self) -> None:
        with self._lock:
            if not self._waiting and not self._closing:
                self._wake.wait(timeout=1.0)

    def _free(self, refusal: Refuse) -> None:
        with self._lock:
            self._refusal = self._refusal or refusal
            refusal = self._refusal
            self._built.set()
            orders = [*self._waiting, *self._orders.values()]
            self._waiting.clear()
            self._orders.clear()
            engine, self._engine = self._engine, None
        for order in orders:
            order.rows.set_exception(refusal)
        if engine is not None:
            engine.close()

    def _build(self) -> StagingEngine:
        try:
            content = self._recipes.find(self._name)
        except CourierLate as error:
            raise Refuse("busy", str(error)) from None
        except ClusterError as error:
            raise Refuse("recipe", str(error)) from None
        recipe, _ = load_recipe(
            _shared(content),
            content.path,
            content.directory,
            user_code=content.user_code,
            closing=lambda: self._closing,
        )
        # Caches are those of the machine that asks. Errors are left to that machine, too.
        loans = [Loan() for stop in recipe.pipeline.stops if stop.keeps]
        unused = iter(loans)
        stops = tuple(
            LentCache(MEMORY, loan=next(unused)) if keeps_samples(stop) else stop
            for stop in recipe.pipeline.stops
        )
        recipe = replace(
            recipe,
            pipeline=replace(recipe.pipeline, stops=stops),
            options=replace(recipe.options, memory=MEMORY, on_error="raise", prefetch=None),
        )
        recipe, choice = choose_workers(recipe, self._cores, content.directory)
        assembly = Assembly(recipe, choice)
        engine = assembly.engine(
            StagingEngine,
            staged=True,
            limit=self._workers,
            deliver=self._deliver,
            clock=self._clock,
            guest=True,
        )
        if not isinstance(engine, StagingEngine):
            raise TypeError(f"a guest needs a StagingEngine, not {type(engine).__name__}")
        with self._lock:
            self._engine, self._loans = engine, loans
        return engine

    def _deliver(self, ready: Ready) -> None:
        with self._lock:
            order = self._orders.pop(id(ready.batch_keys), None)
            engine = self._engine
            self._used = self._clock()
        if order is None or engine is None:
            return
        try:
            rows = _rows_of(ready, engine, order, self._loans)
        except Refuse as refusal:
            order.rows.set_exception(refusal)
            return
        with self._lock:
            self._batches += 1
            self._samples += rows.rows
        order.rows.set_result(rows)


def _rows_of(
    ready: Ready, engine: StagingEngine, order: _GuestTask, loans: Sequence[Loan]
) -> RemoteRows:
    """The rows of a finished batch, in its slot, which is free when they were sent.

    Behind them: the samples that were read for the caches of the other machine.
    """
    staged, wanted = ready.value, len(ready.batch_keys.indices)
    if isinstance(staged, FailedBatch):
        kind: RefusalKind = "deadly" if isinstance(staged.error, DeadlySampleError) else "sample"
        raise Refuse(kind, str(staged.error).partition("\n")[0][:1000])
    layout = staged.layout
    if layout is None or staged.slot is None or staged.rows != wanted:
        if staged.slot is not None:
            engine.ring.release(staged.slot)
        raise Refuse("sample", "its samples do not share one layout")
    columns = layout.columns(engine.ring.lease(staged.slot), staged.rows)
    objects: dict[str, list[Any]] = {}
    if staged.beside is not None:
        objects = {str(number): values for number, values in unpack(staged.beside).items()}
        if len(staged.beside) > LARGEST_TEXTS:
            raise Refuse("sample", "its text is too long for one answer")
    report = {
        "layout": describe(layout),
        "busy": float(staged.busy),
        "tally": list(staged.tally),
        "objects": objects,
        "borrowed": order.borrowed,
    }
    leaves = [column.reshape(-1).view("u1") for column in columns if column is not None]
    places, values = _read_values(order, loans)
    if values:
        report["read"] = pack_integers(np.array(places, np.int64))
        leaves.append(b"".join(values))
    return RemoteRows(0, staged.rows, leaves, report)


def _read_values(
    order: _GuestTask, loans: Sequence[Loan]
) -> tuple[list[tuple[int, int, int]], list[Any]]:
    """(number of the cache, place, bytes) of the samples that the caches lacked, and the values."""
    places: list[tuple[int, int, int]] = []
    values: list[Any] = []
    for number, loan in enumerate(loans):
        # What a cache below this one had was not asked for from this one.
        read = [index for index, (_, held) in order.samples.items() if held <= number]
        try:
            found = loan.read(read)
        except ValueError as error:
            raise Refuse("sample", str(error)) from None
        for index, value in zip(read, found, strict=True):
            if value is not None:
                places.append((number, order.samples[index][0], len(value)))
                values.append(value)
    return places, values


def _shared(content: RecipeContent) -> int:
    """The packed recipe in a shared file."""
    fd = shared_file(len(content.frame))
    try:
        view = memoryview(content.frame)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd
