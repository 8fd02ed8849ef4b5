"""Datasets and samplers that save and restore their own position resume by it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock.errors import StateError
from penstock.torch import DataLoader
from tests.torch.compat.datasets import Made, values


class Counter(IterableDataset[int]):  # type: ignore[misc]
    """Numbers, divided over workers. Its position is in itself, and every number is recorded."""

    def __init__(self, log: Path, n: int = 20) -> None:
        self.log, self.n, self.at = log, n, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = range(worker, self.n, count)
        while self.at < len(numbers):
            self.at += 1
            with self.log.open("a") as file:
                file.write(f"{numbers[self.at - 1]}\n")
            yield numbers[self.at - 1]
        self.at = 0  # for the next epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class _CounterIterator:
    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> _CounterIterator:
        return self

    def __next__(self) -> tuple[int, float]:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at, random.random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulIterator(IterableDataset[Any]):  # type: ignore[misc]
    """The iterator has the state; the samples are random."""

    def __iter__(self) -> _CounterIterator:
        return _CounterIterator(9)


def taken_and_rest(made: Any, batches: int) -> tuple[Any, list[Any]]:
    """The checkpoint after that many batches, and the batches after it."""
    loop = iter(made)
    for _ in range(batches):
        next(loop)
    return made.state_dict(), values(loop)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 4, 7])
def test_a_dataset_resumes_by_its_own_state(workers: int, batches: int, tmp_path: Path) -> None:
    log, again = tmp_path / "log", tmp_path / "again"
    state, rest = taken_and_rest(
        DataLoader(Counter(log), batch_size=3, num_workers=workers), batches
    )
    made = DataLoader(Counter(again), batch_size=3, num_workers=workers)
    made.load_state_dict(state)
    assert values(made) == rest
    # Nothing that was delivered before the checkpoint was read again.
    read = sorted(int(line) for line in again.read_text().split()) if again.exists() else []
    assert read == sorted(sample for batch in rest for sample in batch)
    assert values(made) == values(DataLoader(Counter(log), batch_size=3, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_resumes_by_its_own_state_and_draws_on(workers: int) -> None:
    torch.manual_seed(3)
    state, rest = taken_and_rest(
        DataLoader(StatefulIterator(), batch_size=2, num_workers=workers), 2
    )
    made = DataLoader(StatefulIterator(), batch_size=2, num_workers=workers)
    made.load_state_dict(state)
    assert values(made) == rest
    assert len(rest) == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_hugging_face_streams_resume_in_mid_epoch(
    workers: int, shuffled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        table = datasets.Dataset.from_dict({"a": list(range(24))})
        found = table.to_iterable_dataset(num_shards=4)
        return found.shuffle(seed=3, buffer_size=1) if shuffled else found

    def seen(batches: Any) -> list[Any]:
        return [batch["a"].tolist() for batch in batches]

    first = stream()
    first.set_epoch(2)
    made = DataLoader(first, batch_size=4, num_workers=workers)
    loop = iter(made)
    for _ in range(3):
        next(loop)
    state = made.state_dict()
    rest = seen(loop)
    # After a restart: the dataset is in epoch 0, and the checkpoint is of epoch 2.
    resumed = DataLoader(stream(), batch_size=4, num_workers=workers)
    resumed.load_state_dict(state)
    assert seen(resumed) == rest
    # The next epoch is whole, although nobody has called set_epoch.
    assert sorted(number for batch in seen(resumed) for number in batch) == list(range(24))


class Keeps(IterableDataset[int]):  # type: ignore[misc]
    """Keeps its position in itself, and has no state that it could save."""

    def __init__(self, n: int = 6) -> None:
        self.n, self.at, self.read = n, 0, list[int]()

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.read.append(self.at)
            self.at += 1
            yield self.at


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_keeps_its_position_in_itself_resumes(workers: int) -> None:
    loader = DataLoader(Keeps(), batch_size=2, num_workers=workers)
    epoch = iter(loader)
    assert next(epoch).tolist() == [1, 2]
    state = loader.state_dict()
    resumed = DataLoader(Keeps(), batch_size=2, num_workers=workers)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[3, 4], [5, 6]]
    with pytest.raises(StateError, match="the data is not the same"):
        DataLoader(Keeps(7), batch_size=2).load_state_dict(state)


class Curriculum(Made):
    """A map-style dataset with a state of its own."""

    level = 0

    def __getitem__(self, index: int) -> float:
        return self.level * 100.0 + index

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_map_style_dataset_resumes_by_its_own_state(workers: int) -> None:
    loader = DataLoader(Curriculum(n=6), batch_size=2, num_workers=workers)
    loader.dataset.level = 3
    state, rest = taken_and_rest(loader, 1)
    resumed = DataLoader(Curriculum(n=6), batch_size=2, num_workers=workers)
    resumed.load_state_dict(state)
    assert values(resumed) == rest == [[302, 303], [304, 305]]
    other = DataLoader(Curriculum(n=7), batch_size=2, num_workers=workers)
    with pytest.raises(StateError):
        other.load_state_dict(state)
    assert other.dataset.level == 0


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_run_already_get_the_state_of_a_dataset(
    workers: int, persistent: bool
) -> None:
    loader = DataLoader(Curriculum(n=6), batch_size=2, num_workers=workers)
    loader.dataset.level = 3
    state, rest = taken_and_rest(loader, 1)
    running = DataLoader(
        Curriculum(n=6), batch_size=2, num_workers=workers, persistent_workers=persistent
    )
    assert values(running) == [[0, 1], [2, 3], [4, 5]]
    running.load_state_dict(state)
    assert values(running) == rest
    assert values(running) == [[300, 301], [302, 303], [304, 305]]


class CountsReads(Made):
    """A map-style dataset that changes while it is read."""

    def __init__(self, n: int) -> None:
        super().__init__(n=n)
        self.reads = [0]

    def __getitem__(self, index: int) -> float:
        self.reads[0] += 1
        return self.reads[0] * 100.0 + index

    def state_dict(self) -> dict[str, list[int]]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.reads[:] = state["reads"]


def test_every_checkpoint_of_a_dataset_that_reading_changes_resumes() -> None:
    loader = DataLoader(CountsReads(8), batch_size=2, num_workers=0)
    loop = iter(loader)
    next(loop)
    first = loader.state_dict()
    next(loop)
    second = loader.state_dict()
    rest = values(loop)
    assert rest == [[504, 605], [706, 807]]
    for state, batches in ((second, rest), (first, [[302, 403], *rest])):
        resumed = DataLoader(CountsReads(8), batch_size=2, num_workers=0)
        resumed.load_state_dict(state)
        assert values(resumed) == batches
    # A checkpoint that is refused leaves the dataset as it was.
    with pytest.raises(StateError):
        DataLoader(loader.dataset, batch_size=2, num_workers=0, collate_fn=len).load_state_dict(
            first
        )
    assert loader.dataset.reads == [8]
