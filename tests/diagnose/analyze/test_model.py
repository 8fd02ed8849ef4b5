"""Predictions of the model, its fit to the cold phase, and the remedies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnose.analyze.model import (
    MOST_LOST,
    Change,
    _flow_and_rates,
    fit_cold_run,
    predict,
    scaling,
)
from penstock.diagnose.analyze.remedies import remedies
from penstock.diagnose.analyze.report import AnalysisReport, Rate
from penstock.engine.schedule import HANDING, HANDING_TO_THREADS
from penstock.errors import ReportError
from tests.support.reports import report

WHOLE = 50_000 * 110_000
MEMORY = 64 << 30


def test_slow_storage_makes_training_fetch_bound() -> None:
    found = predict(report())
    assert found.bound == "fetch"
    assert found.speed == pytest.approx(909, rel=0.02)
    assert found.fetch_rate == pytest.approx(100e6 / 110_000)
    assert found.epoch == pytest.approx(50_000 / found.speed)
    assert found.fetch_stall > 0.4


def test_a_cache_of_all_data_removes_the_fetch_stall() -> None:
    found = predict(report(), Change(cache=WHOLE))
    assert found.bound in ("prep", "compute")
    assert found.fetch_stall < 0.02
    assert found.speed > 1.8 * predict(report()).speed


def test_a_larger_cache_helps_more_until_it_holds_all_data() -> None:
    speeds = [predict(report(), Change(cache=WHOLE * n // 4)).speed for n in range(7)]
    assert speeds == sorted(speeds)
    assert speeds[4] == speeds[5] == speeds[6]


def test_slow_preparation_makes_training_prep_bound_and_cores_help() -> None:
    slow = report(storage=10e9, latency=0.0, prep=8e-3)
    found = predict(slow)
    assert found.bound == "prep"
    assert found.speed == pytest.approx(3.8 / 8e-3, rel=0.03)
    assert predict(slow, Change(workers=8)).speed > 1.8 * found.speed


def test_a_slow_accelerator_makes_training_compute_bound() -> None:
    slow = report(storage=10e9, latency=0.0, compute=1 / 300)
    found = predict(slow)
    assert found.bound == "compute"
    assert found.speed == pytest.approx(300, rel=0.01)
    assert predict(slow, Change(accelerator=2.0)).speed == pytest.approx(600, rel=0.01)


def test_copying_to_the_device_is_not_made_faster_by_a_faster_device() -> None:
    slow = report(storage=10e9, latency=0.0, compute=1 / 400, copy=1 / 400)
    assert predict(slow).speed == pytest.approx(200, rel=0.01)
    assert predict(slow, Change(accelerator=1e6)).speed == pytest.approx(400, rel=0.01)


def test_jobs_that_share_are_as_fast_as_one_and_other_jobs_split_the_machine() -> None:
    slow = report(storage=100e9, latency=0.0, prep=8e-3, workers=8, scaling={1: 1.0, 8: 8.0})
    one = predict(slow).speed
    assert predict(slow, Change(jobs=4)).speed == pytest.approx(one / 4, rel=0.05)
    assert predict(slow, Change(jobs=4, share=True)).speed == pytest.approx(one, rel=0.05)


def test_reuse_saves_the_preparation_above_it() -> None:
    slow = report(storage=100e9, latency=0.0, prep=8e-3, reuse_miss=8e-3, reuse_hit=2e-3)
    one = predict(slow).speed
    # Two of three are kept: (8 + 2 + 2) / 3 = 4 ms.
    assert predict(slow, Change(reuse=3)).speed == pytest.approx(2 * one, rel=0.03)
    # Without a place for refurbish there is no gain.
    assert predict(report(), Change(reuse=3)).speed == predict(report()).speed


def test_an_echo_of_two_needs_half_as_many_samples() -> None:
    one = predict(report())
    found = predict(report(), Change(echo=2.0))
    assert found.speed == pytest.approx(min(2_000, 2 * one.speed), rel=0.03)


def test_operations_on_the_device_cost_workers_nothing() -> None:
    slow = report(storage=100e9, latency=0.0, prep=8e-3)
    # normalize is a tenth of the preparation.
    gain = predict(slow, Change(offload=1)).speed / predict(slow).speed
    assert gain == pytest.approx(1 / 0.9, rel=0.02)


def test_without_workers_training_waits_for_reading_and_preparing() -> None:
    alone = report(workers=0, ahead=0, kind="none", scaling={1: 1.0})
    found = predict(alone)
    assert found.speed == pytest.approx(1 / (1 / 2_000 + 2e-3 + 110_000 / 100e6), rel=0.01)
    assert predict(alone, Change(workers=4)).speed > 1.5 * found.speed


def test_without_sizes_of_samples_fetching_is_not_predicted() -> None:
    blind = report(sample_bytes=0.0, storage=0.0, cache=0.0, latency=0.0)
    found = predict(blind)
    assert found.fetch_rate == float("inf")
    assert found.bound != "fetch"


def test_scaling_returns_measured_values_and_extrapolates_linearly() -> None:
    assert scaling({1: 1.0, 4: 3.8}, 4) == 3.8
    assert scaling({1: 1.0}, 3) == 3.0


def test_workers_that_share_a_core_slow_each_other_down() -> None:
    slow = report(storage=10e9, latency=0.0, prep=8e-3, cores=4, scaling={1: 1.0, 4: 4.0, 8: 3.0})
    four = predict(slow, Change(workers=4)).speed
    assert four == pytest.approx(500, rel=0.03)
    assert predict(slow, Change(workers=8)).speed == pytest.approx(0.75 * four, rel=0.03)
    assert predict(slow, Change(workers=6)).speed == pytest.approx(0.875 * four, rel=0.04)
    # On a machine with twice the cores each worker has its own core.
    assert predict(slow, Change(workers=8, cores=8)).speed == pytest.approx(2 * four, rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": -1}, "workers is -1"),
        ({"reuse": 0}, "reuse is 0"),
        ({"accelerator": 0.0}, "accelerator is 0"),
        ({"storage": -5.0}, "storage is -5"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        Change(**wrong)  # type: ignore[arg-type]


# Fitting the model to the cold phase.


def with_cold(rate: float, **changed: object) -> AnalysisReport:
    """Two workers whose waits for storage matter, and a cold phase of this rate."""
    found = report(workers=2, scaling={1: 1.0, 2: 2.0}, latency=3e-3, storage=1e9, **changed)
    phases = tuple(
        replace(phase, rate=Rate(rate, rate, rate)) if phase.name == "cold" else phase
        for phase in found.phases
    )
    return replace(found, phases=phases)


def test_losses_after_waits_are_fitted_to_the_cold_phase() -> None:
    plain = predict(with_cold(1.0)).speed
    found = fit_cold_run(with_cold(0.96 * plain))
    assert predict(found).speed == pytest.approx(0.96 * plain, rel=0.002)
    ((wait, lost),) = found.costs.after_wait
    assert 0 < lost <= MOST_LOST * wait
    # Measured losses are increased, not replaced.
    seen = fit_cold_run(with_cold(0.9 * plain, after_wait=((1e-3, 1e-4), (4e-3, 2e-4))))
    assert all(more > 1e-4 for _, more in seen.costs.after_wait)
    assert predict(seen).speed == pytest.approx(0.9 * plain, rel=0.002)


def test_the_fit_hardly_changes_predictions_for_fast_storage() -> None:
    slow = with_cold(0.96 * predict(with_cold(1.0)).speed)
    fast = Change(storage=100e9)
    quick = replace(slow, costs=replace(slow.costs, latency=110_000 / slow.costs.storage))
    lossy = replace(
        quick, costs=replace(quick.costs, after_wait=fit_cold_run(slow).costs.after_wait)
    )
    assert predict(lossy, fast).speed == pytest.approx(predict(quick, fast).speed, rel=0.002)


@pytest.mark.parametrize("rate", [0.2, 1.0, 2.0])
def test_a_cold_phase_that_was_disturbed_or_is_predicted_changes_nothing(rate: float) -> None:
    found = with_cold(rate * predict(with_cold(1.0)).speed)
    assert fit_cold_run(found) == found


# Remedies.


def test_the_most_useful_remedy_comes_first() -> None:
    found = remedies(report(), MEMORY)
    assert found[0].gain == max(remedy.gain for remedy in found)
    assert all(remedy.gain >= 1.03 for remedy in found)
    (cache,) = (one for one in found if one.title.startswith("a cache"))
    assert 'cache="' in cache.code
    assert cache.prediction.speed == predict(report(), cache.change).speed


def test_the_code_of_a_remedy_fits_the_loader_of_the_script() -> None:
    own = replace(report(), setup=replace(report().setup, loader="penstock.Loader", kind="threads"))
    cache = next(one for one in remedies(own, MEMORY) if one.title.startswith("a cache"))
    assert cache.code.startswith('.cache("')
    cache = next(one for one in remedies(report(), MEMORY) if one.title.startswith("a cache"))
    assert cache.code.startswith("from penstock.torch import DataLoader")


def test_a_cache_takes_half_of_the_memory_at_most() -> None:
    found = remedies(report(), memory=4_000_000_000)
    cache = next(one for one in found if one.title.startswith("a cache"))
    assert cache.change.cache == 2_000_000_000


def test_a_compute_bound_run_has_no_remedy_but_sharing() -> None:
    busy = report(storage=10e9, latency=0.0, compute=1 / 100)
    assert {one.title for one in remedies(busy)} <= {"one preparation for 4 jobs"}


@pytest.mark.parametrize(
    ("kind", "piece", "expected"),
    [
        ("processes", 1, (None, HANDING, 1 << 20, 4)),
        ("crew", 16, (None, HANDING, 1 << 20, 4)),
        ("threads", 16, (None, HANDING_TO_THREADS, 0, 4)),
        ("threads", 1, (1, HANDING_TO_THREADS, 0, 8)),  # 8 samples for each of 64 workers
    ],
)
def test_batches_are_cut_and_opened_as_by_the_loader(
    kind: str, piece: int, expected: tuple[int | None, float, int, int]
) -> None:
    ours = report(
        loader="penstock.Loader", kind=kind, piece=piece, ahead=4, workers=64, batch_bytes=1 << 20
    )
    flow, _, _ = _flow_and_rates(ours, Change())
    assert (flow.piece, flow.handing, flow.batch_bytes, flow.ahead) == expected


def test_a_given_number_of_batches_ahead_stays() -> None:
    ours = report(loader="penstock.Loader", kind="threads", piece=1, ahead=3, workers=64)
    assert _flow_and_rates(ours, Change())[0].ahead == 3
