"""Predictions beside runs: what is compared with what, and a run of it all on a few pictures."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analyze.reports import report

from benchmarks import analyze
from benchmarks.analyze_work import Pace, Setting, analysed, at_pace, measured
from benchmarks.throttle import Disk, OnDisk
from penstock.analysis.model import predict
from penstock.source.source import Source


@pytest.fixture
def photos(tmp_path: Path) -> str:
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / ("cat", "dog")[number % 2]
        folder.mkdir(exist_ok=True)
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        assert cv2.imwrite(str(folder / f"{number}.jpg"), cv2.resize(coarse, (256, 240)))
    return str(tmp_path)


class Bytes(Source):
    def __len__(self) -> int:
        return 8

    def read(self, indices: list[int]) -> list[bytes]:  # type: ignore[override]
        return [bytes(1_000) for _ in indices]


def test_a_disk_serves_one_reader_after_the_other() -> None:
    disk = Disk(100_000)
    source = OnDisk(Bytes(), disk)
    started = time.perf_counter()
    readers = [threading.Thread(target=source.read, args=([0, 1],)) for _ in range(3)]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    # Six samples of 1,000 bytes: it cannot have taken less.
    assert time.perf_counter() - started >= 0.06
    assert source.name(3) == "sample 3"


def test_a_setting_says_what_it_changes(photos: str) -> None:
    base = Setting(photos, 90e6, 0.0, 0.04, 2)
    other = replace(base, storage=30e6, held=0.5, step=0.02, workers=4, reuse=3)
    change = other.change(base)
    assert change.storage == 30e6
    assert change.cache == base.nbytes() // 2
    assert change.accelerator == 2.0
    assert (change.workers, change.reuse) == (4, 3)


def test_faster_cores_prepare_faster_and_nothing_else() -> None:
    slow = report(storage=10e9, latency=0.0, prep=8e-3, reuse_miss=8e-3, reuse_hit=2e-3)
    fast = at_pace(slow, 2.0)
    assert fast.costs.prep == 4e-3
    assert (fast.costs.reuse_miss, fast.costs.reuse_hit) == (4e-3, 1e-3)
    assert fast.costs.compute == slow.costs.compute
    assert predict(fast).speed == pytest.approx(2 * predict(slow).speed, rel=0.02)


def test_errors_are_those_of_each_round() -> None:
    line = analyze.Line("x", predicted=[110.0, 95.0, 90.0], found=[100.0] * 3)
    assert line.error() == pytest.approx(-0.05)
    line = analyze.Line("x", [110.0], [100.0], [120.0], [150.0], "prep")
    assert line.row() == ("x", "100", "110", "+10.0%", "+20.0%", "+50.0%", "prep")


def test_one_analysis_is_held_against_real_runs(photos: str) -> None:
    base = Setting(photos, 5e6, 0.0, 0.002, workers=2, batch=4)
    found = analysed(base, 1.5)
    assert found.setup.samples == 24
    assert found.costs.storage == pytest.approx(5e6, rel=0.5)
    speed = measured(replace(base, held=1.0), 0.05, 0.1)
    assert speed > 0
    pace = Pace(replace(base, batch=4))
    assert pace() > 0
    pace.close()
