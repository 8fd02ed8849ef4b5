"""Transforms of other libraries are reproducible in every pool, with any random generator."""

from __future__ import annotations

import functools
import random as python_random
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.contract import epochs

PICTURES = [
    (np.random.default_rng(i).integers(0, 256, (24, 32, 3), dtype=np.uint8), i) for i in range(12)
]


def same_in_every_pool(pipeline: Any) -> list[list[Any]]:
    """Two epochs, checked to be the same without workers, with one and with two."""
    expected = epochs(pipeline, 2, workers=0, seed=4)
    for workers in (1, 2):
        assert epochs(pipeline, 2, workers=workers, kind="processes", seed=4) == expected
    assert expected[0] != expected[1]
    assert epochs(pipeline, 1, workers=0, seed=5)[0] != expected[0]
    return expected


def test_albumentations_has_generators_of_its_own_and_is_reproducible() -> None:
    pytest.importorskip("albumentations")
    import albumentations

    transform = albumentations.Compose(
        [
            albumentations.HorizontalFlip(p=0.5),
            albumentations.RandomBrightnessContrast(p=1.0),
            albumentations.RandomCrop(16, 16),
        ]
    )
    pipeline = ps.from_dataset(PICTURES).map(transform, on=0).batch(4)
    first = same_in_every_pool(pipeline)
    assert first[0][0][0][1] == (4, 16, 16, 3)
    assert PICTURES[0][0].shape == (24, 32, 3)


def test_torchvision_draws_from_torch_and_is_reproducible(torchvision: Any) -> None:
    pytest.importorskip("torch.utils")
    import torch

    t = torchvision.transforms
    transform = t.Compose(
        [t.ToPILImage(), t.RandomCrop(16), t.RandomHorizontalFlip(), t.ToTensor()]
    )
    pipeline = ps.from_dataset(PICTURES).map(transform, on=0).batch(4)
    torch.manual_seed(3)
    first = epochs(pipeline, 2, workers=0, seed=4)
    again = epochs(pipeline, 2, workers=0, seed=4)
    assert first == again
    assert first[0] != first[1]
    expected = torch.rand(1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.rand(1), expected)


def draws_from_all(picture: Any) -> Any:
    shift = python_random.randint(0, 9) + int(np.random.randint(0, 9))
    return np.roll(picture, shift, axis=1)


class Shifted:
    """A callable object, as transforms often are."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, picture: Any) -> Any:
        return np.roll(picture, python_random.randint(0, self.by), axis=0)


@pytest.mark.parametrize(
    "function",
    [draws_from_all, Shifted(9), functools.partial(lambda x, k: draws_from_all(x) + k, k=1)],
    ids=["function", "object", "partial"],
)
def test_callables_that_draw_from_global_generators_are_reproducible(function: Any) -> None:
    same_in_every_pool(ps.from_dataset(PICTURES).map(function, on=0).batch(4))


def test_a_callable_with_an_rng_parameter_gets_its_generator_in_threads_too() -> None:
    def jitter(picture: Any, rng: np.random.Generator) -> Any:
        return picture + rng.integers(0, 5, dtype=np.uint8)

    pipeline = ps.from_dataset(PICTURES).map(jitter, on=0).batch(4)
    expected = same_in_every_pool(pipeline)
    assert epochs(pipeline, 2, workers=2, kind="threads", seed=4) == expected
