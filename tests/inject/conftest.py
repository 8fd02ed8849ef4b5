"""A directory with photographs for test scripts, and the environment they run in."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.support import ROOT
from tests.support.torchvision import customization


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, and empty directories that replace those of the machine."""
    root = tmp_path_factory.mktemp("scripts")
    rng = np.random.default_rng(0)
    for split, count in (("train", 26), ("val", 9)):
        for number in range(count):
            folder = root / "photos" / split / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
            picture = cv2.resize(coarse, (64, 48), interpolation=cv2.INTER_CUBIC)
            assert cv2.imwrite(str(folder / f"{number:03}.jpg"), picture)
    for name in ("memory", "temporary", "site"):
        (root / name).mkdir()
    return root


@pytest.fixture(scope="module")
def variables(place: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PENSTOCK_RUNTIME_DIR": str(place / "runtime"),
        "PENSTOCK_SHM_DIR": str(place / "memory"),
        "PENSTOCK_CACHE_DIR": str(place / "disk"),
        "TMPDIR": str(place / "temporary"),
        # The second entry makes scripts import the copy of Penstock that is being tested.
        "PYTHONPATH": os.pathsep.join([str(place / "site"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def torchvision(place: Path) -> None:
    """Make torchvision importable in scripts, by a ``sitecustomize`` if needed."""
    pytest.importorskip("PIL")
    text = customization()
    if text is None:
        pytest.skip("torchvision is not installed, or does not match this torch")
    (place / "site" / "sitecustomize.py").write_text(text)
