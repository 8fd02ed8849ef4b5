"""A cache keeps to its budget on every path: other shapes, failed batches, killed workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.errors import PipelineError, SampleError
from penstock.loader import Loader
from penstock.stops.cache import CacheKeeper
from tests.support.contract import POOLS, WaitsForFile, Workers, store_of

BUDGET = 40_000


def arrays(count: int) -> list[Any]:
    """Samples of 40 different shapes, about 16 KB each on average."""
    return [np.full(100 * (index % 40 + 1), index, dtype=np.float64) for index in range(count)]


def check_budget(loader: Loader, budget: int = BUDGET) -> None:
    """What the store holds is what was admitted, and is within the budget.

    Batches that are prepared ahead put samples in too: they are dropped first.
    """
    engine = loader._feed
    assert isinstance(engine, Engine)
    engine._end_workers()
    keeper = loader._assembly.keepers._keepers[0]
    assert isinstance(keeper, CacheKeeper)
    admission = keeper._admission
    assert admission is not None
    keys = store_of(loader).keys()
    assert [key for key in keys if key not in admission] == []
    assert len(keys) == admission.admitted > 0
    stats = loader.stats().caches[0]
    assert stats.admitted == admission.admitted
    assert stats.used == admission.used <= budget


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_the_budget_holds_where_shapes_differ(pool: Workers, size: int) -> None:
    data = arrays(40)
    pipeline = ps.from_dataset(data, random=False).cache(BUDGET).batch(size, collate=list)
    if size == 1:
        pipeline = ps.from_dataset(data, random=False).cache(BUDGET).batch(1)
    with pipeline.loader(**pool._asdict(), seed=1) as loader:
        for _ in range(2):
            seen = [value for batch in loader for row in batch for value in {float(row[0])}]
            assert sorted(seen) == [float(index) for index in range(40)]
        check_budget(loader)
        stats = loader.stats().caches[0]
        assert stats.hits + stats.misses == 80
        assert stats.hits == stats.admitted


class Failing:
    """Fails on one sample, after the samples before it were put into the cache above."""

    def __call__(self, value: Any) -> Any:
        if value[0] == 19:
            raise ValueError("sample 19")
        return value


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_budget_holds_where_batches_fail(pool: Workers) -> None:
    data = [np.full(500, index, dtype=np.float64) for index in range(40)]
    # There is room for more than the two batches that are delivered.
    pipeline = ps.from_dataset(data, random=False).cache("100KB").map(Failing(), random=False)
    with pipeline.batch(8).loader(**pool._asdict(), shuffle=False) as loader:
        for _ in range(3):
            epoch = iter(loader)
            assert [len(next(epoch)) for _ in range(2)] == [8, 8]
            with pytest.raises(SampleError, match="index 19"):
                next(epoch)
        check_budget(loader, 100_000)


class KillsOnce:
    """Kills its worker on one sample, the first time only."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, value: Any) -> Any:
        if value[0] == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value


def test_what_a_killed_worker_put_in_is_counted(tmp_path: Path) -> None:
    data = [np.full(500, index, dtype=np.float64) for index in range(40)]
    killing = KillsOnce(tmp_path / "killed")
    pipeline = ps.from_dataset(data, random=False).cache(BUDGET).map(killing, random=False).batch(8)
    with pipeline.loader(workers=1, kind="processes", shuffle=False) as loader:
        for _ in range(2):
            assert [batch[:, 0].tolist() for batch in loader] == [
                [float(8 * number + row) for row in range(8)] for number in range(5)
            ]
        assert loader.stats().pool.restarts == 1
        check_budget(loader)


def test_a_budget_too_small_for_any_sample_is_refused() -> None:
    source = ps.from_dataset(np.arange(4.0), random=False)
    with pytest.raises(PipelineError, match=r'cache\(\) got 8, a budget of 8 bytes.*"8GB"'):
        source.cache(8)
    with pytest.raises(PipelineError, match="a budget of 512 bytes"):
        source.cache("512B")
    assert source.cache(0).batch(2).loader(workers=0).stats().caches[0].budget == 0


def test_a_cache_on_disk_may_stand_below_operations_that_run_as_one_step(
    tmp_path: Path,
) -> None:
    photo = np.zeros((48, 64, 3), np.uint8)
    import simplejpeg

    for number in range(6):
        photo[:] = number * 40
        (tmp_path / f"{number}.jpg").write_bytes(simplejpeg.encode_jpeg(photo, 90, "RGB", "444"))
    files = [str(tmp_path / f"{number}.jpg") for number in range(6)]
    prepared = ps.from_files(files).map(ps.image.decode()).map(ps.image.center_crop(16))
    cached = prepared.cache("1MB", where=tmp_path / "store").batch(2)

    def one_epoch() -> tuple[list[Any], int]:
        with cached.loader(workers=0, shuffle=False) as loader:
            return [batch.tolist() for batch in loader], loader.stats().caches[0].hits

    first, hits = one_epoch()
    assert hits == 0
    assert one_epoch() == (first, 6)


@pytest.mark.parametrize("budget", ["1MB", "40KB"])
def test_leaving_a_loop_early_takes_nothing_out_of_a_cache_on_disk(
    tmp_path: Path, budget: str
) -> None:
    data = [np.full(500, index, dtype=np.float64) for index in range(40)]
    source = ps.from_dataset(data, random=False, version="1")
    waits = WaitsForFile(tmp_path / "go on", first=4)
    cached = source.cache(budget, where=tmp_path / "store")
    pipeline = cached.map(waits, random=False, version="1").batch(4)

    def held(*, whole: bool) -> set[int]:
        with pipeline.loader(workers=2, kind="processes", shuffle=False) as loader:
            for _ in loader:
                if not whole:
                    break  # while the workers are busy with the next batches
            return set(store_of(loader).keys())

    (tmp_path / "go on").touch()
    first = held(whole=True)
    assert len(first) == (40 if budget == "1MB" else loader_admits(40_000))
    (tmp_path / "go on").unlink()
    for _ in range(3):
        assert first <= held(whole=False)
    (tmp_path / "go on").touch()
    assert held(whole=True) == first


def loader_admits(budget: int) -> int:
    """How many of the samples of 4,000 bytes fit, by the price that every store has for them."""
    with (
        ps.from_dataset([np.zeros(500)] * 40, random=False)
        .cache(budget)
        .batch(4)
        .loader(workers=0) as loader
    ):
        assert len(list(loader)) == 10
        return loader.stats().caches[0].admitted
