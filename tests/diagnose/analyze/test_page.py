"""The page of a report: the numbers of its plots, and that it loads nothing from outside."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.diagnose.analyze import plots, series
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.model import Change, predict
from penstock.diagnose.analyze.page import _cores_words, page_of
from penstock.diagnose.analyze.remedies import remedies
from penstock.diagnose.analyze.report import AnalysisReport, OperationTime, Wait
from penstock.diagnose.analyze.text import gain_words, rate_rows, verdict
from penstock.diagnose.analyze.what_if import ENOUGH, Forecast, Saturation, saturation
from tests.support.reports import bound_by, remedy, report, rich

EVIL = "python train.py --name '<script>alert(1)</script>\" onload=\"x' & <b>"


class Checked(HTMLParser):
    """Checks that every element is closed by a tag of its name."""

    EMPTY = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def parsed(page: str) -> Checked:
    found = Checked()
    found.feed(page)
    assert found.stack == []
    return found


def page(made: AnalysisReport) -> str:
    return page_of(made, [remedy("a cache of 5.5 GB", 2.02, 'cache="5.5GB"', "It fits.")])


def test_stacks_are_the_epoch_as_measured_and_as_predicted() -> None:
    made = report()
    after = predict(made, Change(cache=5_500_000_000))
    measured, predicted, best = series.stacks(
        made, result_of(made), predict(made), ("cache", after)
    )
    assert measured.compute == pytest.approx(50_000 / 2_000)
    assert measured.prep == pytest.approx(50_000 / 1_880 - 50_000 / 2_000)
    assert measured.whole == pytest.approx(50_000 / 900)
    assert predicted.whole == pytest.approx(predict(made).epoch)
    assert best.title == "cache"
    assert best.whole == pytest.approx(after.epoch)


def test_without_all_phases_no_stack_is_called_measured() -> None:
    made = replace(report(), phases=report().phases[:1])
    found = series.stacks(made, result_of(made), predict(made))
    assert [stack.title for stack in found] == ["predicted"]


def test_speed_over_cache_covers_all_sizes_and_marks_the_size_that_is_enough() -> None:
    forecast = Forecast(report())
    enough = saturation(forecast)
    found = series.over_cache(forecast, enough)
    assert found is not None
    lines = {line.name: dict(line.points) for line in found.lines}
    assert set(lines) == {"F", "P", "G", "speed"}
    assert (min(lines["speed"]), max(lines["speed"])) == (0, 5_500_000_000)
    assert lines["speed"][0] == pytest.approx(forecast().speed)
    assert lines["F"][0] == pytest.approx(100e6 / 110_000)
    assert found.present == (0.0, 900.0)
    assert found.enough is not None
    at, speed = found.enough
    assert lines["speed"][at] == speed
    assert speed >= (1 - ENOUGH) * lines["speed"][5_500_000_000]
    assert found.top > max(lines["speed"].values())


def test_without_sizes_of_samples_there_is_no_plot_of_the_cache() -> None:
    made = report(sample_bytes=0.0)
    forecast = Forecast(made)
    assert series.over_cache(forecast, saturation(forecast)) is None
    ids = [attributes.get("id") for _, attributes in parsed(page(made)).seen]
    assert "plot-cache" not in ids


def test_no_point_is_marked_if_a_cache_does_not_help() -> None:
    forecast = Forecast(bound_by("compute"))
    found = series.over_cache(forecast, saturation(forecast))
    assert found is not None
    assert found.enough is None


def test_speed_over_cores_marks_the_present_and_the_number_that_is_enough() -> None:
    forecast = Forecast(bound_by("prep"))
    enough = saturation(forecast)
    found = series.over_cores(forecast, enough)
    lines = {line.name: dict(line.points) for line in found.lines}
    assert found.present == (4.0, 800.0)
    assert 4 in lines["speed"]
    assert enough.cores in lines["speed"]
    assert enough.cores is not None
    assert found.enough == (float(enough.cores), enough.cores_speed)
    assert all(place == round(place) for place in lines["speed"])
    assert lines["P"][4] < lines["P"][max(lines["P"])]


def test_operations_keep_their_order_and_the_smallest_of_many_are_joined() -> None:
    assert [bar.name for bar in series.operations(report())] == [
        "decode",
        "random_resized_crop",
        "random_flip",
        "normalize",
    ]
    many = tuple(OperationTime(f"op {n}", "map", n / 10, 0.05) for n in range(1, 21))
    found = series.operations(replace(report(), operations=many), most=5)
    assert [bar.name for bar in found] == ["op 17", "op 18", "op 19", "op 20", "16 others"]
    assert found[-1].value == pytest.approx(sum(n / 10 for n in range(1, 17)))


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=300))
def test_a_histogram_counts_every_batch_once(times: list[float]) -> None:
    found = series.batch_times(replace(report(), batch_times=tuple(times)))
    assert found is not None
    assert sum(found.counts) == len(times)
    assert len(found.edges) == len(found.counts) + 1
    assert found.edges[0] <= min(times) * (1 + 1e-6)
    assert found.edges[-1] >= max(times) * (1 - 1e-6)
    assert found.median <= found.late
    assert len(found.counts) <= series.MOST_BINS + 2


def test_a_histogram_has_the_right_bars() -> None:
    made = replace(report(), batch_times=(0.11, 0.12, 0.121, 0.13, 0.15))
    found = series.batch_times(made)
    assert found is not None
    assert found.edges == pytest.approx((0.1, 0.12, 0.14, 0.16))
    assert found.counts == (1, 3, 1)
    assert (found.median, found.late) == (0.121, 0.15)


def test_the_allowed_time_of_a_batch_is_known_if_workers_take_whole_batches() -> None:
    whole = series.batch_times(report())
    assert whole is not None
    assert whole.allowed == pytest.approx(4 * 64 / 2_000)
    pieces = series.batch_times(report(piece=4))
    assert pieces is not None
    assert pieces.allowed is None


def test_a_timeline_cuts_out_the_time_between_phases() -> None:
    waits = (Wait(0, "replay", 0.1, 1.0), Wait(9, "cold", 0.5, 1.0), Wait(11, "cold", 0.3, 1.0))
    found = series.timeline(replace(report(), waits=waits))
    assert [(bar.phase, bar.steps) for bar in found] == [("replay", 1), ("cold", 1), ("cold", 1)]
    assert [bar.begin for bar in found] == pytest.approx([0, 1.1, 2.6])
    assert found[-1].end == pytest.approx(3.9)
    assert [(name, begin) for name, begin, _ in series.phases_of(found)] == [
        ("replay", 0),
        ("cold", pytest.approx(1.1)),
    ]


def test_many_steps_share_bars_without_losing_any() -> None:
    waits = tuple(
        Wait(n, "cold" if n >= 500 else "cached", 0.001 * (n % 7), 1.0) for n in range(1000)
    )
    found = series.timeline(replace(report(), waits=waits), most=100)
    assert len(found) <= 101
    assert sum(bar.steps for bar in found) == 1000
    assert sum(bar.mean * bar.steps for bar in found) == pytest.approx(
        sum(wait.wait for wait in waits)
    )
    assert max(bar.longest for bar in found) == 0.006


def test_the_page_is_well_formed_and_shows_every_plot() -> None:
    found = parsed(page(rich()))
    plots = [attributes for tag, attributes in found.seen if tag == "svg"]
    assert [plot["id"] for plot in plots] == [
        "plot-epoch",
        "plot-operations",
        "plot-cache",
        "plot-cores",
        "plot-batches",
        "plot-waits",
    ]
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)


def test_the_page_loads_nothing_from_outside() -> None:
    made = page(rich())
    for tag, attributes in parsed(made).seen:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "data"} & set(attributes)
    assert not re.search(r"https?://|@import|url\((?!#field-)", made)


def test_text_of_the_user_cannot_become_markup() -> None:
    made = rich()
    made = replace(
        made,
        command=EVIL,
        machine=EVIL,
        made=EVIL,
        notes=(EVIL,),
        setup=replace(made.setup, loader=EVIL, accelerator=EVIL),
        operations=(OperationTime(EVIL, EVIL, 1.0, 1.0),),
    )
    shown = page_of(made, [remedy(EVIL, 1.5, EVIL, EVIL)])
    found = parsed(shown)
    assert [tag for tag, _ in found.seen].count("script") == 1
    assert "b" not in {tag for tag, attributes in found.seen if "class" in attributes}
    assert not any("onload" in attributes for _, attributes in found.seen)
    assert "alert(1)" in shown
    assert "<script>alert" not in shown


@pytest.mark.parametrize("bound", ["compute", "prep", "fetch"])
def test_the_verdict_stands_at_the_top(bound: str) -> None:
    made = page_of(bound_by(bound))
    assert f'<h1 class="is-{bound}">{bound.capitalize()}-bound</h1>' in made


def test_a_report_without_optional_parts_still_makes_a_page() -> None:
    bare = replace(
        report(sample_bytes=0.0, workers=0, kind="none"),
        phases=(),
        operations=(),
        batch_times=(),
        waits=(),
        device_reads=None,
        command="",
        made="",
        machine="",
    )
    ids = [attributes["id"] for tag, attributes in parsed(page_of(bare)).seen if tag == "svg"]
    assert ids == []  # nothing was measured, so nothing is predicted


def test_infinite_rates_are_not_drawn() -> None:
    forecast = Forecast(report(sample_bytes=0.0))
    assert forecast().fetch_rate == math.inf
    found = series.over_cores(forecast, saturation(forecast))
    assert [line.name for line in found.lines] == ["P", "G", "speed"]
    plots = re.findall(r"<svg.*?</svg>", page_of(report(sample_bytes=0.0)), flags=re.DOTALL)
    assert not any(re.search(r"\b(inf|nan)\b", plot) for plot in plots)


def test_the_page_shows_the_numbers_of_the_text() -> None:
    for bound in ("fetch", "prep", "compute"):
        made = bound_by(bound, penstock=1e-3)
        result = result_of(made)
        found = remedies(made, 64 << 30, result)
        shown = " ".join(
            re.sub(r"<[^>]+>", " ", html.unescape(page_of(made, found, result))).split()
        )
        for row in rate_rows(made, result):
            assert f"{row.rate.value:,.0f}" in shown
        assert verdict(result).partition(": ")[2].lower() in shown.lower()
        for one in found:
            assert gain_words(one, result) in shown


def test_prose_has_no_button_that_copies_it() -> None:
    made = bound_by("prep")
    result = result_of(made)
    found = remedies(made, 64 << 30, result)
    machine = [one for one in found if one.change.cores is not None]
    assert machine
    assert not any(one.code or one.command for one in machine)
    buttons = page_of(made, found, result).count('class="copy"')
    assert buttons == sum(bool(one.command) + bool(one.code) for one in found)


def test_one_core_is_never_called_enough() -> None:
    enough = Saturation(cache=0, cache_speed=500.0, cores=1, cores_speed=500.0)
    curves = series.over_cores(Forecast(bound_by("compute")), enough)
    assert "enough:" not in plots.cores_plot(curves)
    assert _cores_words(enough) == "More cores do not help."
