"""The demo reads speeds and predictions from what the commands print."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.support import ROOT

REPORT = """\
prep-bound: the accelerator stands still 60 % of the time
Most useful: echo with factor 2: 2.00 times as fast (239 samples/s, then prep-bound)
Then:
  {}
  4 workers: 1.18 times as fast (141 samples/s, then prep-bound)
"""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_speed_is_that_of_all_epochs_after_the_first(demo: ModuleType) -> None:
    epochs = ("epoch 1: 10 images/s", "epoch 2: 1,000 images/s, loss 1", "epoch 3: 500 images/s")
    # Equally long epochs: the mean of the times, not of the speeds.
    assert demo.speed("\n".join(epochs)) == pytest.approx(2 / (1 / 1000 + 1 / 500))
    assert demo.speed(epochs[0]) == 10
    with pytest.raises(ValueError, match="no epoch"):
        demo.speed("Traceback")


def test_the_best_remedy_that_keeps_the_batches_is_applied_as_it_is_printed(
    demo: ModuleType,
) -> None:
    printed = """Penstock's loader with 4 workers: 4.50 times as fast (9 instead of 2 samples/s)
      penstock run --native --workers 4 -- python train.py --epochs 9"""
    assert demo.remedy(REPORT.format(printed)) == (4.5, ["--native", "--workers", "4"])


def test_without_such_a_remedy_there_is_no_prediction(demo: ModuleType) -> None:
    echo = "echo: 3.00 times as fast\n    penstock run --echo 2 --echo-at batch -- python train.py"
    assert demo.remedy(REPORT.format(echo)) is None
    assert demo.remedy("compute-bound") is None
