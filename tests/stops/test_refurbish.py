"""Refurbish: partly augmented samples are used several times, always in the same way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.diversity.auto import placed
from penstock.errors import PipelineError, StateError
from penstock.loader import Loader
from tests.support import ROOT
from tests.support.contract import POOLS, Workers, noise, plain, store_of

N = 53


def first(value: Any, rng: np.random.Generator) -> Any:
    return np.array([value, rng.random(), 0.0])


def last(value: Any, rng: np.random.Generator) -> Any:
    value = value.copy()
    value[2] = rng.random()
    return value


def pipeline(reuse: int = 3, batch: int = 8, **options: Any) -> ps.Pipeline:
    data = np.arange(float(N))
    return ps.from_dataset(data).map(first).refurbish(reuse, **options).map(last).batch(batch)


def run(p: ps.Pipeline, epochs: int, **options: Any) -> list[list[Any]]:
    with p.loader(seed=5, **options) as loader:
        return [[batch.copy() for batch in loader] for _ in range(epochs)]


def bits(epochs: list[list[Any]]) -> list[list[Any]]:
    return [[plain(batch) for batch in epoch] for epoch in epochs]


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    return run(pipeline(), 7, workers=0)


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_a_pool_changes_no_bit_and_no_count(pool: Workers, expected: Any) -> None:
    with pipeline().loader(seed=5, **pool._asdict()) as loader:
        found = [[plain(batch) for batch in loader] for _ in range(7)]
        stats = loader.stats().refurbish
    assert found == bits(expected)
    assert stats is not None
    assert stats.kept == N
    assert stats.fresh + stats.reused == 7 * N
    # All samples in epoch 0, then a third of 53 in each of six epochs. If the next epoch begins
    # early, its first batches may prepare samples that the last batches of this one need.
    early = (N + 2 * N) - stats.fresh
    assert early == 0 if pool.workers == 0 else 0 <= early <= 8


def test_the_partial_augmentation_is_reused_and_the_final_one_is_always_fresh(
    expected: Any,
) -> None:
    partial: dict[float, list[float]] = {}
    final = []
    for epoch in expected:
        rows = np.concatenate(epoch)
        assert sorted(rows[:, 0]) == list(range(N))
        for index, kept, fresh in rows.tolist():
            partial.setdefault(index, []).append(kept)
            final.append(fresh)
    assert len(set(final)) == 7 * N
    for uses in partial.values():
        runs = [uses.count(kept) for kept in dict.fromkeys(uses)]
        # The first generation is used 1 to 3 times, each later one that is over exactly 3 times.
        assert 1 <= runs[0] <= 3
        assert all(count == 3 for count in runs[1:-1])


def test_every_batch_has_its_share_of_fresh_samples(expected: Any) -> None:
    seen: set[float] = set()
    for number, epoch in enumerate(expected):
        counts = []
        for batch in epoch:
            fresh = set(batch[:, 1].tolist()) - seen
            seen |= fresh
            counts.append(len(fresh))
        if number:
            assert N // 3 <= sum(counts) <= N // 3 + 1
            whole = counts[:-1]  # the last batch is smaller
            assert max(whole) - min(whole) <= 1


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("stop_at", [0, 3, 6])
def test_a_resume_repeats_every_bit_though_the_store_is_gone(
    pool: Workers, stop_at: int, expected: Any
) -> None:
    with pipeline().loader(seed=5, workers=0) as loader:
        for _ in range(3):
            epoch = iter(loader)
            for _ in range(stop_at if loader.epoch == 2 else 7):
                next(epoch)
        state = loader.state_dict()
    with pipeline().loader(seed=5, **pool._asdict()) as again:
        again.load_state_dict(state)
        rest = [plain(batch) for batch in again]
        after = [plain(batch) for batch in again]
    assert rest == bits(expected)[2][stop_at:]
    assert after == bits(expected)[3]


def test_a_store_emptied_while_it_is_used_changes_no_batch(expected: Any) -> None:
    with pipeline().loader(seed=5, workers=2, kind="threads") as loader:
        found = []
        for epoch in range(5):
            for number, batch in enumerate(loader):
                found.append(plain(batch))
                if (epoch + number) % 3 == 0:
                    store = store_of(loader)
                    store.delete_many(list(range(0, N, 2)))
    assert found == [batch for epoch in bits(expected)[:5] for batch in epoch]


@given(
    n=st.integers(1, 40),
    reuse=st.integers(1, 5),
    batch=st.integers(1, 9),
    world=st.integers(1, 3),
    room=st.none() | st.integers(0, 40),
)
@settings(max_examples=25, deadline=None)
def test_all_ranks_together_have_every_sample_once_and_kept_ones_are_used_reuse_times(
    n: int, reuse: int, batch: int, world: int, room: int | None
) -> None:
    size = None if room is None else room * 270
    p = ps.from_dataset(np.arange(float(n))).map(first).refurbish(reuse, size=size)
    p = p.map(last).batch(batch)
    uses: dict[float, list[float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        loaders = [
            p.loader(workers=0, seed=1, rank=rank, world=world, tail="drop")
            for rank in range(world)
        ]
    kept = loaders[0].stats().refurbish.kept  # type: ignore[union-attr]
    for _ in range(2 * reuse + 1):
        rows = [row.tolist() for loader in loaders for delivered in loader for row in delivered]
        assert len({row[0] for row in rows}) == len(rows) == n // world * world
        for index, partial, _ in rows:
            uses.setdefault(index, []).append(partial)
    for loader in loaders:
        loader.close()
    if world == 1:
        always_fresh = 0
        for values in uses.values():
            counts = Counter(values)
            later = [counts[value] for value in dict.fromkeys(values)][1:-1]
            always_fresh += set(counts.values()) == {1}
            assert all(count in (1, reuse) for count in later)
        if reuse > 1:
            assert always_fresh == n - kept


def test_a_disk_store_serves_the_next_run_and_no_other_pipeline_seed_or_data(
    tmp_path: Path,
) -> None:
    place = str(tmp_path / "kept")

    def fresh(p: ps.Pipeline, seed: int, epoch: int) -> int:
        with p.loader(workers=2, kind="processes", seed=seed) as loader:
            loader.set_epoch(epoch)
            list(loader)
            stats = loader.stats().refurbish
            assert stats is not None
            return stats.fresh

    assert fresh(pipeline(where=place), 5, 2) == N
    assert fresh(pipeline(where=place), 5, 2) == 0
    assert fresh(pipeline(where=place), 5, 3) in (N // 3, N // 3 + 1)
    assert fresh(pipeline(where=place), 6, 2) == N
    other = ps.from_dataset(np.arange(1.0, N + 1)).map(first).refurbish(3, where=place)
    assert fresh(other.map(last).batch(8), 5, 2) == N
    changed = ps.from_dataset(np.arange(float(N))).map(noise).refurbish(3, where=place)
    assert fresh(changed.map(noise).batch(8), 5, 2) == N


_KILLED = """
import sys, numpy as np, penstock as ps
sys.path.insert(0, {tests!r})
import tests.stops.test_refurbish as t
with t.pipeline(where={place!r}).loader(seed=5, workers=2, kind="processes") as loader:
    for epoch in range(3):
        for number, batch in enumerate(loader):
            if (epoch, number) == (2, 3):
                print("now", flush=True)
                sys.stdin.readline()
"""


def test_a_run_killed_in_the_middle_leaves_a_store_that_changes_no_batch(
    tmp_path: Path, expected: Any
) -> None:
    place = str(tmp_path / "kept")
    code = _KILLED.format(tests=str(ROOT), place=place)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        os.kill(child.pid, signal.SIGKILL)
    with pipeline(where=place).loader(seed=5, workers=2, kind="threads") as loader:
        loader.set_epoch(2)
        found = [[plain(batch) for batch in loader] for _ in range(3)]
        stats = loader.stats().refurbish
    assert found == bits(expected)[2:5]
    assert stats is not None
    assert stats.reused > N


def test_a_deleted_disk_store_changes_no_batch(tmp_path: Path, expected: Any) -> None:
    place = tmp_path / "kept"
    first_part = run(pipeline(where=str(place)), 2, workers=0)
    shutil.rmtree(place)
    with pipeline(where=str(place)).loader(seed=5, workers=0) as loader:
        loader.set_epoch(2)
        rest = [[plain(batch) for batch in loader] for _ in range(2)]
    assert bits(first_part) + rest == bits(expected)[:4]


def test_a_checkpoint_has_the_number_of_kept_samples() -> None:
    # 20 of 53 samples find room; a machine with room for all must still deal the same batches.
    small, large = pipeline(size=20 * 270), pipeline()
    with small.loader(seed=5, workers=0) as loader:
        whole = [[plain(batch) for batch in loader] for _ in range(4)]
        kept = loader.stats().refurbish.kept  # type: ignore[union-attr]
    with small.loader(seed=5, workers=0) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
    assert 0 < kept < N
    assert state["kept"] == kept
    with large.loader(seed=5, workers=0) as loader:
        loader.load_state_dict(state)
        assert [plain(batch) for batch in loader] == whole[0][1:]
        assert [plain(batch) for batch in loader] == whole[1]
    state["kept"] = N + 1
    with large.loader(seed=5, workers=0) as loader, pytest.raises(StateError, match="keeps 54"):
        loader.load_state_dict(state)


def test_an_order_that_is_not_shuffled_is_not_changed() -> None:
    with pipeline().loader(seed=5, workers=0, shuffle=False) as loader:
        for _ in range(4):
            assert np.concatenate(list(loader))[:, 0].tolist() == list(range(N))
        assert loader.stats().refurbish.fresh == 2 * N  # type: ignore[union-attr]


def test_ranks_with_separate_stores_get_a_warning(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="2 ranks .* where="):
        pipeline().loader(rank=0, world=2)
    pipeline(where=str(tmp_path)).loader(rank=0, world=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: b.map(first).refurbish(0), "reuse"),
        (lambda b: b.map(first).refurbish(2.5), "reuse"),
        (lambda b: b.map(first).refurbish(2, encode="zip"), "encode"),
        (lambda b: b.refurbish(2), "nothing random above"),
        (lambda b: b.map(first).refurbish(2).map(last).refurbish(2), "second refurbish"),
        (lambda b: b.map(first).echo(2).refurbish(2), "echo"),
        (lambda b: b.map(first).refurbish(2).cache("1MB"), "random map"),
        (lambda b: b.map(first).batch(2).refurbish(2), "below batch"),
        (lambda b: b.map(first).refurbish(2).batch(2).loader(workers=0), "no random map below"),
    ],
)
def test_wrong_arguments_and_places_are_refused_with_the_reason(make: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        make(ps.from_dataset(np.arange(4.0)))


def test_a_stream_cannot_be_refurbished() -> None:
    with pytest.raises(PipelineError, match="stream"):
        ps.from_dataset(lambda: iter(range(3))).map(first).refurbish(2)


def test_explain_and_repr_show_the_settings() -> None:
    p = pipeline(size="1GB")
    assert "refurbish   used 3 times, 1.0 GB, memory" in p.explain()
    assert ".refurbish(reuse=3" in repr(p)


class VirtualClock:
    """A clock for the costs that ``refurbish("auto")`` measures. Reading it takes a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr("penstock.diversity.auto.time", clock)
    return clock


class TestAuto:
    """``refurbish("auto")``: position and reuse are chosen by cost and diversity."""

    def road(self, clock: VirtualClock | None = None) -> ps.Pipeline:
        def costly(value: Any, rng: np.random.Generator) -> Any:
            if clock is not None:
                clock.now += 2e-3
            return np.array([value, rng.random()])

        def cheap(value: Any, rng: np.random.Generator) -> Any:
            return value + rng.integers(1_000_000)

        costly.outcomes = 1000  # type: ignore[attr-defined]
        cheap.outcomes = 1_000_000  # type: ignore[attr-defined]
        data = ps.from_dataset(np.arange(40.0))
        return data.map(costly).map(cheap).refurbish("auto").batch(8)

    def test_it_is_placed_below_the_costly_map_and_above_the_diverse_one(
        self, caplog: pytest.LogCaptureFixture, virtual_clock: VirtualClock
    ) -> None:
        with self.road(virtual_clock).loader(workers=0, seed=1) as loader:
            names = [stop.name for stop in loader.pipeline.stops]
            epochs = [[plain(batch) for batch in loader] for _ in range(3)]
            state = loader.state_dict()
        assert names == ["costly", "refurbish", "cheap"]
        reuse = state["refurbish"]["reuse"]
        assert 2 <= reuse <= 5
        (record,) = [record for record in caplog.records if record.name == "penstock.refurbish"]
        assert record.levelname == "WARNING"
        assert record.message.startswith(f"penstock: refurbish(reuse={reuse}) below costly: ")
        fixed = self.road()
        stops = (fixed.stops[0], loader.pipeline.stops[1], fixed.stops[1])
        from dataclasses import replace

        with replace(fixed, stops=stops).loader(workers=2, kind="threads", seed=1) as again:
            assert [[plain(batch) for batch in again] for _ in range(3)] == epochs

    @staticmethod
    def choose(loader: Loader, chosen: dict[str, Any]) -> None:
        loader._switch_to(placed(loader._written, chosen), chosen, None)

    def test_a_resume_uses_the_choice_of_the_checkpoint(self) -> None:
        with self.road().loader(workers=0, seed=1) as loader:
            self.choose(loader, {"place": 1, "reuse": 3})
            list(loader)
            epoch = iter(loader)
            next(epoch)
            state = loader.state_dict()
            rest = [plain(batch) for batch in epoch]
        for chosen in ({"place": None, "reuse": 1}, {"place": 1, "reuse": 2}):
            with self.road().loader(workers=0, seed=1) as again:
                self.choose(again, chosen)
                again.load_state_dict(state)
                assert [plain(batch) for batch in again] == rest
        state["refurbish"] = None
        with (
            self.road().loader(workers=0, seed=1) as other,
            pytest.raises(StateError, match="does not say what"),
        ):
            other.load_state_dict(state)

    @pytest.mark.usefixtures("virtual_clock")
    def test_no_sample_is_kept_if_reuse_saves_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        p = ps.from_dataset(np.arange(30.0)).map(noise).map(noise).refurbish("auto").batch(8)
        with p.loader(workers=0) as loader:
            assert [stop.name for stop in loader.pipeline.stops] == ["noise", "noise"]
            assert sum(len(batch) for batch in loader) == 30
        assert "penstock: No reuse: " in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_is_twice_in_a_batch_does_not_deadlock(workers: int) -> None:
    twice = ps.from_dataset(np.arange(5.0)).map(first).refurbish(2).map(last).batch(20)
    found: list[Any] = []

    def deal() -> None:
        order = ps.Weighted([1.0] * 5, samples=40)
        with twice.loader(workers=workers, kind="threads", order=order) as loader:
            found.extend(batch[:, 0].tolist() for _ in range(3) for batch in loader)

    # A daemon thread: a deadlock fails this test only, and not all tests after it.
    thread = threading.Thread(target=deal, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert [len(batch) for batch in found] == [20] * 6
    assert {value for batch in found for value in batch} == {0.0, 1.0, 2.0, 3.0, 4.0}
