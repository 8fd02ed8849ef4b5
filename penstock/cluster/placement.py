"""Decides which machine owns a sample, and which machines come next if it cannot keep it.

Pure functions over whole batches of indices. The owner of a sample is the machine that meets it
first in epoch 0. The order tells every machine which one that is, so no directory is needed, the
owners are balanced, and in the first epoch no sample crosses the network.

A sample stays with its first owner for as long as that machine is in the view. All other samples
(the owner has left the cluster, or epoch 0 did not deal them) are placed by weighted rendezvous
hashing: each machine gets a score for each sample, and the lowest score wins. A machine that
leaves therefore moves its own samples and no others, and one that joins takes only its share of
samples that have no first owner.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.membership import Machine
from penstock.errors import PipelineError
from penstock.order import Deal, Generations
from penstock.store.admission import split_keys

NOBODY = 0xFFFF
"""In ``FirstOwners.owner_of``: epoch 0 does not deal this sample."""

MOST_MACHINES = NOBODY

_AT_ONCE = 1 << 18
"""Scores that are computed at a time: 2 MB, which stays in the processor's cache."""

Places = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class FirstOwners:
    """First owners: those of epoch 0, fixed when the cache is opened.

    - ``fingerprint``: of the samples that are cached.
    - ``names``: the machines of the job. ``owner_of``: for each index, a place in ``names``.
    """

    fingerprint: str
    names: tuple[str, ...]
    owner_of: NDArray[np.uint16]

    @classmethod
    def first_epoch(
        cls, fingerprint: str, deal: Deal, machine_of_rank: Sequence[str]
    ) -> FirstOwners:
        """First owners in a job whose ranks are dealt ``deal``, whatever its own rank is.

        >>> from penstock.order import Sequential
        >>> deal = Deal(Sequential(), n=7, seed=0, batch_size=2, world=2, tail="drop")
        >>> owners = FirstOwners.first_epoch("f", deal, ["left", "right"])
        >>> owners.names, owners.owner_of.tolist()
        (('left', 'right'), [0, 1, 0, 1, 0, 1, 65535])
        """
        if len(machine_of_rank) != deal.world:
            raise PipelineError(
                f"There are {deal.world} ranks, but machines for {len(machine_of_rank)} of them: "
                "give the machine of every rank."
            )
        names = tuple(sorted(set(machine_of_rank)))
        if len(names) > MOST_MACHINES:
            raise PipelineError(
                f"A cache can be divided over {MOST_MACHINES:,} machines; there are {len(names):,}."
            )
        place_of = {name: place for place, name in enumerate(names)}
        dealt = [replace(deal, rank=rank).rank_samples(0)[0] for rank in range(deal.world)]
        sequence = np.stack(dealt, axis=1).ravel()
        places = np.array([place_of[name] for name in machine_of_rank], dtype=np.uint16)
        owners = np.tile(places, len(dealt[0]))
        owner_of = np.full(deal.n, NOBODY, dtype=np.uint16)
        # Of several assignments to one index NumPy keeps the last: here the one dealt first.
        owner_of[sequence[::-1]] = owners[::-1]
        owner_of.flags.writeable = False
        return cls(fingerprint, names, owner_of)

    def places(self, keys: NDArray[np.int64]) -> NDArray[np.uint16]:
        """The first owner of each key: a place in ``names``, or NOBODY."""
        return self.owner_of[keys]


@dataclass(frozen=True, eq=False)
class VersionOwners:
    """First owners of versions of samples: the machine that prepares a version keeps it.

    That is the machine that is dealt the sample in the first epoch that uses the version, so
    nothing has to be sent where a version is new. ``owner_in``: for an epoch, the owner of each
    index, as ``FirstOwners.owner_of``.
    """

    fingerprint: str
    names: tuple[str, ...]
    generations: Generations
    owner_in: Callable[[int], NDArray[np.uint16]]

    def places(self, keys: NDArray[np.int64]) -> NDArray[np.uint16]:
        """See ``FirstOwners.places``."""
        indices, versions = split_keys(keys)
        epochs = self.generations.first_epochs(indices, versions)
        places = np.full(len(keys), NOBODY, np.uint16)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            places[chosen] = self.owner_in(epoch)[indices[chosen]]
        return places


class Owners(Protocol):
    """The first owners of samples, or of versions of samples."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def places(self, keys: NDArray[np.int64]) -> NDArray[np.uint16]: ...


class Placement:
    """The owners of all samples in one view. Machines are places in ``names``.

    >>> owners = FirstOwners("f", ("a", "b"), np.array([0, 1, 1, NOBODY], dtype=np.uint16))
    >>> machines = [Machine(name, f"{name}:1", 1, cache_bytes=1 << 30) for name in "abc"]
    >>> placement = Placement(owners, machines)
    >>> [placement.names[place] for place in placement.owners(np.array([0, 1, 2]))]
    ['a', 'b', 'b']
    >>> without_b = Placement(owners, [machines[0], machines[2]])
    >>> without_b.names[without_b.owners(np.array([0]))[0]]
    'a'
    """

    def __init__(self, first_owners: Owners, machines: Iterable[Machine]) -> None:
        ordered = sorted(machines, key=lambda machine: machine.name)
        if not ordered:
            raise PipelineError("A placement needs at least one machine; the view has none.")
        self.first_owners = first_owners
        self.machines = {machine.name: machine for machine in ordered}
        self.names = tuple(self.machines)
        place_of = {name: place for place, name in enumerate(self.names)}
        weights = np.array([machine.cache_bytes for machine in ordered], dtype=np.float64)
        self._weights = weights if weights.any() else np.ones(len(ordered))
        self._hashes = np.array([_hash_of(name) for name in self.names], dtype=np.uint64)
        self._salt = np.uint64(_hash_of(first_owners.fingerprint))
        # The place in this view of each first owner, and of NOBODY: -1 if it has none.
        self._present = np.full(NOBODY + 1, -1, dtype=np.intp)
        for place, name in enumerate(first_owners.names):
            self._present[place] = place_of.get(name, -1)

    def owners(self, keys: NDArray[np.int64]) -> Places:
        """The owner of each sample."""
        owners = self._present[self.first_owners.places(keys)]
        orphans = np.flatnonzero(owners < 0)
        step = max(1, _AT_ONCE // len(self.names))
        for start in range(0, len(orphans), step):
            rows = orphans[start : start + step]
            owners[rows] = self._scores(keys[rows]).argmin(axis=1)
        return owners

    def owner(self, key: int) -> str:
        """The name of the owner of one sample."""
        return self.names[int(self.owners(np.array([key]))[0])]

    def preference(self, key: int) -> list[str]:
        """All machines that may keep this sample: its owner, then the others in a fixed order.

        The order is that of their scores, so a machine with twice the room is twice as often the
        first. Machines without room for samples are left out, except for the owner.
        """
        scores = self._scores(np.array([key]))[0]
        owner = self._present[self.first_owners.places(np.array([key]))[0]]
        if owner >= 0:
            scores[owner] = -1.0
        ordered = np.argsort(scores, kind="stable")
        return [self.names[place] for place in ordered if np.isfinite(scores[place])]

    def _scores(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """A score for each key (row) and machine (column): exponential, with the weight as rate.

        The logarithm may differ in its last bit between processors. Two machines then disagree
        on an owner if two scores are equal up to that bit, which costs one read from storage.
        """
        mixed = _mixed(keys.astype(np.uint64) ^ self._salt)
        bits = _mixed(mixed[:, None] ^ self._hashes[None, :])
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):
            scores: NDArray[np.float64] = -np.log(uniform) / self._weights
        return scores


def pack_ranks(ranks: NDArray[np.int32]) -> bytes:
    """The rank that is dealt each sample in the first epoch, -1 for none, as bytes.

    >>> unpack_ranks(pack_ranks(np.array([0, 1, -1, 1], np.int32))).tolist()
    [0, 1, -1, 1]
    """
    return zlib.compress(ranks.astype("<i4", copy=False).tobytes(), 1)


def unpack_ranks(packed: bytes) -> NDArray[np.int32]:
    """What ``pack_ranks`` has packed. Raises PipelineError."""
    try:
        return np.frombuffer(zlib.decompress(packed), "<i4").astype(np.int32)
    except (zlib.error, ValueError) as error:
        raise PipelineError(f"the ranks of samples cannot be read: {error}") from None


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit of the input changes half the bits of the output."""
    bits = np.add(bits, np.uint64(0x9E3779B97F4A7C15))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed
