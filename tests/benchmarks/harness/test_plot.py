"""Plots of points: where they are drawn, with which words, and that it is well formed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness import plot
from benchmarks.harness.plot import Axis, Figure, Point, Range, Series, svg

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
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.get("cy") != f"{plot.TOP - 16.5}"]
    x, y = ([float(dot.get(axis, "")) for dot in dots] for axis in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[2]
    assert [dot.get("class") for dot in dots] == ["s0", "s0", "s1"]
    words = [text.text for text in root.iter(f"{SVG}text")]
    for word in ("t < u", "across", "up", "a", "b", "p10 & more", "c never came"):
        assert word in words
    kinds = [path.get("class") or "" for path in root.iter(f"{SVG}path")]
    assert len([kind for kind in kinds if kind.startswith("line")]) == 1
    assert len([kind for kind in kinds if kind.startswith("spread")]) == 3


def test_an_axis_has_a_few_round_ticks() -> None:
    assert list(Axis(0.0, 10.0, 0, 1).ticks()) == [0, 2, 4, 6, 8, 10]
    assert list(Axis(57.2, 61.9, 0, 1).ticks()) == [58, 59, 60, 61]
    flat = Axis.over([Range(5.0, 5.0, 5.0)], 0, 100)
    assert flat(5.0) == pytest.approx(50)


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
            assert abs(x - other_x) >= 70 or abs(y - other_y) >= plot.LINE


def test_a_plot_is_also_a_picture_and_of_nothing_none(tmp_path: Path) -> None:
    drawn = Figure("t", "x", "y", (Series("a", points((1, 1), (2, 2))),), zero=True)
    plot.write(tmp_path / "none.svg", Figure("t", "x", "y", ()))
    assert not (tmp_path / "none.svg").exists()
    pytest.importorskip("matplotlib")
    plot.write(tmp_path / "out.png", drawn)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
