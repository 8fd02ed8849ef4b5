"""The plotter: ticks, scales and units, places of marks in pixels, escaping, light and dark."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.diagnose.svg import (
    BYTES,
    DARK,
    LIGHT,
    PERCENT,
    SECONDS,
    Drawing,
    PlotArea,
    PlotBox,
    Scale,
    Style,
    Theme,
    Tick,
    Unit,
    choose_unit,
    duration_unit,
    number_labels,
    series_kind,
    shorten,
    spread_apart,
    text_width,
)

SVG = "{http://www.w3.org/2000/svg}"
BOX = PlotBox(50, 20, 250, 120)
EVIL = "<script>alert(\"1\")</script> & 'b' ]]> --> \x00\x1b\ud800\uffff"


def parsed(drawing: Drawing, style: Style | None = None, title: str = "t") -> ElementTree.Element:
    text = drawing.document(style or Style("test"), title, "d")
    return ElementTree.fromstring(text.encode())


def marks(drawing: Drawing, tag: str, *names: str) -> list[list[float | str]]:
    """Attributes of all marks of a tag, numbers as numbers; the card behind them is left out."""

    def value(text: str) -> float | str:
        return float(text) if re.fullmatch(r"-?[\d.]+", text) else text

    elements = [mark for mark in parsed(drawing).iter(SVG + tag) if mark.get("class") != "back"]
    return [[value(mark.get(name, "")) for name in names] for mark in elements]


def words(drawing: Drawing) -> list[str | None]:
    return [text.text for text in parsed(drawing).iter(f"{SVG}text")]


# Scales, ticks and units


def test_a_scale_maps_values_to_pixels_upwards_too() -> None:
    across, up = Scale(10, 20, 100, 300), Scale(0, 4, 120, 20)
    assert [across(value) for value in (10, 15, 20, 25)] == [100, 200, 300, 400]
    assert [up(value) for value in (0, 1, 4)] == [120, 95, 20]


def test_a_scale_around_values_leaves_room_on_both_sides() -> None:
    scale = Scale.around([20, 10, 15], 0, 120)
    assert (scale.low, scale.high) == pytest.approx((9, 21))
    assert scale(10) == pytest.approx(10)
    from_zero = Scale.around([20, 10], 0, 1, from_zero=True)
    assert (from_zero.low, from_zero.high) == pytest.approx((0, 21))
    assert Scale.around([5.0], 0, 100)(5.0) == pytest.approx(50)
    assert Scale.around([0.0], 0, 100)(0.0) == pytest.approx(50)


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (57.2, 61.9, 5, [58, 59, 60, 61]),
        (0, 100, 4, [0, 25, 50, 75, 100]),
        (-3, 3, 5, [-2, 0, 2]),
        (0, 0.7, 4, [0, 0.2, 0.4, 0.6]),
        (3, 3, 5, [3]),
    ],
)
def test_ticks_are_round(low: float, high: float, about: int, expected: list[float]) -> None:
    assert Scale(low, high, 0, 1).round_values(about) == pytest.approx(expected)


def test_whole_ticks_are_never_fractions() -> None:
    assert Scale(1, 3, 0, 1).round_values() != [1, 2, 3]
    assert Scale(1, 3, 0, 1).round_values(whole=True) == [1, 2, 3]
    assert Scale(0, 11, 0, 1).round_values(4, whole=True) == [0, 5, 10]


@given(st.floats(0, 1e9), st.floats(1e-6, 1e9), st.booleans())
def test_ticks_are_few_and_within_their_scale(low: float, span: float, whole: bool) -> None:
    ticks = Scale(low, low + span, 0, 100).round_values(whole=whole)
    slack = 1e-6 * max(1.0, low + span)
    assert len(ticks) <= 8
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)


def test_ticks_are_round_in_their_unit_and_keep_their_place() -> None:
    gigabytes = Scale(0, 5.5e9, 0, 110).ticks(Unit("GB", 1e9))
    assert gigabytes == [Tick(0, "0"), Tick(2e9, "2"), Tick(4e9, "4")]
    shares = Scale(0, 1, 0, 100).ticks(PERCENT, about=4, suffix="%")
    assert [label for _, label in shares] == ["0%", "25%", "50%", "75%", "100%"]
    assert [value for value, _ in shares] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 3 * 0.1, 1], ["0", "0.3", "1"]),
        ([0, 1000, 50_000], ["0", "1,000", "50,000"]),
        ([0, 50_000, 100_000], ["0", "50K", "100K"]),
        ([0, 500_000, 1_000_000], ["0", "0.5M", "1M"]),
        ([0, 2.5e9], ["0", "2.5G"]),
        ([-0.5, 0], ["-0.5", "0"]),
        ([], []),
    ],
)
def test_labels_of_ticks_are_short_and_alike(values: list[float], labels: list[str]) -> None:
    assert number_labels(values) == labels


def test_a_unit_is_the_largest_that_gives_at_least_one() -> None:
    assert [choose_unit(n, BYTES).name for n in (0, 999, 2e6, 1e9, 3e15)] == [
        "bytes",
        "bytes",
        "MB",
        "GB",
        "TB",
    ]
    assert [choose_unit(n, SECONDS).name for n in (2, 0.5, 1e-4, 0)] == ["s", "ms", "µs", "µs"]


def test_long_times_are_shown_in_minutes_and_hours() -> None:
    units = [duration_unit(seconds) for seconds in (1e-5, 0.1, 55, 179, 600, 7199, 9000)]
    assert [unit.name for unit in units] == ["ms", "ms", "s", "s", "minutes", "minutes", "hours"]
    assert [unit.divisor for unit in units] == [1e-3, 1e-3, 1, 1, 60, 60, 3600]


# Words


def test_wide_letters_take_more_room_and_bold_ones_too() -> None:
    assert text_width("illi") < text_width("nooc") < text_width("MWWM")
    assert text_width("speed", bold=True) > text_width("speed")
    assert text_width("speed", 26) == pytest.approx(2 * text_width("speed", 13))


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.floats(40, 300))
def test_shortened_words_fit(text: str, width: float) -> None:
    shown = shorten(text, width)
    if text_width(text) <= width:
        assert shown == text
    else:
        assert shown.endswith("…")
        assert text.startswith(shown[:-1])
        assert text_width(shown) <= width or len(shown) == 4


@given(st.lists(st.floats(0, 100), max_size=12))
def test_places_that_are_spread_apart_keep_order_distance_and_limits(places: list[float]) -> None:
    moved = spread_apart(places, 10, 0, 120)
    ordered = sorted(moved)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(ordered))
    assert all(-1e-9 <= place <= 120 + 1e-9 for place in moved)
    pairs = list(zip(places, moved, strict=True))
    assert all(m <= n for p, m in pairs for q, n in pairs if p < q)


def test_places_that_are_apart_already_stay() -> None:
    assert spread_apart([50, 10, 30], 15, 0, 100) == [50, 10, 30]
    assert spread_apart([100, 100], 15, 0, 100) == [85, 100]


@given(st.text(st.characters(), max_size=30))
def test_any_words_make_well_formed_xml(text: str) -> None:
    drawing = Drawing(100, 50)
    drawing.text(1, 2, text)
    drawing.rect(1, 2, 3, 4, "fill s0", text)
    drawing.circle(1, 2, 3, "fill s0", text)
    drawing.heading(text, text)
    drawing.point_labels(BOX, [((1, 2), text)])
    parsed(drawing, title=text)
    ElementTree.fromstring(drawing.inline("plot", "n", text).encode())


def test_words_cannot_become_markup() -> None:
    drawing = Drawing(100, 50)
    drawing.text(1, 2, EVIL)
    drawing.rect(1, 2, 3, 4, "fill s0", EVIL)
    root = parsed(drawing, title=EVIL)
    shown = EVIL[:-4] + "\ufffd" * 4
    assert [text.text for text in root.iter(f"{SVG}text")] == [shown]
    assert [title.text for title in root.iter(f"{SVG}title")] == [shown, shown]
    inline = ElementTree.fromstring(drawing.inline("plot", "n", EVIL).encode())
    assert inline.get("aria-label") == shown
    assert {element.tag for element in inline.iter()} == {"svg", "text", "rect", "title"}


# Colours


def rules(css: str) -> dict[str, str]:
    """Declarations by selector, of rules outside and inside the dark part of a style sheet."""
    return {
        selector.strip(): body.strip()
        for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css)
        for selector in selectors.split(",")
    }


def test_light_and_dark_have_their_own_colours() -> None:
    light, dark = Style("a").css.split("@media (prefers-color-scheme: dark) {")
    for css, theme in ((light, LIGHT), (dark, DARK)):
        found = rules(css)
        assert found[".a text"] == f"fill: {theme.muted}"
        assert found[".a .head"].endswith(f"fill: {theme.ink}")
        assert found[".a .back"] == f"fill: {theme.background}; stroke: {theme.border}"
        assert found[".a .grid"] == f"stroke: {theme.grid}"
        for kind, colour in theme.kinds.items():
            assert found[f".a .line.{kind}"] == f"stroke: {colour}"
            assert found[f".a .fill.{kind}"] == f"fill: {colour}"
    assert LIGHT.kinds.keys() == DARK.kinds.keys()
    assert not set(LIGHT.kinds.values()) & set(DARK.kinds.values())


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out_from_the_background(theme: Theme) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in (theme.ink, theme.muted, *theme.kinds.values()):
        dim, bright = sorted((luminance(colour), luminance(theme.background)))
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, colour


def test_colours_may_be_variables_of_a_page() -> None:
    theme = replace(LIGHT, ink="var(--ink)", kinds={"prep": "var(--p)"}, words={"prep": "var(--w)"})
    css = Style("plot", theme, dark=None).css
    assert "@media" not in css
    found = rules(css)
    assert found[".plot .fill.prep"] == "fill: var(--p)"
    assert found[".plot .name.prep"] == "fill: var(--w)"
    assert found[".plot .hollow"].startswith(f"fill: {LIGHT.background}")


def test_rules_stay_within_their_scope() -> None:
    text = Drawing(10, 10).document(Style("mine"), "t")
    css = text.split("<style>")[1].split("</style>")[0]
    inner = css.replace("@media (prefers-color-scheme: dark) {", "")
    assert all(re.match(r"\.mine( |$)", selector) for selector in rules(inner))
    assert not re.search(r"href|src|url\(|@import", text)


def test_series_beyond_the_last_colour_begin_again() -> None:
    assert [series_kind(number) for number in (0, 5, 6)] == ["s0", "s5", "s0"]
    assert {series_kind(number) for number in range(20)} == LIGHT.kinds.keys()


# Marks


def test_a_document_has_a_size_a_card_and_words_for_screen_readers() -> None:
    root = parsed(Drawing(300, 200.5), title="a < b")
    assert (root.get("viewBox"), root.get("width"), root.get("height")) == (
        "0 0 300 200.5",
        "300",
        "200.5",
    )
    assert (root.get("class"), root.get("role")) == ("test", "img")
    assert (root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")) == ("a < b", "d")
    card = root.find(f"{SVG}rect")
    assert card is not None
    assert (card.get("class"), card.get("width"), card.get("height")) == ("back", "299", "199.5")


def test_bars_and_lines_are_drawn_at_their_values() -> None:
    field = PlotArea.within(BOX, x=(0, 10), y=(0, 200))
    drawing = Drawing(300, 200)
    for x, value in ((0, 50), (5, 200)):
        left, top = field.place(x, value)
        drawing.rect(left, top, field.x(x + 4) - left, BOX.bottom - top, "fill s0", f"at {x}")
    drawing.path(field.places([(0, 0), (2.5, 100), (10, 200)]), "line s1", dash="6 4")
    drawing.area(field.places([(0, 100), (10, 200)]), BOX.bottom)
    drawing.circle(*field.place(5, 50), 4, "fill s1")
    assert marks(drawing, "rect", "x", "y", "width", "height", "class") == [
        [50, 95, 80, 25, "fill s0"],
        [150, 20, 80, 100, "fill s0"],
    ]
    assert marks(drawing, "path", "class", "d", "stroke-dasharray") == [
        ["line s1", "M50 120L100 70L250 20", "6 4"],
        ["area", "M50 120L50 70L250 20L250 120Z", ""],
    ]
    assert marks(drawing, "circle", "cx", "cy", "r") == [[150, 95, 4]]


def test_a_bar_is_never_negative() -> None:
    drawing = Drawing(10, 10)
    drawing.rect(1, 2, -3, -4, "fill s0", radius=0)
    assert marks(drawing, "rect", "width", "height", "rx") == [[0, 0, ""]]


def test_a_whisker_has_caps_across_its_ends() -> None:
    drawing = Drawing(300, 200)
    drawing.whisker((10, 50), (30, 50), cap=4)
    drawing.whisker((10, 50), (10, 20), "whisker s0", cap=3)
    drawing.whisker((10, 50), (10, 20), "whisker s0")
    assert marks(drawing, "path", "class", "d") == [
        ["whisker", "M10 50L30 50M10 46v8M30 46v8"],
        ["whisker s0", "M10 50L10 20M7 50h6M7 20h6"],
        ["whisker s0", "M10 50L10 20"],
    ]


def test_axes_have_a_line_and_a_label_for_every_tick() -> None:
    field = PlotArea.within(BOX, x=(0, 10), y=(0, 200))
    drawing = Drawing(300, 200)
    drawing.y_axis(field, "up", field.y.ticks(about=2))
    drawing.x_axis(field, "across", field.x.ticks(about=2), grid=True)
    ends = marks(drawing, "line", "class", "x1", "y1", "x2", "y2")
    assert ends[:3] == [["grid", 50, y, 250, y] for y in (120, 70, 20)]
    assert ends[3:] == [
        ["grid", 50, 20, 50, 120],
        ["axis", 50, 120, 50, 124],
        ["grid", 150, 20, 150, 120],
        ["axis", 150, 120, 150, 124],
        ["grid", 250, 20, 250, 120],
        ["axis", 250, 120, 250, 124],
        ["axis", 50, 120, 250, 120],
    ]
    assert words(drawing) == ["up", "0", "100", "200", "0", "5", "10", "across"]
    places = marks(drawing, "text", "x", "y", "text-anchor")
    assert places[1] == [43, 124, "end"]
    assert places[5] == [150, 138, "middle"]


def test_marks_outside_of_a_clip_are_hidden() -> None:
    drawing = Drawing(300, 200)
    with drawing.clipped("field-a", BOX):
        drawing.path([(0, 0), (300, 200)], "line s0")
    drawing.circle(1, 1, 1, "fill s0")
    root = parsed(drawing)
    group = root.find(f"{SVG}g")
    assert group is not None
    assert group.get("clip-path") == "url(#field-a)"
    assert [element.tag for element in group] == [f"{SVG}path"]
    clip = root.find(f"{SVG}clipPath")
    assert clip is not None
    assert clip.get("id") == "field-a"
    assert clip[0].attrib == {"x": "50", "y": "20", "width": "200", "height": "100"}


def test_a_legend_ends_at_the_right_and_its_entries_do_not_touch() -> None:
    drawing = Drawing(400, 100)
    entries = [("s0", "one & all"), ("s1", "MMMM"), ("s2", "iiii")]
    drawing.legend(entries, 390, 20)
    texts = marks(drawing, "text", "x")
    dots = marks(drawing, "circle", "class", "cx")
    assert words(drawing) == ["iiii", "MMMM", "one & all"]
    assert [dot[0] for dot in dots] == ["fill s2", "fill s1", "fill s0"]
    right = 390.0
    for (x,), (_, cx), word in zip(texts, dots, ("iiii", "MMMM", "one & all"), strict=True):
        assert isinstance(x, float)
        assert isinstance(cx, float)
        assert cx + 4.5 < x
        assert x + text_width(word) <= right + 0.1
        right = cx - 4.5


@given(st.lists(st.tuples(st.floats(60, 240), st.floats(30, 110)), min_size=1, max_size=3))
def test_labels_of_points_lie_in_the_field_and_off_each_other(
    places: list[tuple[float, float]],
) -> None:
    drawing = Drawing(300, 200)
    drawing.point_labels(BOX, [((x, y), f"p{number}") for number, (x, y) in enumerate(places)])
    boxes = []
    for x, y in marks(drawing, "text", "x", "y"):
        assert isinstance(x, float)
        assert isinstance(y, float)
        boxes.append(PlotBox(x, y - 11, x + text_width("p0"), y + 4))
    assert len(boxes) == len(places)
    assert all(box.left >= BOX.left - 0.1 and box.right <= BOX.right + 0.1 for box in boxes)
    # Places are written with one decimal, so neighbours may overlap by the rounding.
    slack = 0.2
    for number, box in enumerate(boxes):
        for left, top, right, bottom in boxes[number + 1 :]:
            other = PlotBox(left + slack, top + slack, right - slack, bottom - slack)
            assert not box.overlaps(other)


def test_importing_the_plotter_loads_nothing_slow() -> None:
    code = (
        "import sys, penstock.diagnose.svg;"
        "print(sorted(name for name in sys.modules if name.startswith('penstock')),"
        "'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['penstock', 'penstock.diagnose', 'penstock.diagnose.svg'] False"
