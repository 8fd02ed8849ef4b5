"""Predictions beside runs: what is compared with what, and a run of it all on a few pictures."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.analyze import analyze
from benchmarks.analyze import work as analyze_work
from benchmarks.analyze.pace import Pace
from benchmarks.analyze.work import PhaseLog, Scenario, measure_rate, run_analysis, scale_costs
from benchmarks.harness.throttle import Disk, OnDisk
from penstock.diagnose.analyze.model import Change, predict
from penstock.source.source import Source
from tests.support.reports import report


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
    base = Scenario(photos, 90e6, 0.0, 0.04, 2)
    other = replace(base, storage=30e6, cached=0.5, step=0.02, workers=4, reuse=3)
    change = other.change(base)
    assert change.storage == 30e6
    assert change.cache == base.nbytes() // 2
    assert change.accelerator == 2.0
    assert (change.workers, change.reuse) == (4, 3)


def test_each_round_is_held_against_its_own_analysis_and_the_middle_one_counts() -> None:
    comparison = analyze.Comparison("x", Change(cache=10**9), measure_rate, [80.0, 100.0, 100.0])  # type: ignore[arg-type]
    slower = report(prep=2 * report().costs.prep)
    for one in (report(), report(), slower):
        comparison.predict(one, report(prep=3 * one.costs.prep))
    found, other = (predict(one, Change(cache=10**9)) for one in (report(), slower))
    assert comparison.errors == pytest.approx(
        [found.speed / 80 - 1, found.speed / 100 - 1, other.speed / 100 - 1]
    )
    assert comparison.error == pytest.approx(found.speed / 100 - 1)
    assert comparison.row()[:3] == ("x", "100", f"{found.speed:,.0f}")
    assert comparison.verdict == other.bound
    assert comparison.plain_error >= comparison.error
    assert comparison.unpaced_error < comparison.error


def test_a_report_is_brought_to_another_pace() -> None:
    found = report(prep=1e-3, reading=2e-4, reuse_miss=4e-4, reuse_hit=1e-4)
    costs = scale_costs(found, 1.5, 2.0).costs
    assert (costs.prep, costs.reading) == pytest.approx((1.5e-3, 3e-4))
    assert (costs.reuse_miss, costs.reuse_hit) == pytest.approx((8e-4, 2e-4))
    costs = scale_costs(report(prep=1e-3), 1.5, 2.0).costs
    assert (costs.reuse_miss, costs.reuse_hit) == (None, None)


def test_what_an_analysis_says_tells_when_it_did_what(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 2.0, 5.0, 9.0, 9.5])
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr(analyze_work, "time", clock)
    phases = PhaseLog()
    for what in ("in the loop", "1, 2 workers", "reads"):
        phases(what)
    assert phases.during("workers") == (2.0, 5.0)
    assert phases.during("refurbish") == (1.0, 9.5)


def test_the_pace_is_that_of_the_moments_asked_for(photos: str) -> None:
    began = time.perf_counter()
    with Pace(Path(photos)) as pace:
        deadline = began + 30
        while len(pace._samples) < 6 and time.perf_counter() < deadline:
            time.sleep(0.01)
    looks = sorted(pace._samples)
    assert len(looks) >= 6
    first, last = looks[0], looks[-1]
    assert pace.between(began, first[0]) == first[1] > 0
    assert pace.between(last[0], last[0] + 1) == last[1]
    assert not any(thread.is_alive() for thread in pace._threads)


def test_one_analysis_is_held_against_real_runs(photos: str) -> None:
    base = Scenario(photos, 5e6, 0.0, 0.002, workers=2, batch=4)
    found = run_analysis(base, 1.5)
    assert found.setup.samples == 24
    assert found.costs.storage == pytest.approx(5e6, rel=0.5)
    speed = measure_rate(replace(base, cached=1.0), 0.05, 0.1)
    assert speed > 0


def test_whole_epochs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=sleep)
    monkeypatch.setattr(analyze_work, "time", clock)
    # Batches of 1, 2 and 3 samples: two a second, but for those who stop within an epoch.
    epoch = [(np.zeros(size), None) for size in (1, 2, 3)]
    assert analyze_work.time_epochs(epoch, step=1.0, warm_up=0.5, seconds=4.0) == 2.0
    assert now == 9.0


def test_preparing_that_sleeps_needs_no_core(photos: str) -> None:
    base = Scenario(photos, 1e12, 0.0, 0.001, workers=4, batch=4, sleep=0.002)
    assert base.change(base).cores == 64
    # Four workers that sleep for 2 ms each, whatever the machine.
    assert measure_rate(base, 0.05, 0.2) < 4 / 0.002 * 1.1
