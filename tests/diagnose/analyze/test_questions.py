"""What-if questions beyond sizes and counts: batch size, first epoch, page cache, latency."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import cli
from penstock.commands.what_if import with_fixed_part
from penstock.diagnose.analyze.assumptions import assumptions
from penstock.diagnose.analyze.model import Change, lru_hits, predict
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.what_if import Forecast, Values, prediction_rows
from penstock.errors import PipelineError
from tests.support.reports import bound_by, report

GB = 10**9


def lines(made: AnalysisReport, **values: float) -> str:
    options = [Values(name, (value,)) for name, value in values.items()]
    forecast = Forecast(made)
    return " ".join(assumptions(forecast, options, prediction_rows(forecast, options)))


def simulated_hits(share: float, samples: int = 4000, epochs: int = 6) -> float:
    """Share of the reads that hit a real LRU cache, without the first epoch, which fills it."""
    chance = random.Random(0)
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for epoch in range(epochs):
        for sample in chance.sample(range(samples), samples):
            hits += bool(epoch) and sample in kept
            kept[sample] = None
            kept.move_to_end(sample)
            if len(kept) > share * samples:
                kept.popitem(last=False)
    return hits / samples / (epochs - 1)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.65, 0.9])
def test_the_formula_for_a_page_cache_agrees_with_an_lru_cache(share: float) -> None:
    assert lru_hits(share) == pytest.approx(simulated_hits(share), abs=0.01)


def test_a_page_cache_is_worth_less_than_a_cache_that_evicts_nothing() -> None:
    data = report().setup.sample_bytes * report().setup.samples
    for share in (0.25, 0.5, 0.75):
        page = predict(report(), Change(page_cache=round(share * data)))
        cache = predict(report(), Change(cache=round(share * report().setup.full_cache_bytes)))
        assert predict(report()).speed < page.speed < cache.speed
    assert predict(report(), Change(page_cache=round(data))).speed == pytest.approx(
        predict(report(), Change(cache=round(data))).speed
    )


def test_thrashing_is_told_apart_from_what_any_cache_of_that_size_misses() -> None:
    half = round(report().setup.sample_bytes * report().setup.samples / 2)
    said = lines(report(), page_cache=half)
    assert "85% of the reads miss it: 50% would miss any cache for 50% of the data" in said
    assert "and 35% are thrashing" in said
    assert "does not thrash" in lines(report(), page_cache=10**12)


def test_the_first_epoch_is_spread_over_all_epochs() -> None:
    change = Change(cache=3 * GB)
    first, later = predict(report()), predict(report(), change)
    for epochs in (1, 4, 90):
        mean = predict(report(), replace(change, epochs=epochs))
        assert mean.epoch == pytest.approx((first.epoch + (epochs - 1) * later.epoch) / epochs)
        assert mean.speed == pytest.approx(report().setup.samples / mean.epoch)
    said = lines(report(), cache=3 * GB, epochs=90)
    assert f"The first epoch takes {first.epoch:,.1f} s" in said
    assert f"each later one {later.epoch:,.1f} s" in said


def test_without_a_cache_the_first_epoch_costs_no_more() -> None:
    assert predict(report(), Change(epochs=3)) == predict(report())
    assert "costs no more than later ones" in lines(report(), epochs=3)


def test_a_larger_batch_spreads_the_fixed_part_of_a_step() -> None:
    made = bound_by("compute")
    step = made.setup.batch * made.costs.compute
    fixed = replace(made, costs=replace(made.costs, fixed=step / 2))
    assert predict(made, Change(batch=128)).ingestion == pytest.approx(500)
    assert predict(fixed, Change(batch=64)) == predict(fixed)
    assert predict(fixed, Change(batch=128)).ingestion == pytest.approx(500 / 0.75)
    assert predict(fixed, Change(batch=32)).ingestion == pytest.approx(500 / 1.5)


def test_a_larger_batch_makes_the_stall_larger_where_steps_have_a_fixed_part() -> None:
    made = bound_by("prep", fixed=0.02)
    shares = [predict(made, Change(batch=batch)).prep_stall for batch in (16, 64, 256)]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.1


def test_two_reports_tell_the_fixed_part_of_a_step() -> None:
    def with_batch(batch: int) -> AnalysisReport:
        return report(batch=batch, compute=(0.010 + batch * 1e-4) / batch)

    found = with_fixed_part(with_batch(64), with_batch(256))
    assert found.costs.fixed == pytest.approx(0.010)
    ingestion = predict(found, Change(batch=256)).ingestion
    assert ingestion == pytest.approx(1 / with_batch(256).costs.compute)
    with pytest.raises(PipelineError, match="same batch size, 64"):
        with_fixed_part(with_batch(64), with_batch(64))
    with pytest.raises(PipelineError, match="two reports of one script"):
        with_fixed_part(
            with_batch(64), replace(with_batch(256), setup=report(samples=9, batch=256).setup)
        )


def test_the_line_through_two_noisy_reports_has_no_negative_part() -> None:
    faster = with_fixed_part(report(), report(batch=128, compute=2 / 2_000))
    assert faster.costs.fixed == 0
    constant = with_fixed_part(report(), report(batch=128, compute=0.1 / 2_000))
    assert constant.costs.fixed == pytest.approx(64 / 2_000)


def test_workers_wait_for_the_latency_of_storage_and_a_fetcher_does_not() -> None:
    waiting = predict(report(), Change(latency=0.1))
    # Four workers, each of which waits 0.1 s and 1.1 ms for a sample, and prepares it in 2 ms.
    assert waiting.speed == pytest.approx(4 / (0.1 + 1 / 909 + 0.002), rel=0.05)
    assert waiting.bound == "fetch"
    assert predict(report(), Change(latency=0.1, requests=10)).speed == pytest.approx(99, rel=0.05)
    ahead = predict(report(), Change(latency=0.1, requests=1000))
    assert ahead.speed == pytest.approx(predict(report(), Change(latency=0.0)).speed, rel=0.01)


def test_more_requests_never_make_a_prediction_slower() -> None:
    speeds = [predict(report(), Change(latency=0.03, requests=n)).speed for n in (4, 8, 32, 128)]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "8"], "Give --latency"),
        (["--latency", "30"], "give a time, such as 30ms"),
        (["--other", "x.json"], "--other belongs to --batch"),
        (["--batch", "0"], "at least 1|must be above 0"),
        (["--epochs", "0"], "at least 1|must be above 0"),
    ],
)
def test_an_option_that_cannot_be_used_says_what_to_give(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report().save(tmp_path / "report.json")
    assert cli.main(["what-if", str(tmp_path / "report.json"), *words])
    assert re.search(message, capsys.readouterr().err)


def test_the_command_reads_the_second_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    report(compute=(0.010 + 64 * 1e-4) / 64).save(one)
    report(batch=256, compute=(0.010 + 256 * 1e-4) / 256).save(two)
    assert not cli.main(["what-if", str(one), "--batch", "64,256", "--other", str(two)])
    assert "A step takes 10.0 ms, and 100 us for each sample" in capsys.readouterr().out
    assert not cli.main(["what-if", str(one), "--batch", "64,256"])
    assert "Assumed: the time of a step is proportional to the batch" in capsys.readouterr().out
