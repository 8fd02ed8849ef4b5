"""Data and settings for the tests of benchmarks that train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.echo import echo
from benchmarks.harness import measure, training
from benchmarks.harness.alone import Watched
from benchmarks.reuse import accuracy


def write_images(path: Path, count: int) -> None:
    """Write images of ten classes, each a colour with noise."""
    pa = pytest.importorskip("pyarrow")
    cv2 = pytest.importorskip("cv2")
    import pyarrow.parquet

    rng = np.random.default_rng(count)
    labels = rng.integers(0, 10, count)
    colours = np.random.default_rng(0).integers(0, 256, (10, 1, 1, 3))
    pixels = np.clip(colours[labels] + rng.integers(-20, 20, (count, 32, 32, 3)), 0, 255)
    images = [cv2.imencode(".png", image)[1].tobytes() for image in pixels.astype(np.uint8)]
    columns = {"image": images, "label": labels.astype(np.int32)}
    pyarrow.parquet.write_table(pa.table(columns), path)


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training set and a test set of small images, as Parquet files."""
    folder = tmp_path_factory.mktemp("cifar")
    write_images(folder / "c-train.parquet", 96)
    write_images(folder / "c-test.parquet", 64)
    return folder


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with one thread: these tests do not run with ``training_environment``."""
    monkeypatch.setattr(training, "cores", lambda: 1)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Run everything in this process: each fresh one would import torch again."""
    pytest.importorskip("torch")

    def run(function: Callable[..., Any], *args: Any, **_: Any) -> Watched:
        return Watched(function(*args), 0)

    for module in (accuracy, echo, measure):
        monkeypatch.setattr(module, "run_alone", run)
