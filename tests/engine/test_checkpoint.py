"""Checkpoints of another pipeline are refused, and the error names the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import StateError
from tests.support.contract import noise, plain

BASE = ps.from_dataset(np.arange(30.0)).map(noise).batch(4)


def state_of(pipeline: Any, batches: int = 2, **options: Any) -> dict[str, Any]:
    with pipeline.loader(workers=0, **options) as loader:
        epoch = iter(loader)
        for _ in range(batches):
            next(epoch)
        return loader.state_dict()  # type: ignore[no-any-return]


def test_a_state_is_plain_data_and_travels_as_json() -> None:
    state = json.loads(json.dumps(state_of(BASE)))
    with BASE.loader(workers=0) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 6


@pytest.mark.parametrize(
    ("other", "options", "names"),
    [
        (BASE, {"seed": 1}, "seed was 0 and is 1"),
        (BASE, {"shuffle": False}, "order was 'shuffled' and is 'sequential'"),
        (BASE, {"order": ps.Weighted([1.0] * 30)}, "order was"),
        (ps.from_dataset(np.arange(31.0)).map(noise).batch(4), {}, "samples was 30 and is 31"),
        (ps.from_dataset(np.arange(1.0, 31)).map(noise).batch(4), {}, "the data is not the same"),
        (ps.from_dataset(np.arange(30.0)).batch(4), {}, r"the stops were \['noise'\] and are \[\]"),
        (
            ps.from_dataset(np.arange(30.0)).map(lambda x, rng: x, name="noise").batch(4),
            {},
            "noise has changed",
        ),
        (
            ps.from_dataset(np.arange(30.0)).map(noise).batch(4, collate=list),
            {},
            "collate",
        ),
    ],
    ids=["seed", "shuffle", "order", "samples", "data", "stops", "code", "collate"],
)
def test_a_state_of_another_pipeline_is_refused_and_the_difference_named(
    other: Any, options: Any, names: str
) -> None:
    state = state_of(BASE)
    with other.loader(workers=0, **options) as loader, pytest.raises(StateError, match=names):
        loader.load_state_dict(state)


def test_caches_workers_and_batch_size_may_change() -> None:
    with BASE.loader(workers=0, seed=3) as loader:
        whole = [x for batch in loader for x in batch.tolist()]
    state = state_of(BASE, seed=3)
    other = ps.from_dataset(np.arange(30.0)).cache("1MB").map(noise).batch(7)
    with other.loader(workers=2, kind="threads", seed=3) as loader:
        loader.load_state_dict(state)
        assert [x for batch in loader for x in batch.tolist()] == whole[8:]


def test_changed_files_are_refused(tmp_path: Path) -> None:
    paths = []
    for i in range(4):
        paths.append(tmp_path / f"{i}.bin")
        paths[-1].write_bytes(bytes([i]))
    pipeline = ps.from_files(paths).map(len, random=False).batch(1)
    state = state_of(pipeline)
    with pipeline.loader(workers=0) as loader:
        loader.load_state_dict(state)
    paths[2].write_bytes(b"longer")
    with pipeline.loader(workers=0) as loader, pytest.raises(StateError, match="data is not"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "state", [{}, {"cursor": 1}, [], {"cursor": {}, "stops": [], "version": 9}]
)
def test_other_values_than_a_state_are_refused(state: Any) -> None:
    with BASE.loader(workers=0) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)


def test_the_state_after_the_last_batch_leaves_an_empty_rest_and_then_the_next_epoch() -> None:
    with BASE.loader(workers=0) as loader:
        first = [plain(b) for b in loader]
        second = [plain(b) for b in loader]
    state = state_of(BASE, batches=8)
    with BASE.loader(workers=0) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
        assert [plain(b) for b in loader] == second
    assert len(first) == 8


def test_prefetched_batches_do_not_count_as_delivered() -> None:
    with BASE.loader(workers=2, kind="threads") as loader:
        epoch = iter(loader)
        next(epoch)
        assert loader.state_dict()["cursor"] == {"epoch": 0, "position": 4, "batch": 1}
