"""Refurbishing and echoing through the drop-in DataLoader."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError
from penstock.stops.refurbish import Refurbish
from penstock.torch import DataLoader

IMPORTED = "fork"
"""Forked workers have the torchvision of this process. Where its compiled operators do not fit the
installed torch, no other process can import it."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / ("cats" if i % 2 else "dogs")
        folder.mkdir(exist_ok=True)
        picture = rng.integers(0, 256, size=(48, 64, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{i:02}.jpg"), picture)
    return tmp_path


def folder(torchvision: Any, photos: Path) -> Any:
    t = torchvision.transforms
    steps = [
        t.RandAugment(2, 9),
        t.RandomResizedCrop(32),
        t.RandomHorizontalFlip(),
        t.ToTensor(),
        t.Normalize((0.5,) * 3, (0.5,) * 3),
    ]
    return torchvision.datasets.ImageFolder(photos, t.Compose(steps))


def stops(loader: DataLoader) -> list[str]:
    return [stop.name for stop in loader._loader.pipeline.stops]


@pytest.mark.parametrize("native", [True, False])
def test_split_counts_the_transforms_that_run_every_time(
    torchvision: Any, photos: Path, native: bool
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "native": native}
    with DataLoader(folder(torchvision, photos), reuse=3, split=4, **options) as loader:
        epochs = [[x.clone() for x, _ in loader] for _ in range(4)]
        stats = loader.stats().refurbish
        names = stops(loader)
    assert stats is not None
    assert (stats.fresh, stats.reused) == (24, 24)
    below = names[names.index("refurbish") + 1 :]
    if native:
        assert names[:3] == ["decode", "rand_augment", "refurbish"]
        assert below == ["random_resized_crop", "random_flip", "normalize"]
    else:
        assert below == ["RandomResizedCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"]
    context = None if native else IMPORTED
    with DataLoader(
        folder(torchvision, photos),
        reuse=3,
        split=4,
        num_workers=2,
        multiprocessing_context=context,
        **options,
    ) as loader:
        again = [[x.clone() for x, _ in loader] for _ in range(4)]
    for epoch, same_epoch in zip(epochs, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(epoch, same_epoch, strict=True))


class Numbers(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """A dataset with a transform in the same attribute as torchvision's datasets."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, int]:
        value = torch.tensor([float(index), 0.0, 0.0])
        return (value if self.transform is None else self.transform(value)), index


def first(value: torch.Tensor) -> torch.Tensor:
    out = value.clone()
    out[1] = torch.rand(())
    return out


def last(value: torch.Tensor) -> torch.Tensor:
    out = value.clone()
    out[2] = torch.rand(())
    return out


def rows(loader: DataLoader, epochs: int) -> torch.Tensor:
    return torch.cat([x.clone() for _ in range(epochs) for x, _ in loader])


def test_the_transforms_of_any_dataset_are_taken_out_of_it(torchvision: Any) -> None:
    dataset = Numbers(torchvision.transforms.Compose([first, last]))
    with DataLoader(dataset, batch_size=5, shuffle=True, reuse=2, split=1, seed=1) as loader:
        seen = rows(loader, 5)
        stats = loader.stats().refurbish
    assert stats is not None
    assert (stats.fresh, stats.reused) == (60, 40)
    assert len(set(seen[:, 1].tolist())) == 60
    assert len(set(seen[:, 2].tolist())) == 100
    assert dataset.transform is not None


def test_partial_and_final_are_two_callables() -> None:
    both: dict[str, Any] = {"partial": first, "final": last}
    for options in (both, {"final": last}):
        data = Numbers() if "partial" in options else Numbers(first)
        with DataLoader(data, batch_size=5, shuffle=True, reuse=2, seed=1, **options) as loader:
            seen = rows(loader, 5)
        assert len(set(seen[:, 1].tolist())) == 60
        assert len(set(seen[:, 2].tolist())) == 100


@pytest.mark.parametrize(
    ("at", "partial", "final"), [("sample", 40, 40), ("augmented", 20, 20), ("batch", 20, 20)]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_echo_stands_where_it_is_put(
    torchvision: Any, at: Any, partial: int, final: int, workers: int
) -> None:
    dataset = Numbers(torchvision.transforms.Compose([first, last]))
    with DataLoader(
        dataset,
        batch_size=5,
        shuffle=True,
        echo=2,
        echo_at=at,
        seed=1,
        num_workers=workers,
        multiprocessing_context=IMPORTED if workers else None,
    ) as loader:
        assert len(loader) == 8
        seen = rows(loader, 1)
        stats = loader.stats().echo
    assert stats is not None
    assert (stats.fresh, stats.delivered) == (20, 40)
    assert set(Counter(seen[:, 0].tolist()).values()) == {2}
    assert len(set(seen[:, 1].tolist())) == partial
    assert len(set(seen[:, 2].tolist())) == final


def test_echo_and_reuse_go_together(torchvision: Any) -> None:
    dataset = Numbers(torchvision.transforms.Compose([first, last]))
    with DataLoader(
        dataset, batch_size=5, reuse=2, split=1, echo=2, echo_at="augmented", seed=1
    ) as loader:
        assert stops(loader) == ["first", "refurbish", "last", "echo"]
        assert len(rows(loader, 2)) == 80


def test_a_sampler_can_have_its_batches_echoed(torchvision: Any) -> None:
    sampler = torch.utils.data.SequentialSampler(Numbers())
    options: dict[str, Any] = {"batch_size": 5, "sampler": sampler}
    with DataLoader(Numbers(), echo=2, echo_at="batch", echo_window=1, **options) as loader:
        seen = [y.tolist() for _, y in loader]
    assert seen[0] == seen[1] == [0, 1, 2, 3, 4]
    assert len(seen) == 8
    with pytest.raises(PipelineError, match="sampler"):
        DataLoader(Numbers(), echo=2, echo_at="augmented", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": 2}, "split"),
        ({"split": 1}, "split=1 has no effect without reuse. Give reuse"),
        ({"reuse": 2, "split": 1, "final": last}, "give either split, or partial and final"),
        ({"reuse": 2, "split": 3}, "has 2 transforms"),
        ({"reuse": 2, "split": True}, "split is True"),
        ({"echo": 2, "echo_at": "end"}, "echo_at"),
        ({"reuse": 2, "split": 1, "reuse_encode": "zip"}, "encode"),
        ({"reuse_size": "1MB"}, "reuse_size='1MB' has no effect without reuse. Give reuse"),
        ({"reuse_where": "disk"}, "reuse_where='disk' has no effect without reuse. Give reuse"),
        ({"reuse_encode": "jpeg"}, "reuse_encode='jpeg' has no effect without reuse. Give reuse"),
        ({"echo_at": "batch"}, "echo_at='batch' has no effect without echo. Give echo"),
        ({"echo_window": 8}, "echo_window=8 has no effect without echo. Give echo"),
        ({"reuse": 0}, "reuse is 0; give .* a whole number from 1"),
        ({"reuse": -1, "split": 1}, "reuse is -1; give"),
        ({"reuse": True}, "reuse is True; give"),
        ({"reuse": 1.5, "final": last}, "reuse is 1.5; give"),
        ({"reuse": "often"}, "reuse is 'often'; give"),
        ({"echo": 0}, r"factor of echo\(\) is 0"),
        ({"echo": 0, "echo_at": "augmented"}, r"factor of echo\(\) is 0"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    torchvision: Any, options: Any, message: str
) -> None:
    dataset = Numbers(torchvision.transforms.Compose([first, last]))
    with pytest.raises(PipelineError, match=message):
        DataLoader(dataset, batch_size=5, **options)


@pytest.mark.parametrize("final", [None, last], ids=["no final", "final"])
def test_auto_keeps_samples_in_the_encoding_that_was_given(torchvision: Any, final: Any) -> None:
    dataset = Numbers(torchvision.transforms.Compose([first, last]))
    with DataLoader(
        dataset, batch_size=5, reuse="auto", final=final, reuse_encode="lossless", seed=1
    ) as loader:
        # What "auto" chooses depends on timing, so look at the pipeline that it started from.
        (refurbish,) = [stop for stop in loader._loader._written.stops if stop.renews]
    assert isinstance(refurbish, Refurbish)
    assert refurbish.encode == "lossless"


def test_partial_and_final_are_plain_maps_without_reuse() -> None:
    with DataLoader(Numbers(), batch_size=5, partial=first, final=last, seed=1) as loader:
        assert stops(loader) == ["first", "last"]
        seen = rows(loader, 2)
    assert len(set(seen[:, 1].tolist())) == len(set(seen[:, 2].tolist())) == 40


@pytest.mark.parametrize("native", [True, False])
def test_final_gets_the_image_of_an_image_folder(
    torchvision: Any, photos: Path, native: bool
) -> None:
    dataset = torchvision.datasets.ImageFolder(photos)
    with DataLoader(dataset, batch_size=12, native=native, final=width_of) as loader:
        widths, labels = next(iter(loader))
    assert widths.tolist() == [64] * 12
    assert labels.tolist() == dataset.targets


def width_of(image: Any) -> int:
    return int(image.width)


def test_a_dataset_without_transforms_says_what_to_give() -> None:
    with pytest.raises(PipelineError, match="partial= and final="):
        DataLoader(Numbers(), batch_size=5, echo=2)
    with pytest.raises(PipelineError, match="partial= and final="):
        DataLoader(Numbers(), batch_size=5, reuse=2, split=1)


def test_operations_serve_as_the_final_part() -> None:
    images = [(np.full((8, 8, 3), i, dtype=np.uint8), i) for i in range(6)]
    data: Any = images
    with DataLoader(
        data, batch_size=3, reuse=2, partial=noisy, final=ps.image.random_crop(4), seed=0
    ) as loader:
        for _ in range(3):
            for x, _ in loader:
                assert x.shape == (3, 4, 4, 3)
        assert loader.stats().refurbish is not None


def noisy(image: Any) -> Any:
    return image + np.random.randint(2, dtype=np.uint8)
