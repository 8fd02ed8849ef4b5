"""The benchmark ``analyze``: scenarios, predictions compared with runs, and the pace of cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks.analyze import analyze, truth
from benchmarks.analyze import work as analyze_work
from benchmarks.analyze.pace import Pace
from benchmarks.analyze.work import PhaseLog, Scenario, measure_rate, run_analysis, scale_costs
from penstock.diagnose.analyze.model import Change, predict
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


def test_a_scenario_describes_its_change_for_the_model(photos: str) -> None:
    base = Scenario(photos, 90e6, 0.0, 0.04, 2)
    other = replace(base, storage=30e6, cached=0.5, step=0.02, workers=4, reuse=3)
    change = other.change(base)
    assert change.storage == 30e6
    assert change.cache == base.nbytes() // 2
    assert change.accelerator == 2.0
    assert (change.workers, change.reuse) == (4, 3)


def test_each_round_is_compared_with_its_own_analysis_and_the_median_counts() -> None:
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


def test_costs_of_a_report_are_scaled_to_another_pace() -> None:
    found = report(prep=1e-3, reading=2e-4, reuse_miss=4e-4, reuse_hit=1e-4)
    costs = scale_costs(found, 1.5, 2.0).costs
    assert (costs.prep, costs.reading) == pytest.approx((1.5e-3, 3e-4))
    assert (costs.reuse_miss, costs.reuse_hit) == pytest.approx((8e-4, 2e-4))
    costs = scale_costs(report(prep=1e-3), 1.5, 2.0).costs
    assert (costs.reuse_miss, costs.reuse_hit) == (None, None)


def test_the_phase_log_finds_the_span_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 2.0, 5.0, 9.0, 9.5])
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr(analyze_work, "time", clock)
    phases = PhaseLog()
    for what in ("in the loop", "1, 2 workers", "reads"):
        phases(what)
    assert phases.during("workers") == (2.0, 5.0)
    assert phases.during("refurbish") == (1.0, 9.5)


def test_the_pace_is_the_mean_over_the_given_span(photos: str) -> None:
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


def test_an_analysis_and_a_real_run_succeed(photos: str) -> None:
    base = Scenario(photos, 5e6, 0.0, 0.002, workers=2, batch=4)
    found = run_analysis(base, 1.5)
    assert found.setup.samples == 24
    # A busy machine may read more slowly than the disk allows, but not faster.
    assert 0 < found.costs.storage < 1.5 * 5e6
    speed = measure_rate(replace(base, cached=1.0), 0.05, 0.1)
    assert speed > 0


def test_whole_epochs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=sleep)
    monkeypatch.setattr(analyze_work, "time", clock)
    # Batches of 1, 2 and 3 samples: two samples per second, but only over whole epochs.
    epoch = [(np.zeros(size), None) for size in (1, 2, 3)]
    assert analyze_work.time_epochs(epoch, step=1.0, warm_up=0.5, seconds=4.0) == 2.0
    assert now == 9.0


def test_preparing_that_sleeps_needs_no_core(photos: str) -> None:
    base = Scenario(photos, 1e12, 0.0, 0.001, workers=4, batch=4, sleep=0.002)
    assert base.change(base).cores == 64
    # Four workers that sleep for 2 ms per sample: an upper limit on any machine.
    assert measure_rate(base, 0.05, 0.2) < 4 / 0.002 * 1.1


def times(wait: float, step: float) -> dict[str, float]:
    return {"wait": wait, "step": step}


@pytest.mark.parametrize(
    ("bottleneck", "plain", "constant", "right"),
    [
        ("sleep", times(0.2, 0.1), times(0.0, 0.1), {"latency"}),
        ("decode", times(0.2, 0.1), times(0.0, 0.1), {"prep"}),
        ("decode", times(0.0, 0.1), times(0.0, 0.1), {"compute"}),
        ("decode", times(0.0, 0.1), times(0.0, 0.08), {"contention"}),
        ("decode", times(0.005, 0.1), times(0.0, 0.1), {"compute", "prep"}),
        ("bytes", times(0.2, 0.1), times(0.0, 0.1), {"fetch", "latency"}),
    ],
)
def test_the_truth_of_a_script_comes_from_its_own_clock(
    bottleneck: str, plain: dict[str, float], constant: dict[str, float], right: set[str]
) -> None:
    assert truth.accepted(bottleneck, plain, constant) == right


def test_the_grid_has_all_bottlenecks_machines_and_kinds_and_parts_can_be_chosen() -> None:
    cells = truth.grid()
    assert len(cells) >= 60
    assert {cell.script.bottleneck for cell in cells} == set(truth.EXPECTED)
    assert {(cell.busy, cell.script.kind) for cell in cells} == {
        (busy, kind) for busy in (0, 1, 2) for kind in ("torch", "ours", "lightning")
    }
    some = truth.chosen(["sleep|python", "0 busy", "torch"])
    assert {cell.script.bottleneck for cell in some} == {"sleep", "python"}
    assert all(cell.busy == 0 and cell.script.kind == "torch" for cell in some)


def test_wrong_and_refused_verdicts_are_counted() -> None:
    cell = truth.grid()[0]
    outcomes = [
        truth.Outcome(cell, {"prep"}, "prep", "", "a cache", 2.2, 2.0),
        truth.Outcome(cell, {"prep"}, "fetch", ""),
        truth.Outcome(cell, {"prep"}, None, "too few steps"),
    ]
    assert [outcome.row()[4] for outcome in outcomes] == ["right", "WRONG", "refused"]
    result = truth.result_of_outcomes(outcomes)
    assert "1 of 3 verdicts are wrong" in result.notes[0]
    assert "33% refused" in result.notes[1]
    assert "median error 10%" in result.notes[2]


def test_a_third_of_the_grid_has_each_bottleneck_on_each_machine_with_each_kind() -> None:
    parts = [truth.chosen([], part) for part in (1, 2, 3)]
    assert sorted(cell.title for part in parts for cell in part) == sorted(
        cell.title for cell in truth.grid()
    )
    for part in parts:
        for key in {(cell.script.bottleneck, cell.script.step) for cell in part}:
            alike = [cell for cell in part if (cell.script.bottleneck, cell.script.step) == key]
            assert sorted(cell.busy for cell in alike) == [0, 1, 2]
            assert len({cell.script.kind for cell in alike}) == 3


def test_kept_results_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run(words: Sequence[str]) -> dict[str, float]:
        ran.append(list(words))
        return {"speed": 100.0, "wait": 0.05, "step": 0.1}

    monkeypatch.setattr(truth, "_run", run)
    monkeypatch.setattr(truth, "_analyse", lambda *_: None)
    words = ["--truth", "--only", "sleep", "0 busy", "torch", "--results", str(tmp_path)]
    _, options = command_line.parse(["analyze", *words])
    first = truth.run_truth(options)
    assert len(ran) == 6
    assert [row[4] for row in first.tables[0].rows] == ["refused"] * 3
    assert truth.run_truth(options).tables[0].rows == first.tables[0].rows
    assert len(ran) == 6

    _, options = command_line.parse(["analyze", *words[:3], *words[4:], "--stop-after", "1e-9"])
    result = truth.run_truth(options)
    assert len(ran) == 6
    assert any("6 scripts are not measured yet" in note for note in result.notes)
