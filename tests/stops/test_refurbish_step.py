"""The refurbish stop alone: the keys it asks for, the samples it keeps, and its counters."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import PipelineError
from penstock.keyed import Keys
from penstock.order import BatchKeys, Generations
from penstock.stats import Tally
from penstock.stops.hold import store_key
from penstock.stops.refurbish import Refurbish, RefurbishKeeper
from penstock.stops.stop import StageFailure, StepContext
from penstock.store import HeapStore, LmdbStore
from penstock.store.encoding import Encoding
from tests.support.calls import python_calls

N = 30


class Upstream:
    """Returns the samples of the keys it gets, and records the keys."""

    def __init__(self, image: bool = False) -> None:
        self.asked: list[tuple[int, int]] = []
        self._image = image

    def __call__(self, keys: Keys) -> list[Any]:
        assert keys.replicas is None
        self.asked += [(index, keys.epoch) for index in keys.indices]
        return [self.sample(index, keys.epoch) for index in keys.indices]

    def sample(self, index: int, generation: int) -> Any:
        if not self._image:
            return np.array([index, generation, 0.5])
        y, x = np.mgrid[:40, :60]
        levels = 128 + 100 * np.sin((x + index) / 7 + (y + generation) / 11)
        return np.stack([levels, levels[::-1], levels[:, ::-1]], axis=-1).astype(np.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path / "store", budget=50_000_000)
    yield store
    store.destroy()


def refurbish(store: LmdbStore, kept: int = N, reuse: int = 3, encode: str = "raw") -> Refurbish:
    generations = Generations(N, reuse, kept, seed=7)
    return Refurbish(reuse, encode=encode, number=1, store=store, generations=generations)


def new_context() -> StepContext:
    return StepContext(seed=7, tally=Tally(3, 2))


def test_it_asks_upstream_by_generation_and_only_for_missing_samples(store: LmdbStore) -> None:
    stop, upstream, context = refurbish(store, kept=20), Upstream(), new_context()
    step, generations = stop.step(context), stop.generations
    assert generations is not None
    for epoch in range(8):
        upstream.asked.clear()
        context.tally.clear()
        found = step(Keys(epoch, list(range(N)), list(range(N))), upstream)
        versions = [generations.generation(index, epoch) for index in range(N)]
        assert [row.tolist() for row in found] == [
            [index, generation, 0.5] for index, generation in enumerate(versions)
        ]
        fresh = [index for index in range(N) if generations.is_fresh(index, epoch)]
        assert sorted(upstream.asked) == [(index, versions[index]) for index in fresh]
        assert context.tally.misses == [0, len(fresh)]
        assert context.tally.hits == [0, N - len(fresh)]
    held = store.keys()
    kept = {key // 2 for key in held}
    assert kept == {index for index in range(N) if generations.keeps(index)}
    assert len(kept) == 20


def test_samples_that_are_not_kept_come_from_upstream_every_time(store: LmdbStore) -> None:
    for stop in (refurbish(store, kept=0), refurbish(store, reuse=1)):
        upstream = Upstream()
        step = stop.step(new_context())
        for _ in range(2):
            step(Keys(4, [1, 2]), upstream)
        assert upstream.asked == [(1, 4), (2, 4)] * 2
        assert len(store) == 0


@pytest.mark.parametrize("encode", ["raw", "lossless", "jpeg", "jpeg:50"])
def test_kept_and_fresh_samples_are_equal(store: LmdbStore, encode: str) -> None:
    stop, upstream = refurbish(store, encode=encode), Upstream(image=True)
    step = stop.step(new_context())
    first = [sample.copy() for sample in step(Keys(0, list(range(5))), upstream)]
    again = step(Keys(0, list(range(5))), upstream)
    assert len(upstream.asked) == 5
    np.testing.assert_array_equal(first, again)
    exact = [upstream.sample(index, 0) for index in range(5)]
    assert np.array_equal(first, exact) is not Encoding(encode).lossy
    store.delete_many(store.keys())
    np.testing.assert_array_equal(first, step(Keys(0, list(range(5))), upstream))
    assert len(upstream.asked) == 10


@pytest.mark.parametrize("encode", ["raw", "lossless", "jpeg"])
def test_changing_a_sample_in_place_does_not_change_the_kept_one(
    store: LmdbStore, encode: str
) -> None:
    step, upstream = refurbish(store, encode=encode).step(new_context()), Upstream(image=True)
    [sample] = step(Keys(0, [3]), upstream)
    expected = sample.copy()
    for _ in range(3):
        sample += 1
        [sample] = step(Keys(0, [3]), upstream)
        np.testing.assert_array_equal(sample, expected)
    assert upstream.asked == [(3, 0)]


@pytest.mark.filterwarnings("ignore:the store:RuntimeWarning")
def test_a_store_that_cannot_store_causes_no_error(tmp_path: Path) -> None:
    full = LmdbStore(tmp_path / "full", budget=0, overshoot=0)
    gone = LmdbStore(tmp_path / "gone", budget=1_000_000)
    gone.destroy()
    for store in (full, gone):
        upstream, context = Upstream(), new_context()
        step = refurbish(store).step(context)
        for _ in range(2):
            assert [row[0] for row in step(Keys(0, [4, 5]), upstream)] == [4, 5]
        assert upstream.asked == [(4, 0), (5, 0)] * 2
        assert context.tally.misses[1] == 4
    full.destroy()


def test_a_damaged_value_counts_as_a_miss(store: LmdbStore) -> None:
    stop, upstream, context = refurbish(store), Upstream(), new_context()
    step = stop.step(context)
    step(Keys(0, [4]), upstream)
    environment = store._attached()
    assert environment is not None

    def flip(transaction: Any) -> None:
        key = store_key(4, 0).to_bytes(8, "little")
        value = bytearray(transaction.get(key))
        value[-1] ^= 1
        transaction.put(key, value)

    environment.write(flip)
    with pytest.warns(RuntimeWarning, match="damaged bytes"):
        [found] = step(Keys(0, [4]), upstream)
    assert found.tolist() == [4, 0, 0.5]
    assert (context.tally.corrupt, context.tally.misses[1], context.tally.hits[1]) == (1, 2, 0)
    step(Keys(0, [4]), upstream)
    assert context.tally.hits[1] == 1


def test_a_trial_keeps_nothing(store: LmdbStore) -> None:
    context, upstream = new_context(), Upstream()
    context.trial = True
    refurbish(store).step(context)(Keys(0, [1]), upstream)
    assert len(store) == 0


def test_a_sample_that_cannot_be_kept_is_named(store: LmdbStore) -> None:
    step = refurbish(store).step(new_context())
    with pytest.raises(StageFailure) as found:
        step(Keys(0, [6]), lambda keys: [(byte for byte in b"never pickled")])
    assert (found.value.stage, found.value.index) == ("refurbish", 6)
    assert found.value.__cause__ is not None


def test_a_failure_upstream_keeps_its_stage_name(store: LmdbStore) -> None:
    def broken(keys: Keys) -> list[Any]:
        raise StageFailure("decode", keys.indices[0])

    with pytest.raises(StageFailure) as found:
        refurbish(store).step(new_context())(Keys(0, [6]), broken)
    assert (found.value.stage, found.value.index) == ("decode", 6)


def test_it_can_be_pickled_and_workers_share_its_store(store: LmdbStore) -> None:
    stop, upstream = refurbish(store), Upstream()
    stop.step(new_context())(Keys(0, [1, 2]), upstream)
    copy = pickle.loads(pickle.dumps(stop))
    found = copy.step(new_context())(Keys(0, [2, 1]), upstream)
    assert [row[0] for row in found] == [2, 1]
    assert len(upstream.asked) == 2


def test_without_a_store_it_does_not_run() -> None:
    with pytest.raises(PipelineError, match="only through a loader"):
        Refurbish(3).step(new_context())


def test_its_fingerprint_has_only_settings_that_change_batches(store: LmdbStore) -> None:
    stop = refurbish(store)
    assert stop.name == "refurbish"
    same = replace(stop, budget=5, where="disk", number=4, store=None, generations=None)
    assert same.fingerprint() == stop.fingerprint()
    for other in (replace(stop, reuse=4), replace(stop, encode="jpeg")):
        assert other.fingerprint() != stop.fingerprint()


def calls_to_find_and_remove(count: int) -> tuple[int, int]:
    """Python calls for finding ``count`` lent samples, and for removing a part of them."""
    generations = Generations(count, 3, count, seed=7)
    store = HeapStore(50_000_000)
    stop = Refurbish(3, number=1, lends=True, store=store, generations=generations)
    access, keys = stop.access(new_context()), Keys(0, list(range(count)))
    samples = [(np.full(3, index), index) for index in keys.indices]
    access.keep(keys.indices, [0] * count, samples)
    found = [access.find(keys)]  # the first time, the queue of generations is computed
    finding = python_calls(lambda: found.append(access.find(keys)))
    assert found[0].samples == found[1].samples == samples
    keeper = RefurbishKeeper(stop, store, generations)
    batch = BatchKeys(1, 0, np.arange(count), None)
    removing = python_calls(lambda: keeper.handed_out(batch))
    assert len(store) == count - generations.fresh(1)
    return finding, removing


def test_python_calls_do_not_grow_with_the_number_of_lent_samples() -> None:
    assert calls_to_find_and_remove(64) == calls_to_find_and_remove(256)


def test_outdated_versions_are_those_of_kept_samples_that_the_epoch_renews() -> None:
    generations = Generations(N, 3, 20, seed=7)
    store = HeapStore(50_000_000)
    stop = Refurbish(3, number=1, lends=True, store=store, generations=generations)
    keeper = RefurbishKeeper(stop, store, generations)
    for epoch in range(8):
        changed = [
            store_key(index, generations.generation(index, epoch - 1))
            for index in range(N)
            if generations.keeps(index) and epoch and generations.is_fresh(index, epoch)
        ]
        assert keeper.outdated(BatchKeys(epoch, 0, np.arange(N), None)) == changed
