"""The contract of sample stores: every store passes the same tests.

A new store becomes subject to them by one more line in ``STORES``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.serialize import pack, unpack
from penstock.store import HeapStore, LmdbStore, SampleStore, Value, cost, memory_store
from penstock.store.partitioned import PartitionedStore
from penstock.store.value import PIECE
from tests.store.reading import get, get_many, get_tagged

MB = 1_000_000
LARGE = 3 * PIECE + 1000

Make = Callable[..., SampleStore]
"""Makes a store with this budget in bytes, and ``overshoot`` beyond it."""


def make_heap_store(place: Path, budget: int, overshoot: int | None) -> SampleStore:
    return HeapStore(budget, overshoot=overshoot)


def make_lmdb_store(place: Path, budget: int, overshoot: int | None) -> SampleStore:
    return LmdbStore(place, budget, overshoot=overshoot)


def make_partitioned_store(place: Path, budget: int, overshoot: int | None) -> SampleStore:
    own = HeapStore(budget, overshoot=overshoot)
    return PartitionedStore(own, HeapStore(budget, overshoot=overshoot))


STORES: dict[str, Callable[[Path, int, int | None], SampleStore]] = {
    "heap": make_heap_store,
    "lmdb": make_lmdb_store,
    "partitioned": make_partitioned_store,
}


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[SampleStore] = []

    def make(budget: int = 50 * MB, overshoot: int | None = None) -> SampleStore:
        made.append(STORES[request.param](tmp_path / f"store-{len(made)}", budget, overshoot))
        return made[-1]

    yield make
    for store in made:
        store.destroy()


@pytest.fixture
def store(make: Make) -> SampleStore:
    return make()


any_store = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# Storing and reading.


def test_stored_values_are_returned(store: SampleStore) -> None:
    store.open()
    items: list[tuple[int, Value]] = [
        (0, b""),
        (7, b"seven"),
        (2**62, b"x" * 200_000),
        (-3, b"minus"),
        (8, [b"ei", b"ght"]),
    ]
    assert store.put_many(items) == [True] * 5
    assert get_many(store, [8, 7, 0, 2**62, -3, 9]) == [
        b"eight",
        b"seven",
        b"",
        b"x" * 200_000,
        b"minus",
        None,
    ]
    assert len(store) == 5
    assert sorted(store.keys()) == [-3, 0, 7, 8, 2**62]


def test_calls_without_keys_do_nothing(store: SampleStore) -> None:
    assert store.get_many([]) == []
    assert store.get_tagged([], []) == []
    assert store.put_many([]) == []
    assert store.put_tagged([]) == []
    assert store.delete_many([]) == 0


def test_an_empty_store_is_true(store: SampleStore) -> None:
    assert len(store) == 0
    assert store.used == 0
    assert store


def test_a_key_keeps_its_first_value(store: SampleStore) -> None:
    assert store.put_many([(1, b"first"), (1, b"again")]) == [True, True]
    assert store.put_many([(1, b"later")]) == [True]
    assert get(store, 1) == b"first"


def test_returned_values_are_writable_copies(store: SampleStore) -> None:
    for key, value in ((1, b"small"), (2, bytes(LARGE))):
        store.put_tagged([(key, 0, value)])
        store.put_many([(-key, value)])
        for found in (store.get_tagged([key], [0])[0], store.get_many([-key])[0]):
            found[:3] = b"xyz"
        assert get(store, key) == get(store, -key) == value


def test_stored_values_are_copies(store: SampleStore) -> None:
    image = np.arange(100_000, dtype=np.uint8)
    store.put_tagged([(1, 0, pack({"image": image, "small": np.arange(3)}))])
    image[:] = 0
    for _ in range(2):
        found = unpack(store.get_tagged([1], [0])[0])
        np.testing.assert_array_equal(found["image"], np.arange(100_000, dtype=np.uint8))
        np.testing.assert_array_equal(found["small"], np.arange(3))
        found["image"][:] = 1
        found["small"][:] = 1


def test_packed_samples_are_stored_and_unpacked(store: SampleStore) -> None:
    pixels = np.arange(90_000, dtype=np.float32).reshape(300, 300)
    store.put_many([(1, pack((pixels, 7)))])
    store.put_tagged([(2, 3, pack((pixels, 8)))])
    for found, label in ((store.get_many([1])[0], 7), (store.get_tagged([2], [3])[0], 8)):
        again, label_again = unpack(found)
        assert label_again == label
        assert again.flags.writeable
        np.testing.assert_array_equal(again, pixels)


@any_store
@given(
    st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 9), st.binary(max_size=5000))))
)
def test_a_store_behaves_like_a_dict_that_never_overwrites(
    store: SampleStore, steps: list[tuple[bool, dict[int, bytes]]]
) -> None:
    store.delete_many(range(10))
    model: dict[int, bytes] = {}
    for put, values in steps:
        if put:
            assert all(store.put_many(list(values.items())))
            model = {**values, **model}
        else:
            assert store.delete_many(list(values)) == len(values.keys() & model.keys())
            model = {key: value for key, value in model.items() if key not in values}
        assert get_many(store, range(10)) == [model.get(key) for key in range(10)]
        assert len(store) == len(model)


# Tags.


def test_only_a_value_with_the_given_tag_is_returned(store: SampleStore) -> None:
    assert store.put_tagged([(1, 4, b"one"), (2, 5, bytes(LARGE)), (3, -1, b"")]) == [True] * 3
    assert get_tagged(store, [1, 2, 3, 4], [4, 5, -1, 0]) == [b"one", bytes(LARGE), b"", None]
    assert store.get_tagged([1, 2, 3], [3, 6, 0]) == [None] * 3
    assert store.corrupt == 0


@pytest.mark.parametrize(
    ("stored", "put", "held", "left"),
    [
        (3, 3, True, b"old"),
        (3, 4, True, b"new"),
        (3, 9, True, b"new"),
        (4, 3, False, b"old"),
        (5, 3, True, b"new"),
        (0, -1, False, b"old"),
    ],
)
def test_a_value_stays_if_its_tag_is_the_same_or_the_next(
    store: SampleStore, stored: int, put: int, held: bool, left: bytes
) -> None:
    store.put_tagged([(7, stored, b"old")])
    assert store.put_tagged([(7, put, b"new")]) == [held]
    assert get(store, 7) == left
    assert get_tagged(store, [7], [stored if left == b"old" else put]) == [left]


def test_an_untagged_value_matches_no_tag(store: SampleStore) -> None:
    store.put_many([(1, b"plain")])
    assert store.get_tagged([1], [0]) == [None]
    assert store.put_tagged([(1, 0, b"tagged")]) == [True]
    assert get_many(store, [1]) == [b"tagged"]
    assert store.put_many([(1, b"plain")]) == [True]
    assert get_tagged(store, [1], [0]) == [b"tagged"]
    assert store.corrupt == 0


tagged_steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete"]),
        st.dictionaries(
            st.integers(0, 4),
            st.tuples(st.integers(0, 3), st.integers(0, 255), st.integers(0, 3 * PIECE)),
        ),
    ),
    max_size=12,
)


@any_store
@given(tagged_steps)
def test_a_store_behaves_like_a_dict_that_keeps_the_same_and_the_next_tag(
    store: SampleStore, steps: list[tuple[str, dict[int, tuple[int, int, int]]]]
) -> None:
    store.delete_many(range(5))
    model: dict[int, tuple[int, bytes]] = {}
    for what, values in steps:
        if what == "put":
            items = [(key, tag, bytes([fill]) * n) for key, (tag, fill, n) in values.items()]
            held = store.put_tagged(items)
            for key, tag, value in items:
                old = model.get(key, (-9, b""))[0]
                assert held.pop(0) == (old != tag + 1)
                if old not in (tag, tag + 1):
                    model[key] = (tag, value)
        else:
            assert store.delete_many(list(values)) == len(values.keys() & model.keys())
            model = {key: value for key, value in model.items() if key not in values}
        for tag in range(4):
            expected = [
                model[key][1] if model.get(key, (9,))[0] == tag else None for key in range(5)
            ]
            assert get_tagged(store, range(5), [tag] * 5) == expected
    assert len(store) == len(model)
    assert store.corrupt == 0
    store.delete_many(range(5))
    assert store.used == 0


# Deleting, sealing and the budget.


def test_deleting_counts_values_and_frees_their_bytes(store: SampleStore) -> None:
    store.put_many([(key, bytes(10_000)) for key in range(20)])
    assert 200_000 <= store.used <= 20 * store.cost(10_000) + 8192
    assert store.delete_many([3, 4, 99]) == 2
    assert get_many(store, [3, 5]) == [None, bytes(10_000)]
    assert store.delete_many(range(20)) == 18
    assert store.used == 0
    assert len(store) == 0


def test_a_sealed_store_accepts_no_new_values(store: SampleStore) -> None:
    store.put_many([(1, b"one")])
    before = store.sealed
    store.seal()
    assert (before, store.sealed) == (False, True)
    assert store.put_many([(1, b"again"), (2, b"two")]) == [True, False]
    assert get_many(store, [1, 2]) == [b"one", None]
    assert store.delete_many([1]) == 1


def test_a_sealed_store_replaces_no_values_and_does_not_warn(store: SampleStore) -> None:
    store.put_tagged([(1, 0, b"one")])
    store.seal()
    held = store.put_tagged([(1, 0, b"one"), (1, 1, b"again"), (2, 0, b"two")])
    assert held == [True, False, False]
    assert get_tagged(store, [1], [0]) == [b"one"]


def test_the_cost_of_a_value_does_not_depend_on_the_store(store: SampleStore) -> None:
    for nbytes in (0, 100, 110_000):
        assert store.cost(nbytes) == cost(nbytes)
        assert store.cost(nbytes, tagged=True) == cost(nbytes, tagged=True)


def test_beyond_budget_and_overshoot_values_are_refused_with_one_warning(make: Make) -> None:
    store = make(100_000, overshoot=60_000)
    assert store.budget == 100_000
    with pytest.warns(RuntimeWarning, match=r"past .* budget of 100\.0 KB.*larger budget") as found:
        held = store.put_many([(key, bytes(10_000)) for key in range(20)])
    assert len(found) == 1
    assert held == [True] * 12 + [False] * 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.put_many([(50, bytes(10_000)), (0, b"known")]) == [False, True]
        assert store.put_many([(51, b"small")]) == [True]
    assert store.used <= 160_000


def test_a_replaced_value_frees_its_bytes(make: Make) -> None:
    nbytes = 100_000
    room = 10 * cost(nbytes, tagged=True)
    store = make(room, overshoot=20_000)
    most = room + 20_000
    assert all(store.put_tagged([(key, 0, bytes(nbytes)) for key in range(10)]))
    for tag in range(1, 30):
        for key in range(10):
            assert store.put_tagged([(key, tag, bytes([tag]) * nbytes)]) == [True]
            assert store.used <= most
    # All in one call, too.
    assert all(store.put_tagged([(key, 50, bytes(nbytes)) for key in range(10)]))
    assert store.used <= most
    with pytest.warns(RuntimeWarning, match=r"past .* budget"):
        assert store.put_tagged([(3, 51, bytes(2 * nbytes)), (4, 51, b"small")]) == [False, True]
    assert get_tagged(store, [3, 4], [50, 51]) == [bytes(nbytes), b"small"]
    assert store.put_tagged([(99, 0, bytes(nbytes - 20_000))]) == [True]


# Threads and the end.


def test_threads_may_store_read_and_delete_at_once(store: SampleStore) -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(100):
            key = (number + turn) % 3
            store.put_tagged([(key, 2 * turn, bytes([key]) * 70_000)])
            for at, value in enumerate(store.get_many([0, 1, 2])):
                if value is not None and value != bytes([at]) * 70_000:
                    wrong.append(value)
            store.delete_many([key])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.delete_many([0, 1, 2])
    assert (store.used, len(store)) == (0, 0)


def test_threads_that_store_the_same_keys_agree(store: SampleStore) -> None:
    def work(seed: int) -> None:
        for key in range(200):
            store.put_many([((key * seed) % 211, b"%d" % ((key * seed) % 211) * 500)])
            found = store.get_many([key, (key * seed) % 211])
            if (found[0] is not None and found[0] != b"%d" % key * 500) or found[1] is None:
                wrong.append(key)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(store.keys()) == {key * seed % 211 for key in range(200) for seed in range(1, 9)}


def test_closing_twice_is_harmless(store: SampleStore) -> None:
    store.put_many([(1, b"one")])
    store.close()
    store.close()


def test_a_destroyed_store_is_empty_and_accepts_nothing(store: SampleStore) -> None:
    store.put_many([(1, b"one")])
    store.destroy()
    assert store.put_many([(1, b"one"), (2, b"two")]) == [False, False]
    assert store.put_tagged([(1, 0, b"one")]) == [False]
    assert store.get_many([1]) == [None]
    assert store.get_tagged([1], [0]) == [None]
    assert store.delete_many([1]) == 0
    assert (store.keys(), len(store), store.used) == ([], 0, 0)
    store.close()
    store.destroy()


# Which store is made.


@pytest.mark.parametrize(("shared", "kind"), [(True, LmdbStore), (False, HeapStore)])
def test_a_memory_store_is_in_lmdb_if_processes_share_it(shared: bool, kind: type) -> None:
    store = memory_store(MB, shared=shared)
    try:
        assert type(store) is kind
        assert not store.persistent
    finally:
        store.destroy()


KEYS = range(5)
values = st.tuples(st.integers(0, 255), st.integers(0, 2 * PIECE)).map(
    lambda made: bytes([made[0]]) * made[1]
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put_many"), st.dictionaries(st.integers(0, 4), values)),
        st.tuples(
            st.just("put_tagged"),
            st.dictionaries(st.integers(0, 4), st.tuples(st.integers(-1, 3), values)),
        ),
        st.tuples(st.just("delete_many"), st.lists(st.integers(KEYS[0], KEYS[-1]), unique=True)),
        st.tuples(st.just("seal"), st.none()),
    ),
    max_size=12,
)


def do(store: SampleStore, what: str, given: Any) -> Any:
    if what == "put_many":
        return store.put_many(list(given.items()))
    if what == "put_tagged":
        return store.put_tagged([(key, tag, value) for key, (tag, value) in given.items()])
    if what == "delete_many":
        return store.delete_many(given)
    store.seal()
    return None


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps, st.uuids())
def test_all_stores_give_the_same_answers(
    tmp_path: Path, steps: list[tuple[str, Any]], name: Any
) -> None:
    stores = [make(tmp_path / str(name), 50 * MB, None) for make in STORES.values()]
    try:
        for what, given in steps:
            first, *others = [do(store, what, given) for store in stores]
            assert all(other == first for other in others)
            first, *others = [
                [
                    get_many(store, KEYS),
                    [get_tagged(store, KEYS, [tag] * len(KEYS)) for tag in range(-1, 4)],
                    sorted(store.keys()),
                    len(store),
                    store.sealed,
                ]
                for store in stores
            ]
            assert all(other == first for other in others)
    finally:
        for store in stores:
            store.destroy()


def test_a_partitioned_store_finds_borrowed_values_and_keeps_none_of_them() -> None:
    own, arrivals = HeapStore(MB), HeapStore(MB)
    store = PartitionedStore(own, arrivals)
    store.put_many([(1, b"own")])
    arrivals.put_many([(1, b"not looked up"), (2, b"borrowed")])
    arrivals.put_tagged([(3, 7, b"tagged")])
    assert [None if value is None else bytes(value) for value in store.get_many([1, 2, 4])] == [
        b"own",
        b"borrowed",
        None,
    ]
    assert [value is not None for value in store.get_tagged([3, 3], [6, 7])] == [False, True]
    assert (store.keys(), len(store)) == ([1], 1)
    assert store.delete_many([1, 2]) == 1
    assert bytes(arrivals.get_many([2])[0]) == b"borrowed"
