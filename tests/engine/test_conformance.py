"""Batches have the same bits in every pool, with any number of workers, ranks and interruptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.contract import (
    ORDERS,
    POOLS,
    Workers,
    epochs,
    noise,
    packed,
    pipelines,
    plain,
)

PIPELINES = pipelines()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[Any]]]:
    """The batches of each pipeline without workers."""
    return {name: epochs(p, 3, workers=0, seed=5) for name, p in PIPELINES.items()}


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pool_changes_no_bit(name: str, pool: Workers, expected: Any) -> None:
    assert epochs(PIPELINES[name], 3, **pool._asdict(), seed=5) == expected[name]


def test_epochs_and_seeds_differ(expected: Any) -> None:
    first, second, _ = expected["random map"]
    assert first != second
    assert epochs(PIPELINES["random map"], 1, workers=0, seed=6)[0] != first


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("stop_at", [0, 1, 3, 6, 7])
def test_a_resumed_epoch_is_bit_equal_in_any_pool(
    pool: Workers, stop_at: int, expected: Any
) -> None:
    with PIPELINES["pairs"].loader(workers=0, seed=5) as loader:
        for _ in range(2):
            epoch = iter(loader)
            seen = [plain(next(epoch)) for _ in range(stop_at if loader.epoch else 7)]
        state = loader.state_dict()
    with PIPELINES["pairs"].loader(**pool._asdict(), seed=5) as again:
        again.load_state_dict(state)
        rest = [plain(batch) for batch in again]
        after = [plain(batch) for batch in again]
    assert seen + rest == expected["pairs"][1]
    assert after == expected["pairs"][2]


@pytest.mark.parametrize("pool", POOLS[:4], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_see_every_sample_once_an_epoch(pool: Workers, world: int) -> None:
    pipeline = ps.from_dataset(np.arange(53.0)).batch(4)
    for epoch in range(2):
        seen: list[float] = []
        for rank in range(world):
            options = {**pool._asdict(), "rank": rank, "world": world, "tail": "drop"}
            with pipeline.loader(**options, seed=1) as loader:
                loader.set_epoch(epoch)
                seen += [x for batch in loader for x in batch.tolist()]
        assert len(seen) == len(set(seen)) == 53 // world * world


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 4)])
def test_a_resume_with_another_world_size_deals_the_rest_exactly_once(
    before: int, after: int
) -> None:
    pipeline = ps.from_dataset(np.arange(96.0)).map(noise).batch(4)

    def some(rank: int, world: int, state: Any, count: int | None) -> tuple[list[float], Any]:
        with pipeline.loader(workers=0, seed=2, rank=rank, world=world) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen: list[float] = []
            for number, batch in enumerate(loader, start=1):
                seen += batch.tolist()
                if number == count:
                    break
            return seen, loader.state_dict()

    parts = [some(rank, before, None, 3) for rank in range(before)]
    state = parts[0][1]
    rest = [some(rank, after, state, None) for rank in range(after)]
    everything = [x for part, _ in [*parts, *rest] for x in part]
    whole = some(0, 1, None, None)[0]
    assert sorted(everything) == sorted(whole)


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_the_same_in_every_pool_and_after_a_resume(name: str) -> None:
    pipeline = packed().map(noise, on=0).batch(4)
    order = ORDERS[name]
    expected = epochs(pipeline, 2, workers=0, seed=5, order=order)
    for pool in POOLS[1:4]:
        assert epochs(pipeline, 2, **pool._asdict(), seed=5, order=order) == expected
    for stop_at in (1, 9, 13):
        with pipeline.loader(workers=0, seed=5, order=order) as loader:
            epoch = iter(loader)
            seen = [plain(next(epoch)) for _ in range(stop_at)]
            state = loader.state_dict()
        with pipeline.loader(workers=2, kind="threads", seed=5, order=order) as again:
            again.load_state_dict(state)
            assert seen + [plain(batch) for batch in again] == expected[0]
            assert [plain(batch) for batch in again] == expected[1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1), (2, 4)])
@pytest.mark.parametrize("name", ["reservoir", "reservoir in lanes"])
def test_a_reservoir_goes_on_with_another_world_size(name: str, before: int, after: int) -> None:
    pipeline, order = packed().batch(2), ORDERS[name]

    def labels(rank: int, world: int, state: Any, count: int | None) -> tuple[list[int], Any]:
        with pipeline.loader(
            workers=0, seed=2, order=order, rank=rank, world=world, tail="drop"
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen: list[int] = []
            for number, (_, numbers) in enumerate(loader, start=1):
                seen += numbers.tolist()
                if number == count:
                    break
            return seen, loader.state_dict()

    parts = [labels(rank, before, None, 4) for rank in range(before)]
    rest = [labels(rank, after, parts[0][1], None) for rank in range(after)]
    assert len({len(part) for part, _ in parts}) == len({len(part) for part, _ in rest}) == 1
    everything = [label for part, _ in [*parts, *rest] for label in part]
    assert len(set(everything)) == len(everything) == 53 - (53 - 8 * before) % after


def test_global_generators_are_keyed_in_processes_and_left_alone_inline() -> None:
    import random as python_random

    def draw(value: float) -> tuple[float, float, float]:
        return value, python_random.random(), float(np.random.random())

    pipeline = ps.from_dataset(np.arange(20.0)).map(draw).batch(6)
    python_random.seed(1)
    np.random.seed(1)
    inline = epochs(pipeline, 2, workers=0, seed=3)
    assert python_random.random() == python_random.Random(1).random()
    assert float(np.random.random()) == float(np.random.RandomState(1).random_sample())
    for workers in (1, 2):
        assert epochs(pipeline, 2, workers=workers, seed=3) == inline
    with pipeline.loader(workers=2) as loader:
        assert loader.choice.kind == "processes"
        assert "draw may draw from the global generators" in repr(loader)


def test_a_cache_put_into_a_pipeline_changes_no_sample() -> None:
    data = [np.full(4, i, dtype=np.float32) for i in range(30)]
    without = ps.from_dataset(data).map(noise).batch(8)
    with_cache = ps.from_dataset(data).cache("1MB").map(noise).batch(8)
    assert epochs(without, 3, workers=2, seed=9) == epochs(with_cache, 3, workers=2, seed=9)


def test_breaking_off_an_epoch_starts_the_next_one(expected: Any) -> None:
    for pool in (
        Workers(0, "auto"),
        Workers(2, "threads"),
        Workers(2, "processes"),
        Workers(2, "crew"),
    ):
        with PIPELINES["random map"].loader(**pool._asdict(), seed=5) as loader:
            for _ in loader:
                break
            assert [plain(b) for b in loader] == expected["random map"][1]
            assert loader.epoch == 2
