"""A torch DataLoader is analysed without a trace, and what was trained is put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from penstock.diagnose.analyze.opened import Opened
from penstock.torch.device import TorchDevice
from penstock.torch.restoring import Before
from penstock.torch.subject import TorchSubject


class Notes(Opened):
    """Without the audit hook, which would stay in this process: files are told to it."""

    def __init__(self, directory: Path) -> None:
        self.on = False
        self._directory = directory


class Files(Dataset[torch.Tensor]):
    """Samples in files of their own, opened where nobody sees it."""

    def __init__(self, folder: Path, count: int) -> None:
        self.samples = []
        for number in range(count):
            path = folder / f"{number:03}"
            path.write_bytes(bytes([number]) * (1_000 + 10 * number))
            self.samples.append((str(path), number))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        path, label = self.samples[index]
        return torch.tensor([Path(path).read_bytes()[0], label])


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    place = tmp_path / "notes"
    place.mkdir()
    return Notes(place)


@pytest.fixture
def data(tmp_path: Path) -> Files:
    place = tmp_path / "data"
    place.mkdir()
    return Files(place, 64)


def subject_of(loader: DataLoader[Any], notes: Opened) -> TorchSubject:
    return TorchSubject(loader, DataLoader.__iter__, notes)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_analysis_leaves_no_trace_in_the_scripts_generators(
    data: Files, notes: Notes, workers: int
) -> None:
    loader = DataLoader(
        data, 4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5)
    )
    expected = [one.tolist() for one in loader]
    loader.generator.manual_seed(5)  # type: ignore[union-attr]
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    subject = subject_of(loader, notes)
    subject.learn()
    cached = subject.cached()
    found = list(islice(cached, 3))
    cached.close()  # type: ignore[attr-defined]
    subject.operations()
    subject.close()
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])  # type: ignore[arg-type]
    assert [len(one) for one in found] == [4, 4, 4]
    assert [one.tolist() for one in loader] == expected


def test_what_a_loader_is_like_is_told(data: Files, notes: Notes) -> None:
    loader = DataLoader(data, 4, num_workers=2, prefetch_factor=3)
    subject = subject_of(loader, notes)
    subject.learn()
    subject.close()
    setup = subject.setup
    assert (setup.samples, setup.batch, setup.piece) == (64, 4, 4)
    assert (setup.workers, setup.kind, setup.ahead) == (2, "processes", 6)
    assert setup.sample_bytes == pytest.approx(1_000 + 10 * 31.5)
    assert 0.5 < subject.sizes[0] < 1.0 < subject.sizes[-1] < 1.5


def test_batches_that_are_timed_are_noted_by_the_workers(data: Files, notes: Notes) -> None:
    subject = subject_of(DataLoader(data, 4, num_workers=2), notes)
    subject.learn()
    assert subject.batch_times() == []
    cached = subject.cached()
    assert len(list(islice(cached, 40))) == 40  # more than there are: they come again
    cached.close()  # type: ignore[attr-defined]
    assert len(subject.batch_times()) >= 40
    subject.close()


def test_penstock_takes_its_place_with_the_same_batches(data: Files, notes: Notes) -> None:
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    subject = subject_of(loader, notes)
    subject.learn()
    theirs, ours = subject.cached(), subject.replaced()
    assert ours is not None
    expected, found = list(islice(theirs, 3)), list(islice(ours, 3))
    ours.close()  # type: ignore[attr-defined]
    subject.close()
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


class Told(Files):
    """A dataset whose workers tell it something, and which is asked for many at once."""

    more = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] + self.more for index in indices]


def tell(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert len(info.dataset.samples) == 4  # type: ignore[attr-defined]
    info.dataset.more = 100  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_come_late_are_the_same(data: Files, notes: Notes, workers: int) -> None:
    subject = subject_of(DataLoader(data, 4, num_workers=workers), notes)
    subject.learn()
    at_once, late = subject.cached(workers), subject.cached(workers, (0.0, 0.002))
    assert [one.tolist() for one in islice(late, 5)] == [one.tolist() for one in islice(at_once, 5)]
    subject.close()
    late.close()  # type: ignore[attr-defined]
    at_once.close()  # type: ignore[attr-defined]


def test_a_dataset_that_is_late_passes_for_itself(tmp_path: Path, notes: Notes) -> None:
    loader = DataLoader(Told(tmp_path, 4), 2, num_workers=1, worker_init_fn=tell)
    subject = subject_of(loader, notes)
    subject.learn()
    late = subject.cached(1, (0.0, 0.002))
    found = [one.tolist() for one in islice(late, 2)]
    assert found == [[[100, 100], [101, 101]], [[102, 102], [103, 103]]]
    late.close()  # type: ignore[attr-defined]
    subject.close()


def test_a_loader_of_single_samples_is_analysed_too(data: Files, notes: Notes) -> None:
    subject = subject_of(DataLoader(data, batch_size=None), notes)
    subject.learn()
    cached = subject.cached()
    assert [one.tolist() for one in islice(cached, 2)] == [[0, 0], [1, 1]]
    assert subject.setup.batch == 1
    assert subject.replaced() is None
    subject.close()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_stream_counts_as_preparation_altogether(notes: Notes) -> None:
    subject = subject_of(DataLoader(Stream(), 2), notes)
    subject.learn()
    assert "cannot be told apart" in subject.notes[0]
    assert subject.cold() is None
    assert subject.reading(1, cold=True) is None
    cached = subject.cached()
    assert len(list(islice(cached, 7))) == 7  # it begins again
    subject.close()


# The device.


def test_a_batch_that_the_loop_writes_into_is_replayed_as_it_was() -> None:
    device = TorchDevice(torch.device("cpu"))
    batch = device.to_device((torch.ones(3), {"label": torch.zeros(2)}, "name"))
    assert device.again(batch) is batch
    fresh = device.again(batch)
    fresh[0].add_(1)
    copied = device.again(batch)
    assert copied[0] is not batch[0]
    assert copied[2] == "name"
    copied[0].add_(1)
    assert torch.equal(device.again(batch)[0], batch[0])


def test_copies_are_timed_where_there_is_a_device() -> None:
    device = TorchDevice(torch.device("cpu"))
    assert device.name == "cpu"
    assert device.copying([torch.ones(8)]) == 0.0
    assert device._timed_copies([torch.ones(8), "text"]) > 0.0
    device.sync()
    assert device.agree(True)
    assert not device.agree(False)


# What was trained.


def test_training_goes_on_as_if_nothing_had_been() -> None:
    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout()
        )
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(model: Any, optimizer: Any, schedule: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.rand(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    expected = train(*made(), 6)
    parts = made()
    first = train(*parts, 2)
    before = Before()
    train(*parts, 3)
    before.restore()
    assert first + train(*parts, 4) == expected
