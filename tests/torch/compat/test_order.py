"""The order of samples is torch's, also after seeding again, and so are the draws it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock.torch import DataLoader
from tests.torch.compat.datasets import Made, Stream, values

DATA = Made()


class LazyNumpy:
    """Draws for each index, from NumPy."""

    def __iter__(self) -> Any:
        for _ in range(6):
            yield int(np.random.randint(10))


class Eager:
    """Draws where its iteration begins."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(10).tolist())

    def __len__(self) -> int:
        return 10


class Lazy:
    """Draws for each index."""

    def __iter__(self) -> Any:
        for _ in range(6):
            yield int(torch.randint(10, (1,)))


ORDERS: dict[str, Any] = {
    "plain": dict,
    "batches of 3": lambda: {"batch_size": 3},
    "drop last": lambda: {"batch_size": 3, "drop_last": True},
    "shuffle": lambda: {"shuffle": True, "batch_size": 3},
    "shuffle, drop last": lambda: {"shuffle": True, "batch_size": 4, "drop_last": True},
    "generator": lambda: {
        "shuffle": True,
        "batch_size": 4,
        "generator": torch.Generator().manual_seed(3),
    },
    "random sampler": lambda: {"sampler": RandomSampler(DATA), "batch_size": 4},
    "replacement": lambda: {"sampler": RandomSampler(DATA, True, 13), "batch_size": 4},
    "sequential sampler": lambda: {"sampler": SequentialSampler(DATA), "batch_size": 4},
    "subset": lambda: {"sampler": SubsetRandomSampler([1, 5, 7]), "batch_size": 2},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 10, 15), "batch_size": 4},
    "distributed": lambda: {"sampler": DistributedSampler(DATA, 2, 1), "batch_size": 2},
    "list": lambda: {"sampler": [3, 1, 3, 9], "batch_size": 2},
    "range": lambda: {"sampler": range(0, 10, 3), "batch_size": 2},
    "tensor": lambda: {"sampler": torch.tensor([4, 2, 0]), "batch_size": 2},
    "eager": lambda: {"sampler": Eager(), "batch_size": 3},
    "lazy": lambda: {"sampler": Lazy(), "batch_size": 4},
    "lazy, NumPy": lambda: {"sampler": LazyNumpy(), "batch_size": 2},
    "lazy, single": lambda: {"sampler": Lazy(), "batch_size": None},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA), 3, False)},
    "batches given": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "single samples": lambda: {"batch_size": None},
    "single, shuffled": lambda: {"batch_size": None, "shuffle": True},
    "single, sampler": lambda: {"batch_size": None, "sampler": [5, 5, 1]},
}


def epochs(loader: Any, options: dict[str, Any], **more: Any) -> Any:
    """Two epochs, the first again after seeding, and the state of the script's generator."""
    np.random.seed(0)
    made = loader(DATA, **options, **more)
    seen = [values(made), values(made)]
    torch.manual_seed(0)
    if options.get("generator") is not None:
        options["generator"].manual_seed(3)
    seen.append(values(made))
    return seen, torch.rand(1).item()


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_epochs_and_the_draws_are_torchs(order: str, loader: Any) -> None:
    expected = epochs(torch.utils.data.DataLoader, ORDERS[order]())
    torch.manual_seed(0)
    seen, drawn = epochs(loader, ORDERS[order]())
    assert (seen, drawn) == expected
    if not order.startswith("lazy") and order != "random sampler":
        assert seen[0] == seen[2]


@pytest.mark.parametrize("order", ["shuffle", "generator", "weighted", "lazy", "batch sampler"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_do_not_change_the_order(order: str, persistent: bool, loader: Any) -> None:
    more: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
    if loader is torch.utils.data.DataLoader and order != "shuffle":
        pytest.skip("torch's own worker processes are needed for one order only")
    expected = _torch_draws(ORDERS[order](), persistent)
    torch.manual_seed(0)
    made = loader(DATA, **ORDERS[order](), **more)
    assert [values(made), values(made)] == expected


LATE = ["shuffle", "generator", "replacement", "lazy", "lazy, NumPy", "lazy, single"]


def beside_a_loop(loader: Any, order: str, leave: bool, workers: int) -> Any:
    """Batches and random numbers of a loop that draws too, and may be left."""
    torch.manual_seed(0)
    np.random.seed(0)
    options = ORDERS[order]()
    made, seen = loader(DATA, **options, num_workers=workers), []
    for _ in range(2):
        for number, batch in enumerate(made):
            seen += [batch.tolist() if isinstance(batch, torch.Tensor) else batch]
            seen += [torch.rand(1).item(), np.random.rand()]
            if leave and number == 1:
                break
        if options.get("generator") is not None:
            seen.append(options["generator"].get_state().tolist())
    return seen


@pytest.mark.parametrize("order", LATE)
@pytest.mark.parametrize("leave", [False, True])
def test_samplers_draw_between_the_draws_of_the_loop(order: str, leave: bool, loader: Any) -> None:
    expected = beside_a_loop(torch.utils.data.DataLoader, order, leave, 0)
    assert beside_a_loop(loader, order, leave, 0) == expected


@pytest.mark.parametrize("order", ["generator", "lazy"])
def test_with_workers_samplers_draw_as_far_ahead_as_in_torch(order: str, loader: Any) -> None:
    if loader is torch.utils.data.DataLoader:
        pytest.skip("torch says what is right")
    expected = beside_a_loop(torch.utils.data.DataLoader, order, True, 1)
    assert beside_a_loop(loader, order, True, 1) == expected


def drawn_beside_a_loop(loader: Any, **options: Any) -> list[int]:
    """How many batches a sampler of the script has drawn whenever the loop gets one."""
    drawn: list[int] = []

    class Recording(Sampler[int]):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            drawn.append(0)
            for index in range(len(DATA)):
                drawn[-1] += 1
                yield index

    return [drawn[-1] for _ in loader(DATA, sampler=Recording(), **options)]


@pytest.mark.parametrize("more", [{"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 1}])
def test_batches_on_the_way_to_a_device_count_among_those_drawn_ahead(more: Any) -> None:
    expected = drawn_beside_a_loop(torch.utils.data.DataLoader, **more)
    assert drawn_beside_a_loop(DataLoader, device="meta", **more) == expected


def _torch_draws(options: dict[str, Any], persistent: bool) -> Any:
    """What torch delivers with a worker, without one: it begins the sampler twice, and draws the
    first batches ahead."""
    made = torch.utils.data.DataLoader(DATA, **options)
    generator = options.get("generator")
    seen = []
    for epoch in range(2):
        if epoch == 0 or not persistent:
            iter(made._index_sampler)
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        drawn = list(made._index_sampler)
        seen.append([[float(index) for index in batch] for batch in drawn])
    return seen


def test_two_loaders_made_after_one_seed_differ(loader: Any) -> None:
    one, other = (loader(DATA, batch_size=10, shuffle=True) for _ in range(2))
    assert values(one) != values(other)


@pytest.mark.parametrize("size", [1, 3, 10, 11])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dataset", [Made(), Stream(10), Made(n=1)], ids=["map", "stream", "one"])
def test_batch_sizes(size: int, drop_last: bool, dataset: Any, loader: Any) -> None:
    n = dataset.n
    made = loader(dataset, batch_size=size, drop_last=drop_last)
    whole, rest = divmod(n, size)
    sizes = [size] * whole + ([rest] if rest and not drop_last else [])
    assert [len(batch) for batch in made] == sizes
    assert [x for batch in made for x in batch] == list(range(n))[: sum(sizes)]


def test_set_epoch_of_a_distributed_sampler_changes_the_order(loader: Any) -> None:
    sampler = DistributedSampler(DATA, 2, 0)
    made = loader(DATA, batch_size=5, sampler=sampler)
    first = values(made)
    assert values(made) == first
    made.sampler.set_epoch(1)
    assert values(made) != first


def test_the_batch_size_of_the_batch_sampler_may_be_changed(loader: Any) -> None:
    made = loader(DATA, batch_size=5)
    assert [len(batch) for batch in made] == [5, 5]
    made.batch_sampler.batch_size = 4
    assert [len(batch) for batch in made] == [4, 4, 2]
