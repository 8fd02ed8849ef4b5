"""Decides where each sample of a batch comes from: this machine, another machine, or storage.

Pure: events and the time in, decisions out. One ``Partition`` serves one cache (one fingerprint) on
one machine. Batches are asked for ahead of time; a batch is *settled* when each of its samples is
on this machine, has arrived, or is to be read from storage.

- **Owners** are asked with one request for each owner and each call of ``want``.
- **Credits** bound the bytes that are on their way and those that have arrived and are not used:
  for each peer, and in all. Requests carry their credit, so owners do not send more, except for a
  single value that is larger. The oldest batch that is not used may exceed the total, so that
  values of later batches cannot keep it waiting.
- **Hedging**: an owner that takes longer than nearly all its earlier answers is not waited for. The
  samples that are missing are read from storage, and what arrives late is dropped. A peer that is
  hedged gets half the credit, and an answer in time gives some back.
- **One read**: a sample that is being read for a batch is not read for another one meanwhile. The
  other batch waits until the sample is kept here or by another machine, for a limited time. It
  does not wait if no machine has room.
- **Offers**: a sample that its owner does not have is read by the machine that needs it, and then
  offered to the owner. If the owner has no room, it is offered to the next machines in the order
  of ``Placement.preference``, and a message to the owner says where it is (*spilled*).

A key is a ``version_key``: the index of a sample, and its generation where it has generations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.holdings import PROMISE, Holdings, OwnerReply
from penstock.cluster.placement import Placement
from penstock.config import cluster_patience

TOTAL_BYTES = 256 << 20
"""Bytes that may be on their way or unused, over all peers."""

FIRST_CREDIT, LEAST_CREDIT, MOST_CREDIT = 8 << 20, 256 << 10, 64 << 20
"""Credit of a peer in bytes: at the start, at least, and at most."""

CREDIT_STEP = 1 << 20
"""Credit that a peer gains with an answer in time."""

SAMPLE_BYTES = 128 << 10
"""Assumed size of a sample until the first ones have arrived."""

FIRST_DELAY, LEAST_DELAY, MOST_DELAY = (cluster_patience() * x for x in (0.5, 0.02, 1.0))
"""Seconds after which a request is hedged: before a peer has answered, at least, and at most. The
least is far above the time of a request in a local network (under a millisecond) and of a read from
a disk, so that a hedge is rare where all is well."""

LONGEST_READ = 5.0 * cluster_patience()
"""Seconds of a read from storage beyond which a hedge does not wait any longer."""

LOCAL_READ = 30.0 * cluster_patience()
"""Seconds that a batch waits for a sample which is being read for another batch of this machine.
Longer than waits for other machines: the reading batch ends, or the engine reports that it failed.
"""

QUANTILE, QUANTILE_STEP = 0.95, 0.1
"""The share of answers that should arrive before the delay, and how fast the estimate moves."""

FIXED_COST = 64 << 10
"""The fixed time of a request, as bytes that could be sent in it: at 1 GB/s, 65 us."""


class Ask(NamedTuple):
    """Ask this machine for samples, and for values of at most ``most_bytes`` in all."""

    request: int
    owner: str
    keys: tuple[int, ...]
    most_bytes: int


class ReadStorage(NamedTuple):
    """Read these samples from storage. Report them with ``read``."""

    keys: tuple[int, ...]


class Keep(NamedTuple):
    """Put the value of this sample into the store of this machine: it was admitted."""

    key: int


class OfferValues(NamedTuple):
    """Offer the values of these samples to this machine. Report the result with ``offered``.

    Hold the values until then: they may have to be kept here, or offered to another machine.
    """

    to: str
    keys: tuple[int, ...]


class Tell(NamedTuple):
    """Tell the owner which machine keeps its samples; an empty name if none has room.

    The name of the owner: the sample was promised to this machine, which cannot offer it.
    """

    owner: str
    holders: dict[int, str]


class Settled(NamedTuple):
    """Every sample of this batch is here, or is being read from storage."""

    batch: int


class SendReply(NamedTuple):
    """This machine's own holdings answer a request that waited."""

    reply: OwnerReply


PartitionDecision = Ask | ReadStorage | Keep | OfferValues | Tell | Settled | SendReply


@dataclass(slots=True)
class Counts:
    """Samples since the start. Once all batches are settled,
    ``asked == local + remote + storage + cancelled``. Copies of other machines' samples are local.

    - ``hedged``: of those from storage, the ones that a slow or lost peer did not send in time.
    - ``late``: values that arrived after that, and were dropped.
    - ``offered``: values that another machine has kept; ``refused``: offers for which the machine
      had no room; ``spilled``: values that are kept by a machine that does not own them.
    """

    asked: int = 0
    local: int = 0
    remote: int = 0
    storage: int = 0
    cancelled: int = 0
    hedged: int = 0
    late: int = 0
    offered: int = 0
    spilled: int = 0
    refused: int = 0
    requests: int = 0


SampleState = Literal["queued", "asked", "arrived", "storage"]


@dataclass(slots=True)
class _WantedSample:
    """A sample that open batches want and that is not on this machine.

    ``batches``: once for each time that a batch wants it. ``unsettled``: those of them that wait
    for it. ``tried``: machines that were asked. ``missed``: the owner has said that it does not
    have the sample.
    """

    owner: str
    batches: list[int]
    unsettled: list[int]
    state: SampleState = "queued"
    request: int = -1
    nbytes: int = 0
    tried: set[str] = field(default_factory=set)
    missed: bool = False


@dataclass(slots=True)
class _StorageRead:
    """A read from storage. ``offer``: the value is for the owner, too."""

    owner: str
    offer: bool


@dataclass(slots=True)
class _OpenRequest:
    """A request on its way. ``ahead``: bytes that the owner had to send before this."""

    owner: str
    missing: set[int]
    most_bytes: int
    sent: float
    hedge_at: float
    ahead: int
    held: set[int] = field(default_factory=set)
    held_until: float = 0.0
    nbytes: int = 0
    answered: bool = False
    hedged: bool = False


@dataclass(slots=True)
class _Queued:
    """Keys that wait for credit. ``since``: when the credit of the peer began to lack."""

    owner: str
    keys: list[int]
    since: float | None = None


@dataclass(slots=True)
class PeerCredit:
    """What is known of another machine: its credit, bytes on the way, and seconds per byte.

    ``hedged``: requests to it that were not waited for.
    """

    credit: int = FIRST_CREDIT
    in_flight: int = 0
    pace: float | None = None
    hedged: int = 0

    def delay(self, nbytes: int, reading: float = 0.0) -> float:
        """Seconds after which a request for this many bytes is hedged.

        ``reading``: seconds of a read from storage. Before that it is not worth beginning one.
        """
        delay = FIRST_DELAY
        if self.pace is not None:
            delay = min(max(self.pace * (nbytes + FIXED_COST), LEAST_DELAY), MOST_DELAY)
        return max(delay, min(reading, LONGEST_READ))

    def answered(self, nbytes: int, seconds: float) -> None:
        """Follow the quantile of seconds per byte: a step up if above it, a small one down."""
        pace = max(seconds, 1e-9) / (nbytes + FIXED_COST)
        if self.pace is None:
            self.pace = 2.0 * pace
        elif pace > self.pace:
            self.pace *= 1.0 + QUANTILE_STEP * QUANTILE
        else:
            self.pace *= 1.0 - QUANTILE_STEP * (1.0 - QUANTILE)

    def in_time(self) -> None:
        self.credit = min(self.credit + CREDIT_STEP, MOST_CREDIT)

    def too_late(self) -> None:
        self.credit = max(self.credit // 2, LEAST_CREDIT)


class Partition:
    """Where the samples of one machine's batches come from.

    ``me``: the name of the machine. ``newcomer``: it has joined or was restarted after the cache
    was opened, so others may have samples that it owns. ``copies``: samples of other machines that
    are here, too.
    """

    def __init__(
        self,
        me: str,
        placement: Placement,
        holdings: Holdings,
        *,
        total_bytes: int = TOTAL_BYTES,
        newcomer: bool = False,
        copies: Container[int] = (),
    ) -> None:
        self.me = me
        self.counts = Counts()
        self.peers: dict[str, PeerCredit] = {}
        self._placement = placement
        self._holdings = holdings
        self._copies = copies
        self._total_bytes = total_bytes
        self._samples: dict[int, _WantedSample] = {}
        self._batches: dict[int, list[int]] = {}
        """By batch that is not used yet, oldest first: its keys that are not on this machine."""
        self._unsettled: dict[int, int] = {}
        """By batch: how many of these are neither here nor to be read."""
        self._queue: deque[_Queued] = deque()
        self._all_queued_after = -1
        """The oldest batch, if all queued samples are known to be for later ones; else -1."""
        self._requests: dict[int, _OpenRequest] = {}
        self._exceeding: dict[int, int] = {}
        """Requests that exceed the total, and the batch that they are for."""
        self._next_request = 0
        self._in_flight = 0
        self._unused = 0
        self._reads: dict[int, _StorageRead] = {}
        self._awaited: dict[int, float] = {}
        """Samples that are read for one batch, or offered to another machine, while other batches
        wait for them; and since when."""
        self._offering: dict[int, tuple[str, str, int]] = {}
        """By key: the owner, the machine that it is offered to, and the bytes."""
        self._offering_bytes = 0
        self._mean_bytes = float(SAMPLE_BYTES)
        self.reading = 0.0
        """Seconds that it takes to read a sample from storage, and to prepare what is kept of it;
        0 until it was measured."""
        self._suspects: set[str] = set()
        self._newcomers = {me} if newcomer else set()
        self._full: set[str] = set()
        self._told_full: set[str] = set()
        """Owners that know that no machine has room."""

    # Queries.

    @property
    def bytes_held(self) -> int:
        """Bytes that may be on their way, and bytes that are here and not used."""
        return self._in_flight + self._unused + self._offering_bytes

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    def is_wanted(self, key: int) -> bool:
        """Whether an open batch wants this sample, and it is not on this machine."""
        return key in self._samples

    def has_arrived(self, key: int) -> bool:
        """Whether this sample has arrived from another machine, and is still needed."""
        sample = self._samples.get(key)
        return sample is not None and sample.state == "arrived"

    def arrived(self, batch: int) -> dict[int, int]:
        """Bytes of the samples of a batch that came from other machines, by key."""
        wanted = self._samples
        keys = [key for key in self._batches.get(batch, ()) if wanted[key].state == "arrived"]
        return {key: wanted[key].nbytes for key in keys}

    def is_settled(self, batch: int) -> bool:
        return batch not in self._unsettled

    def to_prepare(self, batch: int) -> list[int]:
        """The samples of a batch that are to be read from storage, and not sent by a machine."""
        return [
            key
            for key in self._batches.get(batch, ())
            if self._samples[key].state == "storage" and key not in self._holdings
        ]

    # What the engine does.

    def want(self, batches: Mapping[int, Sequence[int]], now: float) -> list[PartitionDecision]:
        """These batches will be prepared, in this order. One request for each owner."""
        fresh: dict[int, _WantedSample] = {}
        for batch, keys in batches.items():
            self.counts.asked += len(keys)
            elsewhere = [
                key for key in keys if key not in self._copies and key not in self._holdings
            ]
            self.counts.local += len(keys) - len(elsewhere)
            self._batches[batch] = elsewhere
            self._unsettled[batch] = len(elsewhere)
            for key in elsewhere:
                sample = self._samples.get(key)
                if sample is None:
                    fresh[key] = self._samples[key] = _WantedSample("", [batch], [batch])
                    continue
                sample.batches.append(batch)
                if sample.state == "arrived":
                    self._count_settled(batch, "arrived", 1)
                elif sample.state == "storage" and self._holdings.refuses_all:
                    self._count_settled(batch, "storage", 1)
                else:
                    sample.unsettled.append(batch)
                    if sample.state == "storage":
                        self._awaited.setdefault(key, now)
        keys_by_owner: dict[str, list[int]] = {}
        to_read: list[int] = []
        for key, owner in zip(fresh, self._owners(list(fresh)), strict=True):
            fresh[key].owner = owner
            fresh[key].missed = owner == self.me and self._holdings.redirect(key) is None
            if key in self._offering:
                # Read for an earlier batch, and on its way to the machine that will keep it.
                fresh[key].state, self._awaited[key] = "storage", now
                continue
            source = self._source(key, owner, now)
            if source is None:
                to_read.append(key)
            else:
                keys_by_owner.setdefault(source, []).append(key)
        for source, keys in keys_by_owner.items():
            self._queue.append(_Queued(source, keys))
            self._all_queued_after = -1
        return [
            *self._to_storage(to_read, now),
            *self._after_reads(now),
            *self._ask(now),
            *self._settle(batches),
        ]

    def used(self, batch: int, now: float) -> list[PartitionDecision]:
        """The values of a batch are no longer needed."""
        return self._close(batch, now)

    def cancelled(self, batch: int, now: float) -> list[PartitionDecision]:
        """A batch is not needed any more, settled or not."""
        return self._close(batch, now)

    def read(self, sizes: Mapping[int, int], now: float) -> list[PartitionDecision]:
        """These samples were read from storage; ``sizes``: their bytes.

        Samples of this machine are kept, samples that their owner lacks are offered to it.
        """
        reads = {key: self._reads.pop(key) for key in sizes if key in self._reads}
        self._awaited.update((key, now) for key in reads if key in self._awaited)
        offered: dict[int, str] = {}
        # The owner may have changed since: the new one lacks it.
        for key, owner in zip(reads, self._owners(list(reads)), strict=True):
            if reads[key].offer or owner != reads[key].owner:
                offered[key] = owner
        values = {key: (owner, sizes[key]) for key, owner in offered.items()}
        return [*self._offer(values, now), *self._after_reads(now)]

    def told(self, holders: Mapping[int, str], now: float) -> list[PartitionDecision]:
        """Another machine tells where samples of this machine are: see ``Tell``."""
        replies: list[OwnerReply] = []
        for key, holder in holders.items():
            if holder == self.me:
                replies += self._holdings.withdrawn(key, now)
            elif holder:
                replies += self._holdings.spilled(key, holder, now)
            else:
                replies += self._holdings.homeless(key, now)
        return [SendReply(reply) for reply in replies]

    def learnt(self, machine: str, keys: NDArray[np.int64]) -> None:
        """Another machine keeps these samples: those of this machine are asked from there."""
        if not len(keys) or machine not in self._placement.machines:
            return
        mine = self._placement.names.index(self.me)
        owned: list[int] = keys[self._placement.owners(keys) == mine].tolist()
        self._holdings.learnt(machine, owned)

    # What other machines do.

    def answered(
        self,
        owner: str,
        request: int,
        now: float,
        present: Mapping[int, int] | None = None,
        absent: Collection[int] = (),
        redirected: Mapping[int, str] | None = None,
        held: Collection[int] = (),
        left: Collection[int] = (),
    ) -> list[PartitionDecision]:
        """A machine has answered a request, or a part of it. ``present``: sizes by key.

        The other arguments are those of ``OwnerReply``. A machine that answers is trusted again.
        """
        self._suspects.discard(owner)
        asked = self._requests.get(request)
        if asked is None or asked.owner != owner:
            self.counts.late += len(present or ())
            return []
        peer = self._peer(owner)
        touched: set[int] = set()
        missed: dict[int, tuple[str, int]] = {}
        for key, nbytes in (present or {}).items():
            if key in asked.missing:
                self._arrive(key, nbytes, asked, request, touched, missed)
        asked.held |= asked.missing.intersection(held)
        asked.held_until = now + PROMISE
        asked.held -= {*absent, *(redirected or ()), *(present or ()), *left}
        decisions = self._elsewhere(asked, request, absent, redirected or {}, left, now)
        asked.missing -= {*(present or ()), *absent, *(redirected or ()), *left}
        if not asked.answered and asked.missing <= asked.held:
            # What the owner itself has to wait for says nothing about its speed.
            asked.answered = True
            peer.answered(asked.ahead + asked.nbytes, now - asked.sent)
            if not asked.hedged:
                peer.in_time()
        if not asked.missing:
            self._end(request, asked)
        return [
            *decisions,
            *self._offer(missed, now),
            *self._ask(now),
            *self._settle(touched),
        ]

    def lost(self, owner: str, now: float) -> list[PartitionDecision]:
        """A connection was reset: this machine is not asked until it answers or is restarted."""
        self._suspects.add(owner)
        self._peer(owner).too_late()
        return self._give_up(owner, now)

    def failed(self, request: int, now: float) -> list[PartitionDecision]:
        """A request has ended without an answer, because of its deadline or an error."""
        asked = self._requests.get(request)
        if asked is None:
            return []
        decisions = self._hedge(request, asked, asked.missing, now)
        self._end(request, asked)
        return [*decisions, *self._ask(now)]

    def trusted(self, name: str, now: float) -> list[PartitionDecision]:
        """A machine that was lost answers again."""
        self._suspects.discard(name)
        return self._ask(now)

    def offered(
        self, to: str, kept: Iterable[int], refused: Iterable[int], now: float
    ) -> list[PartitionDecision]:
        """A machine has kept or refused values that were offered to it."""
        offers: dict[str, list[int]] = {}
        decisions: list[PartitionDecision] = []
        told: dict[str, dict[int, str]] = {}
        for key in kept:
            owner, _ = self._end_offer(key, to)
            if owner:
                self.counts.offered += 1
            if owner not in ("", to):
                self.counts.spilled += 1
                if owner == self.me:
                    decisions += map(SendReply, self._holdings.spilled(key, to, now))
                else:
                    told.setdefault(owner, {})[key] = to
        for key in refused:
            owner, nbytes = self._end_offer(key, to)
            if owner:
                self.counts.refused += 1
                self._full.add(to)
                decisions += self._spill(key, owner, nbytes, offers, now)
        decisions += [Tell(owner, holders) for owner, holders in told.items()]
        decisions += [OfferValues(name, tuple(keys)) for name, keys in offers.items()]
        return [*decisions, *self._after_reads(now), *self._ask(now)]

    def withdraw(self, to: str, keys: Iterable[int]) -> None:
        """These values cannot be offered to this machine after all."""
        for key in keys:
            self._end_offer(key, to)

    # Time, and changes of the view.

    def tick(self, now: float) -> list[PartitionDecision]:
        """Time has passed: hedge requests that take too long."""
        decisions: list[PartitionDecision] = [
            SendReply(reply) for reply in self._holdings.tick(now)
        ]
        for number, asked in list(self._requests.items()):
            late = set()
            if now >= asked.hedge_at and not asked.hedged:
                late = asked.missing - asked.held
            if asked.held and now >= asked.held_until:
                decisions += self._hedge(number, asked, asked.held, now, blame=False)
            if late:
                decisions += self._hedge(number, asked, late, now)
        return [*decisions, *self._after_reads(now), *self._ask(now)]

    def placed(
        self, placement: Placement, now: float, late: Collection[str] = ()
    ) -> list[PartitionDecision]:
        """The view has changed. ``late``: machines that were in it before they became owners."""
        before, after = self._placement.machines, placement.machines
        self._placement = placement
        restarted = {
            name
            for name in (before.keys() & after.keys()) - {self.me}
            if before[name].incarnation != after[name].incarnation
        }
        gone = before.keys() - after.keys()
        new = (after.keys() - before.keys() | restarted) - {self.me}
        self._newcomers = (self._newcomers | new | {*late} - {self.me}) - gone
        for name in gone | restarted:
            self._holdings.left(name)
        decisions: list[PartitionDecision] = []
        if new:
            self._holdings.joined()
        for name in sorted(gone | restarted):
            decisions += self._give_up(name, now)
        self._full -= gone | new
        if new:
            self._told_full.clear()
        self._suspects -= gone | new
        for name in gone | new:
            peer = self.peers.get(name)
            if peer is not None and not peer.in_flight:
                del self.peers[name]
        return decisions

    # Where a sample comes from.

    def _owners(self, keys: list[int]) -> list[str]:
        if not keys:
            return []
        names, owners = self._placement.names, self._placement.owners(np.array(keys, np.int64))
        return [names[place] for place in owners.tolist()]

    def _source(self, key: int, owner: str, now: float) -> str | None:
        """The machine to ask for a sample that is not here; ``None`` for storage.

        This machine asks itself for a sample of its own that another machine is reading now: the
        answer comes when that machine offers it.
        """
        if owner == self.me:
            holder = self._holdings.redirect(key)
            if holder is not None and self._may_ask(holder):
                return holder
            if self._holdings.is_promised(key, now):
                return self.me
            return self._earlier_owner(key, owner, ())
        return owner if self._may_ask(owner) else None

    def _may_ask(self, name: str) -> bool:
        return name in self._placement.machines and name not in self._suspects

    def _earlier_owner(self, key: int, owner: str, tried: Collection[str]) -> str | None:
        """The machine that may have a sample which its owner lacks, because the owner is new.

        While the owner was away, or before it joined, the next machine in the order of preference
        was the owner. If that machine is new as well, so was the next one that is not.
        """
        if owner not in self._newcomers:
            return None
        others = [name for name in self._placement.preference(key) if name != owner]
        settled = (name for name in others if name not in self._newcomers)
        for name in (*others[:1], *islice(settled, 1)):
            if name not in tried and name != self.me and self._may_ask(name):
                return name
        return None

    def _elsewhere(
        self,
        asked: _OpenRequest,
        request: int,
        absent: Iterable[int],
        redirected: Mapping[int, str],
        left: Iterable[int],
        now: float,
    ) -> list[PartitionDecision]:
        """Decide on samples that this machine did not send: ask another one, or read them."""
        next_asked: dict[str, list[int]] = {}
        to_read: list[int] = []
        for key in (*absent, *redirected, *left):
            sample = self._samples.get(key)
            if sample is None or sample.request != request or sample.state != "asked":
                # It is being read already, or was, because this answer is late.
                if key in absent and key in self._reads:
                    self._reads[key].offer = True
                continue
            following: str | None = None
            if key in redirected:
                following = redirected[key]
            elif key in left:
                following = asked.owner
                sample.tried.discard(asked.owner)
            else:
                # A machine other than the owner was asked because of a redirect that is outdated,
                # or because the owner is new: the owner lacks it in both cases.
                sample.missed = True
                following = self._earlier_owner(key, sample.owner, sample.tried)
            if following in sample.tried or following == self.me:
                following = None
            if following is None or not self._may_ask(following):
                to_read.append(key)
            else:
                sample.state = "queued"
                next_asked.setdefault(following, []).append(key)
        for name, keys in next_asked.items():
            # In front: these samples have waited already.
            self._queue.appendleft(_Queued(name, keys))
            self._all_queued_after = -1
        return self._to_storage(to_read, now)

    def _to_storage(
        self, keys: Iterable[int], now: float, *, at_once: bool = False
    ) -> list[PartitionDecision]:
        """Read these samples from storage. ``at_once``: each batch that wants them reads them."""
        read: list[int] = []
        touched: set[int] = set()
        for key in keys:
            sample = self._samples.get(key)
            if sample is None or sample.state in ("arrived", "storage") or not sample.unsettled:
                continue
            sample.state = "storage"
            read.append(key)
            mine = sample.owner == self.me
            self._reads[key] = _StorageRead(sample.owner, mine or sample.missed)
            if mine:
                self._holdings.reading([key], now)
            # The first of several batches reads it, unless nobody would keep it for the others.
            every = at_once or self._holdings.refuses_all
            first = sample.unsettled[0]
            readers = [batch for batch in sample.unsettled if every or batch == first]
            sample.unsettled = [batch for batch in sample.unsettled if batch not in readers]
            if sample.unsettled:
                self._awaited[key] = now
            for batch in readers:
                self._count_settled(batch, "storage", 1)
                touched.add(batch)
        decisions: list[PartitionDecision] = [ReadStorage(tuple(read))] if read else []
        return [*decisions, *self._settle(touched)]

    def _arrive(
        self,
        key: int,
        nbytes: int,
        asked: _OpenRequest,
        request: int,
        touched: set[int],
        missed: dict[int, tuple[str, int]],
    ) -> None:
        asked.nbytes += nbytes
        self._mean_bytes += (nbytes - self._mean_bytes) / 64
        sample = self._samples.get(key)
        if sample is None or sample.request != request or sample.state != "asked":
            self.counts.late += 1
            return
        sample.state, sample.nbytes = "arrived", nbytes
        self._unused += nbytes
        if sample.missed:
            missed[key] = (sample.owner, nbytes)
        for batch in sample.unsettled:
            self._count_settled(batch, "arrived", 1)
            touched.add(batch)
        sample.unsettled = []

    def _after_reads(self, now: float) -> list[PartitionDecision]:
        """Go on with batches that wait for a sample which was read for another batch."""
        touched: set[int] = set()
        to_read: list[int] = []
        late: list[int] = []
        queued: dict[str, list[int]] = {}
        for key, since in list(self._awaited.items()):
            sample = self._samples.get(key)
            if sample is None or sample.state != "storage" or not sample.unsettled:
                del self._awaited[key]
                continue
            if key in self._holdings:
                for batch in sample.unsettled:
                    self._count_settled(batch, "here", 1)
                    touched.add(batch)
                sample.unsettled = []
                del self._awaited[key]
                continue
            is_read = key in self._reads and len(sample.unsettled) < len(sample.batches)
            in_time = now < since + (LOCAL_READ if is_read else PROMISE)
            if in_time and (is_read or key in self._offering):
                continue
            # It is not kept here, or its batch was dropped.
            del self._awaited[key]
            sample.state, sample.request, sample.missed = "queued", -1, sample.owner == self.me
            sample.tried.clear()
            source = self._source(key, sample.owner, now) if in_time else None
            if source is not None and key not in self._reads:
                queued.setdefault(source, []).append(key)
            else:
                (to_read if in_time else late).append(key)
        for name, keys in queued.items():
            self._queue.append(_Queued(name, keys))
            self._all_queued_after = -1
        return [
            *self._to_storage(to_read, now),
            *self._to_storage(late, now, at_once=True),
            *(self._ask(now) if queued else ()),
            *self._settle(touched),
        ]

    def _count_settled(
        self, batch: int, source: Literal["here", "arrived", "storage"], count: int
    ) -> None:
        if source == "here":
            self.counts.local += count
        elif source == "arrived":
            self.counts.remote += count
        else:
            self.counts.storage += count
        self._unsettled[batch] -= count

    def _settle(self, batches: Iterable[int]) -> list[PartitionDecision]:
        settled = [batch for batch in batches if self._unsettled.get(batch) == 0]
        for batch in settled:
            del self._unsettled[batch]
        return [Settled(batch) for batch in settled]

    def _close(self, batch: int, now: float) -> list[PartitionDecision]:
        self.counts.cancelled += self._unsettled.pop(batch, 0)
        unkept: list[int] = []
        for key in self._batches.pop(batch, ()):
            sample = self._samples[key]
            sample.batches.remove(batch)
            if batch in sample.unsettled:
                sample.unsettled.remove(batch)
            if not sample.batches:
                self._unused -= sample.nbytes
                del self._samples[key]
                if sample.state == "storage" and key in self._reads:
                    unkept.append(key)
        return [*self._withdraw_reads(unkept, now), *self._after_reads(now), *self._ask(now)]

    def _withdraw_reads(self, keys: Iterable[int], now: float) -> list[PartitionDecision]:
        """These samples were to be read, and ``read`` was not called: they are not in the store.

        Its disk is full, or they are bad samples. Whoever waits for them must not wait for long.
        """
        decisions: list[PartitionDecision] = []
        told: dict[str, dict[int, str]] = {}
        for key in keys:
            owner, promised = self._reads[key].owner, self._reads[key].offer
            if owner == self.me:
                decisions += map(SendReply, self._holdings.withdrawn(key, now))
            elif promised and self._may_ask(owner):
                told.setdefault(owner, {})[key] = owner
        return [*decisions, *(Tell(owner, holders) for owner, holders in told.items())]

    # Requests and credits.

    def _peer(self, name: str) -> PeerCredit:
        if name not in self.peers:
            self.peers[name] = PeerCredit()
        return self.peers[name]

    def _ask(self, now: float) -> list[PartitionDecision]:
        """Send what credits allow, in order. Samples that wait for too long are read from storage,
        except for those that wait because the values of earlier batches have not been used."""
        decisions: list[PartitionDecision] = []
        waiting: deque[_Queued] = deque()
        oldest = next(iter(self._batches), -1)
        all_later = True
        while self._queue:
            queued = self._queue.popleft()
            if not self._may_ask(queued.owner):
                decisions += self._to_storage(self._still_queued(queued), now)
                continue
            room = self._total_bytes - self.bytes_held
            exceeds = room < self._mean_bytes
            if exceeds and (oldest not in self._unsettled or oldest == self._all_queued_after):
                self._queue.appendleft(queued)
                break
            if exceeds:
                keys = self._still_queued(queued)
                later = [key for key in keys if oldest not in self._samples[key].batches]
                if later:
                    waiting.append(_Queued(queued.owner, later))
                keys = [key for key in keys if oldest in self._samples[key].batches]
                queued = _Queued(queued.owner, keys, queued.since)
                room = int(len(keys) * self._mean_bytes)
            peer = self._peer(queued.owner)
            credit = peer.credit - peer.in_flight
            # One batch at a time may exceed the total.
            if (credit < self._mean_bytes and peer.in_flight) or (
                exceeds and any(batch != oldest for batch in self._exceeding.values())
            ):
                queued.since = now if queued.since is None else queued.since
                if now - queued.since >= peer.delay(peer.in_flight, self.reading):
                    late = self._still_queued(queued)
                    self.counts.hedged += len(late)
                    decisions += self._to_storage(late, now)
                else:
                    waiting.append(queued)
                    all_later = False
                continue
            keys = self._still_queued(queued)
            if not keys:
                continue
            most_bytes = int(max(min(credit, room), self._mean_bytes))
            count = max(1, int(most_bytes / self._mean_bytes))
            ask = self._send(queued.owner, peer, keys[:count], most_bytes, now)
            decisions.append(ask)
            if exceeds:
                self._exceeding[ask.request] = oldest
            if len(keys) > count:
                self._queue.appendleft(_Queued(queued.owner, keys[count:]))
        else:
            # Nothing left in the queue is for the oldest batch: no need to search it again.
            self._all_queued_after = oldest if all_later else -1
        waiting.extend(self._queue)
        self._queue = waiting
        return decisions

    def _still_queued(self, queued: _Queued) -> list[int]:
        """The keys that are still wanted: their batch may have been closed."""
        wanted = self._samples
        return [key for key in queued.keys if key in wanted and wanted[key].state == "queued"]

    def _send(
        self, owner: str, peer: PeerCredit, keys: list[int], most_bytes: int, now: float
    ) -> Ask:
        number, self._next_request = self._next_request, self._next_request + 1
        ahead, expected = peer.in_flight, int(len(keys) * self._mean_bytes)
        # More than expected, or sizes that differ would make two requests of most.
        granted = min(most_bytes, 2 * expected)
        hedge_at = now + peer.delay(ahead + expected, self.reading)
        asked = _OpenRequest(owner, set(keys), granted, now, hedge_at, ahead)
        self._requests[number] = asked
        peer.in_flight += granted
        self._in_flight += granted
        self.counts.requests += 1
        for key in keys:
            sample = self._samples[key]
            sample.state, sample.request = "asked", number
            sample.tried.add(owner)
        return Ask(number, owner, tuple(keys), granted)

    def _end(self, number: int, asked: _OpenRequest) -> None:
        del self._requests[number]
        self._exceeding.pop(number, None)
        self._in_flight -= asked.most_bytes
        self._peer(asked.owner).in_flight -= asked.most_bytes

    def _hedge(
        self, number: int, asked: _OpenRequest, keys: set[int], now: float, *, blame: bool = True
    ) -> list[PartitionDecision]:
        """Read from storage what this request has not brought. Its answer is dropped.

        Its credit is not given back: the bytes may still be on their way.
        """
        if blame and not asked.hedged:
            asked.hedged = True
            peer = self._peer(asked.owner)
            peer.hedged += 1
            peer.too_late()
        late = []
        for key in sorted(keys):
            sample = self._samples.get(key)
            if sample is not None and sample.state == "asked" and sample.request == number:
                late.append(key)
        asked.held = asked.held - keys
        self.counts.hedged += len(late)
        return self._to_storage(late, now)

    def _give_up(self, owner: str, now: float) -> list[PartitionDecision]:
        """End all requests and offers to this machine."""
        decisions: list[PartitionDecision] = []
        for number, asked in list(self._requests.items()):
            if asked.owner == owner:
                decisions += self._hedge(number, asked, asked.missing, now, blame=False)
                self._end(number, asked)
        for key, (_, to, _) in list(self._offering.items()):
            if to == owner:
                self._end_offer(key, to)
        return [*decisions, *self._after_reads(now), *self._ask(now)]

    # Offers.

    def _offer(self, values: Mapping[int, tuple[str, int]], now: float) -> list[PartitionDecision]:
        """Offer values to their owners. ``values``: owner and bytes by key."""
        decisions: list[PartitionDecision] = []
        offers: dict[str, list[int]] = {}
        for key, (owner, nbytes) in values.items():
            if key in self._offering or owner in self._suspects:
                continue
            if owner == self.me or owner in self._full:
                if key not in self._holdings:
                    decisions += self._spill(key, owner, nbytes, offers, now)
            else:
                self._begin_offer(key, owner, owner, nbytes)
                offers.setdefault(owner, []).append(key)
        return [*decisions, *(OfferValues(to, tuple(keys)) for to, keys in offers.items())]

    def _spill(
        self, key: int, owner: str, nbytes: int, offers: dict[str, list[int]], now: float
    ) -> list[PartitionDecision]:
        """Offer a value to the first machine in the order of preference that may have room."""
        for name in self._placement.preference(key):
            if name == self.me:
                kept, replies = self._holdings.keep(key, nbytes, now)
                if not kept:
                    continue
                decisions: list[PartitionDecision] = [Keep(key), *map(SendReply, replies)]
                if owner != self.me:
                    self.counts.spilled += 1
                    decisions.append(Tell(owner, {key: self.me}))
                return decisions
            if name not in self._full and name not in self._suspects and name != owner:
                self._begin_offer(key, owner, name, nbytes)
                offers.setdefault(name, []).append(key)
                return []
        if owner == self.me:
            return [SendReply(reply) for reply in self._holdings.homeless(key, now)]
        if owner in self._told_full:
            return []
        self._told_full.add(owner)
        return [Tell(owner, {key: ""})]

    def _begin_offer(self, key: int, owner: str, to: str, nbytes: int) -> None:
        self._offering[key] = (owner, to, nbytes)
        self._offering_bytes += nbytes

    def _end_offer(self, key: int, to: str) -> tuple[str, int]:
        """The owner and bytes of an offer to this machine; an empty name if there is none."""
        owner, offered_to, nbytes = self._offering.get(key, ("", "", 0))
        if offered_to != to:
            return "", 0
        del self._offering[key]
        self._offering_bytes -= nbytes
        return owner, nbytes
