"""One cache that several machines divide: carries out what ``Partition`` decides on one of them."""

from __future__ import annotations

import hashlib
import logging
import threading
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.copies import SampleCopies
from penstock.cluster.holdings import PROMISE, Holdings, OwnerReply
from penstock.cluster.membership import Machine
from penstock.cluster.partition import (
    Ask,
    Keep,
    OfferValues,
    Partition,
    PartitionDecision,
    SendReply,
    Settled,
    Tell,
)
from penstock.cluster.placement import (
    NOBODY,
    FirstOwners,
    Owners,
    Placement,
    VersionOwners,
    unpack_ranks,
)
from penstock.cluster.transport import KeyAnswer
from penstock.config import cluster_patience
from penstock.order import Generations
from penstock.store import SampleStore
from penstock.store.admission import Admission, KeptSet, Versions, index_of, split_keys
from penstock.store.partitioned import RanksIn, Shelf, VersionShelf, to_send, to_store
from penstock.store.plain import pack_sample, unpack_sample
from penstock.store.value import Lent

_log = logging.getLogger("penstock.node.cluster")

START = 10.0 * cluster_patience()
"""Seconds that the first batches wait for the machines of all ranks. Before these are known, the
owners of samples are not, and samples would be read by machines that will not keep them."""

TABLES = 3
"""Epochs, beside those that kept versions were prepared in, for which the owners of all samples
are remembered."""

Hosted = tuple[str, str, tuple[int, ...]]
"""Which ranks a machine trains: (content of the cache, digest of ``dealt``, ranks)."""


class ClusterCalls(Protocol):
    """What a divided cache needs of the cluster. All of these return at once."""

    def opened(self, cache: DividedCache) -> None: ...

    def closed(self, cache: DividedCache) -> None: ...

    def announce(self) -> None: ...

    def notify(self, done: Callable[[], None]) -> None: ...

    def ask(self, cache: DividedCache, ask: Ask) -> None: ...

    def offer(self, cache: DividedCache, offer: OfferValues, values: Sequence[Any]) -> None: ...

    def tell(self, cache: DividedCache, tell: Tell) -> None: ...

    def learn(self, cache: DividedCache, machine: str) -> None: ...


class DividedCache:
    """See ``Division``. ``guest``: it keeps samples for jobs on other machines only.

    ``versions``: it keeps versions of samples. ``generations``: which version an epoch uses.

    The lock protects the decisions; values are packed, unpacked and sent without it.
    """

    def __init__(
        self,
        content: str,
        me: str,
        own: SampleStore,
        arrivals: SampleStore,
        *,
        lends: bool,
        samples: int,
        service: ClusterCalls,
        clock: Callable[[], float],
        guest: bool = False,
        versions: bool = False,
        generations: Generations | None = None,
    ) -> None:
        self.content = content
        self.guest = guest
        self._me = me
        self.versions = versions or generations is not None
        self._generations = generations
        shelf = VersionShelf if self.versions else Shelf
        self._own = shelf(own)
        self._arrivals = shelf(arrivals)
        # Arrivals are in memory, for which the budget of a cache on disk says nothing. Versions
        # are outdated after a few epochs.
        self._copies = SampleCopies(0 if own.persistent or self.versions else own.budget)
        self._lends = lends
        self._service = service
        self._clock = clock
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._holdings: Holdings | None = None
        self._partition: Partition | None = None
        self._machines: tuple[Machine, ...] = ()
        self._ranks: NDArray[np.int32] = np.full(samples, -1, np.int32)
        """The rank that is dealt each sample in the first epoch; -1 for none."""
        self._world = 0
        """Number of ranks that are dealt samples."""
        self._ranks_in: RanksIn | None = None
        self._ranks_by_epoch: dict[int, NDArray[np.int32]] = {}
        self._known_ranks: dict[int, str] = {}
        """The machines of the ranks, as far as they are known."""
        self._opened = 0.0
        self._unheard: set[str] | None = None
        """Machines that were asked what they keep and have not answered; ``None``: none was."""
        self._begun = False
        """A batch was asked for."""
        self._starting: dict[int, list[int]] = {}
        """Batches that wait until the machines of all ranks are known, and their keys."""
        self._digest = ""
        self._hosted: tuple[int, ...] = ()
        self._sizes = array("Q")
        """Bytes of each sample in the own store, by slot."""
        self._usual_size = 0
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[int, list[int]] = {}
        self._waiting: dict[int, Callable[[], None]] = {}
        self._last = 0
        self._offering: dict[int, Any] = {}
        """Packed values that are being offered to other machines, by key."""
        self._held: dict[int, OwnerReply] = {}
        """Answers to requests of other machines that waited, by request."""
        self._requests = 0
        self._newest = 0
        """The latest version that this machine was offered."""
        self._unsent = 0
        """Samples that could not be sent because they are not plain data."""
        self._looked = False
        """Whether a sample was looked at for that."""

    @property
    def is_open(self) -> bool:
        return self._partition is not None

    @property
    def budget(self) -> int:
        return self._own.store.budget

    @property
    def samples(self) -> int:
        """Number of samples of the source."""
        return len(self._ranks)

    @property
    def used(self) -> int:
        """Bytes of the samples that this machine holds."""
        return self._own.store.used

    @property
    def hosted(self) -> Hosted:
        return self.content, self._digest, self._hosted

    # The life of the cache.

    def open(self, kept: KeptSet) -> None:
        """See ``Division.open``."""
        with self._lock:
            if self._partition is not None:
                return  # another pipeline has opened it
            self._opened = self._clock()
            # Of samples that were in the store before.
            self._usual_size = self._own.store.used // max(1, len(self._own.store))
            alone = Machine(self._me, "", 0, cache_bytes=self.budget)
            self._holdings = Holdings(self._me, kept, self._size)
            placement = Placement(self._layout((alone,)), (alone,))
            self._partition = Partition(
                self._me, placement, self._holdings, copies=self._copies.costs
            )
        self._service.opened(self)

    def open_as_guest(self) -> None:
        self.open(Versions() if self.versions else Admission(self.budget))

    def host(self, dealt: bytes, ranks: Collection[int], ranks_in: RanksIn | None = None) -> None:
        """See ``Division.host``."""
        unpacked = unpack_ranks(dealt)
        digest = hashlib.blake2b(unpacked.tobytes(), digest_size=8).hexdigest()
        hosted = tuple(sorted(rank for rank in ranks if rank <= unpacked.max(initial=-1)))
        with self._lock:
            if self._digest not in ("", digest) or len(unpacked) != len(self._ranks):
                return  # the first job decides; others find its samples by asking
            if hosted == self._hosted:
                return
            self._digest, self._ranks, self._hosted = digest, unpacked, hosted
            self._world = int(unpacked.max(initial=-1)) + 1
            self._ranks_in = self._ranks_in or ranks_in
            machines = self._machines
        self.place(machines)
        self._service.announce()

    def place(self, machines: Sequence[Machine]) -> None:
        """The machines of the cluster, or the ranks that they train, have changed."""
        with self._lock:
            self._machines = tuple(machines)
            if self._partition is None:
                return
            machines = self._with_me(machines)
            before = self._known_ranks
            placement = Placement(self._layout(machines), machines)
            # Samples of ranks whose machine was not known are with the machines placed instead.
            late = {*self._known_ranks.values()} - {*before.values()} if self._begun else ()
            decisions = self._partition.placed(placement, self._clock(), late)
            asked = self._machines_to_ask(placement.names)
            decisions += self._begin_batches()
        self._carry_out(decisions)
        for name in asked:
            self._service.learn(self, name)

    def _with_me(self, machines: Sequence[Machine]) -> list[Machine]:
        """These machines and this one, with the room that it has.

        The view may lack this machine, or its room, until the head has heard of it. It must not
        give its samples away in that time.
        """
        alone = Machine(self._me, "", 0, cache_bytes=self.budget)
        [me] = [machine for machine in machines if machine.name == self._me] or [alone]
        others = [machine for machine in machines if machine.name != self._me]
        return [*others, replace(me, cache_bytes=max(me.cache_bytes, self.budget))]

    def _layout(self, machines: Sequence[Machine]) -> Owners:
        """The first owners, as far as the machines have said which ranks they train."""
        names = tuple(machine.name for machine in machines)
        place_of_rank = np.full(self._world + 1, NOBODY, np.uint16)
        times = np.zeros(len(place_of_rank), np.int64)
        times[list(self._hosted)] = 1
        for place, machine in enumerate(machines):
            for content, digest, ranks in machine.ranks:
                if content == self.content and digest == self._digest:
                    known = [rank for rank in ranks if 0 <= rank < self._world]
                    place_of_rank[known] = place
                    times[known] += machine.name != self._me
        place_of_rank[list(self._hosted)] = names.index(self._me)
        # The last entry is that of rank -1: samples that the first epoch does not deal.
        place_of_rank[-1] = NOBODY
        self._known_ranks = {
            rank: names[place]
            for rank, place in enumerate(place_of_rank[:-1].tolist())
            if place != NOBODY
        }
        # Jobs of a search: several machines have this rank, and meet its samples at the same time.
        place_of_rank[times > 1] = NOBODY
        if self._generations is None:
            return FirstOwners(self.content, names, place_of_rank[self._ranks])
        return VersionOwners(
            self.content,
            names,
            self._generations,
            lambda epoch: place_of_rank[self._dealt_in(epoch)],
        )

    def _dealt_in(self, epoch: int) -> NDArray[np.int32]:
        """The rank that is dealt each sample in an epoch, as far as that can be known."""
        if epoch == 0 or self._ranks_in is None or self._generations is None:
            return self._ranks
        tables = self._ranks_by_epoch
        if epoch not in tables:
            tables[epoch] = self._ranks_in(epoch)
            for old in sorted(tables)[: -self._generations.reuse - TABLES]:
                del tables[old]
        return tables[epoch]

    def _begin_batches(self) -> list[PartitionDecision]:
        """Ask for the batches that have waited, if the start is over. The caller holds the lock."""
        if self._partition is None or not self._starting or self._is_starting():
            return []
        batches, self._starting = self._starting, {}
        self._begun = True
        return self._partition.want(batches, self._clock())

    def _is_starting(self) -> bool:
        """Whether machines of the job may not be known yet, or not what they keep.

        Only before the first batch: a machine that is lost later is not waited for.
        """
        if self._begun:
            return False
        missing = len(self._known_ranks) < self._world
        return bool(missing or self._unheard) and self._clock() < self._opened + START

    def _machines_to_ask(self, names: Iterable[str]) -> list[str]:
        """The machines to be asked what they keep: all, once the machines of all ranks are known.

        What they have on their disks is not read from storage, whoever owns it now.
        """
        all_known = 0 < self._world == len(self._known_ranks)
        if self._unheard is not None or not all_known or self.versions:
            return []
        self._unheard = {*names} - {self._me}
        return sorted(self._unheard)

    def learnt(self, machine: str, indices: NDArray[np.int64]) -> None:
        """Another machine keeps these samples, as far as is known."""
        with self._lock:
            if self._partition is None or self._unheard is None:
                return
            self._unheard.discard(machine)
            self._partition.learnt(machine, indices)
            decisions = self._begin_batches()
        self._carry_out(decisions)

    def kept(self) -> NDArray[np.int64]:
        """The samples that this machine keeps."""
        with self._lock:
            return np.zeros(0, np.int64) if self._holdings is None else self._holdings.kept()

    def close(self) -> None:
        """See ``Division.close``."""
        with self._lock:
            self._partition = self._holdings = None
            self._copies.remove(list(self._copies.costs))
            waiting, self._waiting = list(self._waiting.values()), {}
            self._answered.notify_all()
        self._service.closed(self)
        for done in waiting:
            self._service.notify(done)

    # What the engine needs.

    def fetch(self, batch: Hashable, keys: Sequence[int], done: Callable[[], None]) -> bool:
        """See ``Division.fetch``."""
        with self._lock:
            if self._partition is None:
                return True
            self._last += 1
            number = self._numbers[batch] = self._last
            self._keys[number] = list(keys)
            self._waiting[number] = done
            if self._is_starting():
                self._starting[number] = list(keys)
                return False
            self._begun = True
            decisions = self._partition.want({number: keys}, self._clock())
            now = Settled(number) in decisions
            if now:
                del self._waiting[number]
        self._carry_out([made for made in decisions if made != Settled(number)])
        return now

    def to_prepare(self, batch: Hashable) -> list[int]:
        """See ``Division.to_prepare``."""
        with self._lock:
            number = self._numbers.get(batch)
            if self._partition is None or number is None:
                return []
            return self._partition.to_prepare(number)

    def release(self, batch: Hashable) -> None:
        """See ``Division.release``."""
        with self._lock:
            number = self._numbers.pop(batch, None)
            if number is None:
                return
            del self._keys[number]
            self._waiting.pop(number, None)
            self._starting.pop(number, None)
            if self._partition is None:
                return
            arrived = self._partition.arrived(number)
            decisions = self._partition.used(number, self._clock())
            unused = [key for key in arrived if not self._partition.is_wanted(key)]
            staying = self._let_stay({key: arrived[key] for key in unused})
            self._remove([key for key in unused if key not in staying] + self._leaving_copies())
        self._carry_out(decisions)

    def _let_stay(self, sizes: dict[int, int]) -> set[int]:
        """Make copies of arrived samples, as far as there is room. The caller holds the lock."""
        if not sizes or not self._copies.budget or self._holdings is None:
            return set()
        # What this machine waited for because another one was reading it is in its own store.
        costs = {
            key: self._arrivals.cost(nbytes)
            for key, nbytes in sizes.items()
            if key not in self._holdings
        }
        staying = self._copies.offer(costs, self._own.store.used)
        if self._lends:
            # They are views of messages with other samples, which would stay in memory, too.
            found = self._arrivals.get(staying)
            self._arrivals.delete(staying)
            there = [
                (key, value) for key, value in zip(staying, found, strict=True) if value is not None
            ]
            held = self._arrivals.put([(key, self._apart(value)) for key, value in there])
            kept = {key for (key, _), held_now in zip(there, held, strict=True) if held_now}
            self._copies.remove([key for key in staying if key not in kept])
        return {*staying}

    def _remove(self, keys: Sequence[int]) -> None:
        """Remove borrowed samples that no batch needs. The caller holds the lock.

        Without it, a batch could ask for one of them meanwhile. It would arrive again, and then be
        removed.
        """
        if keys:
            self._arrivals.delete(keys)

    def _apart(self, value: Lent) -> Lent:
        """A lent sample in memory of its own."""
        packed = memoryview(pack_sample(value.sample).tobytes())
        return Lent(unpack_sample(packed, lambda: False), len(packed))

    def _leaving_copies(self) -> list[int]:
        """Copies that leave, because samples of this machine need the room; they are to be deleted.

        The caller holds the lock.
        """
        copies, kept = self._copies, self._own.store.used if self._copies.costs else 0
        if kept + copies.used <= copies.budget:
            return []
        in_use = {key for keys in self._keys.values() for key in keys}
        return copies.make_room(kept, in_use)

    def admit(self, offers: Sequence[tuple[int, int]]) -> list[int]:
        """See ``Division.admit``."""
        sizes = dict(offers)
        with self._lock:
            partition, holdings = self._partition, self._holdings
            if partition is None or holdings is None:
                return list(sizes)
            for index, nbytes in sizes.items():
                self._note_size(index, nbytes)
            decisions = partition.read(sizes, self._clock())
            refused = [index for index in sizes if index not in holdings]
            lost = [index for index in sizes if index in self._copies.costs]
            self._copies.remove(lost)  # a worker has not found them
            self._remove(lost + self._leaving_copies())
        # What is kept is in the store already.
        self._carry_out([made for made in decisions if not isinstance(made, Keep)])
        # What could not be sent is kept here after all.
        return [index for index in refused if index not in holdings]

    @property
    def full(self) -> bool:
        """See ``Division.full``."""
        with self._lock:
            return self._holdings is not None and self._holdings.full_everywhere

    @property
    def alone(self) -> bool:
        """See ``Division.alone``."""
        with self._lock:
            return len(self._hosted) == self._world

    def holds(self, keys: Sequence[int]) -> list[bool]:
        """See ``Division.holds``."""
        with self._lock:
            partition, holdings, copies = self._partition, self._holdings, self._copies.costs
            if partition is None or holdings is None:
                return [False] * len(keys)
            return [key in holdings or key in copies or partition.has_arrived(key) for key in keys]

    def keep_read(self, key: int, value: memoryview) -> int:
        """See ``Division.keep_read``."""
        # A copy: it came in one message with other samples, which would stay in memory, too.
        stored = self._stored(memoryview(bytes(value)))
        if stored is None or not self._own.put([(key, stored)])[0]:
            return 0
        return self._own.cost(len(value))

    @property
    def needs_pickle(self) -> bool:
        """See ``Division.needs_pickle``. Looks at the first sample that it finds, once."""
        if not self._looked:
            first = self.some_here(1)
            self._looked = bool(first)
            self._values(self._own, first)  # counts it if it cannot be sent
        return self._unsent > 0

    def some_here(self, count: int) -> list[int]:
        """See ``Division.some_here``."""
        kept = self.kept()
        some: list[int] = kept[:: max(1, len(kept) // max(1, count))][:count].tolist()
        return some

    def known(self) -> list[int]:
        """See ``Division.known``."""
        with self._lock:
            return [] if self._holdings is None else self._holdings.known()

    def forget(self, keys: Sequence[int]) -> None:
        """See ``Division.forget``."""
        with self._lock:
            if self._holdings is None:
                return
            here = [key for key in keys if key in self._holdings]
            self._holdings.forget(keys)
        self._own.delete(here)

    def measured(self, seconds: float) -> None:
        """See ``Division.measured``."""
        with self._lock:
            if self._partition is not None:
                before = self._partition.reading or seconds
                self._partition.reading = before + (seconds - before) / 8

    # What other machines ask.

    def serve(self, peer: str, keys: list[int], most_bytes: int) -> Iterator[list[KeyAnswer]]:
        """The answers to a request of another machine. Waits for samples that are being read."""
        place_of = {key: place for place, key in enumerate(keys)}
        with self._lock:
            if self._holdings is None:
                reply = OwnerReply(peer, 0, absent=list(place_of))
                request = 0
            else:
                self._requests += 1
                request = self._requests
                reply = self._holdings.asked(
                    peer, request, list(place_of), most_bytes, self._clock()
                )
        held = set(reply.held)
        yield list(self._answers(reply, place_of))
        until = self._clock() + PROMISE
        while held:
            with self._lock:
                late = self._held.pop(request, None)
                if late is None and self._clock() < until and self._partition is not None:
                    self._answered.wait(timeout=max(0.0, until - self._clock()))
                    continue
            if late is None:
                late = OwnerReply(peer, request, absent=sorted(held))
            yield list(self._answers(late, place_of))
            held -= {*late.present, *late.absent, *late.redirected, *late.left}

    def lend(self, keys: Sequence[int]) -> list[Any]:
        """The packed values of samples that are here; ``None`` for others. Claims nothing.

        For a machine that prepares a tiny-batch of this one: what it does not get here, this
        machine was to read, and it reads. So it never waits for a read of another machine.
        """
        found = self._values(self._own, keys)
        missing = [place for place, value in enumerate(found) if value is None]
        borrowed = self._values(self._arrivals, [keys[place] for place in missing])
        for place, value in zip(missing, borrowed, strict=True):
            found[place] = value
        return found

    def _answers(self, reply: OwnerReply, place_of: dict[int, int]) -> Iterator[KeyAnswer]:
        for key, value in zip(reply.present, self._values(self._own, reply.present), strict=True):
            if value is None:  # the store is damaged, or the sample is not plain
                yield KeyAnswer(place_of[key], "absent")
            else:
                yield KeyAnswer(place_of[key], "present", value)
        for key in reply.absent:
            yield KeyAnswer(place_of[key], "absent")
        for key, machine in reply.redirected.items():
            yield KeyAnswer(place_of[key], "moved", None, machine)
        for key in reply.left:
            yield KeyAnswer(place_of[key], "later")

    def keep_offered(self, key: int, value: memoryview) -> bool:
        """Another machine offers a sample. Returns whether this machine keeps it."""
        stored = self._stored(value)
        if stored is None or (not self.guest and index_of(key) >= len(self._ranks)):
            return False
        cost = self._own.cost(len(value))
        with self._lock:
            if self._holdings is None or not self._holdings.may_keep(key):
                return False
        # First the value, then the decision: what is admitted must be there.
        if not self._own.put([(key, stored)])[0]:
            if self.used + cost <= self.budget:
                self._refused()
            return False
        with self._lock:
            kept, replies = False, list[OwnerReply]()
            if self._holdings is not None:
                self._note_size(key, cost)
                kept, replies = self._holdings.keep(key, cost, self._clock())
            self._remove(self._leaving_copies())
        if not kept:
            self._own.delete([key])
        elif self.guest and self.versions:
            self._forget_before(key)
        self._carry_out([SendReply(reply) for reply in replies])
        return kept

    def _forget_before(self, key: int) -> None:
        """Remove outdated versions. In any epoch the versions of all samples differ by one at most.

        A guest does not know which epoch uses which version.
        """
        version = int(split_keys(np.array([key]))[1][0])
        if version <= self._newest:
            return
        self._newest = version
        keys = np.array(self.known(), np.int64)
        self.forget(keys[split_keys(keys)[1] < version - 1].tolist())

    def told(self, holders: dict[int, str]) -> None:
        """Another machine tells where samples of this machine are."""
        with self._lock:
            if self._partition is None:
                return
            decisions = self._partition.told(holders, self._clock())
        self._carry_out(decisions)

    # What came of the calls to other machines.

    def answered(self, ask: Ask, answers: Iterable[KeyAnswer]) -> None:
        """Another machine has answered a request."""
        present: dict[int, int] = {}
        absent: list[int] = []
        redirected: dict[int, str] = {}
        left: list[int] = []
        arrived: list[tuple[int, Any]] = []
        for answer in answers:
            key = ask.keys[answer.place]
            stored = self._stored(answer.value) if answer.state == "present" else None
            if stored is not None:
                present[key] = len(answer.value)
                arrived.append((key, stored))
            elif answer.state == "moved":
                redirected[key] = answer.moved_to
            elif answer.state == "later":
                left.append(key)
            else:
                absent.append(key)
        held = self._arrivals.put(arrived)
        for (key, _), kept in zip(arrived, held, strict=True):
            if not kept:
                del present[key]
                absent.append(key)
        with self._lock:
            if self._partition is None:
                return
            decisions = self._partition.answered(
                ask.owner, ask.request, self._clock(), present, absent, redirected, (), left
            )
            unwanted = [
                key
                for key in present
                if not self._partition.has_arrived(key) and key not in self._copies.costs
            ]
            self._remove(unwanted)
        self._carry_out(decisions)

    def request_failed(self, ask: Ask, *, lost: bool) -> None:
        """A request has failed. ``lost``: the other machine cannot be reached."""
        with self._lock:
            if self._partition is None:
                return
            now = self._clock()
            decisions = (
                self._partition.lost(ask.owner, now)
                if lost
                else self._partition.failed(ask.request, now)
            )
        self._carry_out(decisions)

    def offered(self, offer: OfferValues, kept: list[bool] | None) -> None:
        """Another machine has answered an offer; ``None``: it could not be reached."""
        with self._lock:
            if self._partition is None:
                return
            if kept is None:
                decisions = self._partition.lost(offer.to, self._clock())
            else:
                pairs = list(zip(offer.keys, kept, strict=True))
                decisions = self._partition.offered(
                    offer.to,
                    [key for key, flag in pairs if flag],
                    [key for key, flag in pairs if not flag],
                    self._clock(),
                )
            again = {
                key for made in decisions if isinstance(made, OfferValues) for key in made.keys
            }
        self._carry_out(decisions)
        with self._lock:
            for key in set(offer.keys) - again:
                self._offering.pop(key, None)

    def trust(self, name: str) -> None:
        """A machine that was lost answers again."""
        with self._lock:
            if self._partition is None:
                return
            decisions = self._partition.trusted(name, self._clock())
        self._carry_out(decisions)

    def tick(self) -> None:
        """Time has passed."""
        with self._lock:
            if self._partition is None:
                return
            decisions = [*self._begin_batches(), *self._partition.tick(self._clock())]
        self._carry_out(decisions)

    # Carrying out.

    def _carry_out(self, decisions: Sequence[PartitionDecision]) -> None:
        """Do what was decided. Without the lock, except for short looks at what is waiting."""
        for made in decisions:
            if isinstance(made, Settled):
                with self._lock:
                    done = self._waiting.pop(made.batch, None)
                if done is not None:
                    # In another thread: the caller may hold locks that it needs.
                    self._service.notify(done)
            elif isinstance(made, Ask):
                if made.owner == self._me:
                    self._ask_here(made)
                else:
                    self._service.ask(self, made)
            elif isinstance(made, OfferValues):
                self._offer(made)
            elif isinstance(made, Keep):
                self._keep(made.key)
            elif isinstance(made, Tell):
                self._service.tell(self, made)
            elif isinstance(made, SendReply):
                self._send(made.reply)

    def _ask_here(self, ask: Ask) -> None:
        """Wait for samples of this machine that another machine is reading and will offer."""
        with self._lock:
            if self._holdings is None or self._partition is None:
                return
            now = self._clock()
            reply = self._holdings.asked(self._me, -ask.request, ask.keys, ask.most_bytes, now)
            decisions = self._reported(reply)
        self._carry_out(decisions)

    def _reported(self, reply: OwnerReply) -> list[PartitionDecision]:
        """Report an answer of this machine to itself. The caller holds the lock."""
        if self._partition is None:
            return []
        sizes = {key: self._size(key) for key in reply.present}
        return self._partition.answered(
            self._me,
            -reply.request,
            self._clock(),
            sizes,
            reply.absent,
            reply.redirected,
            reply.held,
            reply.left,
        )

    def _send(self, reply: OwnerReply) -> None:
        """Answer a request that waited: of another machine, whose thread waits, or of this one."""
        if reply.peer != self._me:
            with self._lock:
                before = self._held.get(reply.request)
                if before is not None:
                    before.present += reply.present
                    before.absent += reply.absent
                    before.redirected.update(reply.redirected)
                else:
                    self._held[reply.request] = reply
                self._answered.notify_all()
            return
        with self._lock:
            decisions = self._reported(reply)
        self._carry_out(decisions)

    def _keep(self, key: int) -> None:
        """Put a value that has arrived, or that no other machine has room for, into the store."""
        with self._lock:
            value = self._offering.get(key)
        if value is None:
            [value] = self._values(self._arrivals, [key])
        stored = None if value is None else self._stored(value)
        if stored is not None and not self._own.put([(key, stored)])[0]:
            self._refused(key)

    def _refused(self, *keys: int) -> None:
        """The store has not taken a sample. ``keys``: samples that were admitted before that."""
        with self._lock:
            if self._holdings is not None:
                self._holdings.refused()
                self._holdings.forget(keys)

    def _offer(self, offer: OfferValues) -> None:
        """Send values that were read here, or have arrived, to the machine that is to keep them."""
        with self._lock:
            known = {key: self._offering[key] for key in offer.keys if key in self._offering}
        missing = [key for key in offer.keys if key not in known]
        found = self._values(self._own, missing)
        gone = [key for key, value in zip(missing, found, strict=True) if value is None]
        borrowed = dict(zip(gone, self._values(self._arrivals, gone), strict=True))
        for key, value in zip(missing, found, strict=True):
            known[key] = borrowed.get(key) if value is None else value
        keys = [key for key in offer.keys if known[key] is not None]
        refused = [key for key in offer.keys if known[key] is None]
        with self._lock:
            self._offering.update((key, known[key]) for key in keys)
            decisions: list[PartitionDecision] = []
            if refused and self._partition is not None and self._holdings is not None:
                self._partition.withdraw(offer.to, refused)
                # Better than to read it again in every epoch.
                for key in refused:
                    _, replies = self._holdings.keep(key, self._size(key), self._clock())
                    decisions += map(SendReply, replies)
        if keys:
            self._service.offer(
                self, OfferValues(offer.to, tuple(keys)), [self._offering[key] for key in keys]
            )
        self._carry_out(decisions)

    # Values.

    def _values(self, shelf: Shelf, keys: Sequence[int]) -> list[Any]:
        """The packed values of these samples; ``None`` for those that cannot be sent."""
        return [None if value is None else self._packed(value) for value in shelf.get(keys)]

    def _packed(self, value: Any) -> Any | None:
        packed = to_send(value)
        if packed is not None:
            return packed
        with self._lock:
            self._unsent += 1
            first = self._unsent == 1
        if first:
            _log.warning(
                "samples of cache %s need a pickle, and no machine reads pickles of another: each "
                "machine reads and prepares such samples by itself. Keep arrays, numbers, text or "
                "bytes instead: put cache() above the map that makes the objects.",
                self.content[:12],
            )
        return None

    def _stored(self, value: memoryview) -> Any | None:
        """A received value in the form of the store; ``None`` if it is damaged or a pickle."""
        return to_store(value, lends=self._lends)

    def _size(self, key: int) -> int:
        slot = self._own.slot(key)
        return (self._sizes[slot] if slot < len(self._sizes) else 0) or self._usual_size

    def _note_size(self, key: int, nbytes: int) -> None:
        slot = self._own.slot(key)
        missing = slot + 1 - len(self._sizes)
        if missing > 0:
            self._sizes.extend(bytes(max(missing, len(self._sizes) // 4)))
        self._sizes[slot] = nbytes

    # Status.

    def status(self) -> dict[str, Any]:
        with self._lock:
            partition = self._partition
            counts = None if partition is None else partition.counts
            return {
                "content": self.content,
                "samples": len(self._own.store),
                "bytes": self._own.store.used,
                "budget": self.budget,
                "copies": len(self._copies.costs),
                "copies_bytes": self._copies.used,
                "guest": self.guest,
                "versions": self.versions,
                "unsent": self._unsent,
                "hedged_requests": {}
                if partition is None
                else {name: peer.hedged for name, peer in partition.peers.items() if peer.hedged},
                **{
                    name: 0 if counts is None else getattr(counts, name)
                    for name in (
                        "local",
                        "remote",
                        "storage",
                        "hedged",
                        "late",
                        "offered",
                        "spilled",
                        "requests",
                    )
                },
            }
