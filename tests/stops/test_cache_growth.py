"""A cache on disk under changing budgets: it grows with the budget and is sealed relative to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.stats import CacheStats
from penstock.store import LmdbStore

SAMPLES = 60
NBYTES = 10_000
MB = 1_000_000

KINDS: list[dict[str, Any]] = [
    {"workers": 1, "kind": "threads"},
    {"workers": 2, "kind": "processes"},
]


def block(value: Any) -> Any:
    return np.full(NBYTES, value, np.uint8)


def run(place: Path, budget: int, epochs: int = 2, **workers: Any) -> CacheStats:
    pipeline = (
        ps.from_dataset(np.arange(SAMPLES), random=False, version="1")
        .map(block, random=False, version="1")
        .cache(budget, where=str(place))
        .batch(10)
    )
    with pipeline.loader(seed=0, **(workers or {"workers": 0})) as loader:
        for _ in range(epochs):
            assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(SAMPLES))
        return loader.stats().caches[0]


@pytest.mark.parametrize("workers", KINDS, ids=lambda workers: str(workers["kind"]))
def test_a_cache_filled_under_a_small_budget_grows_under_a_larger_one(
    tmp_path: Path, workers: dict[str, Any]
) -> None:
    small = run(tmp_path / "kept", 100_000, **workers)
    assert small.full
    assert 0 < small.admitted < 10
    large = run(tmp_path / "kept", 10 * MB, **workers)
    assert (large.admitted, large.full) == (SAMPLES, False)
    assert large.hits == small.admitted + SAMPLES
    assert run(tmp_path / "kept", 10 * MB, **workers).hits == 2 * SAMPLES


def test_a_small_budget_admits_nothing_more_and_seals_the_cache_for_nobody_else(
    tmp_path: Path,
) -> None:
    half = run(tmp_path / "kept", 10 * MB, epochs=0)
    assert half.admitted == 0
    first = run(tmp_path / "kept", 300_000)
    assert first.full
    small = run(tmp_path / "kept", 50_000)
    assert (small.admitted, small.full) == (first.admitted, True)
    assert small.hits == 2 * first.admitted
    # The store is still sealed under 300 KB, and still open under more.
    assert run(tmp_path / "kept", 300_000).admitted == first.admitted
    assert run(tmp_path / "kept", 10 * MB).admitted == SAMPLES


def test_the_same_samples_are_admitted_whichever_way_the_budget_grew(tmp_path: Path) -> None:
    for budget in (100_000, 200_000, 400_000):
        run(tmp_path / "grown", budget)
    run(tmp_path / "at once", 400_000)

    def keys(place: Path) -> list[int]:
        (only,) = place.iterdir()
        store = LmdbStore(only, 400_000, identity=only.name, persistent=True)
        try:
            return store.keys()
        finally:
            store.close()

    grown, at_once = keys(tmp_path / "grown"), keys(tmp_path / "at once")
    # Both are the first samples of the first epoch; small stores have partly filled pages.
    assert set(grown) <= set(at_once) or set(at_once) <= set(grown)
    assert abs(len(grown) - len(at_once)) <= 2


def test_a_job_with_a_large_budget_fills_the_store_next_to_one_with_a_small_budget(
    tmp_path: Path,
) -> None:
    small = LmdbStore(tmp_path / "store", 1 * MB, "photos", persistent=True, overshoot=0)
    assert small.put_many([(0, bytes(NBYTES))]) == [True]
    small.seal()
    large = LmdbStore(tmp_path / "store", 300 * MB, "photos", persistent=True)
    assert (small.sealed, large.sealed) == (True, False)
    for start in range(1, 101, 10):
        assert all(large.put_many([(start + i, bytes(MB)) for i in range(10)]))
    assert small.put_many([(500, b"new")]) == [False]
    assert [bytes(value) == bytes(MB) for value in small.get_many([100]) if value] == [True]
    large.seal()
    equal, larger = (
        LmdbStore(tmp_path / "store", budget * MB, "photos", persistent=True)
        for budget in (300, 301)
    )
    assert (equal.sealed, larger.sealed) == (True, False)
    for store in (small, large, equal, larger):
        store.close()


GROW = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
store = LmdbStore(Path(sys.argv[1]), 300_000_000, "photos", persistent=True)
for start in range(0, 120, 10):
    assert all(store.put_many([(1000 + start + i, bytes(1_000_000)) for i in range(10)]))
store.close()
"""


def test_a_store_grown_by_another_process_is_read_and_written_where_it_was_open(
    tmp_path: Path,
) -> None:
    small = LmdbStore(tmp_path / "store", 5 * MB, "photos", persistent=True)
    assert small.put_many([(0, b"first")]) == [True]
    subprocess.run([sys.executable, "-c", GROW, str(tmp_path / "store")], check=True)
    found = small.get_many([0, 1119])
    assert [bytes(value) for value in found if value is not None] == [b"first", bytes(MB)]
    assert small.delete_many(range(1000, 1120)) == 120
    assert small.put_many([(1, b"second")]) == [True]
    small.close()
