"""The loader: iterates a pipeline, says where it stands, and cleans up after itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.diversity.auto import placed, settle
from penstock.engine.build import Assembly, Recipe
from penstock.engine.checkpoint import check_dealing, check_state, describe
from penstock.engine.echo import Echoing
from penstock.engine.feed import Feed, Queue
from penstock.engine.plan import plan_of
from penstock.engine.pools.choose import Choice
from penstock.engine.pools.launch import Start
from penstock.engine.pools.worker import Init
from penstock.errors import PipelineError, StateError
from penstock.host.at_exit import close_at_exit
from penstock.node.share import attach, check_shared
from penstock.options import Options, is_whole
from penstock.order import Cursor, Plan
from penstock.order.plan import Batches
from penstock.pipeline import Pipeline
from penstock.stats import Stats
from penstock.stops.batch import Collate, stack
from penstock.watch.publish import Publisher


@dataclass(frozen=True)
class Custom:
    """What adapters to frameworks put in place of the defaults."""

    plan: Callable[[int, int, bool], Plan] | None = None
    init: Init | None = None
    start: Start = "program"
    convert: Callable[[Any], Any] | None = None
    fallback: Collate = stack
    order_name: str = ""
    recheck: bool = False
    """The dataset may be changed between epochs, and workers must see that."""


class Loader:
    """Iterates a pipeline; made by ``Pipeline.loader``.

    Each ``for`` loop is one epoch. Workers start with the first one and stay; the first batches
    of the next epoch are prepared while the last ones of this are consumed. Batches are views of
    shared memory that is used again when nothing looks at it any more.

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
        batch = pipeline.batching
        if batch is None:
            raise PipelineError("a loader needs batches: end the pipeline with batch(size).")
        self._custom = custom or Custom()
        self._written = pipeline
        self.options = options
        self.choice: Choice = self._recipe(pipeline, None).choice()
        shared = self.choice.own_processes
        self.pipeline, self._chosen = settle(pipeline, options.seed, shared=shared)
        self._batch = batch
        if options.share is not None:
            check_shared(pipeline, options)
        self._echoing = Echoing(self.pipeline)
        self._assemble(None)
        self._feed: Feed | None = None
        self._pid = os.getpid()
        self._closed = False
        self._cursor = Cursor()
        self._settled = False
        self._begun = False
        self._at: Cursor | None = None
        self._batches: Batches | None = None
        # An epoch refers to its loader, so the loader knows epochs by number only: a reference
        # cycle would keep both alive.
        self._epochs = 0
        self._live = Publisher(self)

    def _recipe(self, pipeline: Pipeline, kept: int | None) -> Recipe:
        custom = self._custom
        return Recipe(pipeline, self.options, custom.fallback, custom.init, custom.start, kept)

    def _assemble(self, kept: int | None) -> None:
        """Make the stores, and the plan, which depends on how many samples refurbish keeps."""
        self._assembly = Assembly(self._recipe(self.pipeline, kept), self.choice)
        self._meter = self._assembly.meter
        self._plan = plan_of(
            self.pipeline,
            self.options,
            self._assembly.keepers.road.stops,
            workers=self.choice.workers,
            factors=self._echoing.factors,
            sampling=self._custom.plan,
        )

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        self._check_usable()
        if self._begun:
            # The last loop was left before its end; a new one is a new epoch.
            self._to_epoch(self._cursor.epoch + 1)
        self._begun = True
        self._epochs += 1
        self._echoing.begin(self._meter)
        return _Epoch(self, self._epochs, self._plan.left(self._cursor))

    def __len__(self) -> int:
        """Batches in an epoch."""
        length = self._plan.length(Cursor(self._cursor.epoch))
        if length is None:
            raise TypeError(f"{self._plan.source_name} has no length, so this loader has none")
        return length

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._cursor.epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch were delivered."""
        return self._cursor.batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        if not is_whole(epoch) or epoch < 0:
            raise PipelineError(f"epoch is {epoch!r}; give a whole number from 0 on.")
        if self._begun or epoch != self._cursor.epoch or self._cursor.batch:
            self._to_epoch(epoch)

    def _to_epoch(self, epoch: int) -> None:
        self._epochs += 1
        self._begun = False
        self._cursor = Cursor(epoch)

    def _next(self, epoch: _Epoch) -> Any:
        if epoch.number != self._epochs:
            raise RuntimeError("this epoch is over: another loop over the loader has begun")
        self._check_usable()
        feed, plan = self._running(), self._plan
        while epoch.left != 0:
            self._live.asked(self)
            try:
                ready = self._echoing.next(feed.next, plan, self._cursor, self._meter)
            except BaseException:
                self._at = None
                self._live.moved(self)
                raise
            if ready is None:
                break
            if ready.ended:
                plan.ended(ready.plan)
                continue
            self._cursor = self._at = plan.after(self._cursor, ready.plan)
            if epoch.left is not None:
                epoch.left -= 1
            if not plan.delivers(ready.rows):
                continue
            self._live.moved(self)
            convert = self._custom.convert
            return ready.value if convert is None else convert(ready.value)
        over = self._cursor.epoch
        self._echoing.end(self._meter, self._assembly.work.road.stops, self.choice.workers)
        self._to_epoch(over + 1)
        began = self._batches is not None and self._batches.epoch > over
        self._at = self._cursor if began else None
        self._live.moved(self)
        raise StopIteration

    def _running(self) -> Feed:
        """The feed, preparing from the cursor on."""
        feed = self._feed
        if feed is None:
            feed = self._feed = self._make_feed()
            self._finalizer = close_at_exit(self, feed)
            self._at = None
        if self._at != self._cursor:
            self._echoing.restart()
            if self._custom.recheck and self._cursor.batch == 0:
                feed.refresh()
            # Asked before the first batch: a cache that is full later may still hold samples of
            # batches in preparation, which are removed when those are handed out.
            self._settled = feed.settled()
            self._batches = Batches(self._plan, self._cursor, self._may_run_ahead)
            feed.start(iter(self._batches))
            self._at = self._cursor
        return feed

    def _may_run_ahead(self) -> bool:
        """Whether the next epoch may be begun before this one is over.

        Not while caches still admit: a sample missed there could be one that this epoch is about
        to put in, and the next epoch's hits would depend on which worker was faster.
        """
        if not self._plan.ahead or not self._settled:
            return False
        return not (self._custom.recheck and self.choice.kind == "processes")

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain data: put it into a checkpoint."""
        if not self.options.in_order and self._begun and self._cursor.batch:
            raise StateError(
                "batches delivered out of order cannot be counted: with in_order=False, take "
                "state_dict() between epochs."
            )
        cursor, generations = self._cursor, self._assembly.keepers.generations
        return {
            **describe(self.pipeline, self.options, self._custom.order_name),
            "cursor": cursor.as_dict(),
            "plan": self._plan.epoch_state(cursor.epoch),
            "first_batch": self._plan.first(cursor),
            "refurbish": self._chosen,
            "kept": None if generations is None else generations.kept,
            "echo": self._echoing.state(cursor.epoch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken.

        A checkpoint of another loader is refused, and then this loader stays as it was.
        """
        pipeline, chosen = self.pipeline, self._chosen
        if chosen is not None and isinstance(state, Mapping):
            chosen = state.get("refurbish")
            pipeline = placed(self._written, chosen)
        mine = describe(pipeline, self.options, self._custom.order_name)
        check_state(state, mine)
        cursor = Cursor.from_dict(state["cursor"])
        first = int(state.get("first_batch") or 0)
        if first or (cursor.batch and self._echoing.echo is not None):
            check_dealing(state, mine)
        self._echoing.check_state(state.get("echo"))
        kept = _checked_kept(pipeline, state.get("kept"))
        self._plan.check_state(state.get("plan"), first)
        # From here on nothing is refused.
        generations = self._assembly.keepers.generations
        if chosen != self._chosen or (generations is not None and kept != generations.kept):
            self._use(pipeline, chosen, kept)
        self._echoing.restore(cursor.epoch, state.get("echo") or {})
        self._plan.begin_at(cursor.epoch, first)
        self._plan.restore(state.get("plan"))
        self._epochs += 1
        self._begun = False
        self._cursor = cursor
        self._at = None

    def _use(self, pipeline: Pipeline, chosen: Any, kept: int | None) -> None:
        """Go over to what ``refurbish("auto")`` chose, and kept, where a checkpoint was taken."""
        self._end_feed()
        self.pipeline, self._chosen = pipeline, chosen
        self._assemble(kept)

    # Watching.

    def stats(self) -> Stats:
        """A frozen snapshot of what happened so far."""
        restarts = self._feed.restarts if self._feed is not None else 0
        held = self._assembly.keepers.stats(self._meter.answered())
        held = self._echoing.counted(held, self._cursor.epoch)
        return self._meter.snapshot(self.choice.kind, self.choice.workers, restarts, held)

    def queue(self) -> Queue:
        """How many batches are ready or in preparation, and the memory they take."""
        return Queue() if self._feed is None else self._feed.queue()

    def batch_times(self) -> list[float]:
        """Seconds of work in each of the last batches, added up over the workers."""
        return list(self._meter.batch_times)

    def __repr__(self) -> str:
        source = self.pipeline.source
        what = f"{len(source)} samples" if source.indexed else "a stream"
        return (
            f"<Loader of {what}, batches of {self._batch.size}, seed {self.options.seed}, "
            f"{self.choice}>"
        )

    # Making and ending.

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """End the workers and drop what memory caches hold. Batches already out stay good."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._live.close()
        self._end_feed()

    def _end_feed(self) -> None:
        if self._feed is not None:
            self._finalizer()
            self._feed = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remade(
        self,
        pipeline: Pipeline | None = None,
        options: Options | None = None,
        plan: Callable[[int, int, bool], Plan] | None = None,
    ) -> Loader:
        """A new loader with the same adapters; without ``plan`` it follows the order."""
        custom = replace(self._custom, plan=plan)
        return Loader(pipeline or self._written, options or self.options, custom)

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this loader is closed")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this loader was made in another process, of which this one is a fork. Make the "
                "loader in the process that iterates it."
            )

    def _make_feed(self) -> Feed:
        if self.options.share is None:
            return self._assembly.engine(in_order=self.options.in_order)
        about = describe(self.pipeline, self.options, self._custom.order_name)
        return attach(self._assembly, about, self._plan)


def _checked_kept(pipeline: Pipeline, kept: Any) -> int | None:
    """How many samples refurbish kept where a checkpoint was taken."""
    if not any(stop.renews for stop in pipeline.stops):
        return None
    samples = len(pipeline.source)
    if not is_whole(kept) or not 0 <= kept <= samples:
        raise StateError(
            f"the checkpoint says that refurbish keeps {kept!r} samples of {samples}: it is "
            "damaged, or was not written by this loader."
        )
    return int(kept)


class _Epoch:
    """One pass over the data."""

    def __init__(self, loader: Loader, number: int, left: int | None) -> None:
        self._loader: Loader | None = loader
        self.number = number
        self.left = left

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._loader is None:
            raise StopIteration
        try:
            return self._loader._next(self)
        except StopIteration:
            self._loader = None
            raise
