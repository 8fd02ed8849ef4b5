"""The keepers of one pipeline: one for each stop that keeps samples, opened and closed together."""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.fingerprint import fingerprint
from penstock.keyed import Keys
from penstock.options import Options
from penstock.order import BatchKeys, Generations
from penstock.pipeline import Pipeline
from penstock.stats import Held
from penstock.stops.hold import Keeper, Opening, keeps_samples
from penstock.stops.road import Road, scope_of
from penstock.stops.stop import Offer, StageFailure, Stop
from penstock.store import RunDir, ThreadClaims
from penstock.store.admission import index_of
from penstock.store.partitioned import Division
from penstock.store.shared import SharedStores

if TYPE_CHECKING:
    from penstock.store.ledger import StoreUse

Prepare = Callable[[Sequence[int]], list[Any]]
"""Prepares samples by index, and leaves out bad ones."""


class Keepers:
    """Opens a store for every stop that keeps samples. ``road``: the road with these stops.

    - ``kept``: how many samples refurbish keeps, as recorded in a checkpoint, because it decides
      which samples are always fresh. ``None``: the number follows from the budget of refurbish,
      and a few samples are prepared to learn their size.
    - ``shared``: workers are processes.
    - ``in_node``: a node keeps the samples, so this process has no statistics of them.
    - ``shared_stores``: the caches that several pipelines of a node share.
    - ``prepare_above``: prepares samples of a pipeline with these stops in a worker process;
      ``None``: they are prepared in this process.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: Options,
        kept: int | None = None,
        *,
        shared: bool,
        in_node: bool = False,
        shared_stores: SharedStores | None = None,
        prepare_above: Callable[[tuple[Stop, ...]], Prepare] | None = None,
    ) -> None:
        self._in_node = in_node
        self._keepers: list[Keeper] = []
        self._claims: list[Path] = []
        self._restarted = False
        self._handed_out: deque[tuple[BatchKeys, Sequence[Offer], Sequence[Any]]] = deque()
        self._fetching: set[Hashable] = set()
        """Batches for which samples of other machines were asked for, and not given back."""
        self._fetching_lock = threading.Lock()
        self._places: list[int] = []
        """The places of the stops that keep samples on the road."""
        self._catching_up = threading.RLock()
        self._uses: list[StoreUse] = []
        road = pipeline.road(options.seed)
        identity = cache(pipeline.source.identity)
        stacks = pipeline.batching is not None and pipeline.batching.collate is None
        ranks = options.world if options.share is None else 1
        stops: list[Stop] = []
        for place, stop in enumerate(road.stops):
            if keeps_samples(stop):
                below = road.stops[place + 1 :]
                preserved = stacks and all(stop.preserves_input for stop in below)
                number = len(self._keepers)
                if prepare_above is None:
                    prepare = _preparer(replace(road, stops=road.stops[:place]))
                else:
                    above = _stops_above(pipeline, number)
                    prepare = prepare_above(tuple(stop for stop in above if not stop.keeps))
                opening = Opening(
                    number=number,
                    samples=len(road.source),
                    seed=options.seed,
                    shared=shared,
                    lends=preserved and stop.in_memory and not shared,
                    made_of=_identity_above(pipeline, number, identity),
                    prepare=prepare,
                    claims=lambda: self._new_claims(shared),
                    shared_stores=shared_stores,
                    kept=kept,
                    ranks=ranks,
                )
                keeper = stop.make_keeper(opening)
                self._keepers.append(keeper)
                self._places.append(place)
                if keeper.store.persistent and keeper.store.place is not None:
                    parents = tuple(use.made.identity for use in self._uses)
                    self._uses.append(
                        _use_of(pipeline, number, place, keeper.store.place, identity(), parents)
                    )
                stop = keeper.stop
            stops.append(stop)
        self.road = replace(road, stops=tuple(stops))
        self.any = bool(self._keepers)
        """Whether a stop of the pipeline keeps samples."""
        self.may_lag = all(keeper.may_lag for keeper in self._keepers)
        """Batches handed out may be left to the next worker that finishes a task."""

    @property
    def generations(self) -> Generations | None:
        """Which version of each sample an epoch uses, where the pipeline has a refurbish."""
        by_keeper = (keeper.generations for keeper in self._keepers)
        return next((generations for generations in by_keeper if generations is not None), None)

    @property
    def divisions(self) -> list[Division]:
        """How several machines divide what the stops keep, from the first stop to the last."""
        return [keeper.division for keeper in self._keepers if keeper.division is not None]

    def fetch(self, batch: Hashable, keys: BatchKeys, done: Callable[[], None]) -> bool:
        """Borrow what other machines keep of a batch. See ``Division.fetch``.

        The lowest stop comes first. What it lacks is prepared here, and asked for from the stop
        above it.
        """
        with self._fetching_lock:
            self._fetching.add(batch)
        indices: list[int] = keys.indices.tolist()
        return self._fetch_from(len(self._keepers) - 1, batch, indices, keys.epoch, done)

    def _fetch_from(
        self,
        number: int,
        batch: Hashable,
        indices: list[int],
        epoch: int,
        done: Callable[[], None],
    ) -> bool:
        """``fetch`` from the stop with this number on, upwards."""
        while number >= 0 and indices:
            division, kept = self._keepers[number].division, list[int]()
            if division is not None:
                kept = self._keepers[number].keys_of(indices, epoch)
            if division is not None and kept:
                fetched = partial(
                    self._fetched, number, division, batch, indices, kept, epoch, done
                )
                settled = division.fetch(batch, kept, fetched)
                with self._fetching_lock:
                    released = batch not in self._fetching
                if released:  # meanwhile, in another thread
                    division.release(batch)
                    return True
                if not settled:
                    return False
                indices = _lacking(division, batch, indices, kept)
            number -= 1
        return True

    def _fetched(
        self,
        number: int,
        division: Division,
        batch: Hashable,
        indices: list[int],
        kept: list[int],
        epoch: int,
        done: Callable[[], None],
    ) -> None:
        """What the stop with this number keeps of a batch is here, or will not come."""
        lacking = _lacking(division, batch, indices, kept)
        if self._fetch_from(number - 1, batch, lacking, epoch, done):
            done()

    # Tiny-batches that another machine prepares.

    @property
    def contents(self) -> list[str]:
        """The identity of what each stop keeps; "-" for one that is not divided."""
        divisions = [keeper.division for keeper in self._keepers]
        return ["-" if division is None else division.content for division in divisions]

    @property
    def full(self) -> bool:
        """Whether no machine has room for further samples."""
        return all(division.full for division in self.divisions)

    def held(self, indices: Sequence[int]) -> list[int]:
        """By sample of a fetched batch: the number of the lowest stop that has it, or -1."""
        found = [-1] * len(indices)
        for number, keeper in enumerate(self._keepers):
            if keeper.division is not None:
                for place, here in enumerate(keeper.division.holds(indices)):
                    found[place] = number if here else found[place]
        return found

    def keep_read(self, number: int, index: int, value: memoryview) -> Offer | None:
        """Put a sample that another machine has read for the stop with this number into its store,
        and offer it, as a worker does; ``None`` if the store has not taken it."""
        division = self._keepers[number].division
        cost = 0 if division is None else division.keep_read(index, value)
        return (number, index, cost) if cost else None

    @property
    def stays_here(self) -> str:
        """Why no other machine may prepare samples of the pipeline; empty if they may."""
        if any(division.needs_pickle for division in self.divisions):
            return (
                "a cache keeps samples that need a pickle, and no machine reads pickles of "
                "another; keep arrays, numbers, text or bytes instead"
            )
        return ""

    def some_here(self, count: int) -> list[int] | None:
        """At most ``count`` samples that are in a cache of this machine.

        ``None``: there are none, and the caches are full, so that none will be added.
        """
        divisions = self.divisions
        here = next(filter(None, (division.some_here(count) for division in divisions[::-1])), [])
        return None if not here and self.full else here

    def release(self, batch: Hashable) -> None:
        """Give back what was borrowed for a batch."""
        with self._fetching_lock:
            if batch not in self._fetching:
                return
            self._fetching.remove(batch)
        for division in self.divisions:
            division.release(batch)

    def _new_claims(self, shared: bool) -> Path | ThreadClaims:
        if not shared:
            return ThreadClaims()
        path = RunDir.current().path / f"{uuid.uuid4().hex}.claims"
        self._claims.append(path)
        return path

    def lacking(self, batch: BatchKeys) -> list[int]:
        """The samples of a batch that no stop keeps now, in their order, each once."""
        indices = list(dict.fromkeys(batch.indices.tolist()))
        for keeper in reversed(self._keepers):
            division = keeper.division
            if division is None:
                indices = keeper.lacks(indices, batch.epoch)
                continue
            # Samples of other machines have arrived before the batch is taken.
            kept = keeper.keys_of(indices, batch.epoch)
            here = {
                index_of(key) for key, held in zip(kept, division.holds(kept), strict=True) if held
            }
            indices = [index for index in indices if index not in here]
        return indices

    def open(self) -> None:
        """Open the stores before any worker uses them."""
        for keeper in self._keepers:
            keeper.open()
        for use in self._uses:
            use.begin()
        if self._uses:
            from penstock.store.catalogue import collect_by_policy

            collect_by_policy()

    def handed_out(
        self, batch: BatchKeys, offers: Sequence[Offer], tally: Sequence[Any] = ()
    ) -> None:
        """Note that a batch was handed out. ``offers``: samples put into stores for it, by row.

        ``tally``: its counters, as ``Tally.as_list`` returns them.

        The thread of the training loop calls this. ``catch_up`` does the rest in another thread.
        """
        self._handed_out.append((batch, offers, tally))

    def catch_up(self) -> None:
        """Admit samples of the batches handed out, and remove those that no later batch needs.

        In the order in which the batches were handed out, whichever thread does it.
        """
        if not self._handed_out:
            return
        with self._catching_up:
            while self._handed_out:
                batch, offers, tally = self._handed_out[0]
                try:
                    self._measure(tally)
                    if offers:
                        self._admit(offers, batch.epoch)
                    for keeper in self._keepers:
                        keeper.handed_out(batch)
                finally:
                    self._handed_out.popleft()  # only now: other threads wait until it is done

    def _measure(self, tally: Sequence[Any]) -> None:
        """Tell the divisions how long samples took that no machine had."""
        if not tally:
            return
        for use in self._uses:
            use.count(tally)
        samples, seconds = tally[0], tally[1]
        for keeper, place in zip(self._keepers, self._places, strict=True):
            # Stage 0 is the source, so the stage above a stop has the number of its place.
            if keeper.division is not None and samples[place]:
                keeper.division.measured(seconds[place] / samples[place])

    def _admit(self, offers: Sequence[Offer], epoch: int) -> None:
        """Decide which samples of a batch stay in the stores, in the order of its rows."""
        by_keeper: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, index, cost in offers:
            by_keeper[number].append((index, cost))
        for number, offered in by_keeper.items():
            self._keepers[number].admit(offered, epoch)

    def discard(self, offers: Sequence[Offer]) -> None:
        """Remove samples that were put into stores for a batch that will not be handed out."""
        if not offers:
            return
        self.catch_up()  # a sample that is about to be admitted for another batch stays
        by_keeper: defaultdict[int, list[int]] = defaultdict(list)
        for number, index, _ in offers:
            by_keeper[number].append(index)
        for number, indices in by_keeper.items():
            self._keepers[number].discard(indices)

    def lost(self, indices: Sequence[int]) -> None:
        """Remove samples that a worker may have put into stores before it died without a report."""
        self.catch_up()
        for keeper in self._keepers:
            keeper.lost(indices)

    def check(self, indices: Sequence[int]) -> None:
        """Give up the stores whose damage may have killed the worker that prepared these samples.

        Then their samples are prepared again, and no sample is blamed for a damaged store.
        """
        for keeper in self._keepers:
            keeper.check(indices)

    def settled(self) -> bool:
        """Whether the next epoch may begin early. Called once before each start of the loader.

        It may not while this epoch still puts samples into the stores: the hits of the next epoch
        would depend on which worker is faster.
        """
        self.catch_up()
        restarted, self._restarted = self._restarted, True
        return all(keeper.settled(restarted=restarted) for keeper in self._keepers)

    def stats(self, answered: Sequence[tuple[int, int]]) -> Held:
        """The statistics of the stops that keep samples, given the (hits, misses) of each."""
        held = Held()
        if self._in_node:
            return held  # `penstock status` shows the statistics of the node
        self.catch_up()
        for keeper, (hits, misses) in zip(self._keepers, answered, strict=True):
            held = keeper.stats(held, hits, misses)
        return held

    def close(self) -> None:
        """Close the stores."""
        self.catch_up()
        for keeper in self._keepers:
            keeper.close()
        for use in self._uses:
            use.end()
        for file in self._claims:
            file.unlink(missing_ok=True)


def _lacking(
    division: Division, batch: Hashable, indices: Sequence[int], kept: Sequence[int]
) -> list[int]:
    """The samples of a batch that are prepared here: those that are never kept, and those that no
    machine has."""
    found = set(map(index_of, kept)).difference(map(index_of, division.to_prepare(batch)))
    return [index for index in indices if index not in found]


def _identity_above(
    pipeline: Pipeline, number: int, identity: Callable[[], str]
) -> Callable[[], object]:
    """Returns the identity of what the stop with this number keeps: the source and stops above it.

    The stops count as written: joining several of them into one step changes no sample.
    ``identity``: returns that of the source.
    """
    above = _stops_above(pipeline, number)
    return lambda: (identity(), [stop.fingerprint() for stop in above])


def _stops_above(pipeline: Pipeline, number: int) -> tuple[Stop, ...]:
    """The stops above the one with this number of those that keep samples."""
    places = [place for place, stop in enumerate(pipeline.stops) if stop.keeps]
    return pipeline.stops[: places[number]]


def _use_of(
    pipeline: Pipeline,
    number: int,
    stop_place: int,
    directory: Path,
    data: str,
    parents: tuple[str, ...],
) -> StoreUse:
    """The use of the store of the stop with this number, for the ledger.

    ``data``: the identity of the source. ``parents``: of the stores above it.
    """
    from penstock.store.ledger import Provenance, StoreUse

    above = _stops_above(pipeline, number)
    stop = pipeline.stops[len(above)]
    origin = pipeline.source.origin()
    made = Provenance(
        kind=stop.name,
        identity=directory.name,
        place=str(directory),
        origin=origin,
        data=data,
        made_by=(type(pipeline.source).__name__, *(one.full_call for one in (*above, stop))),
        # Without a known origin two data sets could look the same.
        line=fingerprint((stop.name, origin, [one.name for one in above])) if origin else "",
        parents=parents,
    )
    return StoreUse(made, number, stop_place)


def _preparer(above: Road) -> Prepare:
    """Returns a function that prepares samples by index, without stores, and skips bad samples."""
    bare = replace(above, stops=tuple(stop for stop in above.stops if not stop.keeps))

    def prepare(indices: Sequence[int]) -> list[Any]:
        samples = []
        with scope_of(bare, own_process=False):
            road = bare.open()
            for index in indices:
                try:
                    samples += road.get(Keys(0, [index]))
                except StageFailure:
                    continue  # a bad sample is reported when its turn comes
        return samples

    return prepare
