"""Upgraded torch loaders deliver the same batches and draw the same random numbers as before."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    dataloader,
)

from penstock.inject import upgrade  # noqa: E402
from penstock.inject.build import shuffles  # noqa: E402
from penstock.torch.iteration import Iteration  # noqa: E402

Install = Callable[..., None]


@pytest.fixture
def install() -> Iterator[Install]:
    """Installs the task with the given settings. The class is restored after the test."""
    original = DataLoader._get_iterator, DataLoader.__len__
    yield lambda **settings: upgrade.install(settings, dataloader)
    DataLoader._get_iterator, DataLoader.__len__ = original
    gc.collect()


class Rows(Dataset):  # type: ignore[misc]
    def __init__(self, n: int = 22) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return torch.full((2,), float(index)), {"index": index, "half": index / 2}


class Picky(Rows):
    """Has one bad sample."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index == 5:
            raise FileNotFoundError(f"row {index}")
        return super().__getitem__(index)


class Locked(Rows):
    """Can be inherited by a fork, but not pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10.0))


class Chunks:
    """A batch sampler that draws from Python's generator and has a wrong length."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(22))
        random.shuffle(order)
        return iter([order[:9], order[9:10], order[10:]])


class Pairs:
    """A batch sampler that yields tuples besides indices, which its dataset accepts."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1], [2, (3,)], [(4,), 5]])


class TakesPairs(Rows):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if isinstance(index, int) else index[0])


def seeded(number: int) -> Any:
    generator = torch.Generator()
    generator.manual_seed(number)
    return generator


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Rows(), 4),
    "shuffle": lambda: DataLoader(Rows(), 4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=seeded(3)),
    "replacement": lambda: DataLoader(
        Rows(), 4, sampler=RandomSampler(Rows(), replacement=True, num_samples=40)
    ),
    "weighted": lambda: DataLoader(Rows(), 5, sampler=WeightedRandomSampler([0.1] * 22, 30)),
    "subset": lambda: DataLoader(Rows(), 5, sampler=SubsetRandomSampler(range(4, 20))),
    "batch sampler": lambda: DataLoader(Rows(), batch_sampler=Chunks()),
    "no batches": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "collate": lambda: DataLoader(Rows(), 4, shuffle=True, collate_fn=lambda rows: (len(rows),)),
    "stream": lambda: DataLoader(Stream(), 4),
    "no indices": lambda: DataLoader(TakesPairs(), batch_sampler=Pairs()),
    "workers": lambda: DataLoader(Rows(), batch_sampler=Chunks(), num_workers=1),
    "persistent": lambda: DataLoader(
        Rows(), 4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=3
    ),
    "locked": lambda: DataLoader(Locked(), 4, shuffle=True, num_workers=1),
}
STAY = {
    "no indices": "stays as it is: its sampler yielded (3,), which is not an index of its 22 "
    "samples.",
}


def epochs(make: Callable[[], Any], count: int = 2) -> tuple[list[Any], list[Any]]:
    """All batches, and the states of the generators after each epoch."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    loader = make()
    batches, states = [], []
    for _ in range(count):
        batches += list(loader)
        own = loader.generator.get_state().tolist() if loader.generator is not None else []
        states.append((torch.get_rng_state().tolist(), random.getstate(), own, np.random.rand()))
    return batches, states


def plain(value: Any) -> Any:
    """The value with tensors as lists, which can be compared; other types stay."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


@pytest.mark.parametrize("name", LOADERS)
def test_batches_and_generators_are_those_of_torch(
    name: str, install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    batches, states = epochs(LOADERS[name])
    install()
    again, then = epochs(LOADERS[name])
    assert plain(again) == plain(batches)
    if name != "locked":  # torch's workers are started a second time, and draw a second seed
        assert then == states
    messages = capfd.readouterr().err.splitlines()
    assert "is upgraded" in messages[0]
    assert [line for line in messages if STAY.get(name, "stays") in line] == messages[1:]


def test_a_loop_that_is_left_has_drawn_as_in_torch(install: Install) -> None:
    def left() -> Any:
        loader = LOADERS["generator"]()
        next(iter(loader))
        return loader.generator.get_state().tolist()

    wanted = left()
    install()
    assert left() == wanted


def test_a_dataset_without_a_length_stays_with_torch(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    class Endless(Dataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> int:
            return index

    install()
    assert [batch.tolist() for batch in DataLoader(Endless(), sampler=[3, 100])] == [[3], [100]]
    assert "Endless has no length" in capfd.readouterr().err


def test_two_loops_at_once_both_get_everything(install: Install) -> None:
    make = LOADERS["shuffle"]
    torch.manual_seed(0)
    loader = make()
    wanted = plain(list(zip(loader, loader, strict=True)))
    install()
    torch.manual_seed(0)
    loader = make()
    assert plain(list(zip(loader, loader, strict=True))) == wanted


def test_an_abandoned_loop_does_not_disturb_later_ones(install: Install) -> None:
    install()
    loader = DataLoader(Rows(), 4)
    kept = iter(loader)
    next(kept)
    assert plain(next(iter(loader))) == plain(next(iter(loader)))
    assert [len(rows) for rows, _ in loader] == [4, 4, 4, 4, 4, 2]
    assert isinstance(kept, Iteration)
    assert plain(next(kept)[0])[1][0] == [4.0, 4.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_exceptions_of_the_dataset_arrive_unchanged(install: Install, workers: int) -> None:
    install()
    with pytest.raises(FileNotFoundError, match="row 5"):
        list(DataLoader(Picky(), 4, num_workers=workers))


def test_bad_samples_are_skipped_with_on_error_skip(install: Install) -> None:
    install(on_error="skip")
    assert sum(len(rows) for rows, _ in DataLoader(Picky(), 4)) == 21


def test_isinstance_subclasses_and_pickling_still_work(install: Install) -> None:
    original = DataLoader
    install(echo=2, echo_at="batch")
    assert torch.utils.data.DataLoader is original

    class Mine(DataLoader):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return (rows for rows, _ in super().__iter__())

    loader = Mine(Rows(), 4)
    assert [len(rows) for rows in loader] == [4, 4, 4, 4, 4, 2]
    assert len(loader) == 6
    again = pickle.loads(pickle.dumps(DataLoader(Rows(), 4)))
    assert len(list(again)) == 6


def test_echo_applies_to_shuffling_loaders_and_changes_their_length(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(echo=2, echo_at="batch")
    train, val = DataLoader(Rows(), 4, shuffle=True), DataLoader(Rows(), 4)
    assert (len(train), len(val)) == (12, 6)
    assert (len(list(train)), len(list(val))) == (12, 6)
    mine = DataLoader(Rows(), batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 4, False))
    assert (len(mine), len(list(mine))) == (6, 6)
    messages = capfd.readouterr().err.splitlines()
    assert [("echo 2" in line, "shuffled by Penstock" in line) for line in messages] == [
        (True, True),
        (False, False),
        (True, False),
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_with_penstocks_order_the_generators_advance_as_in_torch(
    install: Install, workers: int
) -> None:
    def make() -> Any:
        return DataLoader(TensorDataset(torch.arange(22.0)), 4, shuffle=True, num_workers=workers)

    _, states = epochs(make)
    install(echo=2, echo_at="batch")
    batches, then = epochs(make)
    assert then == states
    assert len(batches) == 2 * 12


def test_an_option_that_does_not_work_is_left_out_with_the_reason(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(cache="1MB", echo=2)
    loader = DataLoader(Rows(), 4, shuffle=True)
    assert len(list(loader)) == 6
    upgraded, echo, cache = capfd.readouterr().err.splitlines()
    assert upgraded.startswith("penstock: DataLoader 1 (Rows, 22 samples, shuffled) is upgraded: ")
    assert echo.startswith("  without --echo: its dataset has no attribute 'transform'")
    assert cache.endswith("say so with --no-random.")


def test_a_loader_that_fails_before_its_first_batch_is_torchs_again(
    install: Install, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    wanted = plain(list(LOADERS["locked"]()))
    # Our workers are not forked if a dataset holds CUDA tensors, and a lock cannot be pickled.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("penstock.torch.dataloader.holds_cuda_tensor", lambda dataset: True)
    install(echo=2, echo_at="batch")
    torch.manual_seed(2)
    loader = LOADERS["locked"]()
    assert plain(list(loader)) == wanted
    assert len(loader) == 6
    assert "stays as it is: the pipeline cannot be sent" in capfd.readouterr().err


def test_a_cache_holds_the_samples_of_a_dataset_without_randomness(install: Install) -> None:
    class Counted(Rows):
        asked = 0

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            type(self).asked += 1
            return super().__getitem__(index)

    install(cache="1MB", random=False)
    loader = DataLoader(Counted(), 4, shuffle=True)
    for _ in range(3):
        assert sorted(row for rows, _ in loader for row in rows[:, 0].tolist()) == list(range(22))
    assert Counted.asked <= 22


def test_only_the_first_rank_prints_messages(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(rank=1)
    assert len(list(DataLoader(Rows(), 4))) == 6
    assert capfd.readouterr().err == ""


def test_a_collected_loader_ends_its_workers(install: Install) -> None:
    install()
    before = set(psutil.Process().children())
    loader = DataLoader(Rows(), 4, num_workers=1)
    list(loader)
    started = set(psutil.Process().children()) - before
    assert len(started) == 1
    del loader
    gc.collect()
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_workers_of_the_command_replace_those_of_the_script(install: Install) -> None:
    install(workers=2, kind="threads")
    data = TensorDataset(torch.arange(10.0))
    assert [rows.tolist() for [rows] in DataLoader(data, 5)] == [
        [0.0, 1.0, 2.0, 3.0, 4.0],
        [5.0, 6.0, 7.0, 8.0, 9.0],
    ]


def test_shuffling_loaders_are_recognised() -> None:
    distributed = torch.utils.data.DistributedSampler
    rows = Rows()

    class Wrapper:
        def __init__(self, batch_sampler: Any) -> None:
            self.batch_sampler = batch_sampler

        def __iter__(self) -> Iterator[Any]:
            return iter(self.batch_sampler)

    def shuffled(**arguments: Any) -> bool:
        return shuffles(DataLoader(rows, **arguments))

    assert shuffled(shuffle=True)
    assert shuffled(batch_size=None, shuffle=True)
    assert shuffled(sampler=[3, 1])
    assert shuffled(batch_sampler=Chunks())
    assert shuffled(sampler=distributed(rows, 2, 0))
    assert shuffled(batch_sampler=Wrapper(BatchSampler(RandomSampler(rows), 2, False)))
    assert not shuffled()
    assert not shuffled(batch_size=None)
    assert not shuffled(sampler=range(4))
    assert not shuffled(sampler=distributed(rows, 2, 0, shuffle=False))
    assert not shuffled(batch_sampler=Wrapper(BatchSampler(SequentialSampler(rows), 2, False)))
    assert not shuffles(DataLoader(Stream()))


@pytest.mark.parametrize("settings", [{}, {"echo": 2, "echo_at": "batch"}], ids=str)
def test_a_launcher_changes_nothing_as_in_torch(
    settings: dict[str, Any], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    install(random=False, **settings)
    for data in (Rows(), Stream()):
        # Only a sampler divides the samples of torch's loader.
        loader = DataLoader(data, 2, shuffle=True if isinstance(data, Rows) else None)
        rows = [x for batch in loader for x in (batch[0] if isinstance(batch, list) else batch)]
        stream = isinstance(data, Stream)
        assert len(rows) == (10 if stream else 22 * settings.get("echo", 1))
