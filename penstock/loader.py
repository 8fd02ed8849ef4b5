"""The loader: iterates a pipeline, says where it stands, and cleans up after itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.diversity.auto import placed, settle
from penstock.engine.build import Assembly, Recipe
from penstock.engine.checkpoint import check_dealing, check_state, describe
from penstock.engine.echo import Echoing
from penstock.engine.engine import Engine
from penstock.engine.plan import plan_of
from penstock.engine.pools.choose import Choice
from penstock.engine.pools.launch import Start
from penstock.engine.pools.worker import Init
from penstock.errors import PipelineError, StateError
from penstock.host.at_exit import close_at_exit
from penstock.node.recut import Recut
from penstock.node.share import Member, attached, check_shared
from penstock.options import Options, is_whole
from penstock.order import BatchKeys, Cursor, Deal, MidEpoch
from penstock.order.plan import Batches, Plan
from penstock.order.streams import Rotation
from penstock.pipeline import Pipeline
from penstock.source.stream import StreamSource
from penstock.stats import Held, Stats
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
        custom = custom or Custom()
        self._written = pipeline
        self.options = options
        self.choice: Choice = _recipe(pipeline, options, custom).choice()
        shared = self.choice.own_processes
        self.pipeline, self._chosen = settle(pipeline, options.seed, shared=shared)
        self._custom = custom
        self._batch = batch
        self._stream = isinstance(pipeline.source, StreamSource)
        if self._stream:
            options.check_stream()
        self._shared = options.share is not None
        if self._shared:
            check_shared(pipeline, options)
        self._echoing = Echoing(self.pipeline)
        self._assemble(None)
        self._engine: Engine | Member | None = None
        self._pid = os.getpid()
        self._closed = False
        self._cursor = Cursor()
        self._settled = False
        self._begun = False
        self._taken = [0] * max(1, self.choice.workers)
        self._turn = 0
        self._at: Cursor | None = None
        self._batches: Batches | None = None
        # Epochs know their loader; the loader knows them by number, or neither could be let go.
        self._epochs = 0
        self._live = Publisher(self)

    def _assemble(self, kept: int | None) -> None:
        """The road and all that depends on what refurbish keeps."""
        recipe = _recipe(self.pipeline, self.options, self._custom, kept)
        self._assembly = Assembly(recipe, self.choice)
        self._holds, self._meter = self._assembly.holds, self._assembly.meter
        self._plan: Plan | None = None
        if not self._stream:
            renewal, factors = self._holds.renewal, self._echoing.factors
            self._plan = plan_of(self.pipeline, self.options, renewal, factors, self._custom.plan)

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        self._check_usable()
        if self._begun:
            # The last loop was left before its end; a new one is a new epoch.
            self._to_epoch(self._cursor.epoch + 1)
        self._begun = True
        self._epochs += 1
        self._echoing.begin(self._meter)
        return _Epoch(self, self._epochs, self._batches_left())

    def __len__(self) -> int:
        """Batches in an epoch."""
        if self._plan is not None:
            length = self._plan.length(Cursor(self._cursor.epoch))
            if length is None:
                raise TypeError("the sampler has no length, so this loader has none")
            return length
        samples = self.pipeline.source.length() if self._stream else None  # type: ignore[union-attr]
        if samples is None:
            raise TypeError("a stream has no length, so this loader has none")
        size = self._batch.size
        return samples // size if self._batch.drop_last else -(-samples // size)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._cursor.epoch

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
        self._taken = [0] * len(self._taken)
        self._turn = 0

    def _batches_left(self) -> int | None:
        return self._plan.length(self._cursor) if self._plan is not None else None

    def _next(self, epoch: _Epoch) -> Any:
        if epoch.number != self._epochs:
            raise RuntimeError("this epoch is over: another loop over the loader has begun")
        self._check_usable()
        engine = self._running()
        while epoch.left != 0:
            self._live.asked(self)
            try:
                ready = self._echoing.next(engine.next, self._plan, self._cursor, self._meter)
            except BaseException:
                self._at = None
                self._live.moved(self)
                raise
            if ready is None:
                break
            if self._stream and ready.ended:
                continue
            if not self._shared:
                self._holds.handed_out(ready.plan)
            self._advance(ready.plan)
            if epoch.left is not None:
                epoch.left -= 1
            if ready.rows == 0 or (
                self._stream and self._batch.drop_last and ready.rows < self._batch.size
            ):
                continue
            self._live.moved(self)
            convert = self._custom.convert
            return ready.value if convert is None else convert(ready.value)
        over = self._cursor.epoch
        self._echoing.end(self._meter, self._holds.road.stages, self.choice.workers)
        self._to_epoch(over + 1)
        began = self._batches is not None and self._batches.epoch > over
        self._at = self._cursor if began else None
        self._live.moved(self)
        raise StopIteration

    def _advance(self, plan: BatchKeys) -> None:
        if self._plan is not None:
            self._cursor = self._plan.after(self._cursor, plan)
        else:
            worker = Rotation.worker(plan)
            self._taken[worker] = plan.number + 1
            self._turn = worker + 1
            self._cursor = self._cursor._replace(batch=self._cursor.batch + 1)
        self._at = self._cursor

    def _running(self) -> Engine | Member:
        """The engine, preparing from the cursor on."""
        engine = self._engine
        if engine is None:
            engine = self._engine = self._make_engine()
            self._finalizer = close_at_exit(self, engine, self._holds)
            self._at = None
        if self._at != self._cursor:
            self._echoing.restart()
            if self._custom.recheck and self._cursor.batch == 0:
                engine.refresh()
            if self._plan is None:
                rotation = Rotation(self._taken, self._batch.size, self._cursor.epoch, self._turn)
                engine.start(iter(rotation), rotation)
            else:
                # As it was before the first batch: what is full now may still hold samples of
                # batches on their way, which are taken out when those are handed out.
                self._settled = self._may_settle()
                self._batches = Batches(self._plan, self._cursor, self._may_run_ahead)
                engine.start(iter(self._batches))
            self._at = self._cursor
        return engine

    def _may_settle(self) -> bool:
        if not self._shared:
            return self._holds.settled()
        # What a node holds is not known here; after an epoch most of it is there.
        return self._epochs > 1 or not self._holds.road.holds

    def _may_run_ahead(self) -> bool:
        """Whether the next epoch may be begun before this one is over.

        Not while caches still admit: a sample that is missed there could be one that this epoch
        is just putting in, and the next epoch's hits would depend on who was faster.
        """
        if self._plan is None or not self._plan.ahead or not self._settled:
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
        plan = self._plan
        sampler = getattr(plan, "epoch_state", None)
        return {
            **describe(self.pipeline, self.options, self._custom.order_name),
            "cursor": self._cursor.as_dict(),
            "sampler": sampler(self._cursor.epoch) if sampler is not None else None,
            "refurbish": self._chosen,
            "kept": None if self._holds.renewal is None else self._holds.renewal.kept,
            "echo": self._echoing.state(self._cursor.epoch),
            "turned": plan.first(self._cursor) if isinstance(plan, MidEpoch) else 0,
            "streams": {"taken": list(self._taken), "turn": self._turn} if self._stream else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken. Refuses what is not this loader's."""
        if self._chosen is not None and isinstance(state, Mapping):
            self._choose(state.get("refurbish"))
        mine = describe(self.pipeline, self.options, self._custom.order_name)
        check_state(state, mine)
        cursor = Cursor.from_dict(state["cursor"])
        if self._stream:
            streams = state.get("streams") or {}
            taken = list(streams.get("taken", ()))
            if len(taken) != len(self._taken):
                raise StateError(
                    f"the checkpoint was taken with {len(taken)} streams, one for each worker, and "
                    f"this loader has {len(self._taken)}: give the same number of workers."
                )
            self._taken, self._turn = taken, int(streams["turn"])
        if cursor.batch and self._echoing.echo is not None:
            check_dealing(state, mine)
        self._echoing.restore(cursor.epoch, state.get("echo"))
        self._keep(state.get("kept"))
        self._turn_to(state, mine, cursor)
        restore = getattr(self._plan, "restore", None)
        if restore is not None:
            restore(state.get("sampler"))
        self._epochs += 1
        self._begun = False
        self._cursor = cursor
        self._at = None

    def _keep(self, kept: Any) -> None:
        """Let refurbish keep as many samples as it did where a checkpoint was taken."""
        renewal = self._holds.renewal
        if renewal is None or kept == renewal.kept:
            return
        if not is_whole(kept) or not 0 <= kept <= renewal.n:
            raise StateError(
                f"the checkpoint says that refurbish keeps {kept!r} samples of {renewal.n}: it is "
                "damaged, or was not written by this loader."
            )
        self._assemble_again(kept)

    def _turn_to(self, state: Mapping[str, Any], mine: Mapping[str, Any], cursor: Cursor) -> None:
        """Go on with an epoch that was begun in the middle, among others that shared it."""
        first = state.get("turned") or 0
        if self._plan is None or not first:
            return
        check_dealing(state, mine)
        if not isinstance(self._plan, MidEpoch):
            self._plan = MidEpoch(self._plan)
        self._plan.firsts[cursor.epoch] = int(first)

    def _choose(self, chosen: Any) -> None:
        """Do what ``refurbish("auto")`` came to where a checkpoint was taken."""
        if chosen != self._chosen:
            self.pipeline, self._chosen = placed(self._written, chosen), chosen
            self._assemble_again(None)

    def _assemble_again(self, kept: int | None) -> None:
        if self._engine is not None:
            self._finalizer()
            self._engine = None
        self._assemble(kept)

    # Watching.

    def stats(self) -> Stats:
        """A frozen snapshot of what happened so far."""
        restarts = self._engine.restarts if self._engine is not None else 0
        epoch = self._cursor.epoch
        held = Held()  # what a node keeps, `penstock status` shows
        if not self._shared:
            held = self._holds.stats(self._meter.answered(), self._echoing.factor(epoch))
        held = self._echoing.counted(held, epoch)
        return self._meter.snapshot(self.choice.kind, self.choice.workers, restarts, held)

    def __repr__(self) -> str:
        plan = self._plan
        what = "a stream" if plan is None else f"{len(self.pipeline.source)} samples"  # type: ignore[arg-type]
        return (
            f"<Loader of {what}, batches of {self._batch.size}, seed {self.options.seed}, "
            f"{self.choice}>"
        )

    # Making and ending.

    def close(self) -> None:
        """End the workers and drop what memory caches hold. Batches already out stay good."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._live.close()
        if self._engine is not None:
            self._finalizer()
            self._engine = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this loader is closed")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this loader was made in another process, of which this one is a fork. Make the "
                "loader in the process that iterates it."
            )

    def _make_engine(self) -> Engine | Member:
        if not self._shared:
            return self._assembly.engine(in_order=self.options.in_order)
        about = describe(self.pipeline, self.options, self._custom.order_name)
        plan = self._plan.plan if isinstance(self._plan, MidEpoch) else self._plan
        engine = attached(self._assembly, about, plan)
        if isinstance(plan, Deal) and not isinstance(engine, Recut):
            # Among others an epoch may be begun where they are.
            self._plan = self._plan if isinstance(self._plan, MidEpoch) else MidEpoch(plan)
            live = self.options.join == "live"
            self._plan.begin = engine.begin if live else engine.begin_at_start
        return engine


def _recipe(
    pipeline: Pipeline, options: Options, custom: Custom, kept: int | None = None
) -> Recipe:
    return Recipe(pipeline, options, custom.fallback, custom.init, custom.start, kept)


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
