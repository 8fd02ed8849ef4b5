"""The heap store: what it does beyond the contract of sample stores."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.stops.hold import keeps_samples
from penstock.store import HeapStore, LmdbStore
from penstock.store.value import Lent

MB = 1_000_000


def test_a_lent_sample_is_returned_as_the_same_object() -> None:
    store = HeapStore(MB)
    lent = Lent({"label": 3}, nbytes=100_000)
    assert store.put_many([(1, lent)]) == [True]
    assert store.get_many([1])[0] is lent
    assert store.used == store.cost(100_000)
    assert store.put_tagged([(1, 0, lent)]) == [True]
    assert store.get_tagged([1], [0])[0] is lent
    assert store.used == store.cost(100_000, tagged=True)


def test_refused_values_are_counted() -> None:
    store = HeapStore(MB, overshoot=0)
    big = bytes(400_000)
    assert store.put_tagged([(1, 0, big), (2, 0, big)]) == [True, True]
    with pytest.warns(RuntimeWarning, match=r"past their budget of .*larger budget"):
        assert store.put_tagged([(3, 0, big)]) == [False]
    assert store.put_tagged([(4, 0, big)]) == [False]
    assert store.put_tagged([(1, 1, big)]) == [True]
    assert store.full == 2
    assert store.delete_many([1, 2, 3]) == 2
    assert store.used == 0
    assert store.put_tagged([(3, 0, big)]) == [True]


def test_it_cannot_be_sent_to_another_process() -> None:
    with pytest.raises(TypeError, match="need an LmdbStore"):
        pickle.dumps(HeapStore(MB))


def noisy(value: Any, rng: np.random.Generator) -> Any:
    return value + rng.random()


@pytest.mark.parametrize(("kind", "store"), [("threads", HeapStore), ("processes", LmdbStore)])
def test_a_loader_keeps_samples_where_its_workers_see_them(kind: Any, store: type) -> None:
    cached = ps.from_dataset(np.arange(6.0)).cache("1MB")
    written = cached.map(noisy).refurbish(2).echo(2).map(noisy).batch(3)
    with written.loader(workers=1, kind=kind, seed=1) as loader:
        assert len(list(loader)) == 4
        stops = loader._assembly.keepers.road.stops
        kept = [stop.store for stop in stops if keeps_samples(stop)]
    assert [type(one) for one in kept] == [store] * 3


def test_lent_values_that_are_new_are_counted_as_one_by_one() -> None:
    small, large = Lent("small", nbytes=100), Lent("large", nbytes=60_000)
    store = HeapStore(MB)
    assert store.put_tagged([(1, 5, small), (2, 6, large)]) == [True, True]
    needed = [store.cost(value.nbytes, tagged=True) for value in (small, large)]
    assert store.used == sum(needed)
    assert store.get_tagged([1, 2, 2, 3], [5, 6, 5, 0]) == [small, large, None, None]
    assert store.delete_many([1, 3]) == 1
    assert store.used == needed[1]


def test_lent_values_that_replace_others_or_do_not_fit_are_looked_at_one_by_one() -> None:
    old, new, big = Lent("old", 100), Lent("new", 200), Lent("big", 900_000)
    store = HeapStore(MB, overshoot=0)
    assert store.put_tagged([(1, 0, old), (1, 0, new)]) == [True, True]
    assert store.get_tagged([1], [0]) == [old]
    assert store.used == store.cost(100, tagged=True)
    assert store.put_tagged([(1, 1, new), (2, 0, old)]) == [True, True]
    assert store.get_tagged([1, 2], [1, 0]) == [new, old]
    assert store.put_tagged([(3, 0, big)]) == [True]
    with pytest.warns(RuntimeWarning, match="larger budget"):
        assert store.put_tagged([(4, 0, big), (5, 0, old)]) == [False, True]
    store.seal()
    assert store.put_tagged([(6, 0, old)]) == [False]
    sizes = (200, 100, 900_000, 100)
    assert store.used == sum(store.cost(nbytes, tagged=True) for nbytes in sizes)


def test_removed_values_are_freed_by_the_next_reader_not_by_the_training_loop() -> None:
    store = HeapStore(budget=1_000_000)
    array = np.arange(10)
    freed = weakref.ref(array)
    store.put_tagged([(7, 0, Lent(array, array.nbytes))])
    del array
    assert store.delete_many([7]) == 1
    assert store.used == 0
    assert store.get_tagged([8], [0]) == [None]
    assert freed() is None


def test_removed_values_are_freed_when_the_store_is_closed() -> None:
    store = HeapStore(budget=1_000_000)
    array = np.arange(10)
    freed = weakref.ref(array)
    store.put_tagged([(7, 0, Lent(array, array.nbytes))])
    del array
    store.delete_many([7])
    store.close()
    assert freed() is None
