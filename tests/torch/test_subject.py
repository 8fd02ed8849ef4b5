"""A torch DataLoader is analysed without side effects, and training is restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from penstock.diagnose.analyze.sample_files import OpenedFiles
from penstock.torch import subject as torch_subject
from penstock.torch.analysis import TorchDevice
from penstock.torch.restoring import SavedTraining
from penstock.torch.subject import TorchSubject


class Notes(OpenedFiles):
    """Without the audit hook, which could not be removed from this process."""

    def __init__(self, directory: Path) -> None:
        self.on = False
        self._directory = directory


class FileDataset(Dataset[torch.Tensor]):  # type: ignore[misc]
    """Each sample is a file, and nothing records that it is opened."""

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
def data(tmp_path: Path) -> FileDataset:
    place = tmp_path / "data"
    place.mkdir()
    return FileDataset(place, 64)


def close(batches: Iterator[Any]) -> None:
    cast(Generator[Any], batches).close()


def subject_of(loader: DataLoader[Any], notes: OpenedFiles) -> TorchSubject:
    return TorchSubject(loader, DataLoader.__iter__, notes)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_analysis_does_not_change_the_generators_of_the_script(
    data: FileDataset, notes: Notes, workers: int
) -> None:
    loader = DataLoader(
        data, 4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5)
    )
    expected = [batch.tolist() for batch in loader]
    loader.generator.manual_seed(5)
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"],
    )
    subject = subject_of(loader, notes)
    subject.choose_samples()
    cached = subject.cached()
    found = list(islice(cached, 3))
    close(cached)
    subject.operations()
    subject.close()
    after = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"],
    )
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    assert [len(batch) for batch in found] == [4, 4, 4]
    assert [batch.tolist() for batch in loader] == expected


def test_the_setup_describes_the_loader(data: FileDataset, notes: Notes) -> None:
    loader = DataLoader(data, 4, num_workers=2, prefetch_factor=3)
    subject = subject_of(loader, notes)
    subject.choose_samples()
    subject.close()
    setup = subject.setup
    assert (setup.samples, setup.batch, setup.piece) == (64, 4, 4)
    assert (setup.workers, setup.kind, setup.ahead) == (2, "processes", 6)
    assert setup.sample_bytes == pytest.approx(1_000 + 10 * 31.5)
    assert 0.5 < subject.sizes[0] < 1.0 < subject.sizes[-1] < 1.5


def test_workers_note_the_times_of_their_batches(data: FileDataset, notes: Notes) -> None:
    subject = subject_of(DataLoader(data, 4, num_workers=2), notes)
    subject.choose_samples()
    assert subject.batch_times() == []
    cached = subject.cached()
    assert len(list(islice(cached, 40))) == 40  # more than there are: they are repeated
    close(cached)
    assert len(subject.batch_times()) >= 40
    subject.close()


def test_penstocks_loader_yields_the_same_batches(data: FileDataset, notes: Notes) -> None:
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    subject = subject_of(loader, notes)
    subject.choose_samples()
    theirs, ours = subject.cached(), subject.with_penstock()
    assert ours is not None
    expected, found = list(islice(theirs, 3)), list(islice(ours, 3))
    close(ours)
    subject.close()
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


@pytest.mark.parametrize(("own", "measured"), [(0, 1), (1, 1)])
def test_penstocks_loader_is_measured_with_as_many_workers_as_its_cost_is_divided_by(
    data: FileDataset, notes: Notes, monkeypatch: pytest.MonkeyPatch, own: int, measured: int
) -> None:
    # Without workers it was measured with two of them, and its cost was taken for that of one: 2
    # workers were predicted to be 3.42 times as fast, and were 2.10 times as fast.
    asked: list[int] = []

    def made(*_: Any, num_workers: int, **__: Any) -> Any:
        asked.append(num_workers)

    monkeypatch.setattr(torch_subject, "OwnLoader", made)
    subject = subject_of(DataLoader(data, 4, num_workers=own), notes)
    subject.with_penstock()
    assert asked == [measured]


class AdjustableDataset(FileDataset):
    """A dataset that workers adjust, and that reads several samples at once."""

    more = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] + self.more for index in indices]


def adjust(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert len(info.dataset.samples) == 4
    info.dataset.more = 100


@pytest.mark.parametrize("workers", [0, 1])
def test_delayed_samples_are_the_same(data: FileDataset, notes: Notes, workers: int) -> None:
    subject = subject_of(DataLoader(data, 4, num_workers=workers), notes)
    subject.choose_samples()
    at_once, delayed = subject.cached(workers), subject.cached(workers, (0.0, 0.002))
    expected = [batch.tolist() for batch in islice(at_once, 5)]
    assert [batch.tolist() for batch in islice(delayed, 5)] == expected
    subject.close()
    close(delayed)
    close(at_once)


def test_workers_can_adjust_a_delayed_dataset(tmp_path: Path, notes: Notes) -> None:
    loader = DataLoader(AdjustableDataset(tmp_path, 4), 2, num_workers=1, worker_init_fn=adjust)
    subject = subject_of(loader, notes)
    subject.choose_samples()
    delayed = subject.cached(1, (0.0, 0.002))
    found = [batch.tolist() for batch in islice(delayed, 2)]
    assert found == [[[100, 100], [101, 101]], [[102, 102], [103, 103]]]
    close(delayed)
    subject.close()


def test_a_loader_without_batches_is_analysed_too(data: FileDataset, notes: Notes) -> None:
    subject = subject_of(DataLoader(data, batch_size=None), notes)
    subject.choose_samples()
    cached = subject.cached()
    assert [batch.tolist() for batch in islice(cached, 2)] == [[0, 0], [1, 1]]
    assert subject.setup.batch == 1
    assert subject.with_penstock() is None
    subject.close()


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_the_fetching_of_a_stream_counts_as_preparation(notes: Notes) -> None:
    subject = subject_of(DataLoader(Stream(), 2), notes)
    subject.choose_samples()
    assert "cannot be told apart" in subject.notes[0]
    assert subject.cold() is None
    assert subject.reading(1, cold=True) is None
    cached = subject.cached()
    assert len(list(islice(cached, 7))) == 7  # it is repeated
    subject.close()


# The device.


def test_a_batch_that_the_loop_writes_into_is_replayed_unchanged() -> None:
    device = TorchDevice(torch.device("cpu"))
    batch = device.to_device((torch.ones(3), {"label": torch.zeros(2)}, "name"))
    assert device.replayed(batch) is batch
    fresh = device.replayed(batch)
    fresh[0].add_(1)
    copied = device.replayed(batch)
    assert copied[0] is not batch[0]
    assert copied[2] == "name"
    copied[0].add_(1)
    assert torch.equal(device.replayed(batch)[0], batch[0])


def test_copies_to_a_device_are_timed() -> None:
    device = TorchDevice(torch.device("cpu"))
    assert device.name == "cpu"
    assert device.copy_seconds([torch.ones(8)]) == 0.0
    assert device._timed_copies([torch.ones(8), "text"]) > 0.0
    device.sync()
    assert device.agree(True)
    assert not device.agree(False)


# Restoring.


def test_training_continues_from_the_saved_state() -> None:
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
    saved = SavedTraining()
    train(*parts, 3)
    saved.restore()
    assert first + train(*parts, 4) == expected
