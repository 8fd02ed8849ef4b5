"""Checkpoints of the drop-in hash nothing within an epoch, and notice a changed dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from penstock.errors import StateError
from penstock.fingerprint.walk import Walk
from penstock.source.listing import Listing
from penstock.torch import DataLoader


class Numbers(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self.samples = [(f"number {number}", number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index][1]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was hashed, or asked of the file system."""
    made: list[str] = []
    start, stats = Walk.__init__, Listing.stats

    def counted(walk: Walk, opened: dict[int, int]) -> None:
        made.append("hash")
        start(walk, opened)

    def asked(listing: Listing, first: int, last: int) -> Any:
        made.append("stats")
        return stats(listing, first, last)

    monkeypatch.setattr(Walk, "__init__", counted)
    monkeypatch.setattr(Listing, "stats", asked)
    return made


@pytest.mark.parametrize("workers", [0, 1])
def test_checkpoints_of_a_dataset_hash_it_once_an_epoch(hashed: list[str], workers: int) -> None:
    with DataLoader(Numbers(30), batch_size=5, num_workers=workers) as loader:
        for _ in range(2):
            epoch = iter(loader)
            next(epoch)
            loader.state_dict()
            del hashed[:]
            for _ in epoch:
                loader.state_dict()
            assert hashed == []


def test_checkpoints_of_an_image_folder_hash_nothing(
    torchvision: Any, tmp_path: Path, hashed: list[str]
) -> None:
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        picture = np.full((12, 12, 3), number, np.uint8)
        cv2.imwrite(str(tmp_path / "ab"[number % 2] / f"{number}.jpg"), picture)
    dataset = torchvision.datasets.ImageFolder(tmp_path, torchvision.transforms.ToTensor())
    with DataLoader(dataset, batch_size=2, num_workers=1) as loader:
        epoch = iter(loader)
        next(epoch)
        first = loader.state_dict()
        assert all(first["data"].values())
        del hashed[:]
        for _ in epoch:
            assert loader.state_dict()["data"] == first["data"]
        assert hashed == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_changed_between_epochs_is_noticed(workers: int) -> None:
    dataset = Numbers(30)
    with DataLoader(dataset, batch_size=5, num_workers=workers) as loader:
        list(loader)
        before = loader.state_dict()
        dataset.samples = dataset.samples[::-1]
        next(iter(loader))
        after = loader.state_dict()
    assert before["data"] != after["data"]
    with (
        DataLoader(Numbers(30), batch_size=5, num_workers=workers) as fresh,
        pytest.raises(StateError, match="the data is not the same"),
    ):
        fresh.load_state_dict(after)


def test_a_checkpoint_between_epochs_describes_the_dataset_as_it_is_then() -> None:
    dataset = Numbers(30)
    with DataLoader(dataset, batch_size=5, seed=1) as loader:
        list(loader)
        before = loader.state_dict()
        dataset.samples = dataset.samples[::-1]
        after = loader.state_dict()
        rest = [batch.tolist() for batch in loader]
    with DataLoader(dataset, batch_size=5, seed=1) as fresh:
        with pytest.raises(StateError, match="the data is not the same"):
            fresh.load_state_dict(before)
        fresh.load_state_dict(after)
        assert [batch.tolist() for batch in fresh] == rest


def test_a_dataset_that_stays_is_hashed_once(hashed: list[str]) -> None:
    with DataLoader(Numbers(30), batch_size=5, num_workers=1, persistent_workers=True) as loader:
        for _ in range(2):
            list(loader)
            loader.state_dict()
        del hashed[:]
        for _ in range(100):
            loader.state_dict()
        assert hashed == []
