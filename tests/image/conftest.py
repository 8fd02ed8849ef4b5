"""Images for tests, and torchvision to compare with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

Image = NDArray[np.uint8]


@pytest.fixture(scope="session")
def by_torchvision(torchvision: Any) -> Callable[..., NDArray[Any]]:
    """Calls a torchvision function, or one of v2.functional by name, on an HWC array."""
    torch = importlib.import_module("torch")

    def call(function: str | Callable[..., Any], image: NDArray[Any], **options: Any) -> Any:
        named = torchvision.transforms.v2.functional
        called = getattr(named, function) if isinstance(function, str) else function
        tensor = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return called(tensor, **options).permute(1, 2, 0).numpy()

    return call


def make_photo(height: int = 240, width: int = 320, channels: int = 3, seed: int = 0) -> Image:
    """A synthetic photograph: smooth areas, texture at every scale, and noise."""
    rng = np.random.default_rng(seed)
    photo = np.full((height, width, channels), 120.0, np.float32)
    for step, strength in ((64, 60.0), (32, 40.0), (16, 25.0), (8, 15.0), (4, 9.0), (2, 6.0)):
        coarse = rng.normal(0, strength, (height // step + 2, width // step + 2, channels))
        fine = cv2.resize(coarse.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
        photo += fine.reshape(photo.shape)
    photo += rng.normal(0, 2.0, photo.shape)
    levels: Image = np.clip(photo, 0, 255).astype(np.uint8)
    return levels


@pytest.fixture
def photo() -> Image:
    return make_photo()


def make_images() -> dict[str, Image]:
    rng = np.random.default_rng(7)
    return {
        "photo": make_photo(60, 80),
        "grey photo": make_photo(60, 81, channels=1, seed=1),
        "noise": rng.integers(0, 256, (41, 33, 3), dtype=np.uint8),
        "dark": rng.integers(10, 40, (32, 32, 3), dtype=np.uint8),
        "flat": np.full((16, 24, 3), 77, np.uint8),
        "black": np.zeros((9, 9, 3), np.uint8),
        "colourless": np.repeat(rng.integers(0, 256, (20, 30, 1), dtype=np.uint8), 3, axis=2),
        "column": rng.integers(0, 256, (37, 1, 3), dtype=np.uint8),
        "row": rng.integers(0, 256, (1, 37, 1), dtype=np.uint8),
        "pixel": np.array([[[200, 10, 90]]], np.uint8),
    }


IMAGES = make_images()


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Image:
    name: str = request.param
    copy: Image = IMAGES[name].copy()
    return copy
