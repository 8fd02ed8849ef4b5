"""What samplers may yield, and what datasets may be read by."""

from __future__ import annotations

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


def test_several_samples_read_at_once(loader: Any) -> None:
    class AtOnce(Made):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [index + 100 for index in indices]

    assert values(loader(AtOnce(n=3), batch_size=2)) == [[100, 101], [102]]
