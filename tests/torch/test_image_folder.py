"""An ImageFolder is taken apart into files, decode and maps, which give the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from penstock.torch import DataLoader
from penstock.torch.image_folder import take_apart


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of smooth pictures, on which different antialiasing differs little."""
    rng = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / ("cats" if i % 2 else "dogs")
        folder.mkdir(exist_ok=True)
        small = rng.integers(0, 256, size=(6, 8, 3), dtype=np.uint8)
        picture = cv2.resize(small, (120, 90), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(folder / f"{i:02}.jpg"), picture)
    return tmp_path


def folder(torchvision: Any, photos: Path, *steps: Any) -> Any:
    transforms = torchvision.transforms
    return torchvision.datasets.ImageFolder(photos, transforms.Compose(list(steps)))


def test_fixed_transforms_give_what_torchvision_gives(torchvision: Any, photos: Path) -> None:
    t = torchvision.transforms
    dataset = folder(
        torchvision,
        photos,
        t.Resize(64),
        t.CenterCrop(48),
        t.ToTensor(),
        t.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    )
    expected = torch.stack([dataset[i][0] for i in range(12)])
    with DataLoader(dataset, batch_size=12, num_workers=1) as loader:
        images, labels = next(iter(loader))
        assert loader._loader.choice.kind == "threads"
        assert "normalize" in repr(loader._loader.pipeline)
    assert images.dtype == torch.float32
    assert images.shape == (12, 3, 48, 48)
    assert (images - expected).abs().mean() < 2 / 255 / 0.2
    assert labels.tolist() == dataset.targets


def test_random_transforms_run_natively_and_vary_by_epoch(torchvision: Any, photos: Path) -> None:
    t = torchvision.transforms
    dataset = folder(
        torchvision,
        photos,
        t.RandomResizedCrop(32, scale=(0.3, 1.0)),
        t.RandomHorizontalFlip(),
        t.ToTensor(),
    )
    with DataLoader(dataset, batch_size=12, num_workers=2, seed=1) as loader:
        (first, _), (second, _) = next(iter(loader)), next(iter(loader))
    assert first.shape == (12, 3, 32, 32)
    assert first.min() >= 0
    assert first.max() <= 1
    assert not torch.equal(first, second)
    with DataLoader(dataset, batch_size=12, num_workers=0, seed=1) as loader:
        assert torch.equal(next(iter(loader))[0], first)


def test_native_false_keeps_torchvisions_own_transforms(torchvision: Any, photos: Path) -> None:
    t = torchvision.transforms
    dataset = folder(torchvision, photos, t.Resize((40, 40)), t.ToTensor())
    expected = torch.stack([dataset[i][0] for i in range(12)])
    with DataLoader(dataset, batch_size=12, native=False) as loader:
        assert torch.equal(next(iter(loader))[0], expected)


def test_one_transform_without_equivalent_keeps_all_as_they_are(
    torchvision: Any, photos: Path
) -> None:
    t = torchvision.transforms
    dataset = folder(torchvision, photos, t.Resize((40, 40)), t.Grayscale(3), t.ToTensor())
    expected = torch.stack([dataset[i][0] for i in range(12)])
    with DataLoader(dataset, batch_size=12) as loader:
        assert torch.equal(next(iter(loader))[0], expected)


@pytest.mark.parametrize("native", [True, False])
def test_the_cache_holds_the_encoded_files(torchvision: Any, photos: Path, native: bool) -> None:
    t = torchvision.transforms
    dataset = folder(
        torchvision, photos, t.RandomResizedCrop(32), t.RandomHorizontalFlip(), t.ToTensor()
    )
    options: dict[str, Any] = {"batch_size": 4, "cache": "1MB", "native": native}
    with DataLoader(dataset, **options) as loader:
        for _ in range(3):
            list(loader)
        stats = loader.stats()
    sizes = sum(Path(path).stat().st_size for path, _ in dataset.samples)
    assert stats.bytes_read == sizes
    assert (stats.caches[0].hits, stats.caches[0].misses) == (24, 12)


def test_datasets_that_are_not_plain_are_left_whole(torchvision: Any, photos: Path) -> None:
    make = torchvision.datasets.ImageFolder

    class Subclass(make):  # type: ignore[misc, valid-type]
        pass

    assert take_apart(make(photos), True) is not None
    assert take_apart(Subclass(photos), True) is None
    assert take_apart(make(photos, loader=lambda path: path), True) is None
    assert take_apart(make(photos, target_transform=str), True) is None
    assert take_apart([1, 2], True) is None
