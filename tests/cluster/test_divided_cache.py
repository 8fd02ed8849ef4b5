"""A divided cache on one machine, without a network: what it asks of others, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cluster.divided_cache import START, DividedCache
from penstock.cluster.membership import Machine
from penstock.cluster.partition import Ask, OfferValues, Tell
from penstock.cluster.placement import pack_ranks
from penstock.cluster.transport import KeyAnswer
from penstock.order import Generations
from penstock.store import HeapStore, LmdbStore
from penstock.store.admission import Admission, Versions, version_key, version_slot
from penstock.store.plain import pack_sample
from penstock.store.value import Lent
from tests.support.fabric import VirtualClock

SAMPLES, ROOM = 16, 1 << 20


@dataclass
class Recorder:
    """Calls to other machines. None of them is answered."""

    made: list[Any] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """What other machines say they keep."""

    def opened(self, cache: DividedCache) -> None: ...

    def closed(self, cache: DividedCache) -> None: ...

    def announce(self) -> None: ...

    def notify(self, done: Callable[[], None]) -> None:
        done()

    def ask(self, cache: DividedCache, ask: Ask) -> None:
        self.made.append(ask)

    def offer(self, cache: DividedCache, offer: OfferValues, values: Sequence[Any]) -> None:
        self.made.append(offer)

    def tell(self, cache: DividedCache, tell: Tell) -> None:
        self.made.append(tell)

    def learn(self, cache: DividedCache, machine: str) -> None:
        cache.learnt(machine, np.array(self.kept, np.int64))


OTHER = Machine("other", "10.0.0.2:1", 7, cache_bytes=ROOM)


@pytest.fixture
def calls() -> Recorder:
    return Recorder()


@pytest.fixture
def own() -> HeapStore:
    return HeapStore(ROOM, overshoot=0)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def cache(calls: Recorder, own: HeapStore, clock: VirtualClock) -> DividedCache:
    made = DividedCache(
        "content",
        "me",
        own,
        HeapStore(ROOM, overshoot=0),
        lends=True,
        samples=SAMPLES,
        service=calls,
        clock=clock,
    )
    made.open(Admission(ROOM))
    return made


GENERATIONS = Generations(SAMPLES, 2, SAMPLES, 0)


@pytest.fixture
def refurbished(calls: Recorder, own: HeapStore, clock: VirtualClock) -> DividedCache:
    """What refurbish keeps. Even samples are dealt to this machine in even epochs."""
    made = DividedCache(
        "content",
        "me",
        own,
        HeapStore(ROOM, overshoot=0),
        lends=True,
        samples=SAMPLES,
        service=calls,
        clock=clock,
        generations=GENERATIONS,
    )
    made.open(Versions())
    made.host(pack_ranks(dealt_in(0)), {0}, dealt_in)
    made.place((trains(made, 1),))
    return made


def dealt_in(epoch: int) -> NDArray[np.int32]:
    """The rank that is dealt each sample in an epoch."""
    return ((np.arange(SAMPLES) + epoch) % 2).astype(np.int32)


def trains(cache: DividedCache, rank: int) -> Machine:
    """The other machine, once it has said which rank it trains."""
    content, digest, _ = cache.hosted
    return replace(OTHER, ranks=((content, digest, (rank,)),))


def read(cache: DividedCache, own: HeapStore, indices: list[int]) -> list[int]:
    """Put these samples into the store, as workers do. Returns those that are not kept."""
    nbytes = pack_sample(np.zeros(100, np.uint8)).nbytes
    own.put_many([(index, Lent(np.full(100, index, np.uint8), nbytes)) for index in indices])
    refused = cache.admit([(index, own.cost(nbytes)) for index in indices])
    own.delete_many(refused)
    return refused


def test_a_machine_keeps_its_samples_before_it_is_in_the_view(
    calls: Recorder, own: HeapStore, cache: DividedCache
) -> None:
    cache.place((OTHER,))
    cache.host(pack_ranks(dealt_in(0)), {1})
    cache.place((trains(cache, 0),))
    mine = list(range(1, SAMPLES, 2))
    assert cache.fetch("batch", mine, lambda: None)
    assert read(cache, own, mine) == []
    # The view names this machine at last: it has not been restarted, and keeps what it has.
    cache.release("batch")
    me = Machine("me", "10.0.0.1:1", 8, cache_bytes=ROOM)
    cache.place((trains(cache, 0), me))
    assert cache.fetch("next", mine, lambda: None)
    assert (calls.made, cache.status()["local"]) == ([], len(mine))


def test_a_machine_uses_its_room_before_the_view_knows_of_it(
    calls: Recorder, own: HeapStore, cache: DividedCache
) -> None:
    cache.place((OTHER, Machine("me", "10.0.0.1:1", 8)))
    theirs = [index for index in range(SAMPLES) if not cache.fetch(index, [index], lambda: None)]
    for ask in [made for made in calls.made if isinstance(made, Ask)]:
        cache.answered(ask, [KeyAnswer(place, "absent") for place in range(len(ask.keys))])
    assert read(cache, own, theirs) == theirs
    for offer in [made for made in calls.made if isinstance(made, OfferValues)]:
        cache.offered(offer, [False] * len(offer.keys))
    assert sorted(own.keys()) == theirs


# The start.


def test_the_first_batches_wait_until_the_machines_of_all_ranks_are_known(
    calls: Recorder, cache: DividedCache
) -> None:
    cache.host(pack_ranks(dealt_in(0)), {0})
    cache.place((OTHER,))
    done: list[str] = []
    for batch, keys in (("first", [0, 2]), ("second", [4, 1])):
        assert not cache.fetch(batch, keys, lambda name=batch: done.append(name))  # type: ignore[misc]
    cache.tick()
    assert (calls.made, done, cache.status()["storage"]) == ([], [], 0)
    cache.place((trains(cache, 1),))
    assert done == ["first"]
    [ask] = calls.made
    assert (ask.owner, ask.keys) == ("other", (1,))
    assert cache.to_prepare("second") == [4]
    # From now on nothing waits, whatever becomes of the other machine.
    cache.place((OTHER,))
    cache.release("first")


def test_the_wait_for_other_machines_has_a_limit(
    calls: Recorder, cache: DividedCache, clock: VirtualClock
) -> None:
    cache.host(pack_ranks(dealt_in(0)), {0})
    done: list[int] = []
    assert not cache.fetch("batch", [0, 1, 2], lambda: done.append(1))
    clock.advance(START - 0.1)
    cache.tick()
    assert done == []
    clock.advance(0.1)
    cache.tick()
    assert done == [1]
    # There is no other machine, so this one reads everything, and goes on at once.
    assert cache.to_prepare("batch") == [0, 1, 2]
    assert cache.fetch("next", [3], lambda: None)


def test_a_machine_that_is_lost_soon_after_the_start_is_not_waited_for(
    cache: DividedCache, clock: VirtualClock
) -> None:
    cache.host(pack_ranks(dealt_in(0)), {0})
    cache.place((trains(cache, 1),))
    cache.fetch("first", [0, 2], lambda: None)
    cache.place(())
    clock.advance(START / 2)
    assert cache.fetch("second", [1, 3], lambda: None)
    assert cache.to_prepare("second") == [1, 3]


def test_a_batch_that_is_cancelled_at_the_start_is_not_asked_for(
    calls: Recorder, cache: DividedCache
) -> None:
    cache.host(pack_ranks(dealt_in(0)), {0})
    assert not cache.fetch("batch", [1], lambda: None)
    cache.release("batch")
    cache.place((trains(cache, 1),))
    assert (calls.made, cache.status()["requests"]) == ([], 0)


# Versions of samples.


def prepare(cache: DividedCache, own: HeapStore, keys: list[int]) -> list[int]:
    """Put these versions into the store, as workers do. Returns those that are not kept."""
    values = [(key, Lent(np.full(9, key % 251, np.uint8), 300)) for key in keys]
    own.put_tagged([(version_slot(key), key >> 40, value) for key, value in values])
    return cache.admit([(key, own.cost(300, tagged=True)) for key in keys])


def used_in(epoch: int, indices: list[int]) -> list[int]:
    """The versions of these samples that an epoch uses."""
    return [version_key(index, GENERATIONS.generation(index, epoch)) for index in indices]


def test_a_version_is_kept_by_the_machine_that_prepares_it(
    calls: Recorder, own: HeapStore, refurbished: DividedCache
) -> None:
    for epoch in range(3):
        mine = np.flatnonzero(dealt_in(epoch) == 0).tolist()
        fresh = [index for index in mine if GENERATIONS.is_fresh(index, epoch)]
        keys = used_in(epoch, fresh)
        assert refurbished.fetch(epoch, keys, lambda: None)
        assert refurbished.to_prepare(epoch) == keys
        assert prepare(refurbished, own, keys) == []
        refurbished.release(epoch)
        assert set(keys) <= set(refurbished.known())
    assert calls.made == []


def test_a_version_of_another_machine_is_asked_from_the_one_that_prepared_it(
    calls: Recorder, refurbished: DividedCache
) -> None:
    # In epoch 2 this machine is dealt what the other one has prepared in epoch 1.
    mine = np.flatnonzero(dealt_in(2) == 0).tolist()
    keys = used_in(2, [index for index in mine if GENERATIONS.is_fresh(index, 1)])
    assert keys
    assert not refurbished.fetch("batch", keys, lambda: None)
    [ask] = calls.made
    assert (ask.owner, ask.keys) == ("other", tuple(keys))


def test_versions_are_told_apart_and_outdated_ones_are_removed(
    own: HeapStore, refurbished: DividedCache
) -> None:
    old, new = version_key(0, 0), version_key(0, 2)  # in the same place of the store
    assert prepare(refurbished, own, [old]) == [old]  # nobody has asked for it
    refurbished.fetch("batch", [old], lambda: None)
    assert prepare(refurbished, own, [old]) == []
    [[answer]] = list(refurbished.serve("other", [old], 1 << 20))
    assert answer.state == "present"
    frame = memoryview(pack_sample(np.zeros(9, np.uint8)).tobytes())
    assert refurbished.keep_offered(new, frame)
    [[answer]] = list(refurbished.serve("other", [old], 1 << 20))
    assert answer.state == "absent"
    assert not refurbished.keep_offered(old, frame)
    assert refurbished.known() == [new]
    refurbished.forget([new])
    assert (refurbished.known(), len(own)) == ([], 0)


def test_a_sample_that_does_not_exist_is_not_kept(refurbished: DividedCache) -> None:
    frame = memoryview(pack_sample(np.zeros(9, np.uint8)).tobytes())
    assert not refurbished.keep_offered(version_key(SAMPLES, 0), frame)


def test_nobody_waits_for_samples_that_a_full_disk_does_not_take(
    cache: DividedCache, own: HeapStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "put_many", lambda items: [False] * len(items))
    frame = memoryview(pack_sample(np.zeros(9, np.uint8)).tobytes())
    assert not cache.keep_offered(0, frame)
    cache.told({0: ""})  # nor has another machine room for it
    for peer in ("other", "third"):
        [answer] = next(cache.serve(peer, [0], 1 << 20))
        assert answer.state == "absent"


def test_a_sample_that_the_store_does_not_take_is_not_said_to_be_here(
    cache: DividedCache, own: HeapStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "put_many", lambda items: [False] * len(items))
    cache.fetch("batch", [0], lambda: None)
    cache.admit([(0, 9)])  # a worker has read it
    assert cache.known() == [0]
    cache._keep(0)
    assert cache.known() == [0]  # there is no value to put into the store
    frame = memoryview(pack_sample(np.zeros(9, np.uint8)).tobytes())
    cache._offering[0] = frame
    cache._keep(0)
    assert cache.known() == []


def test_a_guest_removes_versions_that_no_epoch_uses_any_more(
    calls: Recorder, own: HeapStore, clock: VirtualClock
) -> None:
    guest = DividedCache(
        "content",
        "me",
        own,
        HeapStore(ROOM, overshoot=0),
        lends=False,
        samples=1,
        service=calls,
        clock=clock,
        guest=True,
        versions=True,
    )
    guest.open_as_guest()
    frame = memoryview(pack_sample(np.zeros(9, np.uint8)).tobytes())
    for key in (version_key(5, 0), version_key(6, 1), version_key(7, 2)):
        assert guest.keep_offered(key, frame)
    assert sorted(guest.known()) == [version_key(6, 1), version_key(7, 2)]
    assert len(own) == 2


# What machines have kept before.


def test_samples_that_another_machine_has_on_its_disk_are_not_read(
    calls: Recorder, cache: DividedCache
) -> None:
    calls.kept = [0, 1, 4, SAMPLES - 1]
    cache.host(pack_ranks(dealt_in(0)), {0})
    cache.place((trains(cache, 1),))
    assert not cache.fetch("batch", [0, 2, 4], lambda: None)
    [ask] = calls.made
    assert (ask.owner, ask.keys) == ("other", (0, 4))
    assert cache.to_prepare("batch") == [2]
    # A third machine that asks this one, the owner, is sent there.
    [answers] = list(cache.serve("third", [4, 6], 1 << 20))
    found = {answer.place: (answer.state, answer.moved_to) for answer in answers}
    assert found == {0: ("moved", "other"), 1: ("absent", "")}


def test_the_first_batches_wait_until_other_machines_have_said_what_they_keep(
    calls: Recorder, cache: DividedCache, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(calls, "learn", lambda cache, machine: asked.append(machine))
    cache.host(pack_ranks(dealt_in(0)), {0})
    cache.place((trains(cache, 1),))
    done: list[int] = []
    assert not cache.fetch("batch", [0, 2], lambda: done.append(1))
    assert (asked, done) == (["other"], [])
    cache.learnt("other", np.array([0]))
    assert cache.to_prepare("batch") == [2]
    assert [ask.keys for ask in calls.made] == [(0,)]


def test_samples_of_an_earlier_run_are_found_and_served(
    calls: Recorder, clock: VirtualClock, tmp_path: Path
) -> None:
    def opened() -> tuple[DividedCache, LmdbStore]:
        own = LmdbStore(tmp_path / "store", ROOM, persistent=True)
        made = DividedCache(
            "content",
            "me",
            own,
            HeapStore(ROOM, overshoot=0),
            lends=False,
            samples=SAMPLES,
            service=calls,
            clock=clock,
        )
        admission = Admission(ROOM)
        admission.restore(own.keys())
        made.open(admission)
        return made, own

    cache, own = opened()
    cache.fetch("batch", [3], lambda: None)
    packed = pack_sample(np.full(100, 3, np.uint8))
    own.put_many([(3, packed)])
    assert cache.admit([(3, own.cost(packed.nbytes))]) == []
    cache.close()
    own.close()
    again, own = opened()
    assert again.kept().tolist() == [3]
    [[answer]] = list(again.serve("other", [3], 1 << 20))
    assert bytes(answer.value) == bytes(packed.tobytes())
    own.destroy()


class WatchedStore(HeapStore):
    """A store that says whether the lock of a cache was held when samples were removed."""

    cache: DividedCache | None = None
    held: list[bool]

    def delete_many(self, keys: Sequence[int]) -> int:
        if keys and self.cache is not None:
            self.held.append(self.cache._lock.locked())
        return super().delete_many(keys)


def test_no_batch_can_ask_for_a_borrowed_sample_while_it_is_removed(
    calls: Recorder, own: HeapStore, clock: VirtualClock
) -> None:
    arrivals = WatchedStore(ROOM, overshoot=0)
    cache = DividedCache(
        *("content", "me", own, arrivals),
        lends=False,
        samples=SAMPLES,
        service=calls,
        clock=clock,
    )
    # There is no room for copies, so a sample that was used leaves.
    cache._copies.budget = 0
    cache.open(Admission(ROOM))
    cache.host(pack_ranks(np.arange(SAMPLES, dtype=np.int32) % 2), {0})
    other = replace(OTHER, ranks=((cache.content, cache.hosted[1], (1,)),))
    cache.place((other,))
    assert not cache.fetch("batch", [1], lambda: None)
    [ask] = [made for made in calls.made if isinstance(made, Ask)]
    packed = memoryview(pack_sample((b"x", 1)).tobytes())
    cache.answered(ask, [KeyAnswer(0, "present", packed)])
    arrivals.cache, arrivals.held = cache, []
    cache.release("batch")
    assert arrivals.held == [True]
    assert len(arrivals) == 0


def test_a_sample_that_needs_a_pickle_is_found_once_and_said_once(
    cache: DividedCache, own: HeapStore, caplog: pytest.LogCaptureFixture
) -> None:
    cache.host(pack_ranks(np.zeros(SAMPLES, np.int32)), {0})
    assert cache.fetch("batch", [0, 1], lambda: None)
    said = [cache.needs_pickle]
    packed = pack_sample({1, 2})
    own.put_many([(0, packed), (1, packed)])
    assert cache.admit([(0, own.cost(packed.nbytes)), (1, own.cost(packed.nbytes))]) == []
    said += [cache.needs_pickle, cache.needs_pickle]
    assert said == [False, True, True]
    assert cache.status()["unsent"] == 1
    assert len([record for record in caplog.records if "pickle" in record.getMessage()]) == 1


def test_what_has_arrived_is_held_and_what_is_elsewhere_is_not(
    cache: DividedCache, calls: Recorder, own: HeapStore
) -> None:
    cache.host(pack_ranks(np.arange(SAMPLES, dtype=np.int32) % 2), {0})
    cache.place((trains(cache, 1),))
    assert cache.fetch("first", [0], lambda: None)
    assert not cache.fetch("batch", [0, 1, 3], lambda: None)
    read(cache, own, [0])
    [ask] = [made for made in calls.made if isinstance(made, Ask)]
    packed = memoryview(pack_sample((b"x", 1)).tobytes())
    cache.answered(ask, [KeyAnswer(ask.keys.index(1), "present", packed)])
    assert cache.holds([0, 1, 2, 3]) == [True, True, False, False]
    assert [value is None for value in cache.lend([0, 1, 2])] == [False, False, True]
    assert cache.some_here(4) == [0]
    assert cache.keep_read(2, packed) == own.cost(len(packed))
    assert cache.holds([2]) == [False], "it is in the store, and not admitted"
    assert cache.keep_read(4, memoryview(b"damaged")) == 0
