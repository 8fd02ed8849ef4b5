"""The loader: iterates a pipeline, saves and restores its position, and ends its workers."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.device.division import DeviceDivision, Rest, undivided
from penstock.engine.ahead import Ahead, Background
from penstock.engine.build import Assembly, DevicePlan, Recipe, Together
from penstock.engine.checkpoint import (
    check_dealing,
    check_state,
    data_difference,
    dealing_of,
    describe,
    parts_of_data,
)
from penstock.engine.echo import Echoing
from penstock.engine.engine import Engine
from penstock.engine.feed import Feed, Queue, Ready
from penstock.engine.plan import Sampling, plan_of
from penstock.engine.pools.choose import Choice
from penstock.engine.pools.gil_watch import GilWatch
from penstock.engine.pools.launch import ChooseStart, as_program
from penstock.engine.pools.runner import WorkerInit
from penstock.engine.slots import Register
from penstock.engine.window_ahead import window_ahead
from penstock.errors import PipelineError, StateError
from penstock.host.at_exit import close_at_exit
from penstock.host.text import many
from penstock.options import Options, is_whole
from penstock.order import Cursor
from penstock.order.plan import Batches, Plan
from penstock.pipeline import Pipeline, batching_of
from penstock.serialize import pack
from penstock.source.identity import DataIdentity
from penstock.stats import Meter, PartStats, Stats, device_line
from penstock.stops.batch import Collate, stack
from penstock.watch.publish import Publisher

if TYPE_CHECKING:
    from penstock.device.shared_copy import CopyDesk

_log = logging.getLogger("penstock.workers")

RESUME_WAIT = 10.0
"""Longest wait of ``load_state_dict`` for the sizes and times of all files, in seconds. A million
files on a local file system take 1.3 seconds of CPU time."""


class Ranks(Protocol):
    """Tells a loader its rank and world, which may become known after it is made.

    ``place`` returns the options with the rank and world that are known now. It is called when a
    loop begins, and before the first one for ``len`` and for checkpoints. ``str`` is for the
    ``repr`` of the loader.
    """

    def place(self, options: Options, reason: Literal["loop", "length", "state"]) -> Options: ...


@dataclass(frozen=True)
class Deliver:
    """How batches reach a device.

    - ``begin``: makes the work that is done ahead of the loop, given what is left for the device,
      and where jobs agree on who copies a batch; see ``Ahead``.
    - ``find``: called in the thread of the loop before the workers start.
    - ``register``: registers the memory of batches; see ``Ring``.
    - ``divide``: decides what of a pipeline is left for the device.
    - ``name``: the device, for the ``repr`` of the loader.
    - ``copies``: the loop gets copies of batches only.
    - ``plan``: decides whether the device prepares a share of each batch; ``None``: it does not.
    - ``decode``: ``"device"`` if samples are decoded there, with other bits than on the CPU.
    """

    begin: Callable[[Rest | None, CopyDesk | None], Background]
    find: Callable[[], None]
    register: Register
    divide: Callable[[Pipeline], DeviceDivision] = undivided
    name: str = ""
    copies: bool = False
    plan: Callable[[Assembly], DevicePlan] | None = None
    decode: Literal["exact", "device"] = "exact"


@dataclass(frozen=True)
class Custom:
    """What adapters to frameworks, such as torch, replace in a loader.

    - ``plan``: makes the plan of a user's sampler from (samples, batch size, drop_last).
    - ``init``: called in each worker before its first task.
    - ``start``: how worker processes are started.
    - ``convert``: turns each batch into what the framework uses.
    - ``fallback``: collates a batch whose samples do not share one layout.
    - ``order_name``: the order in checkpoints, if a sampler decides it.
    - ``recheck``: the dataset may be changed between epochs, and workers must see the change.
    - ``ranks``: finds rank and world; without it they are those of the options.
    - ``deliver``: how batches reach a device, one or two ahead of the loop.
    """

    plan: Sampling | None = None
    init: WorkerInit | None = None
    start: ChooseStart = as_program
    convert: Callable[[Any], Any] | None = None
    fallback: Collate = stack
    order_name: str = ""
    recheck: bool = False
    ranks: Ranks | None = None
    deliver: Deliver | None = None


class Loader:
    """Iterates a pipeline; made by ``Pipeline.loader``.

    Each ``for`` loop is one epoch. Workers start with the first epoch and stay. The first batches
    of the next epoch are prepared while the last ones of this epoch are used. Batches are views of
    shared memory, which is used again once all references to a batch are gone.

    >>> import numpy as np
    >>> import penstock as ps
    >>> loader = ps.from_dataset(np.arange(6)).batch(2).loader(workers=0, seed=1)
    >>> epoch = iter(loader)
    >>> _ = next(epoch)
    >>> state = loader.state_dict()
    >>> rest = [b.tolist() for b in epoch]
    >>> again = ps.from_dataset(np.arange(6)).batch(2).loader(workers=0, seed=1)
    >>> again.load_state_dict(state)
    >>> [b.tolist() for b in again] == rest
    True
    """

    def __init__(self, pipeline: Pipeline, options: Options, custom: Custom | None = None) -> None:
        self._batch = batching_of(pipeline)
        self._custom = custom or Custom()
        self._written = pipeline
        self.options = options
        self.choice: Choice = self._recipe(pipeline, None).choice()
        shared = self.choice.own_processes
        self.pipeline, self._chosen = pipeline, None
        if any(stop.measured for stop in pipeline.stops):
            from penstock.diversity.auto import settle

            self.pipeline, self._chosen = settle(pipeline, options.seed, shared=shared)
        if options.share is not None:
            from penstock.node.share import check_shared

            check_shared(pipeline, options)
        self._echoing = Echoing(self.pipeline)
        self._data = DataIdentity(pipeline.source)
        self._end_identity = close_at_exit(self, self._data)
        self._description: tuple[Pipeline, Options, dict[str, Any]] | None = None
        # The state of a checkpoint whose data is not compared in full yet.
        self._unverified: Mapping[str, Any] | None = None
        self._device_plan: DevicePlan | None = None
        self._together: Together | None = None
        """The device, if it prepares a share of the batches of the feed."""
        self._device_state: Mapping[str, Any] | None = None
        """What was learnt of the device before the feed was made."""
        self._assemble(None)
        self._feed: Feed | None = None
        self._convert = self._custom.convert
        """What is left to do with each batch of the feed; ``None``: nothing."""
        self._engine: Engine | None = None
        """The feed, if it is an engine. Its workers publish the status of the loader."""
        self._plain: Engine | None = None
        """The engine, if nothing but ``Ahead`` is left to do with its batches."""
        self._direct: Engine | None = None
        """The engine, if its batches have the form in which the loop gets them."""
        self._pid, self._forks = os.getpid(), _forks
        self._closed = False
        self._cursor = Cursor()
        self._settled = False
        self._in_epoch = False
        self._feed_cursor: Cursor | None = None
        self._batches: Batches | None = None
        # An epoch refers to its loader. The loader identifies epochs by number, because a
        # reference cycle would keep both alive.
        self._epoch_count = 0
        self._loaded_dealing: Any = None
        self._stated_length: int | None = None
        self._watched = 0
        """Batches since the start, as far as the use of the GIL was watched."""
        self._publisher = Publisher(self)
        deliver = self._custom.deliver
        self._ahead = None if deliver is None else Ahead()
        self._end_ahead = None if self._ahead is None else close_at_exit(self, self._ahead)

    def _recipe(self, pipeline: Pipeline, kept: int | None) -> Recipe:
        custom = self._custom
        prepared = self._divide(pipeline).pipeline
        return Recipe(prepared, self.options, custom.fallback, custom.init, custom.start, kept)

    def _divide(self, pipeline: Pipeline) -> DeviceDivision:
        """What the workers prepare of a pipeline, and what is left for the device."""
        deliver = self._custom.deliver
        return undivided(pipeline) if deliver is None else deliver.divide(pipeline)

    def _assemble(self, kept: int | None, meter: Meter | None = None) -> None:
        """Make the stores, and the plan. ``kept``: how many samples refurbish keeps, if known.

        ``meter``: counters that go on.
        """
        recipe = self._recipe(self.pipeline, kept)
        assembly = Assembly(recipe, self.choice, meter=meter)
        self._gil_watch = recipe.gil_watch(self.choice)
        self._plan = plan_of(
            self.pipeline,
            self.options,
            assembly.keepers.road.stops,
            workers=self.choice.workers,
            factors=self._echoing.factors,
            sampling=self._custom.plan,
        )
        self._assembly = assembly
        self._meter = assembly.meter
        deliver = self._custom.deliver
        if deliver is not None and deliver.plan is not None:
            self._device_plan = deliver.plan(assembly)
            if self._device_plan.begin is not None:
                # Workers of other processes could not prepare what the device needs.
                self._gil_watch = None

    # Ranks.

    def find_ranks(self, reason: Literal["loop", "length", "state"] = "state") -> None:
        """Take the rank and world that are known now; within a run only where a loop begins."""
        ranks = self._custom.ranks
        if ranks is None or (reason != "loop" and (self._feed is not None or self._in_epoch)):
            return
        options, before = ranks.place(self.options, reason), self.options
        if (options.rank, options.world, options.seed) != (before.rank, before.world, before.seed):
            self._take_ranks(options)
        if reason == "loop":
            self._check_loaded_dealing(options)

    def _take_ranks(self, options: Options) -> None:
        """Deal the samples anew, from the cursor on."""
        before = self.options
        generations = self._assembly.keepers.generations
        # Kept samples are counted by the seed, and must be as many in all ranks.
        kept = None if generations is None or options.seed != before.seed else generations.kept
        self.options = options
        try:
            self._reassemble(kept)
        except BaseException:
            self.options = before
            raise

    def _reassemble(self, kept: int | None, meter: Meter | None = None) -> None:
        """End the feed, assemble anew, and go on within the epoch, from the cursor on."""
        cursor, before = self._cursor, self._plan
        first, epoch_state = before.first(cursor), before.epoch_state(cursor.epoch)
        self._end_feed()
        self._assemble(kept, meter)
        self._plan.begin_at(cursor.epoch, first)
        self._plan.restore(epoch_state)
        self._feed_cursor = self._batches = None

    def _check_loaded_dealing(self, options: Options) -> None:
        """Check a checkpoint that was loaded before the number of ranks was known."""
        loaded = self._loaded_dealing
        if loaded is not None:
            check_dealing({"dealing": loaded}, {"dealing": dealing_of(self.pipeline, options)})
        self._loaded_dealing = None

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        self._check_usable()
        if self._in_epoch:
            # The last loop was left before its end; a new loop is a new epoch.
            self._go_to_epoch(self._cursor.epoch + 1)
        self.find_ranks("loop")
        if self._description is not None and self._forget_dataset():
            # The time that this takes belongs to the epoch's start, not to the next checkpoint.
            self._describe(self.pipeline)
        self._in_epoch = True
        self._epoch_count += 1
        self._echoing.begin(self._meter)
        left = self._plan.left(self._cursor)
        return _Epoch(self, self._epoch_count, left, self._stated_length)

    def __len__(self) -> int:
        """Batches in an epoch."""
        self.find_ranks("length")
        length = self.length()
        if length is None:
            raise TypeError(
                f"{self._plan.source_name} has no length, so its loader has none. Iterate the "
                "loader to count its batches."
            )
        if not self.pipeline.source.indexed:
            self._stated_length = length
        return length

    def length(self) -> int | None:
        """Batches in an epoch, by the rank and world as known so far; ``None`` if unknown."""
        return self._plan.length(Cursor(self._cursor.epoch))

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._cursor.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch that the next loop would begin with."""
        return self._cursor.epoch + (1 if self._in_epoch else 0)

    @property
    def plan(self) -> Plan:
        """Which samples are in which batch."""
        return self._plan

    @property
    def batch(self) -> int:
        """The number of batches of this epoch that were delivered."""
        return self._cursor.batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        if not is_whole(epoch) or epoch < 0:
            raise PipelineError(f"set_epoch() got {epoch!r}. Give a whole number from 0 on.")
        if self._in_epoch or epoch != self._cursor.epoch or self._cursor.batch:
            self._go_to_epoch(epoch)

    def position(self) -> tuple[Cursor, Any]:
        """Where the loop under way is, for ``go_to`` of a loader like this one."""
        return self._cursor, self._plan.epoch_state(self._cursor.epoch)

    def go_to(self, position: tuple[Cursor, Any]) -> None:
        """Go to a position of another loader, whose loop the next loop over this one continues."""
        self._epoch_count += 1
        self._in_epoch = False
        self._cursor, epoch_state = position
        self._feed_cursor = None
        self._plan.restore(epoch_state)

    def key_epoch(self, key: int) -> None:
        """Key the random choices of the epoch that begins by ``key``, not by its number."""
        self._plan.key_epoch = key

    def _go_to_epoch(self, epoch: int) -> None:
        self._epoch_count += 1
        self._in_epoch = False
        self._loaded_dealing = None
        self._cursor = Cursor(epoch)

    def _end_epoch(self) -> None:
        """The last batch of the epoch was delivered."""
        epoch_over = self._cursor.epoch
        self._echoing.end(self._meter, self._assembly.work.road.stops, self.choice.workers)
        self._go_to_epoch(epoch_over + 1)
        batches = self._batches
        begun_early = batches is not None and batches.goes_on_after(epoch_over)
        self._feed_cursor = self._cursor if begun_early else None
        self._publisher.moved(self)

    def _skip(self, epoch: _Epoch) -> None:
        if epoch.number != self._epoch_count or epoch.left == 0:
            return
        keys = next(iter(self._plan.batches(self._cursor)), None)
        if keys is not None:
            self._cursor = self._plan.after(self._cursor, keys)
            self._feed_cursor = None
            if epoch.left is not None:
                epoch.left -= 1

    def _wait_for_batch(self, feed: Feed, epoch: _Epoch) -> Ready | None:
        """The next batch in the form in which the loop gets it; ``None`` after the last."""
        publisher = self._publisher
        publisher.asking = True
        try:
            if not self._ahead and (self._engine is None or publisher.begun):
                publisher.asked(self)
            return self._take(feed, epoch) if self._direct is None else feed.next()
        finally:
            publisher.asking = False

    def _take(self, feed: Feed, epoch: _Epoch) -> Ready | None:
        """The next batch of a feed whose batches need more work; ``None`` after the last."""
        ahead, convert, plain = self._ahead, self._convert, self._plain
        if ahead is not None and plain is not None:
            return ahead.next(plain.next, plain.ready, epoch.left, self._meter)

        def take() -> Ready | None:
            ready = self._echoing.next(feed.next, self._plan, self._cursor, self._meter)
            if ready is None or not ready.rows or convert is None:
                return ready
            return ready._replace(value=convert(ready.value))

        if ahead is None:
            return take()

        return ahead.next(take, feed.ready, epoch.left, self._meter)

    def _watch_gil(self, watch: GilWatch) -> None:
        """Move the workers out of this process if they take the GIL from the training loop."""
        self._watched += 1
        share = watch.after(self._watched)
        if watch.over:
            self._gil_watch = None
        if share is None:
            return
        assembly = self._assembly
        try:
            pack((assembly.work, assembly.recipe.init), by_value=True)
        except Exception as error:  # user code may refuse to be pickled
            _log.info("the workers stay threads: the pipeline cannot be pickled: %s", error)
            return
        why = f"as threads of this process they held the GIL for {share:.0%} of the time"
        choice = Choice("crew", self.choice.workers, why)
        _log.info("the workers move: %s", choice)
        self.choice = choice
        self._reassemble(None, self._meter)

    def _check_stated_length(self, epoch: _Epoch) -> None:
        """Warn if a stream goes on after the length that ``len`` has returned, as torch does."""
        stated = epoch.stated
        if stated is None or self._cursor.batch <= stated:
            return
        self._stated_length = epoch.stated = None
        warnings.warn(
            f"the length of the stream was reported to be {many(stated, 'batch', 'batches')} (when "
            "len() of the loader was called), but it goes on. If there are several workers, each "
            "reads the whole stream unless it divides itself: see get_worker_info() of torch.",
            UserWarning,
            stacklevel=3,
        )

    def _running_feed(self) -> Feed:
        """The feed, which prepares batches from the cursor on."""
        feed = self._feed
        if feed is None:
            feed = self._feed = self._make_feed()
            self._finalizer = close_at_exit(self, feed)
            self._feed_cursor = None
        if self._feed_cursor != self._cursor:
            self._echoing.restart()
            if self._ahead is not None:
                self._ahead.clear()
            if self._custom.recheck and self._cursor.batch == 0:
                feed.refresh()
            # Called before the first batch: a cache that fills up later may hold samples of
            # batches in preparation, which are removed when those batches are handed out.
            self._settled = feed.settled()
            self._batches = Batches(self._plan, self._cursor, self._may_begin_early)
            batches = window_ahead(iter(self._batches), self._plan.as_deal, self.pipeline.source)
            most_ahead = self._plan.most_ahead
            if self._ahead is not None:
                most_ahead = self._ahead.leave_of(most_ahead)
            feed.start(batches, any_thread=self._plan.any_thread, most_ahead=most_ahead)
            if self._ahead is not None:
                plain = self._plain if self._plan.any_thread else None
                self._ahead.take_from(None if plain is None else plain.take_ready)
            self._feed_cursor = self._cursor
        return feed

    def _may_begin_early(self) -> bool:
        """Whether the next epoch may begin before this one is over.

        It may not while caches admit samples: this epoch could be about to put in a sample that
        the next one misses, and hits would depend on which worker is faster.
        """
        if not self._plan.ahead or not self._settled:
            return False
        return not (self._custom.recheck and self.choice.own_processes)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader as plain data, for a checkpoint.

        The first call hashes the code of the pipeline, and data that is not in files. Later ones
        only add the position; between epochs they hash a dataset that may have been changed again.
        """
        if not self.options.in_order and self._in_epoch and self._cursor.batch:
            raise StateError(
                "state_dict() was called within an epoch of a loader with in_order=False. Batches "
                "delivered out of order have no position to resume from. Call state_dict() between "
                "epochs, or leave in_order=False out."
            )
        self.find_ranks()
        if not self._in_epoch:
            self._forget_dataset()
        cursor, generations = self._cursor, self._assembly.keepers.generations
        described = self._describe(self.pipeline)
        if self._loaded_dealing is not None:
            # The rest of the epoch is still that of the loaded checkpoint. Whether this loader can
            # deal it is checked when the loop begins.
            described["dealing"] = deepcopy(self._loaded_dealing)
        return {
            **described,
            "cursor": cursor.as_dict(),
            "plan": self._plan.epoch_state(cursor.epoch),
            "first_batch": self._plan.first(cursor),
            "refurbish": self._chosen,
            "kept": None if generations is None else generations.kept,
            "echo": self._echoing.state(cursor.epoch),
            **self._device_checkpoint(),
        }

    def _device_checkpoint(self) -> dict[str, Any]:
        """What was learnt of the device, which affects speed only, and whether it decodes."""
        together = self._together
        state = self._device_state if together is None else together.state_dict()
        found: dict[str, Any] = {} if state is None else {"device": dict(state)}
        if self._decode != "exact":
            found["decode"] = self._decode
        return found

    @property
    def _decode(self) -> str:
        """Who decodes samples, as far as it changes their bits."""
        deliver = self._custom.deliver
        return "exact" if deliver is None else deliver.decode

    def _check_decode(self, state: Mapping[str, Any]) -> None:
        theirs = state.get("decode", "exact")
        if theirs != self._decode:
            raise StateError(
                f"the checkpoint was taken with decode={theirs!r}, and this loader has decode="
                f"{self._decode!r}. The device decodes other pixels than the CPU. Resume with the "
                "same decode=, or start anew."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the position that ``state_dict`` returned.

        Raises StateError for a checkpoint of another pipeline; the loader is then unchanged.
        """
        self.find_ranks()
        pipeline, chosen = self.pipeline, self._chosen
        if chosen is not None and isinstance(state, Mapping):
            from penstock.diversity.auto import placed

            chosen = state.get("refurbish")
            pipeline = placed(self._written, chosen)
        mine = self._describe(pipeline)
        check_state(state, mine, pipeline.stops)
        self._check_decode(state)
        if self._data.pending and parts_of_data(state).get("all") is not None:
            mine["data"] = self._data.complete(RESUME_WAIT)
            check_state(state, mine, pipeline.stops)
        cursor = Cursor.from_dict(state["cursor"])
        first = int(state.get("first_batch") or 0)
        dealing = None
        if first or (cursor.batch and self._echoing.echo is not None):
            if self._custom.ranks is None or self._feed is not None:
                check_dealing(state, mine)
            dealing = state.get("dealing")
        self._echoing.check_state(state.get("echo"))
        kept = _kept_in_state(pipeline, state.get("kept"))
        self._plan.check_state(state.get("plan"), first)
        # All checks are done: the loader changes from here on.
        generations = self._assembly.keepers.generations
        if chosen != self._chosen or (generations is not None and kept != generations.kept):
            self._switch_to(pipeline, chosen, kept)
        self._echoing.restore(cursor.epoch, state.get("echo") or {})
        self._plan.begin_at(cursor.epoch, first)
        self._plan.restore(state.get("plan"))
        self._epoch_count += 1
        self._in_epoch = False
        self._loaded_dealing = dealing
        self._cursor = cursor
        self._feed_cursor = None
        if isinstance(state.get("device"), Mapping):
            self._device_state = state["device"]
        self._unverified = state if self._data.pending else None

    def _describe(self, pipeline: Pipeline) -> dict[str, Any]:
        """The description of this loader with this pipeline; all but the data is kept."""
        kept = self._description  # another thread may take a checkpoint at the same time
        if kept is None or kept[0] is not pipeline or kept[1] is not self.options:
            described = describe(pipeline, self.options, self._custom.order_name)
            kept = self._description = pipeline, self.options, described
        source = pipeline.source
        return {
            **deepcopy(kept[2]),  # a checkpoint belongs to the user
            "samples": len(source) if source.indexed else None,
            "data": self._data.parts(),
        }

    def _forget_dataset(self) -> bool:
        """Drop the description if the user may have changed the dataset since the last epoch."""
        if not self._custom.recheck or self._cursor.batch:
            return False
        self._description = None
        self._data.renew()
        return True

    def _verify(self, state: Mapping[str, Any]) -> None:
        """Compare the data with that of a checkpoint, once the identity of all files is known."""
        if self._data.pending:
            return
        difference = data_difference(state, {"data": self._data.parts()})
        if difference is not None:
            raise StateError(
                f"the checkpoint does not belong to this loader: {difference}. That became known "
                "after load_state_dict() had returned, because there are many files. Go back to "
                "the data that the checkpoint was taken with, or start anew."
            )
        self._unverified = None

    def renew_data(self) -> None:
        """Describe the dataset anew, which has changed, in checkpoints and where one is loaded."""
        self._data.renew()

    def renew_workers(self) -> None:
        """Go on with workers, and stores in memory, of the dataset as it is now."""
        if self._feed is not None:
            generations = self._assembly.keepers.generations
            self._reassemble(None if generations is None else generations.kept)

    def _switch_to(self, pipeline: Pipeline, chosen: Any, kept: int | None) -> None:
        """Use the pipeline that ``refurbish("auto")`` chose when a checkpoint was taken."""
        self._end_feed()
        self.pipeline, self._chosen = pipeline, chosen
        self._assemble(kept)

    # Watching.

    def stats(self) -> Stats:
        """A frozen snapshot of the counters so far."""
        restarts = self._feed.restarts if self._feed is not None else 0
        held = self._assembly.keepers.stats(self._meter.answered())
        held = self._echoing.counted(held, self._cursor.epoch)
        device = None if self._together is None else self._together.stats()
        found = self._meter.snapshot(self.choice.kind, self.choice.workers, restarts, held, device)
        parts = self._plan.progress(self._cursor)
        return replace(found, mix=tuple(starmap(PartStats, parts))) if parts else found

    def explain(self) -> str:
        """The pipeline as it runs, and who runs it: workers, and a device that prepares its share.

        >>> import numpy as np
        >>> import penstock as ps
        >>> print(ps.from_dataset(np.arange(3)).batch(2).loader(workers=0).explain())
        source      DatasetSource
        batch       2 samples, stacked in place
        workers     in this process (workers=0)
        """
        lines = [self.pipeline.explain(), f"{'workers':<11} {self.choice}"]
        if self._device_plan is not None:
            lines.append(f"{'device':<11} {self._device_plan.why}")
        if self._together is not None:
            lines.append(f"{'':<11} {device_line(self._together.stats())}")
        return "\n".join(lines)

    def queue(self) -> Queue:
        """The number of batches that are ready or in preparation, and the memory they take."""
        feed = self._feed  # another thread may close the loader
        return Queue() if feed is None else feed.queue()

    def batch_times(self) -> list[float]:
        """Seconds that the workers spent on each of the last batches, added up."""
        return self._meter.batch_times()

    def __repr__(self) -> str:
        source = self.pipeline.source
        data = f"{len(source)} samples" if source.indexed else "a stream"
        options, ranks = self.options, self._custom.ranks
        part = f"rank {options.rank} of {options.world}" if ranks is None else str(ranks)
        device = "" if self._device_plan is None else f", {self._device_plan.why}"
        size = self._batch.size if self._batch.budget is None else self._batch.described
        return (
            f"<Loader of {data}, batches of {size}, seed {options.seed}, {part}, "
            f"{self.choice}{self._delivery_note()}{device}>"
        )

    def _delivery_note(self) -> str:
        deliver = self._custom.deliver
        if deliver is None or not deliver.name:
            return ""
        note = self._divide(self.pipeline).note
        return f", delivered to {deliver.name}" + (f" ({note})" if note else "")

    # Making and ending.

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """End the workers and free the caches in memory. Delivered batches stay valid."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._publisher.close()
        self._end_identity()
        if self._end_ahead is not None:
            self._end_ahead()
        self._end_feed()

    def _end_feed(self) -> None:
        if self._feed is not None:
            if self._ahead is not None:
                self._ahead.take_from(None)
            self._finalizer()
            self._feed = self._engine = self._plain = self._direct = None
            if self._together is not None:
                self._device_state, self._together = self._together.state_dict(), None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remade(
        self,
        pipeline: Pipeline | None = None,
        options: Options | None = None,
        plan: Sampling | None = None,
    ) -> Loader:
        """A new loader with the same ``Custom``, but for ``plan``; without one it has an order.

        ``options`` given here say which rank it is.
        """
        ranks = self._custom.ranks if options is None else None
        custom = replace(self._custom, plan=plan, ranks=ranks)
        return Loader(pipeline or self._written, options or self.options, custom)

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this loader is closed. Make a new one with pipeline.loader(), or iterate it "
                "before close() and before the end of its with block."
            )
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this loader was made in another process, of which this one is a fork: its workers "
                "serve that process only. Make the loader in the process that iterates it."
            )

    def _make_feed(self) -> Feed:
        self._convert = self._custom.convert
        self._engine = self._plain = self._direct = None
        deliver = self._custom.deliver
        division = self._divide(self.pipeline)
        if deliver is not None and self._ahead is not None:
            deliver.find()
            self._ahead.begin_with(partial(deliver.begin, division.rest, None))
        if self.options.share is None:
            self._data.begin()
            loader = weakref.ref(self)  # the engine must not keep a forgotten loader alive

            def after_task() -> None:
                found = loader()
                if found is not None:
                    found._publisher.worked(found)

            def long_wait() -> None:
                found = loader()
                if found is not None:
                    found._publisher.waits(found)

            convert = None
            if not self._echoing.repeats_batches:
                convert, self._convert = self._convert, None
            plan = self._device_plan
            if plan is not None and plan.begin is not None:
                self._together = plan.begin(self._device_state)
            engine = self._engine = self._assembly.engine(
                register=None if deliver is None else deliver.register,
                together=self._together,
                in_order=self.options.in_order,
                convert=convert,
                after_task=after_task,
                long_wait=long_wait,
            )
            if not self._echoing.repeats_batches:
                self._plain = engine
                self._direct = engine if self._ahead is None else None
            return engine
        from penstock.node.share import attach

        about = {**self._describe(self.pipeline), "data": self._data.complete()}
        if division.rest is not None:
            # All members of a group must be given the same batches, so they must leave the same
            # operations for their devices.
            about["stops"] = describe(division.pipeline, self.options)["stops"]
        # Memory of the group is registered only if nobody but the device reads it.
        register = None if deliver is None or not deliver.copies else deliver.register
        feed = attach(self._assembly, about, self._plan, register)
        if deliver is not None and deliver.copies and self._ahead is not None:
            self._ahead.begin_with(partial(deliver.begin, division.rest, feed.copy_desk()))
        return feed


def _kept_in_state(pipeline: Pipeline, kept: Any) -> int | None:
    """How many samples refurbish keeps, from a checkpoint; ``None`` without refurbish."""
    if not any(stop.renews for stop in pipeline.stops):
        return None
    samples = len(pipeline.source)
    if not is_whole(kept) or not 0 <= kept <= samples:
        raise StateError(
            f"the checkpoint says that refurbish keeps {kept!r} samples of {samples}, which is "
            "impossible: it is damaged, or was not written by a loader of this pipeline. Resume "
            "from another checkpoint, or start anew."
        )
    return int(kept)


class _Epoch:
    """The iterator of one epoch.

    ``left``: batches left of it; ``None`` if not known. ``stated``: the length of a stream, if the
    user asked for it before the epoch; ``list(loader)`` asks too, but not before.
    """

    def __init__(self, loader: Loader, number: int, left: int | None, stated: int | None) -> None:
        self._loader: Loader | None = loader
        self.number = number
        self.left = left
        self.stated = stated

    def __iter__(self) -> Iterator[Any]:
        return self

    def skip(self) -> None:
        """Leave out the next batch, which has failed: the loop may go on after it."""
        if self._loader is not None:
            self._loader._skip(self)

    def __next__(self) -> Any:
        # The training loop pays for every call here, and for each more than usual: after its step
        # the CPU's caches have other code and data. So this is one function.
        loader = self._loader
        if loader is None:
            raise StopIteration
        if self.number != loader._epoch_count:
            raise RuntimeError(
                "this epoch is over, because another loop over the loader has begun, or "
                "set_epoch() or load_state_dict() was called. A loader runs one epoch at a time: "
                "make a second loader to iterate the data twice at once."
            )
        if loader._closed or loader._forks != _forks:
            loader._check_usable()
        if loader._unverified is not None:
            loader._verify(loader._unverified)
        feed = loader._feed
        if feed is None or loader._feed_cursor is not loader._cursor:
            feed = loader._running_feed()
        engine, direct, ahead = loader._engine, loader._direct, loader._ahead
        plan, publisher = loader._plan, loader._publisher
        while self.left != 0:
            try:
                # An engine whose batches need no more work is asked directly.
                if direct is not None:
                    ready = direct.take_ready()
                elif ahead is not None:
                    ready = ahead.take_ready(self.left)
                else:
                    ready = None
                if ready is None:
                    ready = loader._wait_for_batch(feed, self)
            except BaseException:
                loader._feed_cursor = None
                publisher.moved(loader)
                raise
            if ready is None:
                break
            if ready.ended:
                plan.ended(ready.batch_keys)
                continue
            loader._cursor = loader._feed_cursor = plan.after(loader._cursor, ready.batch_keys)
            if self.left is not None:
                self.left -= 1
            if ready.rows < plan.fewest_rows:
                continue
            if self.stated is not None:
                loader._check_stated_length(self)
            if engine is None or publisher.reported_waiting or not engine.working:
                publisher.moved(loader)
            if loader._gil_watch is not None:
                loader._watch_gil(loader._gil_watch)
            return ready.value
        self._loader = None
        loader._end_epoch()
        raise StopIteration


_forks = 0
"""How often this process has become a fork of another one."""


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)
