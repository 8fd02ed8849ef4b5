"""Members with different batch sizes, and groups that share a cache."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.node.client import request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.member import DEPTH
from tests.support.contract import pipelines

N = 53


def noisy(value: Any, rng: np.random.Generator) -> Any:
    return np.array([value, rng.random()])


def twice(value: Any) -> Any:
    return 2 * value


def written(batch: int, drop_last: bool = False) -> ps.Pipeline:
    return ps.from_dataset(np.arange(float(N))).map(noisy).batch(batch, drop_last=drop_last)


def rows(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def alone(pipeline: ps.Pipeline, epochs: int = 2, **options: Any) -> list[list[Any]]:
    with pipeline.loader(seed=5, workers=0, **options) as loader:
        return [rows(loader) for _ in range(epochs)]


def prepared(directory: NodeDirectory) -> list[int]:
    status = request_status(directory)
    assert status is not None
    return [group["prepared"] for group in status["groups"]]


@pytest.mark.parametrize("size", [2, 4, 16, 24])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_divisor_or_multiple_of_the_batch_size_is_served_from_one_preparation(
    node_here: NodeDirectory, size: int, drop_last: bool
) -> None:
    with (
        written(8).loader(seed=5, share="a") as first,
        written(size, drop_last).loader(seed=5, share="a") as other,
    ):
        epochs = iter(first), iter(other)
        received: tuple[list[Any], list[Any]] = ([next(epochs[0]).tolist()], [])
        # The member with fewer samples goes on, so that the two stay together.
        while True:
            samples = [sum(map(len, batches)) for batches in received]
            order = sorted((0, 1), key=lambda which: samples[which])
            batch = next(epochs[order[0]], None)
            if batch is None:
                batch = next(epochs[order[1]], None)
                if batch is None:
                    break
                received[order[1]].append(batch.tolist())
            else:
                received[order[0]].append(batch.tolist())
        assert received[0] == alone(written(8))[0]
        assert received[1] == alone(written(size, drop_last))[0]
        # Each batch once for both, and a few of the next epoch, which is begun early.
        assert prepared(node_here)[0] <= -(-N // 8) + DEPTH
        assert rows(other) == alone(written(size, drop_last))[1]


def test_any_other_batch_size_is_prepared_separately_with_a_warning(
    node_here: NodeDirectory,
) -> None:
    with (
        written(8).loader(seed=5, share="a") as first,
        written(12).loader(seed=5, share="a") as other,
    ):
        assert rows(first) == alone(written(8))[0]
        with pytest.warns(
            RuntimeWarning,
            match="batches of 12 samples cannot be made from the group's batches of 8",
        ):
            assert rows(other) == alone(written(12))[0]


def test_a_member_of_another_size_goes_on_from_its_checkpoint(
    node_here: NodeDirectory,
) -> None:
    with written(8).loader(seed=5, share="a") as first:
        rows(first)
        with written(4).loader(seed=5, share="a") as other:
            epoch = iter(other)
            begun = [next(epoch).tolist() for _ in range(3)]
            state = other.state_dict()
        for size in (4, 8):  # with 8 the rest of the epoch comes in larger batches
            with written(size).loader(seed=5, share="a") as again:
                again.load_state_dict(state)
                rest = rows(again)
            flat = [row for batch in begun + rest for row in batch]
            assert flat == [row for batch in alone(written(4))[0] for row in batch]


def test_a_member_keeps_its_batch_size_when_another_member_restarts_the_group(
    node_directory: NodeDirectory,
) -> None:
    with written(8).loader(seed=5, share="a") as first:
        epoch = iter(first)
        begun = [next(epoch).tolist() for _ in range(2)]
        status = request_status(node_directory)
        assert status is not None
        os.kill(status["pid"], signal.SIGKILL)
        assert wait_for_exit(status["pid"], 100)
        with written(4).loader(seed=5, share="a") as other:
            assert rows(other) == alone(written(4))[0]
            assert begun + rows(epoch) == alone(written(8))[0]
            assert rows(other) == alone(written(4))[1]


def test_ranks_of_another_batch_size_are_served_too(node_here: NodeDirectory) -> None:
    with written(8).loader(seed=5, share="a", rank=1, world=2) as first:
        rows(first)
        with written(4).loader(seed=5, share="a", rank=1, world=2) as other:
            assert rows(other) == alone(written(4), rank=1, world=2)[0]


@pytest.mark.parametrize("name", [*pipelines()])
def test_the_node_changes_no_bit_of_any_pipeline(node_here: NodeDirectory, name: str) -> None:
    pipeline = pipelines()[name]
    received: dict[str, list[Any]] = {}

    def run(who: str, **options: Any) -> None:
        with pipeline.loader(seed=5, **options) as loader:
            received[who] = [[repr(batch) for batch in loader] for _ in range(3)]

    run("alone", workers=0)
    jobs = [threading.Thread(target=run, args=(str(i),), kwargs={"share": "a"}) for i in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert received["0"] == received["1"] == received["alone"]


def cached(below: Any) -> ps.Pipeline:
    doubled = ps.from_dataset(np.arange(float(N)), random=False).map(twice, random=False)
    return doubled.cache("1MB").map(below).batch(8)


def noisier(value: Any, rng: np.random.Generator) -> Any:
    return value + 10 * rng.random()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_groups_with_equal_stages_above_their_caches_share_one_cache(
    node_here: NodeDirectory, kind: Any
) -> None:
    with cached(noisy).loader(seed=5, kind=kind, share="a") as one:
        rows(one)
        with cached(noisier).loader(seed=6, kind=kind, share="b") as other:
            received = rows(other)
            status = request_status(node_here)
    with cached(noisier).loader(seed=6, workers=0) as loader:
        assert received == rows(loader)
    assert status is not None
    caches = {group["name"]: group["caches"][0] for group in status["groups"]}
    assert caches["a"]["misses"] == N
    assert caches["b"]["misses"] == 0
    assert caches["b"]["hits"] >= N
    assert caches["a"]["bytes"] == caches["b"]["bytes"] > 0
