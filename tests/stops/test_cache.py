"""The cache: later epochs hit exactly the samples that the first epoch admitted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import FingerprintError
from penstock.order import Shuffled
from penstock.serialize import pack
from penstock.store import LmdbStore
from tests.support.contract import POOLS, Workers, plain, store_of

SIZES = [int(n) for n in np.random.default_rng(0).integers(500, 9000, size=90)]


def write_files(folder: Path) -> list[Path]:
    paths = []
    for i, size in enumerate(SIZES):
        path = folder / f"{i:03}.bin"
        path.write_bytes(bytes([i]) * size)
        paths.append(path)
    return paths


def admitted_by_the_rule(budget: int, seed: int) -> set[int]:
    """MinIO's rule, computed independently: the first samples of the first epoch that fit."""
    left = budget
    admitted = set()
    for index in Shuffled().indices(len(SIZES), seed, 0).tolist():
        cost = LmdbStore.cost(pack(bytes(SIZES[index])).nbytes)
        if cost > left:
            break
        left -= cost
        admitted.add(index)
    return admitted


def length(data: bytes) -> int:
    return len(data)


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 2.0])
def test_later_epochs_hit_the_admitted_samples_and_read_all_others(
    pool: Workers, share: float, tmp_path: Path
) -> None:
    budget = int(sum(SIZES) * share)
    pipeline = ps.from_files(write_files(tmp_path)).cache(budget).map(length, random=False).batch(8)
    expected = admitted_by_the_rule(budget, seed=3)
    rest = sum(size for i, size in enumerate(SIZES) if i not in expected)
    with pipeline.loader(**pool._asdict(), seed=3) as loader:
        seen = []
        for epoch in range(4):
            before = loader.stats()
            seen.append(sorted(x for batch in loader for x in batch.tolist()))
            after = loader.stats()
            hits = after.caches[0].hits - before.caches[0].hits
            read = after.bytes_read - before.bytes_read
            if epoch == 0:
                assert (hits, read) == (0, sum(SIZES))
            else:
                assert (hits, read) == (len(expected), rest)
        assert after.caches[0].admitted == len(expected)
        assert after.caches[0].used <= max(budget, 0)
        assert after.caches[0].full == (len(expected) < len(SIZES))
    assert seen == [sorted(SIZES)] * 4


def test_a_cache_below_decode_skips_the_decoding() -> None:
    calls = []

    def decode(value: float) -> Any:
        calls.append(value)
        return np.full(10, value)

    pipeline = ps.from_dataset(np.arange(20.0)).map(decode, random=False).cache("1MB").batch(5)
    with pipeline.loader(workers=0, shuffle=False) as loader:
        first = [plain(batch) for batch in loader]
        loader.set_epoch(0)
        assert [plain(batch) for batch in loader] == first
    assert sorted(calls) == list(map(float, range(20)))


def test_a_pipeline_may_have_several_caches(tmp_path: Path) -> None:
    pipeline = (
        ps.from_files(write_files(tmp_path))
        .cache("1MB")
        .map(length, random=False)
        .cache("20KB")
        .batch(8)
    )
    with pipeline.loader(workers=2, kind="threads") as loader:
        for _ in range(2):
            list(loader)
        raw, lengths = loader.stats().caches
    assert raw.misses == 90
    assert lengths.hits > 0
    assert raw.hits == 90 - lengths.hits


def test_a_disk_cache_is_used_by_the_next_run_and_by_no_other_pipeline(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    paths = write_files(tmp_path / "data")

    def run(scale: int, files: list[Path]) -> tuple[int, list[int]]:
        def times(data: bytes) -> int:
            return len(data) * scale

        pipeline = (
            ps.from_files(files)
            .map(times, random=False)
            .cache("1MB", where=tmp_path / "kept")
            .batch(8)
        )
        with pipeline.loader(workers=2, kind="threads") as loader:
            values = sorted(x for batch in loader for x in batch.tolist())
            return loader.stats().caches[0].hits, values

    assert run(1, paths) == (0, sorted(SIZES))
    assert run(1, paths) == (90, sorted(SIZES))
    assert run(2, paths) == (0, sorted(2 * size for size in SIZES))
    paths[0].write_bytes(b"changed")
    hits, values = run(1, paths)
    assert hits == 0
    assert 7 in values


def test_a_disk_cache_of_what_cannot_be_fingerprinted_is_refused(tmp_path: Path) -> None:
    handle = (x for x in range(3))
    pipeline = (
        ps.from_dataset(np.arange(3.0))
        .map(lambda x: (handle, x)[1], random=False)
        .cache("1MB", where=tmp_path)
        .batch(1)
    )
    with pytest.raises(FingerprintError, match='version="'):
        pipeline.loader(workers=0)


def test_a_damaged_value_is_a_miss_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    paths = write_files(tmp_path / "data")
    pipeline = ps.from_files(paths).cache("4MB", where=tmp_path / "kept")
    batched = pipeline.map(length, random=False).batch(8)
    with batched.loader(workers=0) as loader:
        list(loader)
    (data,) = (tmp_path / "kept").rglob("data.mdb")
    content = data.read_bytes()
    damaged = content.replace(bytes([77]) * 400, bytes([77]) * 399 + b"?")
    data.write_bytes(damaged)
    with batched.loader(workers=0) as loader:
        with pytest.warns(RuntimeWarning):
            batches = list(loader)
        stats = loader.stats()
    values = sorted(x for batch in batches for x in batch.tolist())
    assert values == sorted(SIZES)
    assert stats.corrupt == 1
    assert stats.caches[0].hits == 89


def test_losing_the_store_in_mid_run_changes_no_batch(tmp_path: Path) -> None:
    pipeline = ps.from_files(write_files(tmp_path)).cache("1MB").map(length, random=False).batch(8)
    with pipeline.loader(workers=2, kind="threads", seed=1) as loader:
        first = [plain(batch) for batch in loader]
        store = store_of(loader)
        store.delete_many(store.keys())
        loader.set_epoch(0)
        assert [plain(batch) for batch in loader] == first
        assert loader.stats().caches[0].hits == 0


@pytest.mark.parametrize("seed", range(4))
def test_preparing_ahead_changes_no_hits_and_removes_no_admitted_sample(
    seed: int, tmp_path: Path
) -> None:
    def slow(value: float) -> float:
        time.sleep(0.003)
        return value

    base = ps.from_dataset(np.arange(16.0)).map(slow, random=False)
    with base.cache("1MB").batch(8).loader(workers=3, kind="threads", seed=seed) as loader:
        for _ in range(2):
            list(loader)
        assert loader.stats().caches[0].hits == 16
    kept = base.cache("1MB", where=tmp_path).batch(8)
    with kept.loader(workers=3, kind="threads", seed=seed) as loader:
        list(loader)
    with kept.loader(workers=0, seed=seed) as loader:
        list(loader)
        assert loader.stats().caches[0].hits == 16
