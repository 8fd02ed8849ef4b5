"""``penstock what-if``: ranges, tables and grids, prices, and the amounts that are enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import cli
from penstock.commands import what_if as command
from penstock.diagnose.analyze import what_if
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.model import Change, Prediction, predict
from penstock.diagnose.analyze.report import (
    AnalysisReport,
    MachineUse,
    OperationTime,
    Phase,
    Rate,
)
from penstock.diagnose.analyze.what_if import (
    ENOUGH,
    Forecast,
    PredictionRow,
    Prices,
    Values,
    prediction_rows,
    saturation,
    with_cores,
)
from penstock.errors import PipelineError
from tests.support.reports import bound_by, report

GB = 10**9


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A report without phases, as one writes it by hand: nothing is scaled to a measured run."""
    path = tmp_path / "report.json"
    replace(report(), phases=()).save(path)
    return path


def test_a_report_is_saved_and_loaded_by_a_path_of_any_kind(tmp_path: Path) -> None:
    made, path = report(), tmp_path / "saved.json"
    made.save(str(path))
    assert AnalysisReport.load(str(path)) == AnalysisReport.load(path) == made


@pytest.mark.parametrize("others", [2.0, 7.5])
def test_cores_of_other_programs_are_left_to_them(
    others: float, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = (MachineUse("prep", 5.0, 8, own=0.5, others=others),)
    replace(bound_by("prep"), phases=(), machine_use=busy).save(saved)
    assert ask(saved, "--workers", "4,8") == 0
    printed = capsys.readouterr().out
    assert f"Assumed: other programs keep {others:.1f} of 8 cores busy" in printed
    assert "More cores stop helping at 1:" not in printed
    # Of eight cores half a core was free: what eight workers bring is anybody's guess.
    assert ("?: the speed depends on the cores" in printed) == (others > 4)
    assert ask(saved, "--workers", "8", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["certain"] == (others < 4)


def ask(saved: Path, *words: str) -> int:
    return cli.main(["what-if", str(saved), *words])


@pytest.mark.parametrize(
    ("text", "quantity", "found"),
    [
        ("64GB", command.BYTES, (64 * GB,)),
        ("0", command.BYTES, (0,)),
        ("0..4GB:1GB", command.BYTES, (0, GB, 2 * GB, 3 * GB, 4 * GB)),
        ("8..16GB:4", command.BYTES, (8 * GB, 12 * GB, 16 * GB)),
        ("0..8GB", command.BYTES, tuple(n * GB for n in range(9))),
        ("1,2,4GB", command.BYTES, (GB, 2 * GB, 4 * GB)),
        ("1GiB,2GB", command.BYTES, (2**30, 2 * GB)),
        ("500MB/s", command.BYTES_PER_SECOND, (500e6,)),
        ("100,500MB/s", command.BYTES_PER_SECOND, (100e6, 500e6)),
        ("1..4", command.COUNT, (1, 2, 3, 4)),
        ("1..65", command.COUNT, (1, 9, 17, 25, 33, 41, 49, 57, 65)),
        ("1..10:4", command.COUNT, (1, 5, 9)),
        ("0", command.COUNT_FROM_0, (0,)),
        ("2x", command.FACTOR, (2.0,)),
        ("0.5..2x:0.5", command.FACTOR, (0.5, 1.0, 1.5, 2.0)),
        ("4,4", command.COUNT, (4,)),
    ],
)
def test_values_lists_and_ranges_are_read(
    text: str, quantity: command.Quantity, found: tuple[float, ...]
) -> None:
    assert command.read_values(text, "--it", quantity) == pytest.approx(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache", "much"], "--cache is 'much'; give bytes"),
        (["--cache", "..8GB"], "--cache is '..8GB'; a range is written 0..64GB"),
        (
            ["--cache", "8GB..1GB"],
            "a range goes from the smaller value to the larger",
        ),
        (["--cache", "0..1GB:1KB"], "more than 200 values"),
        (["--cache", "0..1GB:0"], "its step must be above 0"),
        (["--cache", "8GB:1GB"], "only a range can have a step"),
        (["--cores", "0"], "--cores is '0'; give at least 1"),
        (["--cores", "2.5"], "--cores is '2.5'; give a whole number"),
        (["--workers=-1"], "--workers is '-1'; give at least 0"),
        (["--storage", "fast"], "--storage is 'fast'; give bytes per second"),
        (["--storage", "0"], "--storage is '0'; give at least 1"),
        (["--accelerator", "nan"], "--accelerator is 'nan'; give a factor"),
        (["--accelerator", "0x"], "--accelerator is '0x'; it must be above 0"),
        (["--echo", "0.5"], "--echo is '0.5'; give at least 1"),
        (["--reuse", ""], "--reuse is ''; give a whole number"),
        (["--share"], "--share lets several jobs share one preparation"),
        (["--price", "cheap"], "--price is 'cheap'; give a price per hour"),
        (["--price-cache-gb=-1"], "--price-cache-gb is '-1'"),
        (["--price-core", "inf"], "--price-core is 'inf'"),
        (
            ["--cache", "0..8GB", "--cores", "1,2", "--jobs", "1,2"],
            "--cache, --cores, --jobs are 3 ranges, and a table has two sides",
        ),
    ],
)
def test_wrong_values_are_refused_with_the_name_of_the_option(
    saved: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(saved, *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("penstock: ")
    assert message in error


def test_a_missing_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(tmp_path / "none.json") == 1
    assert "there is no file" in capsys.readouterr().err


def test_predictions_are_computed_once() -> None:
    forecast = Forecast(report())
    assert forecast(Change(cache=GB)) is forecast(Change(cache=GB))
    assert forecast() == predict(report())


def test_every_combination_is_predicted_and_the_last_option_changes_fastest() -> None:
    forecast = Forecast(report())
    found = prediction_rows(forecast, [Values("cache", (0, GB)), Values("cores", (2, 8))])
    assert [(row.change.cache, row.change.cores) for row in found] == [
        (0, 2),
        (0, 8),
        (GB, 2),
        (GB, 8),
    ]
    assert found[3].prediction == predict(report(), Change(cache=GB, cores=8))
    assert found[3].gain == pytest.approx(found[3].prediction.speed / predict(report()).speed)


def test_the_cost_of_an_epoch_adds_up_all_prices() -> None:
    made = report(world=2)
    found = replace(predict(made), compute=3600.0, prep=0.0, fetch=0.0)
    prices = Prices(machine=1.0, accelerator=10.0, core=0.1, cache_gb=0.01)
    assert prices.epoch(made, Change(), found) == pytest.approx(1 + 2 * 10 + 8 * 0.1)
    changed = Change(cores=16, cache=100 * GB)
    assert prices.epoch(made, changed, found) == pytest.approx(1 + 20 + 1.6 + 1.0)
    # Each job has its own accelerators; jobs split the rest.
    assert prices.epoch(made, Change(jobs=2), found) == pytest.approx((1 + 0.8) / 2 + 20)


def test_more_cache_stops_helping_if_it_adds_less_than_a_hundredth() -> None:
    forecast = Forecast(report())
    enough = saturation(forecast)
    assert enough.cache is not None
    most = forecast(Change(cache=forecast.data)).speed
    assert enough.cache_speed >= (1 - ENOUGH) * most
    # A cache that is smaller by a fiftieth of the data is not enough.
    fewer = enough.cache - forecast.data // 50
    assert forecast(Change(cache=fewer)).speed < (1 - ENOUGH) * most


@pytest.mark.parametrize("bound", ["compute", "prep"])
def test_without_a_fetch_stall_no_cache_is_needed(bound: str) -> None:
    quick = bound_by(bound, latency=1e-5, sample_bytes=10_000.0)
    assert saturation(Forecast(quick)).cache == 0


def test_without_sizes_of_samples_the_cache_that_is_enough_is_unknown() -> None:
    assert saturation(Forecast(report(sample_bytes=0.0))).cache is None


@pytest.mark.parametrize("bound", ["compute", "prep", "fetch"])
def test_more_cores_stop_helping_at_the_first_number_that_is_enough(bound: str) -> None:
    made = bound_by(bound)
    forecast = Forecast(made)
    enough = saturation(forecast)
    assert enough.cores is not None

    def speed(cores: int) -> float:
        return forecast(with_cores(made, Change(), cores)).speed

    # Both are simulated, so they differ a little.
    assert speed(2 * enough.cores) < (1 + 2 * ENOUGH) * speed(enough.cores)
    if enough.cores > 1:
        assert speed(enough.cores - 1) < (1 - ENOUGH / 2) * speed(enough.cores)


def test_the_cores_that_are_enough_depend_on_the_cache() -> None:
    forecast = Forecast(report())
    alone = saturation(forecast).cores
    cached = saturation(forecast, Change(cache=forecast.data)).cores
    assert alone is not None
    assert cached is not None
    assert cached > alone


def test_the_search_gives_up_if_more_cores_always_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed_of_cores(made: object, change: Change) -> Prediction:
        return replace(predict(report()), speed=float(change.cores or 1))

    monkeypatch.setattr(what_if, "predict", speed_of_cores)
    forecast = Forecast(report(sample_bytes=0.0))
    assert saturation(forecast).cores is None
    lines = command.enough_lines(forecast, saturation(forecast), Change())
    assert "More cores help, up to the 256 that were tried." in lines


@given(st.integers(1, 200))
def test_the_search_for_cores_finds_the_knee(knee: int) -> None:
    class Knee(Forecast):
        def __call__(self, change: Change | None = None) -> Prediction:
            cores = (change or Change()).cores or 1
            return replace(PRESENT, speed=float(min(cores, knee)))

    found = saturation(Knee(report(sample_bytes=0.0))).cores
    assert found is not None
    assert (1 - ENOUGH) * knee <= found <= knee


PRESENT = predict(report())


@given(st.integers(0, 5_500_000_000))
def test_the_search_for_a_cache_finds_the_knee(knee: int) -> None:
    class Knee(Forecast):
        def __call__(self, change: Change | None = None) -> Prediction:
            cache = (change or Change()).cache or 0
            return replace(PRESENT, speed=100.0 + min(cache, knee) / 1e7)

    forecast = Knee(report())
    found = saturation(forecast).cache
    assert found is not None
    top = 100.0 + knee / 1e7
    assert 100.0 + min(found, knee) / 1e7 >= (1 - ENOUGH) * top
    assert found <= knee + forecast.data // 256 + 1


def test_one_change_is_shown_next_to_the_present_run(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(saved, "--cache", "2GB", "--cores", "8", "--price", "3.6/h") == 0
    heads, now, then, empty, *_ = capsys.readouterr().out.splitlines()
    assert heads.split("  ")[-1] == "cost"
    assert heads.split()[:3] == ["samples/s", "gain", "stalled"]
    assert now.startswith("as it is ")
    assert then.startswith("cache 2.0 GB, cores 8 ")
    assert empty == ""
    found = predict(report(), Change(cache=2 * GB, cores=8))
    present = predict(report())
    assert then.split()[5:] == [
        f"{found.speed:,.0f}",
        f"{found.speed / present.speed:.2f}x",
        f"{found.fetch_stall:.0%}",
        f"{found.prep_stall:.0%}",
        found.bound,
        f"{found.epoch:,.1f}",
        "s",
        f"{found.epoch / 1000:.4f}",
    ]
    assert now.split()[-1] == f"{present.epoch / 1000:.4f}"


def test_without_options_the_present_run_is_shown_and_the_amounts_that_are_enough(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(saved) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("as it is")
    assert "cost" not in lines[0]
    assert lines[3].startswith("More cache stops helping at ")
    assert lines[4].startswith("More cores stop helping at ")


def test_one_range_is_a_table_with_a_line_for_each_value(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(saved, "--cache", "0..4GB:2GB", "--cores", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cores 8"
    assert lines[1].split()[0] == "cache"
    assert [line[:6].strip() for line in lines[2:5]] == ["0 B", "2.0 GB", "4.0 GB"]


def test_two_ranges_are_a_grid(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(saved, "--cache", "0,4GB", "--cores", "2,8", "--price-core", "0.1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "samples/s, bound by c(ompute), p(rep) or f(etch)"
    assert lines[1].split() == ["cache", "\\", "cores", "2", "8"]
    found = predict(report(), Change(cache=4 * GB, cores=8))
    assert lines[3].split()[-2:] == [f"{found.speed:,.0f}", found.bound[0]]
    assert lines[5] == "cost of an epoch"
    assert lines[8].split()[-1] == f"{found.epoch / 3600 * 0.8:.4f}"


def test_json_has_everything(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(saved, "--jobs", "8", "--share", "--price", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    model = predict(report(), Change(jobs=8, share=True))
    assert (row["change"]["jobs"], row["change"]["share"]) == (8, True)
    assert row["speed"] == pytest.approx(model.speed)
    assert row["cost"] == pytest.approx(model.epoch / 3600 / 8)
    assert set(found["enough"]) == {"cache", "cache_speed", "cores", "cores_speed"}
    assert found["data_bytes"] == 5_500_000_000
    assert found["present"]["gain"] == 1.0


def test_an_infinite_rate_is_null_in_json() -> None:
    shown = PredictionRow(Change(), predict(report(sample_bytes=0.0)), 1.0).to_dict()
    assert shown["fetch_rate"] is None


def test_options_without_effect_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bare.json"
    bare = report(sample_bytes=0.0, reuse_hit=None, reuse_miss=None)
    replace(bare, operations=(), phases=()).save(path)
    assert ask(path, "--reuse", "3", "--cache", "8GB", "--offload", "1", "--penstock") == 0
    last = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split(" change")[0] for line in last] == [
        "--reuse",
        "--penstock",
        "--offload",
        "--cache",
    ]


def test_with_several_ranks_the_slowest_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = report(world=2), report(world=2, rank=1, prep=8e-3)
    path = tmp_path / "ranks.json"
    replace(fast, phases=(), ranks=(replace(slow, phases=()),)).save(path)
    assert ask(path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["present"]["speed"] == pytest.approx(predict(slow).speed)


def test_too_many_ranges_are_refused_before_anything_is_predicted() -> None:
    options = [Values(name, (1, 2)) for name in ("cores", "jobs", "reuse")]
    with pytest.raises(PipelineError, match="--cores, --jobs, --reuse are 3 ranges"):
        prediction_rows(Forecast(report()), options)


def test_a_device_that_prepares_a_share_never_exceeds_the_accelerator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    slow = report(storage=100e9, latency=0.0, prep=8e-3)
    timed = (
        OperationTime("source", "source", 0.2, 0.1),
        OperationTime("decode", "map", 0.8, 0.4),
        OperationTime("random_resized_crop", "map", 0.6, 0.3),
        OperationTime("normalize", "map", 0.4, 0.2),
        OperationTime("batch", "batch", 0.0, 0.0),
    )
    slow = replace(slow, operations=timed)
    replace(slow, phases=()).save(path)
    assert ask(path, "--device-prep", "1x,4x,1000x", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    speeds, shares = ([row[name] for row in rows] for name in ("speed", "device_share"))
    assert speeds == sorted(speeds)
    assert speeds[0] > predict(slow).speed
    assert max(speeds) <= predict(slow).ingestion
    # Half of the preparation stands below decode.
    assert shares == sorted(shares)
    assert max(shares) == pytest.approx(0.5)
    assert predict(slow, Change(device_prep=4.0, cores=64, workers=64)).device_share < 0.01
    assert ask(path, "--device-prep") == 0
    shown = capsys.readouterr().out
    assert "The device can do 50% of the preparation (all below decode)" in shown
    assert 'decode="device" leaves 90% to it' in shown
    assert "With half or twice 10x: " in shown
    assert ask(path, "--device-prep", "0.1x") != 0
    assert "give at least 0.5" in capsys.readouterr().err


def measured_at(speed: float) -> AnalysisReport:
    """A report of a run whose training loop took ``speed`` samples per second."""
    rate = Rate(speed, speed * 0.98, speed * 1.02)
    found = report()
    return replace(found, phases=(Phase("as it is", rate, 40, 40 * 64 / speed), *found.phases))


def test_predictions_are_scaled_to_the_measured_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    measured = measured_at(1.08 * predict(report()).speed)
    measured.save(path)
    assert ask(path) == 0
    trust = result_of(measured).trust
    assert trust.measured is not None
    last = capsys.readouterr().out.splitlines()[-1]
    speed = trust.measured.value
    assert (
        last
        == f"Scaled to the {speed:,.0f} samples/s that were measured; within {trust.error:.0%}."
    )
    assert ask(path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["present"]["speed"] == pytest.approx(speed)


def test_nothing_is_predicted_where_the_model_is_far_from_the_measured_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    measured_at(1.5 * predict(report()).speed).save(path)
    assert ask(path, "--cores", "16") != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Nothing can be predicted from this report. The model says" in printed.err
    assert "33 % too slow" in printed.err
    assert "Run `penstock analyze` again" in printed.err
