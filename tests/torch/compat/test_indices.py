"""What samplers may yield, and what datasets may be read by."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, Subset, TensorDataset

from tests.torch.compat.datasets import Made, plain, samples, values


class ByAnything(Dataset[Any]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> str:
        return str(index)


@pytest.mark.parametrize(
    "indices",
    [["a", "b", "c"], [(0, 1), (2, 3)], [-1, -2], [7, 8], [0, "x"], [0.5, 1.5], [True, 0], [None]],
    ids=str,
)
def test_samplers_may_yield_anything(indices: list[Any], loader: Any) -> None:
    made = loader(ByAnything(), batch_size=2, sampler=indices)
    for _ in range(2):
        assert [text for batch in made for text in batch] == [str(index) for index in indices]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_whole_numbers_of_any_kind_are_indices(kind: Any, loader: Any) -> None:
    made = loader(Made(lambda i: float(i)), batch_size=2, sampler=[kind(3), kind(1)])
    assert values(made) == [[3.0, 1.0]]


def test_a_late_strange_index_does_not_repeat_or_lose_samples(loader: Any) -> None:
    made = loader(ByAnything(), batch_size=1, sampler=[0, 1, 2, "end", 1])
    assert [batch[0] for batch in made] == ["0", "1", "2", "end", "1"]


def test_a_batch_sampler_as_the_sampler_of_single_samples(loader: Any) -> None:
    data = torch.arange(10.0)
    sampler = BatchSampler(SequentialSampler(data), 4, False)
    made = loader(data, sampler=sampler, batch_size=None)
    assert values(made) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("dataset", "sampler"),
    [
        ({"a": 1, "b": 2}, ["b", "a"]),
        ([10, 11, 12], [-1, 0]),
        ((10, 11, 12), None),
        (range(5, 8), None),
        (np.arange(3.0), None),
        (torch.arange(3.0), None),
        (TensorDataset(torch.arange(3), torch.ones(3)), None),
        (Subset(Made(), [4, 2]), None),
        (Made() + Made(n=2), None),
        ("text", None),
    ],
    ids=[
        "dict",
        "negative",
        "tuple",
        "range",
        "array",
        "tensor",
        "tensors",
        "subset",
        "sum",
        "str",
    ],
)
def test_kinds_of_datasets(dataset: Any, sampler: Any, loader: Any) -> None:
    order = sampler if sampler is not None else range(len(dataset))
    expected = plain([torch.utils.data.default_collate([dataset[index]]) for index in order])
    assert plain(list(loader(dataset, sampler=sampler))) == expected


@pytest.mark.parametrize("batch_size", [2, None])
def test_an_empty_dataset_has_no_batches(batch_size: Any, loader: Any) -> None:
    made = loader([], batch_size=batch_size)
    assert values(made) == []
    assert len(made) == 0
    with pytest.raises(ValueError, match="num_samples"):
        loader([], shuffle=True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_may_grow_between_epochs(shuffle: bool, loader: Any) -> None:
    data = [1, 2, 3]
    made = loader(data, batch_size=2, shuffle=shuffle)
    assert sorted(samples(made)) == [1, 2, 3]
    data += [4, 5]
    assert len(made) == 3
    assert sorted(samples(made)) == [1, 2, 3, 4, 5]


def test_an_empty_dataset_may_grow(loader: Any) -> None:
    data: list[int] = []
    made = loader(data)
    assert values(made) == []
    data += [4, 5]
    assert values(made) == [[4], [5]]


def test_a_dataset_without_a_length_with_a_sampler(loader: Any) -> None:
    class Endless(Dataset[int]):  # type: ignore[misc]
        def __getitem__(self, index: int) -> int:
            return index * 2

    assert values(loader(Endless(), sampler=[3, 100])) == [[6], [200]]


class Recorded(Made):
    """Reads whole batches, and keeps what it was asked for."""

    def __init__(self, n: int, give: Any) -> None:
        super().__init__(n=n)
        self.give = give
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(list(indices))
        return self.give(indices)


GIVEN: dict[str, tuple[Any, Any]] = {
    "a list": (lambda indices: [index + 100 for index in indices], None),
    "a dict": (lambda indices: {"x": torch.tensor(indices)}, lambda batch: batch),
    "fewer": (lambda indices: [index for index in indices if index % 2], None),
    "padded together": (lambda indices: [torch.ones(max(indices)) for _ in indices], None),
    "random": (lambda indices: [len(indices)] * len(torch.rand(len(indices))), None),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("subset", [False, True])
def test_datasets_that_read_whole_batches(given: str, subset: bool, loader: Any) -> None:
    give, collate = GIVEN[given]
    data = Recorded(8, give)
    part = Subset(data, [5, 3, 2, 6, 7]) if subset else data
    seen = list(loader(part, batch_size=3, collate_fn=collate))
    expected = [[5, 3, 2], [6, 7]] if subset else [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert data.asked == expected
    collate = collate or torch.utils.data.default_collate
    assert plain(seen) == plain([collate(give(batch)) for batch in expected])


def test_datasets_that_read_whole_batches_in_workers(loader: Any) -> None:
    data = Recorded(5, lambda indices: {"x": torch.tensor(indices)})
    made = loader(data, batch_size=3, num_workers=1, collate_fn=lambda batch: batch)
    assert values(made) == [{"x": [0, 1, 2]}, {"x": [3, 4]}]


def test_single_samples_of_a_dataset_that_reads_whole_batches(loader: Any) -> None:
    data = Recorded(3, None)
    assert list(loader(data, batch_size=None)) == [0.0, 1.0, 2.0]
    assert data.asked == []


def test_an_exception_where_a_whole_batch_is_read(loader: Any) -> None:
    def give(indices: list[int]) -> list[int]:
        if 2 in indices:
            raise FileNotFoundError(2, "no such file", "x.jpg")
        return indices

    epoch = iter(loader(Recorded(6, give), batch_size=2))
    assert next(epoch).tolist() == [0, 1]
    with pytest.raises(FileNotFoundError):
        next(epoch)
    assert values(epoch) == [[4, 5]]


ODD: dict[str, Any] = {
    "one size": lambda i: torch.ones(2),
    "own sizes": lambda i: torch.ones(i + 1),
    "two sizes": lambda i: torch.ones(2 + i // 20),
    "two types": lambda i: float(i) if i % 5 else i,
    "a field more": lambda i: {"x": 1.0} if i < 20 else {"x": 1.0, "y": i},
}


@pytest.mark.parametrize("kind", ODD)
def test_each_sample_is_read_once_where_it_is_needed(kind: str, loader: Any) -> None:
    events: list[Any] = []

    def make(index: int) -> Any:
        events.append(index)
        return ODD[kind](index)

    for _ in loader(Made(make, 40)):
        events.append("batch")
    assert events == [event for index in range(40) for event in (index, "batch")]


@pytest.mark.parametrize("kind", ["own sizes", "two types"])
def test_workers_read_samples_of_many_sizes_once(kind: str, loader: Any) -> None:
    reads = multiprocessing.Value("i", 0)

    def make(index: int) -> Any:
        with reads.get_lock():
            reads.value += 1
        return ODD[kind](index)

    assert len(list(loader(Made(make, 80), num_workers=1))) == 80
    assert 80 <= reads.value < 100  # the first ones may be read again
