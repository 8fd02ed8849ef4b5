"""The report in a terminal: stalls from measured phases, in the words of the documentation."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.diagnose.analyze import text
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.model import SMALL_STALL, Change, predict
from penstock.diagnose.analyze.remedies import remedies
from penstock.diagnose.analyze.report import AnalysisReport, Interval, Phase, PhaseName, Rate
from penstock.diagnose.analyze.result import Result, Shares, Verdict
from penstock.diagnose.analyze.stalls import (
    Stalls,
    all_ranks,
    rank_speeds,
    slowest,
    stalls_of,
)
from tests.support import DOCS
from tests.support.reports import bound_by, remedy, report, rich

BOUNDS = ("compute", "prep", "fetch")


def with_rates(**rates: float) -> AnalysisReport:
    phases = tuple(
        Phase(name, Rate(rate, rate, rate), 10, 1.0)  # type: ignore[arg-type]
        for name, rate in rates.items()
    )
    return replace(report(), phases=phases)


def test_stalls_are_the_differences_between_the_phases() -> None:
    found = stalls_of(with_rates(replay=1000, cached=500, cold=250))
    assert (found.compute, found.prep, found.fetch) == pytest.approx((1e-3, 1e-3, 2e-3))
    assert found.measured
    assert found.speed == pytest.approx(250)
    assert (found.prep_share, found.fetch_share, found.idle) == pytest.approx((0.25, 0.5, 0.75))
    assert found.bound == "fetch"


@given(st.tuples(*[st.floats(1.0, 1e6)] * 3))
def test_stalls_are_never_negative_and_add_up_to_the_slowest_phase(
    rates: tuple[float, float, float],
) -> None:
    found = stalls_of(with_rates(replay=rates[0], cached=rates[1], cold=rates[2]))
    assert min(found.compute, found.prep, found.fetch) >= 0
    assert found.whole == pytest.approx(1 / min(rates))


@pytest.mark.parametrize("missing", ["replay", "cached", "cold"])
def test_the_model_replaces_a_phase_that_was_not_run(missing: PhaseName) -> None:
    whole = report()
    part = replace(whole, phases=tuple(phase for phase in whole.phases if phase.name != missing))
    found, model = stalls_of(part), predict(part)
    assert not found.measured
    if missing == "replay":
        assert found.compute == pytest.approx(model.compute / part.setup.samples)
    elif missing == "cached":
        assert found.prep == pytest.approx(model.prep / part.setup.samples)
    else:
        assert found.fetch == pytest.approx(model.fetch / part.setup.samples)
    if missing != "cached":
        assert not result_of(part).trust.numbers or missing == "cold"


@pytest.mark.parametrize(
    ("stalls", "bound"),
    [
        (Stalls(1.0, 0.02, 0.02), "compute"),
        (Stalls(1.0, SMALL_STALL, SMALL_STALL / 2), "prep"),
        (Stalls(1.0, SMALL_STALL / 2, SMALL_STALL), "fetch"),
    ],
)
def test_a_small_stall_counts_as_compute_bound(stalls: Stalls, bound: str) -> None:
    assert stalls.bound == bound


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_first_words_name_the_bottleneck(bound: str) -> None:
    lines = text.lines_of(bound_by(bound))
    assert lines[0].startswith(f"{bound}-bound: the accelerator stands still ")
    assert lines[1] == text.MEANING[bound]  # type: ignore[index]


def shares(prep: float, fetch: float, contention: float = 0.0, wide: float = 0.0) -> Shares:
    def around(value: float) -> Interval:
        return Interval(value, max(0.0, value - wide), min(1.0, value + wide))

    return Shares(around(prep), around(fetch), around(contention))


def with_verdict(found: Verdict, parts: Shares) -> Result:
    return replace(result_of(report()), verdict=found, shares=parts)


def test_the_shown_parts_of_a_verdict_add_up() -> None:
    # The exact total is 28.8 %.
    shown = text.verdict(with_verdict(Verdict("prep"), shares(0.144, 0.144)))
    assert shown == (
        "prep-bound: the accelerator stands still 28 % of the time: 14 % stalled on prep, "
        "14 % on fetch"
    )


def test_a_wide_verdict_is_shown_with_its_interval() -> None:
    shown = text.verdict(with_verdict(Verdict("prep"), shares(0.3, 0.0, wide=0.05)))
    assert "stands still 30 % of the time (25 to 40 %)" in shown


def test_contention_is_named_with_what_it_costs() -> None:
    found = with_verdict(Verdict("contention"), shares(0.01, 0.0, contention=0.2))
    assert text.verdict(found) == (
        "contention-bound: workers slow the training step by 20 % of the time; it waits 1 % for "
        "batches"
    )
    assert text.meaning(report(), found)[0] == text.MEANING["contention"]


def test_what_workers_wait_for_is_named_with_its_place() -> None:
    found = with_verdict(Verdict("latency", cause="sleep", place="train.py:31"), shares(0.5, 0.0))
    assert text.meaning(report(), found)[:2] == [
        text.MEANING["latency"],
        "Workers sleep: train.py:31.",
    ]


@pytest.mark.parametrize(
    ("cause", "scaling"),
    [
        ("lock", {1: 1.0, 2: 2.0}),
        ("network", {1: 1.0, 2: 1.9, 4: 1.95}),
        ("open", {1: 1.0, 2: 1.02}),
    ],
)
def test_more_workers_are_not_said_to_help_where_they_wait_for_each_other(
    cause: str, scaling: dict[int, float]
) -> None:
    found = with_verdict(Verdict("latency", cause=cause), shares(0.5, 0.0))
    assert text.meaning(report(workers=2, scaling=scaling), found)[0] == text.IN_TURN


def test_workers_are_not_blamed_where_there_are_none() -> None:
    for bound in ("prep", "latency"):
        found = with_verdict(Verdict(bound), shares(0.5, 0.0))
        assert text.meaning(report(workers=0), found)[0] == text.NO_WORKERS


def test_a_refusal_says_why_and_names_no_remedy() -> None:
    why = "not enough steps to tell: 3 steps in 45 s. Give --seconds 300."
    refused = replace(result_of(report()), verdict=Verdict(None, refusal=why))
    assert text.verdict(refused) == f"no verdict: {why}"
    assert remedies(report(), 64 << 30, refused) == []
    assert text.remedy_lines([], refused) == []


def test_rates_are_shown_with_their_intervals_and_in_bytes() -> None:
    lines = text.lines_of(report())
    assert "  G  ingestion   2,000 samples/s  (1,960 to 2,040)" in lines
    assert "  S  storage       909 samples/s  (891 to 927)  100 MB/s" in lines
    (fetch,) = [line for line in lines if line.startswith("  F  fetch ")]
    assert fetch.endswith("with no cache")


def test_the_rate_of_fetching_names_the_present_cache() -> None:
    lines = text.lines_of(replace(report(), setup=replace(report().setup, cache=1_100_000_000)))
    (fetch,) = [line for line in lines if line.startswith("  F")]
    assert fetch.endswith("with a cache of 1.1 GB, 20 % of the data")


def test_without_sizes_of_samples_the_rates_of_storage_are_left_out() -> None:
    lines = text.lines_of(report(sample_bytes=0.0))
    assert [line[2] for line in lines if line.startswith("  ")] == ["G", "P"]


def test_an_interval_that_stayed_wide_is_marked() -> None:
    made = report()
    phases = tuple(replace(phase, enough=phase.name != "prep") for phase in made.phases)
    lines = text.lines_of(replace(made, phases=phases))
    assert sum("still wide when the time was up" in line for line in lines) == 1


def test_the_model_is_compared_with_the_measurement() -> None:
    made = report()
    trust = result_of(made).trust
    (line,) = [line for line in text.lines_of(made) if "the model says" in line]
    assert line.startswith("Training runs at 900 samples/s (882 to 918); the model says ")
    assert f"{abs(trust.modelled / 900 - 1) * 100:.1f} % too fast." in line
    assert f"within {trust.error * 100:.0f} %" in line


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.97, "Cold reads: 97 % of the bytes came from the device."),
        (
            0.4,
            "Cold reads: 40 % of the bytes came from the device, the others from memory: storage "
            "is slower than S says.",
        ),
    ],
)
def test_a_remark_says_how_cold_the_cold_reads_were(share: float, words: str) -> None:
    assert words in text.lines_of(replace(report(), device_reads=share))


def test_without_counters_of_the_device_cold_reads_are_not_mentioned() -> None:
    lines = text.lines_of(replace(report(), device_reads=None))
    assert not any("Cold reads" in line for line in lines)


FETCH = result_of(bound_by("fetch"))


def test_the_most_useful_remedy_comes_first_with_its_code() -> None:
    found = [
        remedy("Twice the workers", 1.1, "num_workers=8"),
        remedy("Cache what is read", 2.04, 'cache="5.5GB"', "It holds all of the data."),
    ]
    lines = text.remedy_lines(found, FETCH)
    assert lines[0].startswith("Most useful: Cache what is read: 2.04 times as fast (")
    assert lines[1:3] == ["  It holds all of the data.", '    cache="5.5GB"']
    assert lines[3:5] == ["", "Then:"]
    assert lines[5].startswith("  Twice the workers: 1.10 times as fast (")
    assert lines[6] == "      num_workers=8"


def test_the_command_without_an_edit_is_shown_in_place_of_code() -> None:
    made = replace(
        remedy("a cache", 2.0, "code"), command="penstock run -- x", condition="only if it rains"
    )
    assert text.remedy_lines([made], FETCH)[1:] == ["  only if it rains", "    penstock run -- x"]


def test_a_measured_gain_stands_beside_the_predicted_one_and_the_baseline() -> None:
    made = replace(
        remedy("a cache", 2.0, ""), measured=1.9, baseline=900.0, speed=1800.0, low=1.8, high=2.2
    )
    assert text.gain_words(made, FETCH).startswith(
        "measured 1.90 times as fast, predicted 2.00 (1.80 to 2.20; 1,800 instead of 900 samples/s"
    )


def test_without_trust_a_remedy_has_no_number() -> None:
    unsure = replace(FETCH, trust=replace(FETCH.trust, numbers=False))
    made = remedy("a cache", 2.0, "")
    assert text.gain_words(made, unsure) == "helps; how much is not known"
    assert text.gain_words(replace(made, measured=1.9), unsure) == "measured 1.90 times as fast"


def test_sharing_and_other_hardware_are_never_the_most_useful_for_a_single_run() -> None:
    cache, share = remedy("a cache", 2.0, "cache"), remedy("one preparation", 4.0, "share")
    share = replace(share, change=Change(jobs=4, share=True), why="if 4 jobs run")
    cores = replace(remedy("a machine", 3.0, ""), change=Change(cores=16))
    assert text.grouped([share, cores, cache]) == ([cache], [cores], [share])
    lines = text.remedy_lines([share, cores, cache], FETCH)
    assert lines[0].startswith("Most useful: a cache")
    assert lines.index("Other hardware:") < lines.index("If 4 jobs run.")


def test_a_missing_remedy_is_mentioned() -> None:
    assert text.remedy_lines([], FETCH) == ["No remedy was found that would help."]
    (line,) = text.remedy_lines([], result_of(bound_by("compute")))
    assert line.startswith("Nothing to do")


def test_ranks_have_a_line_each_and_the_slowest_is_named() -> None:
    lines = text.lines_of(rich())
    start = lines.index("rank  samples/s  loader alone  stalled on fetch  on prep  bound")
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["0", "1"]
    # Both run at the same speed, but the workers of the second take longer.
    assert lines[start + 3] == "Rank 1 is the slowest: the others wait for it."


def test_the_measured_speed_of_a_rank_counts_more_than_that_of_its_loader() -> None:
    first = bound_by("fetch", world=2)
    second = bound_by("compute", rank=1, world=2)
    both = replace(first, ranks=(second,))
    last = slowest(rank_speeds(both))
    assert last is not None
    assert last.report.setup.rank == 1


def test_of_equal_ranks_none_is_the_slowest() -> None:
    made = report(world=2)
    both = replace(made, ranks=(report(rank=1, world=2),))
    assert slowest(rank_speeds(both)) is None
    assert "No rank is slower than the others." in text.lines_of(both)
    assert [rank.setup.rank for rank in all_ranks(both)] == [0, 1]


def test_an_interruption_is_told_once_in_the_head_and_in_the_refusal() -> None:
    # Printed: The analysis was interrupted: it was interrupted after 35 steps.
    cut = replace(bound_by("prep"), interrupted="it was interrupted after 35 steps", phases=())
    lines = text.lines_of(cut)
    assert lines[0] == "The analysis ended early: it was interrupted after 35 steps."
    assert lines[1].startswith("no verdict: it was interrupted after 35 steps, before as it is and")


def test_notes_come_last() -> None:
    assert text.lines_of(rich())[-1] == "note: Preparation was timed on 240 batches."


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_documentation_uses_the_words_that_are_printed(bound: str) -> None:
    page = " ".join((DOCS / "why-is-my-gpu-idle.md").read_text().split())
    result = result_of(bound_by(bound))
    verdict = re.sub(r" \(\d+ to \d+ %\)", "", text.verdict(result))
    meaning = text.meaning(bound_by(bound), result)[0]
    assert verdict in page
    assert meaning in page
    assert f"## {bound}-bound" in page


def test_the_documentation_explains_every_rate_and_remark() -> None:
    page = " ".join((DOCS / "why-is-my-gpu-idle.md").read_text().split())
    for letter, name in text.NAMES.items():
        assert f"| {letter} | {name} | {text.RATES[letter]}" in page
    for words in (
        "of the bytes came from the device",
        "storage is slower than S says",
        "still wide when the time was up",
        "is the slowest: the others wait for it",
        "Most useful:",
    ):
        assert words in page, words
