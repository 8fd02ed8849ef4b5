"""A stop that keeps samples, and its keeper, which owns the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import numpy as np

from penstock.config import disk_dir
from penstock.errors import FingerprintError
from penstock.fingerprint import fingerprint
from penstock.order import BatchKeys, Generations
from penstock.serialize import Packed, pack, unpack
from penstock.stats import Held
from penstock.stops.stop import Stop
from penstock.store import LmdbStore, SampleStore, ThreadClaims
from penstock.store.shared import SharedStores
from penstock.store.value import Lent
from penstock.tree import flatten

_OVERHEAD = 256
"""Bytes that a kept sample takes beside its fields, about."""


class Hold(Stop):
    """A stop that keeps samples, and counts hits (it had the sample) and misses.

    ``number`` says which of a pipeline's holds it is; tallies have a place for each. One that
    ``lends`` hands out the samples it keeps instead of copies: its store is in this process, and
    nothing below it changes what it is given. ``number``, ``lends`` and ``store`` are set by its
    keeper, when a loader opens the pipeline.
    """

    keeps: ClassVar[bool] = True
    by_index: ClassVar[bool] = False
    """Its store knows samples by their plain index."""

    number: int
    lends: bool
    store: SampleStore | None

    @property
    def in_memory(self) -> bool:
        """Whether its store goes with the loader."""
        return True

    def opened(self, opening: Opening) -> Keeper:
        """Make its store, and the keeper that owns it."""
        raise NotImplementedError

    def tried(self, store: SampleStore, number: int, samples: int, seed: int) -> Hold:
        """The same stop with this store, for a trial in which every sample is new."""
        raise NotImplementedError

    def hit_share(self, room: float) -> float | None:
        """The share of samples it finds in its store, of those there is ``room`` for (0 to 1).

        ``None`` where that is not known before training.
        """
        raise NotImplementedError


def keeps_samples(stop: Stop) -> TypeGuard[Hold]:
    return stop.keeps


@dataclass(frozen=True)
class Opening:
    """What a stop that keeps samples needs to open its store.

    - ``number``: which of the pipeline's holds it is.
    - ``samples``: how many samples the source has.
    - ``shared``: workers are processes, so the store must be visible to several of them.
    - ``lends``: samples may be lent: nothing below changes them, and workers are threads.
    - ``made_of``: identifies what it keeps: the source and the stops above. Raises
      FingerprintError.
    - ``prepare``: prepares samples by index with what stands above, to learn their size; bad ones
      are left out.
    - ``claims``: makes a place where workers agree on who prepares a sample.
    - ``shared_stores``: stores that several pipelines of a node use together; ``None`` elsewhere.
    - ``kept``: how many samples refurbish keeps, where a checkpoint says so.
    - ``ranks``: how many ranks read the data, each with stores of its own.
    """

    number: int
    samples: int
    seed: int
    shared: bool
    lends: bool
    made_of: Callable[[], object]
    prepare: Callable[[Sequence[int]], list[Any]]
    claims: Callable[[], Path | ThreadClaims]
    shared_stores: SharedStores | None = None
    kept: int | None = None
    ranks: int = 1

    def disk_store(
        self, stop: str, where: str, budget: int, *tags: object, overshoot: int | None = None
    ) -> SampleStore:
        """A store that outlives this run, named after what it holds."""
        try:
            made_of = self.made_of()
        except FingerprintError as error:
            raise FingerprintError(
                f"{stop}(where={where!r}) outlives this run and must know what it holds: {error}"
            ) from error
        identity = fingerprint((*tags[:1], made_of, *tags[1:]) if tags else made_of)
        root = disk_dir() / "stores" if where == "disk" else Path(where)
        return LmdbStore(
            root / identity, budget, identity=identity, persistent=True, overshoot=overshoot
        )


class Keeper:
    """The life of one hold, in the process of its loader or node.

    A stop is a frozen value that every worker has a copy of; its keeper decides in one place, in
    the order in which batches are handed out. ``stop`` is the stop as workers get it.
    """

    def __init__(self, stop: Hold, store: SampleStore) -> None:
        self.stop = stop
        self.store = store

    @property
    def generations(self) -> Generations | None:
        """Which version of each sample an epoch uses, where samples have versions."""
        return None

    def open(self) -> None:
        """Make the store ready before any worker asks for it."""
        self.store.open()

    def admit(self, offers: Sequence[tuple[int, int]]) -> None:
        """Decide which samples that workers put into the store stay: (index, cost) each."""

    def discard(self, indices: Sequence[int]) -> None:
        """Remove samples of a batch that is not handed out, unless they were admitted before."""

    def outdated(self, batch: BatchKeys) -> list[int]:
        """What the store no longer needs once this batch is handed out."""
        return []

    def handed_out(self, batch: BatchKeys) -> None:
        """Remove what no later batch needs."""
        outdated = self.outdated(batch)
        if outdated:
            self.store.delete_many(outdated)

    def settled(self, *, restarted: bool) -> bool:
        """Whether the next epoch may begin early without changing what it finds in the store.

        ``restarted``: the loader has begun an epoch before.
        """
        return True

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        """Add the statistics of this stop."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the store, and remove it unless it outlives the run."""
        if self.store.persistent:
            self.store.close()
        else:
            self.store.destroy()


def stored(sample: Any, lends: bool) -> Packed | Lent:
    """A sample as it is put into a store: as bytes, or, where nobody below changes it, itself."""
    return (lent(sample) if lends else None) or pack(sample)


def lent(sample: Any) -> Lent | None:
    """A sample to be kept as it is; ``None`` where part of it is handed out and may be changed."""
    nbytes = _OVERHEAD
    for leaf in flatten(sample)[0]:
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            nbytes += leaf.nbytes
        elif isinstance(leaf, (str, bytes)):
            nbytes += len(leaf)
        elif not isinstance(leaf, (int, float, complex, np.generic)):
            return None  # an object is not copied into a batch
    return Lent(sample, nbytes)


def taken(frame: Any) -> Any:
    """The sample that a store had."""
    return frame.sample if type(frame) is Lent else unpack(frame)


def place(index: int, version: int) -> int:
    """Where a sample is kept that there may be two versions of: the next epoch may need the new
    one while this one still needs the old."""
    return 2 * index + version % 2
