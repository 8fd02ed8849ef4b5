"""Worker processes see what torch's see: the process as it is where an epoch begins."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from tests.torch.compat.datasets import Made, Noise, OwnIterator, Stream, samples, values

VALUE = 1
FACTS: dict[str, Any] = {}


def a_function() -> int:
    return 1


def worker_facts(_: int) -> tuple[int, int, int]:
    info = get_worker_info()
    assert info is not None
    return info.id, info.num_workers, info.seed - info.id


@pytest.fixture(params=[False, True], ids=["anew", "persistent"])
def persistent(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_module_state_set_between_epochs(
    loader: Any, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(_: int) -> tuple[int, int, bool]:
        return VALUE, a_function(), torch.ones(1).dtype == torch.float64

    made = loader(Made(make, 4), batch_size=4, num_workers=2, persistent_workers=persistent)
    monkeypatch.setitem(globals(), "VALUE", 2)
    first = [value.unique().tolist() for value in next(iter(made))]
    assert first == [[2], [1], [False]]
    monkeypatch.setitem(globals(), "VALUE", 3)
    monkeypatch.setitem(globals(), "a_function", lambda: 7)
    torch.set_default_dtype(torch.float64)
    try:
        second = [value.unique().tolist() for value in next(iter(made))]
    finally:
        torch.set_default_dtype(torch.float32)
    assert second == (first if persistent else [[3], [7], [True]])


def test_a_dataset_changed_between_epochs(loader: Any, persistent: bool) -> None:
    data = Made(n=2)
    made = loader(data, batch_size=2, num_workers=1, persistent_workers=persistent)
    assert values(made) == [[0, 1]]
    data.make = lambda index: index + 10.0
    assert values(made) == ([[0, 1]] if persistent else [[10, 11]])


def test_shared_state_reaches_workers(loader: Any, persistent: bool) -> None:
    tensor, number = torch.zeros(1).share_memory_(), multiprocessing.Value("i", 0)

    def make(_: int) -> float:
        return float(tensor[0]) + float(number.value)

    made = loader(Made(make, 2), batch_size=2, num_workers=1, persistent_workers=persistent)
    assert values(made) == [[0, 0]]
    tensor[0], number.value = 5, 1
    assert values(made) == [[6, 6]]


def test_what_cannot_be_pickled(loader: Any, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(4)))
    lock = threading.Lock()
    with path.open("rb", buffering=0) as file:

        def make(index: int) -> int:
            with lock:
                file.seek(index)
                return file.read(1)[0]

        assert values(loader(Made(make, 4), batch_size=4, num_workers=1)) == [[0, 1, 2, 3]]


def test_get_worker_info(loader: Any) -> None:
    torch.manual_seed(3)
    (batch,) = loader(Made(worker_facts, 4), batch_size=4, num_workers=2)
    assert batch[1].tolist() == [2] * 4
    torch.manual_seed(3)
    assert set(batch[2].tolist()) == {torch.empty((), dtype=torch.int64).random_().item()}
    assert get_worker_info() is None


def test_worker_init_fn_runs_once_in_each_worker(loader: Any, tmp_path: Path) -> None:
    def init(worker: int) -> None:
        assert get_worker_info() is not None
        with (tmp_path / str(worker)).open("a") as file:
            file.write("x")

    # More workers than samples: those without a task run it too.
    made = loader(Made(n=1), num_workers=2, worker_init_fn=init)
    loop = iter(made)
    assert next(loop).tolist() == [0.0]

    def found() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    limit = time.monotonic() + 60
    while found() != {"0": "x", "1": "x"} and time.monotonic() < limit:
        time.sleep(0.01)
    assert list(loop) == []
    assert found() == {"0": "x", "1": "x"}


def test_an_exception_of_worker_init_fn_is_that_of_the_loop(loader: Any) -> None:
    def init(_: int) -> None:
        raise KeyError("no licence")

    with pytest.raises(KeyError, match="no licence"):
        next(iter(loader(Made(n=2), num_workers=1, worker_init_fn=init)))


def test_a_worker_that_dies_is_a_runtime_error(loader: Any) -> None:
    made = loader(Made(lambda _: os._exit(3), 2), num_workers=1)
    with pytest.raises(RuntimeError):
        next(iter(made))


def test_a_worker_that_takes_too_long_is_a_runtime_error(loader: Any) -> None:
    made = loader(Made(lambda _: time.sleep(60), 2), num_workers=1, timeout=0.1)
    with pytest.raises(RuntimeError):
        next(iter(made))


@pytest.mark.parametrize("shuffle", [None, False, True])
def test_datapipes_are_told_to_shuffle(loader: Any, shuffle: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.data.datapipes.iter import IterableWrapper

        pipe = IterableWrapper(list(range(40))).shuffle()
        found = samples(loader(pipe, shuffle=shuffle))
    assert sorted(found) == list(range(40))
    assert (found == list(range(40))) is (shuffle is False)


def test_an_assigned_worker_init_fn(loader: Any, tmp_path: Path) -> None:
    made = loader(Made(n=2), num_workers=1)
    list(made)
    made.worker_init_fn = lambda worker: (tmp_path / str(worker)).touch()
    list(made)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_seeds_make_random_numbers_repeatable(workers: int, loader: Any) -> None:
    def seen() -> Any:
        torch.manual_seed(4)
        map_style = loader(Made(lambda _: torch.rand(1).item(), 4), num_workers=workers)
        return values(map_style), [values(map_style) for _ in range(2)]

    first = seen()
    assert seen() == first
    assert first[0] != first[1][0] != first[1][1]


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_are_seeded(workers: int, loader: Any) -> None:
    import random

    import numpy as np

    def seen() -> Any:
        torch.manual_seed(4)
        random.seed(4)
        np.random.seed(4)
        stream = loader(Noise(), num_workers=workers)
        return values(stream), values(stream)

    first = seen()
    assert seen()[0] == first[0]
    assert first[0] != first[1]


def test_each_worker_reads_a_stream(loader: Any) -> None:
    made = loader(Stream(4), batch_size=2, num_workers=2)
    assert values(made) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    made = loader(Stream(5, split=True), num_workers=2)
    assert samples(made) == [0, 1, 2, 3, 4]
    # Each epoch has a new copy of a stream that keeps its position in itself.
    own = loader(OwnIterator(3, restarts=False), num_workers=1)
    assert values(own) == values(own) == [[1], [2], [3]]


def test_one_thread_in_workers(loader: Any) -> None:
    (batch,) = loader(Made(lambda _: torch.get_num_threads(), 1), num_workers=1)
    assert batch.item() == 1


def test_spawned_workers(loader: Any, tmp_path: Path) -> None:
    if loader is torch.utils.data.DataLoader:
        pytest.skip("importing torch in a new process takes seconds; checked for ours")
    made = loader(Made(n=3), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    with made:
        assert values(made) == values(made) == [[0, 1], [2]]
        assert made.multiprocessing_context.get_start_method() == "spawn"
