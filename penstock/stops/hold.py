"""A stop that keeps samples, and its keeper, which owns the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np

from penstock.config import disk_dir
from penstock.errors import FingerprintError
from penstock.fingerprint import fingerprint
from penstock.keyed import Keys
from penstock.order import BatchKeys, Generations
from penstock.serialize import Packed
from penstock.stats import Held
from penstock.stops.stop import StepContext, Stop
from penstock.store import SampleStore, ThreadClaims
from penstock.store.partitioned import Division
from penstock.store.plain import pack_sample, unpack_sample
from penstock.store.shared import SharedStores
from penstock.store.value import Lent
from penstock.tree import flatten

_OVERHEAD = 256
"""About the bytes that a kept sample takes beside its fields."""


class Hold(Stop):
    """A stop that keeps samples in a store, and counts hits and misses.

    These are set when a loader opens the pipeline:

    - ``number``: which of the pipeline's holds it is; a tally has counters for each of them.
    - ``lends``: it returns the samples in its store itself, not copies: the store is in this
      process, and no stop below changes its input.
    - ``store``: ``None`` in a pipeline that was not opened.
    """

    keeps: ClassVar[bool] = True
    by_index: ClassVar[bool] = False
    """The keys of its store are the indices of samples."""

    number: int
    lends: bool
    store: SampleStore | None

    @property
    def in_memory(self) -> bool:
        """Whether its store ends with the loader."""
        return True

    @property
    def can_lend(self) -> bool:
        """Whether it keeps samples in a form in which it can lend them to threads."""
        return self.in_memory

    def make_keeper(self, opening: Opening) -> Keeper:
        """Open its store. Returns the keeper that owns the store."""
        raise NotImplementedError

    def for_trial(self, store: SampleStore, number: int, samples: int, seed: int) -> Hold:
        """The same stop with this store, for a measurement in which every sample is new."""
        raise NotImplementedError

    def lent(self, context: StepContext) -> Access | None:
        """Access to its samples if it hands them out without a copy; ``None`` if it does not."""
        return None

    def hit_share(self, room: float) -> float | None:
        """The share of samples that it finds in its store, 0 to 1; ``None``: not known yet.

        ``room``: the share of all samples that the store has room for.
        """
        raise NotImplementedError


@dataclass
class Found:
    """The samples that a hold has of some keys.

    - ``samples``: ``None`` in the places of samples that it does not have.
    - ``missing``: these places; ``keep``: those of them whose samples it will keep.
    - ``versions``: which version of each sample is wanted, where samples have versions.
    """

    samples: list[Any]
    missing: list[int]
    keep: list[int]
    versions: list[int] | None = None


class Access(Protocol):
    """The samples of a hold, for one worker."""

    def find(self, keys: Keys) -> Found:
        """The samples of these keys that it has."""

    def count(self, hits: int, misses: int) -> None:
        """Count samples that were found, and samples that were not."""

    def keep(self, indices: Sequence[int], versions: Sequence[int], fresh: Sequence[Any]) -> None:
        """Keep samples that were missing, each of its version, and offer them to the keeper."""


def keeps_samples(stop: Stop) -> TypeGuard[Hold]:
    """Whether a stop is a ``Hold``."""
    return stop.keeps


@dataclass(frozen=True)
class Opening:
    """What a stop that keeps samples needs to open its store.

    - ``number``: which of the pipeline's holds it is.
    - ``samples``: number of samples in the source.
    - ``seed``: the seed of the loader.
    - ``shared``: workers are processes, so several processes use the store.
    - ``lends``: samples may be lent: no stop below changes them, and workers are threads.
    - ``made_of``: returns the identity of the source and the stops above. Raises
      FingerprintError.
    - ``prepare``: prepares samples by index with the stops above, to learn their size; bad samples
      are left out.
    - ``claims``: makes claims, with which workers agree on who prepares a sample.
    - ``shared_stores``: stores that several pipelines of a node share; ``None`` outside a node.
    - ``kept``: how many samples refurbish keeps, if a checkpoint says so.
    - ``ranks``: number of ranks that read the data, each with stores of its own.
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
        """A store on disk that outlives this run, named by the fingerprint of what it holds."""
        from penstock.store import LmdbStore

        try:
            made_of = self.made_of()
        except FingerprintError as error:
            raise FingerprintError(
                f"{stop}(where={where!r}) keeps samples for later runs, so it needs a fingerprint "
                f"of everything above it: {error}"
            ) from error
        identity = fingerprint((*tags[:1], made_of, *tags[1:]) if tags else made_of)
        root = disk_dir() / "stores" if where == "disk" else Path(where)
        return LmdbStore(
            root / identity, budget, identity=identity, persistent=True, overshoot=overshoot
        )


class Keeper:
    """Owns the store of one hold, in the process of the loader or node.

    Every worker has a copy of the stop; the keeper alone decides which samples stay in the store,
    in the order in which batches are handed out. ``stop``: the stop that is sent to workers.

    ``may_lag``: a batch handed out may be left to the next worker that finishes a task. Otherwise
    the keeper is called before the training loop gets the batch.
    """

    may_lag: ClassVar[bool] = False

    def __init__(self, stop: Hold, store: SampleStore) -> None:
        self.stop = stop
        self.store = store
        self._known: frozenset[int] = frozenset()
        self._known_epoch: int | None = None

    @property
    def generations(self) -> Generations | None:
        """Which version of each sample an epoch uses, where samples have versions."""
        return None

    @property
    def division(self) -> Division | None:
        """How several machines divide its samples; ``None`` if this machine has them all."""
        return None

    def keys_of(self, indices: Sequence[int], epoch: int) -> list[int]:
        """What it keeps of these samples for an epoch, by ``version_key``.

        Samples that it never keeps are left out.
        """
        return list(indices)

    def lacks(self, indices: list[int], epoch: int) -> list[int]:
        """Those of these samples that it does not have for an epoch.

        For fetching ahead: an answer that is out of date costs time only.
        """
        if self._known_epoch != epoch:
            # A sample is needed once in an epoch, so what is put in meanwhile does not matter.
            self._known, self._known_epoch = frozenset(self.store.keys()), epoch
        return [index for index in indices if index not in self._known]

    def open(self) -> None:
        """Open the store before any worker uses it."""
        self.store.open()

    def admit(self, offers: Sequence[tuple[int, int]], epoch: int) -> None:
        """Decide which samples stay that workers put into the store for a batch of this epoch.

        ``offers``: (index, bytes).
        """

    def discard(self, indices: Sequence[int]) -> None:
        """Remove samples of a batch that is not handed out, unless they were admitted before."""

    def lost(self, indices: Sequence[int]) -> None:
        """Remove samples that a worker may have put in before it died without a report."""

    def check(self, indices: Sequence[int]) -> None:
        """Give the store up if reading these samples from it may have killed a worker."""
        if self.stop.by_index:
            self.store.check(indices)
        else:
            self.store.check([store_key(index, version) for index in indices for version in (0, 1)])

    def outdated(self, batch: BatchKeys) -> list[int]:
        """The store keys that no batch after this one needs."""
        return []

    def handed_out(self, batch: BatchKeys) -> None:
        """Remove the samples that no batch after this one needs."""
        outdated = self.outdated(batch)
        if outdated:
            self.store.delete_many(outdated)

    def settled(self, *, restarted: bool) -> bool:
        """Whether the next epoch may begin early without changing its hits.

        ``restarted``: the loader was started before.
        """
        return True

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        """``held`` with the statistics of this stop."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the store, and remove it unless it outlives the run."""
        if self.store.persistent:
            self.store.close()
        else:
            self.store.destroy()


def to_stored(sample: Any, lends: bool) -> Packed | Lent:
    """The value for a store: the sample itself if it can be lent, else the sample packed."""
    return (lend(sample) if lends else None) or pack_sample(sample)


def lend(sample: Any) -> Lent | None:
    """A sample that a store keeps unpacked; ``None`` if the loop could change a part of it.

    Arrays, numbers and text are copied into batches; other objects are handed out themselves.
    """
    # Most samples are an array and a number, for which ``flatten`` costs more than all the rest.
    pair = type(sample) is tuple and len(sample) == 2 and type(sample[1]) in (int, float)
    array = sample[0] if pair else sample
    if type(array) is np.ndarray and not array.dtype.hasobject:
        return Lent(sample, _OVERHEAD + array.nbytes)
    nbytes = _OVERHEAD
    for leaf in flatten(sample)[0]:
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            nbytes += leaf.nbytes
        elif isinstance(leaf, (str, bytes)):
            nbytes += len(leaf)
        elif not isinstance(leaf, (int, float, complex, np.generic)):
            return None
    return Lent(sample, nbytes)


def from_stored(value: Any, store: SampleStore) -> Any:
    """The sample of a value that a store returned. Raises ValueError if it cannot be read."""
    return value.sample if type(value) is Lent else unpack_sample(value, store.holds_pickles)


def store_key(index: int, version: int) -> int:
    """The key of one version of a sample.

    Two versions have room at a time: the next epoch may need the new version while this epoch
    still needs the old one.
    """
    return 2 * index + version % 2
