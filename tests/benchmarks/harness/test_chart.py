"""Charts of races: which bars are drawn, in which order, and that the SVG is well formed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import chart
from benchmarks.harness.chart import panels, svg
from benchmarks.harness.measure import Lane, Run, Spread
from benchmarks.harness.race_table import RATE, join_results, race_result
from benchmarks.harness.report import write_json
from benchmarks.harness.sameness import Look
from penstock.diagnose.svg import FONT_SIZE, HEAD_SIZE, MARGIN, text_width

LOOK = Look((2,), "float32", 0.5, 0.25)


def lane(title: str, rates: dict[int, float], *, ours: bool = False) -> Lane:
    return Lane(title, ours, {number: Run({"rate": rate}, LOOK) for number, rate in rates.items()})


def racers() -> list[Lane]:
    absent = Lane("absent & gone", False, why_not="not installed: run scripts/bench-setup absent")
    return [
        lane("peer", {0: 100.0, 1: 200.0}),
        absent,
        lane("mine", {0: 300.0, 1: 400.0}, ours=True),
        lane("mine too", {0: 50.0}, ours=True),
    ]


def test_a_panel_has_the_fastest_first_and_the_absent_last() -> None:
    (panel,) = panels(race_result("r", "t", racers(), (RATE,), ()).data)
    assert [bar.title for bar in panel.bars] == ["mine", "peer", "mine too", "absent & gone"]
    assert panel.bars[0].spread == Spread(350.0, 300.0, 400.0)
    assert panel.most == 400.0


def test_a_chart_draws_each_contestant_to_scale_and_ours_apart() -> None:
    root = ElementTree.fromstring(svg(panels(race_result("r", "t", racers(), (RATE,), ()).data)))
    name = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in root.iter(f"{name}rect") if bar.get("class") != "back"]
    assert [bar.get("class") for bar in bars] == ["fill ours", "fill peer", "fill ours"]
    widths = [float(bar.get("width", "")) for bar in bars]
    assert widths[1] / widths[0] == pytest.approx(150 / 350, rel=0.01)
    assert len({bar.get("x") for bar in bars}) == 1
    words = [text.text for text in root.iter(f"{name}text")]
    assert "absent & gone" in words
    assert "not installed: run scripts/bench-setup absent" in words
    whiskers = [path.get("d", "") for path in root.iter(f"{name}path")]
    left = float(bars[0].get("x", ""))
    ends = [float(end) for end in re.findall(r"[ML]([\d.]+)", whiskers[0])[:2]]
    assert len(whiskers) == 3
    assert ends == pytest.approx([left + widths[0] * rate / 350 for rate in (300, 400)], abs=0.2)


def test_words_of_a_chart_stay_inside_and_off_each_other() -> None:
    lanes = [*racers(), lane("a lane with a name that is long, very long", {0: 99_999.0})]
    lanes.append(Lane("gone", False, why_not="not installed: " + "because " * 40))
    root = ElementTree.fromstring(
        svg(panels(race_result("randaugment", "t", lanes, (RATE,), ()).data))
    )
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        kind, x = text.get("class", ""), float(text.get("x", ""))
        size = HEAD_SIZE if kind == "head" else FONT_SIZE
        width = text_width(text.text or "", size, bold=kind in ("head", "strong"))
        begin = x - width if text.get("text-anchor") == "end" else x
        rows.setdefault(text.get("y", ""), []).append((begin, begin + width))
    assert len(rows) == 1 + len(lanes)
    for (first, end), (second, last) in rows.values():
        assert first >= MARGIN - 0.1
        assert end < second
        assert last <= chart.WIDTH - MARGIN + 0.1


def test_a_race_of_ours_alone_is_not_drawn_beside_others() -> None:
    data = join_results(
        [
            race_result("peers", "t", racers(), (RATE,), ()),
            race_result("scaling", "t", [lane("one", {0: 1.0}, ours=True)], (RATE,), ()),
        ]
    ).data
    assert [panel.title for panel in panels(data)] == ["peers"]
    assert [panel.title for panel in panels({"scaling": data["scaling"]})] == ["scaling"]


def test_a_race_to_the_first_batch_is_drawn_in_milliseconds_least_first() -> None:
    lanes = [Lane(t, False, {0: Run({"first": s}, LOOK)}) for t, s in (("a", 0.5), ("b", 0.2))]
    (panel,) = panels(race_result("start", "t", lanes, (), ()).data)
    assert [(bar.title, bar.spread) for bar in panel.bars] == [
        ("b", Spread(200.0, 200.0, 200.0)),
        ("a", Spread(500.0, 500.0, 500.0)),
    ]


def test_a_chart_is_redrawn_from_json(tmp_path: Path) -> None:
    made = race_result("r", "t", racers(), (RATE,), ())
    write_json(tmp_path / "out.json", "load", {}, made)
    drawn = tmp_path / "out.svg"
    assert main(["chart", str(tmp_path / "out.json"), "--chart", str(drawn)]) == 0
    assert drawn.read_text() == svg(panels(made.data))


def test_a_chart_is_also_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart.write(tmp_path / "out.png", race_result("r", "t", racers(), (RATE,), ()).data)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        chart.write(tmp_path / "out.svg", {"cache": {"samples": 3}, "r": {}})
