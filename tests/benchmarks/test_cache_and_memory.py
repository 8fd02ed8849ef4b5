"""The benchmarks ``cache`` and ``memory``: the simulated LRU cache, and when memory is measured."""

from __future__ import annotations

from benchmarks import cache, memory


def test_an_lru_of_half_the_data_evicts_samples_before_their_next_use() -> None:
    lru = cache.Lru(budget=20)
    sizes = [10, 10, 10, 10]
    assert lru.epoch([0, 1, 2, 3], sizes) == cache.Epoch(0, 40)
    assert lru.epoch([0, 1, 2, 3], sizes) == cache.Epoch(0, 40)
    assert lru.epoch([3, 2, 1, 0], sizes) == cache.Epoch(2, 20)


def test_an_lru_holds_no_more_than_its_budget() -> None:
    lru = cache.Lru(budget=25)
    assert lru.epoch([0, 1, 2, 0], [10, 15, 30]) == cache.Epoch(1, 55)


def test_memory_is_measured_after_the_last_epoch_too() -> None:
    assert memory.looks(50) == [1, 2, 5, 10, 25, 50]
    assert memory.looks(7) == [1, 2, 5, 7]
    assert memory.looks(1) == [1]
