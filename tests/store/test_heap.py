"""The store of one process: it answers as the shared one does, and keeps to its budget."""

from __future__ import annotations

import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.serialize import pack, unpack
from penstock.store import Heap, Store, Turns, memory_store
from penstock.store.value import PIECE

MB = 1_000_000

KEYS = range(5)
values = st.tuples(st.integers(0, 255), st.integers(0, 2 * PIECE)).map(
    lambda made: bytes([made[0]]) * made[1]
)
keys = st.lists(st.integers(KEYS[0], KEYS[-1]), unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put_many"), st.dictionaries(st.integers(0, 4), values)),
        st.tuples(
            st.just("put_tagged"),
            st.dictionaries(st.integers(0, 4), st.tuples(st.integers(-1, 3), values)),
        ),
        st.tuples(st.just("delete_many"), keys),
        st.tuples(st.just("seal"), st.none()),
    ),
    max_size=12,
)


def do(store: Any, what: str, given: Any) -> Any:
    if what == "put_many":
        return store.put_many(list(given.items()))
    if what == "put_tagged":
        return store.put_tagged([(key, tag, value) for key, (tag, value) in given.items()])
    return store.seal() if what == "seal" else store.delete_many(given)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps, st.uuids())
def test_it_answers_as_the_shared_store_does(
    tmp_path: Path, steps: list[tuple[str, Any]], name: Any
) -> None:
    heap, store = Heap(50 * MB), Store(tmp_path / str(name), 50 * MB)
    try:
        for what, given in steps:
            assert do(heap, what, given) == do(store, what, given)
            assert heap.get_many(KEYS) == store.get_many(KEYS)
            for tag in range(-1, 4):
                tags = [tag] * len(KEYS)
                assert heap.get_tagged(KEYS, tags) == store.get_tagged(KEYS, tags)
            assert heap.keys() == sorted(store.keys())
            assert (len(heap), heap.sealed) == (len(store), store.sealed)
    finally:
        store.destroy()


def test_what_is_put_and_what_is_got_are_copies() -> None:
    heap = Heap(MB)
    sample = {"image": np.arange(100_000, dtype=np.uint8), "small": np.arange(3)}
    heap.put_tagged([(1, 0, pack(sample))])
    sample["image"][:] = 0
    for _ in range(2):
        (frame,) = heap.get_tagged([1], [0])
        found = unpack(frame)
        np.testing.assert_array_equal(found["image"], np.arange(100_000, dtype=np.uint8))
        np.testing.assert_array_equal(found["small"], np.arange(3))
        found["image"][:] = 1
        found["small"][:] = 1


def test_past_its_budget_it_refuses_says_so_once_and_takes_what_replaces_as_much() -> None:
    heap = Heap(MB, overshoot=0)
    big = bytes(400_000)
    assert heap.put_tagged([(1, 0, big), (2, 0, big)]) == [True, True]
    with pytest.warns(RuntimeWarning, match=r"past their budget of .*larger budget"):
        assert heap.put_tagged([(3, 0, big)]) == [False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert heap.put_tagged([(4, 0, big)]) == [False]
        assert heap.put_tagged([(1, 1, big)]) == [True]
    assert heap.full == 2
    assert heap.used <= MB
    assert heap.delete_many([1, 2, 3]) == 2
    assert heap.used == 0
    assert heap.put_tagged([(3, 0, big)]) == [True]


def test_threads_may_put_and_delete_at_once() -> None:
    heap = Heap(100 * MB)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(200):
            key = (number + turn) % 3
            heap.put_tagged([(key, 2 * turn, bytes([key]) * 70_000)])
            for found in heap.get_many([0, 1, 2]):
                if found is not None and len(set(bytes(found[::10_000]))) != 1:
                    wrong.append(found)
            heap.delete_many([key])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    heap.delete_many([0, 1, 2])
    assert (heap.used, len(heap)) == (0, 0)


def test_destroyed_it_holds_and_takes_nothing() -> None:
    heap = Heap(MB)
    heap.put_many([(1, b"one")])
    heap.destroy()
    assert heap.put_many([(1, b"one")]) == [False]
    assert (heap.get_many([1]), len(heap), heap.used) == ([None], 0, 0)


def test_it_cannot_be_sent_to_another_process() -> None:
    with pytest.raises(TypeError, match="need a Store"):
        pickle.dumps(Heap(MB))


def test_who_shares_gets_one_that_is_shared() -> None:
    shared, own = memory_store(MB, shared=True), memory_store(MB, shared=False)
    try:
        assert (type(shared), type(own)) == (Store, Heap)
    finally:
        shared.destroy()


def noisy(value: Any, rng: np.random.Generator) -> Any:
    return value + rng.random()


@pytest.mark.parametrize(("kind", "store"), [("threads", Heap), ("processes", Store)])
def test_a_loader_keeps_samples_where_its_workers_see_them(kind: Any, store: type) -> None:
    cached = ps.from_dataset(np.arange(6.0)).cache("1MB")
    written = cached.map(noisy).refurbish(2).echo(2).map(noisy).batch(3)
    with written.loader(workers=1, kind=kind, seed=1) as loader:
        assert len(list(loader)) == 4
        kept = [
            stop.store for stop in loader._assembly.keepers.road.stops if hasattr(stop, "store")
        ]
    assert [type(one) for one in kept] == [store] * 3


def test_turns_let_one_thread_in_at_a_time_and_others_beside_it() -> None:
    turns = Turns()
    inside: dict[int, int] = {0: 0, 1: 0}
    most: dict[int, int] = {0: 0, 1: 0}
    both = threading.Barrier(2, timeout=20)

    def work(number: int) -> None:
        for _ in range(200):
            with turns.claim(number):
                inside[number] += 1
                most[number] = max(most[number], inside[number])
                inside[number] -= 1

    def meet(number: int) -> None:
        with turns.claim(number):
            both.wait()

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(6)]
    threads += [threading.Thread(target=meet, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == {0: 1, 1: 1}
    assert turns._held == {}
    with pytest.raises(TypeError, match="processes need Claims"):
        pickle.dumps(turns)
