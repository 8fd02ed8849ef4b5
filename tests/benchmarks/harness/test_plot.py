"""Plots of points: where points and labels are drawn, and that the SVG is well formed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness import plot
from benchmarks.harness.plot import Figure, Point, Range, Series, svg
from penstock.diagnose.svg import LINE_HEIGHT

SVG = "{http://www.w3.org/2000/svg}"


def points(*places: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(Point(Range(x, x - 1, x + 1), Range(y, y, y), f"p{x:g} & more") for x, y in places)


def test_a_plot_is_to_scale_and_says_what_each_colour_means() -> None:
    drawn = Figure(
        "t < u",
        "across",
        "up",
        (Series("a", points((10, 1), (20, 2)), joined=True), Series("b", points((30, 3)))),
        notes=("c never came",),
    )
    root = ElementTree.fromstring(svg(drawn))
    circles = list(root.iter(f"{SVG}circle"))
    key = [dot for dot in circles if float(dot.get("cy", "")) < plot.BOX.top]
    dots = [dot for dot in circles if dot not in key]
    assert [dot.get("class") for dot in key] == ["fill s1", "fill s0"]
    x, y = ([float(dot.get(axis, "")) for dot in dots] for axis in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[2]
    assert [dot.get("class") for dot in dots] == ["fill s0", "fill s0", "fill s1"]
    words = [text.text for text in root.iter(f"{SVG}text")]
    for word in ("t < u", "across", "up", "a", "b", "p10 & more", "c never came"):
        assert word in words
    kinds = [path.get("class") or "" for path in root.iter(f"{SVG}path")]
    assert kinds == ["line s0", "whisker s0", "whisker s0", "whisker s1"]


def test_all_points_and_their_spread_lie_in_the_field() -> None:
    spread = tuple(Point(Range(x, x - 9, x + 9), Range(x, x - 5, x + 5)) for x in (1.0, 50.0))
    root = ElementTree.fromstring(svg(Figure("t", "x", "y", (Series("a", spread),))))
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path")]
    assert len(paths) == 4
    for path in paths:
        for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path):
            assert plot.BOX.left < float(x) < plot.BOX.right
            assert plot.BOX.top < float(y) < plot.BOX.bottom


def test_notes_stand_below_the_plot_and_inside_the_drawing() -> None:
    series = (Series("a", points((1, 1), (2, 2))),)
    root = ElementTree.fromstring(svg(Figure("t", "x", "y", series, notes=("one", "two"))))
    places = {text.text: float(text.get("y", "")) for text in root.iter(f"{SVG}text")}
    assert places["x"] + LINE_HEIGHT < places["one"]
    assert places["one"] + LINE_HEIGHT <= places["two"]
    assert places["two"] < float(root.get("height", "")) - 8


def test_labels_of_points_in_one_place_do_not_cover_each_other() -> None:
    crowd = Figure(
        "t", "x", "y", (Series("a", points((10, 1), (10, 1.001), (10, 1.002), (90, 9))),)
    )
    root = ElementTree.fromstring(svg(crowd))
    places = [
        (float(text.get("x", "")), float(text.get("y", "")))
        for text in root.iter(f"{SVG}text")
        if "more" in (text.text or "")
    ]
    assert len(places) == 4
    for number, (x, y) in enumerate(places):
        for other_x, other_y in places[number + 1 :]:
            assert abs(x - other_x) >= 70 or abs(y - other_y) >= LINE_HEIGHT


def test_a_plot_is_also_written_as_png_and_without_points_not_at_all(tmp_path: Path) -> None:
    drawn = Figure("t", "x", "y", (Series("a", points((1, 1), (2, 2))),), zero=True)
    plot.write(tmp_path / "none.svg", Figure("t", "x", "y", ()))
    assert not (tmp_path / "none.svg").exists()
    pytest.importorskip("matplotlib")
    plot.write(tmp_path / "out.png", drawn)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
