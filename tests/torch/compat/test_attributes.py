"""A loader is a DataLoader: its class, its attributes, what may be assigned, copies of it."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from penstock.torch import DataLoader
from tests.torch.compat.datasets import LongStream, Made, Stream, values


def test_it_is_a_torch_dataloader(loader: Any) -> None:
    assert isinstance(loader(Made()), torch.utils.data.DataLoader)
    assert issubclass(loader, torch.utils.data.DataLoader)
    alias = loader[torch.Tensor]
    assert values(alias([1])) == [[1]]


def test_it_takes_the_arguments_of_torch(loader: Any) -> None:
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(loader.__init__).parameters
    assert list(torchs) == [name for name in ours if name in torchs]
    for name, parameter in torchs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)


@pytest.mark.parametrize(
    ("options", "sampler", "batch_sampler"),
    [
        ({}, SequentialSampler, BatchSampler),
        ({"shuffle": True}, RandomSampler, BatchSampler),
        ({"sampler": [1, 2]}, list, BatchSampler),
        ({"batch_sampler": [[1, 2]]}, SequentialSampler, list),
        ({"batch_size": None}, SequentialSampler, type(None)),
        ({"batch_size": None, "shuffle": True}, RandomSampler, type(None)),
    ],
)
def test_samplers(options: Any, sampler: Any, batch_sampler: Any, loader: Any) -> None:
    made = loader(Made(), **options)
    assert type(made.sampler) is sampler
    assert type(made.batch_sampler) is batch_sampler
    if sampler is not list:
        assert len(made.sampler) == 10


ATTRIBUTES = {
    "batch_size": (4, 4),
    "drop_last": (True, True),
    "num_workers": (0, 0),
    "pin_memory": (False, False),
    "timeout": (0, 0),
    "worker_init_fn": (print, print),
    "collate_fn": (list, list),
    "persistent_workers": (False, False),
    "prefetch_factor": (None, None),
    "in_order": (False, False),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_arguments_are_attributes(name: str, loader: Any) -> None:
    given, expected = ATTRIBUTES[name]
    assert getattr(loader(Made(), **{name: given}), name) == expected


def test_attributes_have_torchs_defaults(loader: Any) -> None:
    data = Made()
    made = loader(data)
    assert made.dataset is data
    assert made.collate_fn is torch.utils.data.default_collate
    assert (made.batch_size, made.num_workers, made.generator) == (1, 0, None)
    assert made.multiprocessing_context is None


@pytest.mark.parametrize(
    "name",
    ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"],
)
def test_what_may_not_be_assigned(name: str, loader: Any) -> None:
    made = loader(Made())
    with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
        setattr(made, name, getattr(made, name))


def test_an_assigned_collate_function_counts_from_the_next_loop_on(loader: Any) -> None:
    made = loader(Made(n=2))
    assert values(made) == [[0.0], [1.0]]
    made.collate_fn = lambda samples: [sample * 10 for sample in samples]
    assert list(made) == [[0.0], [10.0]]


def test_an_assigned_generator_counts_from_the_next_loop_on(loader: Any) -> None:
    made = loader(Made(), batch_size=10)
    states = []
    for seed in (1, 1, 2):
        made.generator = torch.Generator().manual_seed(seed)
        list(made)
        states.append(made.generator.get_state().tolist())
    assert states[0] == states[1] != states[2]


def test_attributes_of_the_users_own(loader: Any) -> None:
    made = loader(Made())
    made.name = "train"
    assert made.name == "train"
    with pytest.raises(AttributeError):
        _ = made.nonsense


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
@pytest.mark.parametrize("used", [False, True])
def test_copies(copied: Any, used: bool, loader: Any) -> None:
    made = loader(Made(n=3), batch_size=2)
    if used:
        list(made)
    assert values(copied(made)) == [[0, 1], [2]] == values(made)


@pytest.mark.parametrize("dataset", [[1, 2, 3], LongStream(3)], ids=["map", "stream"])
def test_pickles(dataset: Any, loader: Any) -> None:
    made = loader(dataset, batch_size=2)
    list(made)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is loader
    assert values(again) == values(made)
    assert len(again) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": 0},
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": "nonsense", "num_workers": 1},
    ],
    ids=str,
)
def test_arguments_that_are_refused(options: Any, loader: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        loader(Made(), **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}])
def test_what_a_stream_refuses(options: Any, loader: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        loader(Stream(), **options)


def test_a_subclass_of_the_loader(loader: Any) -> None:
    class Doubled(loader):  # type: ignore[misc]
        def __init__(self, data: Any, factor: int = 2) -> None:
            super().__init__(data, batch_size=2)
            self.factor = factor

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch * self.factor

    assert values(Doubled(Made(n=3))) == [[0, 2], [4]]


def test_the_length_of_an_iterator_is_that_of_the_data(loader: Any) -> None:
    class Other(loader):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(iter(self)) + 1

    made = Other(Made(n=5), batch_size=2)
    assert (len(iter(made)), len(made)) == (3, 4)


@pytest.mark.parametrize(
    "number", [np.int64(1), True, torch.tensor(1)], ids=["numpy", "bool", "tensor"]
)
def test_numbers_of_other_types(number: Any, loader: Any) -> None:
    made = loader(Made(n=3), num_workers=number, prefetch_factor=number)
    assert made.num_workers == made.prefetch_factor == 1
    assert values(made) == [[0], [1], [2]]


@pytest.mark.parametrize("used", [False, True])
def test_a_dataset_that_is_replaced_in_a_finished_loader(used: bool, loader: Any) -> None:
    made = loader(Made(n=3), batch_size=2)
    if used:
        list(made)
    object.__setattr__(made, "dataset", Made(lambda index: -index, 3))
    assert values(made) == [[0, -1], [-2]]


@pytest.mark.parametrize("number", [4, 1000])
def test_more_workers_than_cores_are_a_warning(
    number: int, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 2, raising=False)
    with pytest.warns(UserWarning, match="excessive worker creation"):
        loader(Made(), num_workers=number)


def test_penstocks_own_arguments_are_attributes_too() -> None:
    own = {"seed": 4, "cache": None, "kind": "threads", "on_error": "skip", "random": False}
    made = DataLoader(Made(), **own)  # type: ignore[arg-type]
    assert {name: getattr(made, name) for name in own} == own
