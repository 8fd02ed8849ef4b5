"""A divided cache on one machine, without a network: what it asks of others, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from penstock.cluster.divided_cache import DividedCache
from penstock.cluster.membership import Machine
from penstock.cluster.partition import Ask, OfferValues, Tell
from penstock.cluster.placement import pack_ranks
from penstock.cluster.transport import KeyAnswer
from penstock.store import HeapStore
from penstock.store.admission import Admission
from penstock.store.plain import pack_sample
from penstock.store.value import Lent

SAMPLES, ROOM = 16, 1 << 20


@dataclass
class Recorder:
    """Calls to other machines. None of them is answered."""

    made: list[Any] = field(default_factory=list)

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


OTHER = Machine("other", "10.0.0.2:1", 7, cache_bytes=ROOM)


@pytest.fixture
def calls() -> Recorder:
    return Recorder()


@pytest.fixture
def own() -> HeapStore:
    return HeapStore(ROOM, overshoot=0)


@pytest.fixture
def cache(calls: Recorder, own: HeapStore) -> DividedCache:
    made = DividedCache(
        "content",
        "me",
        own,
        HeapStore(ROOM, overshoot=0),
        lends=True,
        samples=SAMPLES,
        service=calls,
        clock=lambda: 0.0,
    )
    made.open(Admission(ROOM))
    return made


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
    cache.host(pack_ranks(np.arange(SAMPLES, dtype=np.int32) % 2), {1})
    mine = list(range(1, SAMPLES, 2))
    assert cache.fetch("batch", mine, lambda: None)
    assert read(cache, own, mine) == []
    # The view names this machine at last: it has not been restarted, and keeps what it has.
    cache.release("batch")
    cache.place((OTHER, Machine("me", "10.0.0.1:1", 8, cache_bytes=ROOM)))
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
