"""Echo: prepared samples are used several times, and each copy is augmented differently."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PipelineError, StateError
from tests.support.contract import POOLS, Workers, plain, store_of

N = 53


def above(value: Any, rng: np.random.Generator) -> Any:
    return np.array([value, rng.random(), 0.0])


def below(value: Any, rng: np.random.Generator) -> Any:
    value[2] = rng.random()  # in place, as users' maps may be
    return value


BASE = ps.from_dataset(np.arange(float(N)))
ROADS = {
    "before augmentation": BASE.echo(2, window=16).map(above).map(below).batch(8),
    "between": BASE.map(above).echo(3, window=20).map(below).batch(8),
    "a fraction": BASE.map(above).echo(1.5, window=16).map(below).batch(8),
    "after augmentation": BASE.map(above).map(below).echo(2, window=8).batch(8),
    "batches": BASE.map(above).map(below).batch(8).echo(2, window=3),
    "a fraction of batches": BASE.map(above).batch(8).echo(1.5, window=2),
    "with a cache": BASE.cache("1MB").echo(2, window=16).map(above).batch(8, drop_last=True),
    "refurbished": BASE.map(above).refurbish(2).echo(2, window=16).map(below).batch(8),
    "refurbished batches": BASE.map(above).refurbish(2).map(below).batch(8).echo(2),
}


def run(p: ps.Pipeline, epochs: int, **options: Any) -> list[list[Any]]:
    with p.loader(seed=5, **options) as loader:
        return [[plain(batch) for batch in loader] for _ in range(epochs)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[Any]]]:
    return {name: run(p, 3, workers=0) for name, p in ROADS.items()}


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("name", ROADS)
def test_a_pool_changes_no_bit(name: str, pool: Workers, expected: Any) -> None:
    assert run(ROADS[name], 3, **pool._asdict()) == expected[name]


@pytest.mark.parametrize("pool", [POOLS[0], POOLS[2], POOLS[4]], ids=str)
@pytest.mark.parametrize("name", ROADS)
@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_resume_repeats_every_bit(name: str, pool: Workers, stop_at: int, expected: Any) -> None:
    with ROADS[name].loader(seed=5, workers=0) as loader:
        list(loader)
        epoch = iter(loader)
        for _ in range(stop_at):
            next(epoch)
        state = loader.state_dict()
    with ROADS[name].loader(seed=5, **pool._asdict()) as again:
        again.load_state_dict(state)
        assert [plain(batch) for batch in again] == expected[name][1][stop_at:]
        assert [plain(batch) for batch in again] == expected[name][2]


@pytest.mark.parametrize("name", ROADS)
def test_the_length_counts_what_is_delivered(name: str, expected: Any) -> None:
    with ROADS[name].loader(seed=5, workers=0) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert len(loader) == len(expected[name][epoch])


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_everything_above_is_done_once_and_everything_below_for_every_copy(pool: Workers) -> None:
    with ROADS["between"].loader(seed=5, **pool._asdict()) as loader:
        for epoch in range(1, 3):
            rows = np.concatenate([batch.copy() for batch in loader])
            stats = loader.stats().echo
            assert stats is not None
            # Also if several workers need copies of one sample at the same time.
            assert (stats.fresh, stats.delivered) == (epoch * N, epoch * 3 * N)
            assert Counter(rows[:, 0]) == dict.fromkeys(map(float, range(N)), 3)
            assert len(set(rows[:, 1])) == N
            assert len(set(rows[:, 2])) == 3 * N


def test_a_sample_is_kept_until_its_last_copy_and_no_longer() -> None:
    with ROADS["between"].loader(seed=5, workers=2, kind="threads") as loader:
        store = store_of(loader)
        most = 0
        for _ in range(2):
            for _ in loader:
                most = max(most, len(store))
        # A window of 20 places is 7 to 8 samples; some batches are prepared ahead.
        assert most < N
    with ROADS["between"].loader(seed=5, workers=0, prefetch=1) as loader:
        store = store_of(loader)
        held = [len(store) for _ in loader]
        assert held[-1] == 0
        assert max(held) <= 10


@given(
    n=st.integers(1, 30),
    factor=st.integers(1, 4) | st.sampled_from([1.25, 2.5]),
    window=st.integers(1, 20),
    batch=st.integers(1, 7),
    world=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_every_fresh_sample_is_delivered_factor_times_and_copies_differ(
    n: int, factor: float, window: int, batch: int, world: int
) -> None:
    p = ps.from_dataset(np.arange(float(n))).map(above).echo(factor, window=window)
    p = p.map(below).batch(batch)
    counts: Counter[float] = Counter()
    lengths = set()
    finals: list[float] = []
    for rank in range(world):
        with p.loader(workers=0, seed=2, rank=rank, world=world, tail="drop") as loader:
            rows = [row for delivered in loader for row in delivered.tolist()]
            lengths.add(len(rows))
            counts.update(row[0] for row in rows)
            finals += [row[2] for row in rows]
            stats = loader.stats().echo
            if stats is not None and rows:
                assert (stats.fresh, stats.delivered) == (n // world, len(rows))
    assert len(lengths) == 1
    assert len(set(finals)) == len(finals)
    low, high = int(factor), int(-(-factor // 1))
    assert all(low <= count <= high for count in counts.values())
    assert len(counts) == n // world * world


def test_a_batch_changed_in_place_does_not_change_its_copies() -> None:
    p = BASE.batch(8).echo(2, window=1)
    with p.loader(workers=0, shuffle=False) as loader:
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            batch += 1000
    assert seen[0] == seen[1] == list(range(8))


def test_every_copy_of_a_bad_sample_is_skipped() -> None:
    def fail(value: float) -> float:
        if value == 3:
            raise ValueError("bad")
        return value

    p = BASE.map(fail, random=False).echo(2, window=4).batch(8)
    for pool in POOLS:
        with p.loader(**pool._asdict(), on_error="skip") as loader:
            seen = Counter(x for batch in loader for x in batch.tolist())
            assert loader.stats().bad == 2
        assert 3.0 not in seen
        assert set(seen.values()) == {2}


def test_a_resume_within_an_epoch_needs_the_same_dealing() -> None:
    for name in ("between", "batches"):
        with ROADS[name].loader(seed=5, workers=0) as loader:
            epoch = iter(loader)
            next(epoch)
            state = loader.state_dict()
        with (
            ROADS[name].loader(seed=5, workers=0, rank=0, world=2) as other,
            pytest.raises(StateError, match="epoch that was echoed"),
        ):
            other.load_state_dict(state)


class TestAuto:
    """``echo("auto")``: the factor follows the measured pace."""

    @pytest.mark.parametrize("below_batch", [False, True])
    def test_the_first_epoch_is_measured_and_a_resume_uses_the_chosen_factor(
        self, below_batch: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from penstock.engine.echo import Pace

        monkeypatch.setattr(Pace, "between", lambda *a: Pace(0.005, 0.0, 0.002, 1))
        p = BASE.map(above)
        p = p.batch(8).echo("auto") if below_batch else p.echo("auto").map(below).batch(8)
        with p.loader(seed=5, workers=2, kind="threads") as loader:
            first = [plain(batch) for batch in loader]
            assert loader.stats().echo.factor == 2.5  # type: ignore[union-attr]
            epoch = iter(loader)
            next(epoch)
            state = loader.state_dict()
            rest = [plain(batch) for batch in epoch]
        assert len(first) == 7
        assert state["echo"] == {"ratio": 2.5, "factor": 2.5}
        assert len(rest) > 13
        with p.loader(seed=5, workers=0) as again:
            again.load_state_dict(state)
            assert [plain(batch) for batch in again] == rest

    def test_several_ranks_are_refused(self) -> None:
        with pytest.raises(PipelineError, match="ranks"):
            BASE.echo("auto").batch(8).loader(rank=0, world=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: b.echo(0.5), "factor"),
        (lambda b: b.echo(float("nan")), "factor"),
        (lambda b: b.echo("twice"), "echo"),
        (lambda b: b.echo(2, window=0), "window"),
        (lambda b: b.echo(2).map(above).echo(2), "second echo"),
        (lambda b: b.echo(2).batch(4).echo(2), "second echo"),
    ],
)
def test_wrong_arguments_and_places_are_refused_with_the_reason(make: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        make(BASE)


# Streams.


def stream() -> Any:
    return iter(np.arange(float(N)))


STREAM = ps.from_dataset(stream, version="1")
CALLS: list[float] = []


def counted(value: Any) -> Any:
    CALLS.append(float(value))
    return value


def _values(pipeline: ps.Pipeline, **options: Any) -> list[Any]:
    with pipeline.loader(seed=3, **options) as loader:
        return [plain(batch) for batch in loader]


@pytest.mark.parametrize("factor", [1, 2, 3, 1.5])
def test_every_sample_of_a_stream_is_used_as_often_as_the_factor_says(factor: float) -> None:
    CALLS.clear()
    pipeline = STREAM.map(counted, random=False).echo(factor, window=10).map(above).batch(8)
    with pipeline.loader(workers=0, seed=3) as loader:
        rows = np.concatenate(list(loader))
    assert sorted(CALLS) == list(range(N))  # the stages above run once for each sample
    counts = Counter(rows[:, 0].tolist())
    assert set(counts) == set(range(N))
    assert set(counts.values()) <= {int(factor), -int(-factor // 1)}
    # Each copy has its own random numbers below the echo.
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


class Counted:
    def __iter__(self) -> Any:
        return stream()

    def __len__(self) -> int:
        return N


def test_the_length_of_an_echoed_stream_counts_its_copies() -> None:
    data = ps.from_dataset(Counted(), version="1")
    assert len(data.echo(3).batch(8).loader(workers=0)) == -(-3 * N // 8)
    with pytest.raises(TypeError, match="no length"):
        len(data.echo(1.5).batch(8).loader(workers=0))


def test_copies_of_a_stream_are_spread_within_blocks() -> None:
    rows = np.concatenate(list(STREAM.echo(2, window=20).batch(8).loader(workers=0, seed=3)))
    blocks = [sorted(rows[start : start + 20].tolist()) for start in range(0, len(rows), 20)]
    for number, block in enumerate(blocks):
        first = 10 * number
        assert block == sorted([*range(first, min(first + 10, N))] * 2)
    assert rows.tolist() != sorted(rows.tolist())
    together = STREAM.echo(2, window=1).batch(8).loader(workers=0, seed=3)
    assert np.concatenate(list(together)).tolist() == sorted([*range(N)] * 2)


@pytest.mark.parametrize("factor", [2, 1.5])
def test_workers_change_nothing_of_an_echoed_stream(factor: float) -> None:
    pipeline = STREAM.map(above).echo(factor, window=10).map(below).batch(8)
    assert _values(pipeline, workers=0) == _values(pipeline, workers=1)


@pytest.mark.parametrize("factor", [3, 1.5])
@pytest.mark.parametrize("taken", [1, 4, 6])
def test_an_echoed_stream_resumes_at_any_batch(factor: float, taken: int) -> None:
    pipeline = STREAM.map(above).echo(factor, window=10).map(below).batch(8)
    whole = _values(pipeline, workers=0)
    with pipeline.loader(workers=0, seed=3) as loader:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
    with pipeline.loader(workers=0, seed=3) as loader:
        loader.load_state_dict(state)
        assert [plain(batch) for batch in loader] == whole[taken:]


def test_what_a_map_below_changes_in_place_does_not_reach_the_next_copy() -> None:
    rows = np.concatenate(
        list(STREAM.map(above).echo(2, window=1).map(below).batch(8).loader(workers=0, seed=3))
    )
    pairs = rows[: 2 * (len(rows) // 2)].reshape(-1, 2, 3)
    assert (pairs[:, 0, :2] == pairs[:, 1, :2]).all()
    assert (pairs[:, 0, 2] != pairs[:, 1, 2]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: STREAM.echo("auto"), "Give a number"),
        (lambda: STREAM.batch(4).echo(2), "above batch"),
        (lambda: STREAM.echo(2).echo(2), "second echo"),
    ],
)
def test_what_a_stream_cannot_echo_is_refused(make: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        make()


# The default window.


def test_the_default_window_follows_from_the_batch_size() -> None:
    def window(size: int) -> str:
        return BASE.echo(2).batch(size).explain()

    assert "window of 256" in window(8)
    assert "window of 2048" in window(64)
    assert "window of 7" in BASE.echo(2, window=7).batch(64).explain()
    rows = np.concatenate(list(ps.from_dataset(np.arange(4000.0)).echo(2).batch(64).loader(seed=0)))
    batches = [Counter(rows[start : start + 64].tolist()) for start in range(0, len(rows), 64)]
    together = sum(count - 1 for batch in batches for count in batch.values())
    assert together / 4000 < 0.06  # with a window of 256 it is a quarter


def test_a_checkpoint_of_the_old_default_window_resumes_the_same_or_says_what_to_give() -> None:
    data = ps.from_dataset(np.arange(400.0))
    for size in (8, 32):
        with data.echo(2, window=256).batch(size).loader(workers=0, seed=1) as loader:
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
            rest = [batch.tolist() for batch in batches]
        with data.echo(2).batch(size).loader(workers=0, seed=1) as loader:
            if size == 32:
                with pytest.raises(StateError, match=r"give echo\(\.\.\., window=256\)"):
                    loader.load_state_dict(state)
            else:
                loader.load_state_dict(state)
                assert [batch.tolist() for batch in loader] == rest


def test_between_epochs_another_batch_size_may_change_the_default_window() -> None:
    data = ps.from_dataset(np.arange(400.0))
    with data.echo(2).batch(32).loader(workers=0, seed=1) as loader:
        list(loader)
        state = loader.state_dict()
    with data.echo(2).batch(64).loader(workers=0, seed=1) as loader:
        loader.load_state_dict(state)
        assert sorted(np.concatenate(list(loader)).tolist()) == sorted([*range(400)] * 2)
