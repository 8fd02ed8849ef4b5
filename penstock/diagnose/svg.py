"""SVG plots without a library: scales, ticks, axes, marks, labels, and light and dark colours.

A ``Drawing`` collects marks in pixels. ``Scale`` and ``PlotArea`` turn values into pixels, and
``Style`` turns themes into CSS. The ``kind`` of a mark is its CSS classes: its role, and for marks
of data the kind of data, which has a colour in the theme (``"line fetch"``).

>>> drawing = Drawing(200, 120)
>>> field = PlotArea.within(PlotBox(50, 20, 190, 80), x=(0, 4), y=(0, 100))
>>> drawing.y_axis(field, "samples/s", field.y.ticks(about=2))
>>> drawing.path(field.places([(0, 10), (4, 90)]), "line s0")
>>> print(drawing.document(Style("example"), "Speed & cores"))
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 120" width="200" height="120" ...>
<title>Speed &amp; cores</title>
...
<path class="line s0" d="M50 74L190 26"/>
</svg>
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Literal, NamedTuple

Anchor = Literal["start", "middle", "end"]
PixelPlace = tuple[float, float]
"""Pixels from the left and from the top."""

FONT_SIZE = 13.0
HEAD_SIZE = 15.0
MARGIN = 18.0
"""Pixels between the edge of a standalone drawing and its words."""

TITLE_INDENT = 50.0
"""Pixels from the title of a vertical axis to its field; the tick labels stand in between."""

LINE_HEIGHT = 15.0


# Values to pixels


class PlotBox(NamedTuple):
    """A rectangle in pixels. ``top`` is smaller than ``bottom``."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def overlaps(self, other: PlotBox) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


class Tick(NamedTuple):
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit to show values in: a value is divided by ``divisor`` before it is shown."""

    name: str
    divisor: float


PLAIN = Unit("", 1)
PERCENT = Unit("%", 0.01)
BYTES = (Unit("TB", 1e12), Unit("GB", 1e9), Unit("MB", 1e6), Unit("KB", 1e3), Unit("bytes", 1))
SECONDS = (Unit("s", 1), Unit("ms", 1e-3), Unit("µs", 1e-6))


def choose_unit(largest: float, units: Sequence[Unit]) -> Unit:
    """The largest unit in which ``largest`` is at least 1, else the smallest.

    ``units`` are ordered from large to small.
    """
    return next((unit for unit in units if largest >= unit.divisor), units[-1])


def duration_unit(longest: float) -> Unit:
    """Unit for seconds that may be long: hours from two hours on, minutes from three minutes on."""
    if longest >= 7200:
        return Unit("hours", 3600)
    if longest >= 180:
        return Unit("minutes", 60)
    return choose_unit(longest, SECONDS[:2])


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from ``low`` to ``high`` to pixels from ``begin`` to ``end``.

    On a vertical scale ``begin`` is the larger one: pixels count from the top.
    """

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def around(
        cls, values: Iterable[float], begin: float, end: float, *, from_zero: bool = False
    ) -> Scale:
        """A scale over all values, with a tenth more on each side; from 0 if ``from_zero``."""
        values = list(values)
        low, high = min(values), max(values)
        room = 0.1 * ((high - low) or abs(high) or 1.0)
        return cls(0.0 if from_zero else low - room, high + room, begin, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + share * (self.end - self.begin)

    def round_values(self, about: int = 5, *, whole: bool = False) -> list[float]:
        """Round values on the scale, about ``about`` of them; ``whole`` allows only integers."""
        rough = (self.high - self.low) / about
        if rough <= 0 or not math.isfinite(rough):
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
        step = max(1.0, round(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def ticks(
        self, unit: Unit = PLAIN, about: int = 5, *, whole: bool = False, suffix: str = ""
    ) -> list[Tick]:
        """Values that are round in ``unit``, each with its label."""
        in_unit = Scale(self.low / unit.divisor, self.high / unit.divisor, self.begin, self.end)
        values = in_unit.round_values(about, whole=whole)
        labels = number_labels(values)
        return [
            Tick(value * unit.divisor, f"{label}{suffix}")
            for value, label in zip(values, labels, strict=True)
        ]


def number_labels(values: Sequence[float]) -> list[str]:
    """Numbers as words, short enough for an axis: ``20,000``, ``250K``, ``1.5M``."""
    largest = max(map(abs, values), default=0.0)
    sizes = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "K"), (0.0, 1.0, ""))
    divisor, suffix = next((by, suffix) for least, by, suffix in sizes if largest >= least)
    # Nine digits hide the last bits of products such as 3 * 0.1.
    return [f"{value / divisor:,.9g}{suffix if value else ''}" for value in values]


@dataclass(frozen=True, slots=True)
class PlotArea:
    """The rectangle in which data is drawn, with a scale for each direction."""

    box: PlotBox
    x: Scale
    y: Scale

    @classmethod
    def within(cls, box: PlotBox, x: tuple[float, float], y: tuple[float, float]) -> PlotArea:
        """A field whose scales fill the box: ``x`` and ``y`` are the lowest and highest value."""
        return cls(box, Scale(*x, box.left, box.right), Scale(*y, box.bottom, box.top))

    def place(self, x: float, y: float) -> PixelPlace:
        return self.x(x), self.y(y)

    def places(self, points: Iterable[tuple[float, float]]) -> list[PixelPlace]:
        return [self.place(x, y) for x, y in points]


# Words


# Widths of characters in ems, of DejaVu Sans: the widest of the fonts that readers have.
_CHARACTER_WIDTHS = {
    character: width
    for characters, width in (
        ("ijl'|", 0.28),
        (" .,·:;/\\I", 0.34),
        ("-()[]!tfr", 0.41),
        ('"*?_', 0.53),
        ("cszLF", 0.58),
        ("wABCDGHKNOQRUVXZ&", 0.79),
        ("+=<>±~", 0.84),
        ("mMW%@…", 1.0),
    )
    for character in characters
}


def text_width(words: str, size: float = FONT_SIZE, *, bold: bool = False) -> float:
    """Pixels that words take, estimated for a wide font: most readers see them narrower."""
    ems = sum(_CHARACTER_WIDTHS.get(letter, 0.64 if letter < "\u2e80" else 1.0) for letter in words)
    return ems * size * (1.12 if bold else 1.0)


def shorten(words: str, width: float, *, bold: bool = False) -> str:
    """Words cut to fit into ``width`` pixels, with ``…`` at the cut. Three letters always stay."""
    if text_width(words, bold=bold) <= width:
        return words
    kept = words
    while len(kept) > 3 and text_width(kept + "…", bold=bold) > width:
        kept = kept[:-1]
    return kept + "…" if len(kept) < len(words) else words


def spread_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places moved so that any two are ``gap`` pixels apart and all lie from ``low`` to ``high``.

    Their order stays. Where there is too little room, places go below ``low`` rather than touch.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    least = low
    for index in order:
        moved[index] = max(moved[index], least)
        least = moved[index] + gap
    most = high
    for index in reversed(order):
        moved[index] = min(moved[index], most)
        most = moved[index] - gap
    return moved


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(words: str) -> str:
    """Words for XML text and attributes. Characters that XML forbids become U+FFFD."""
    return escape(_NOT_XML.sub("\ufffd", words))


def px(value: float) -> str:
    """Pixels with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


# Colours


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours in CSS: ``#1f2328``, or ``var(--ink)`` for a variable of the page around a drawing.

    ``kinds`` has a colour for each kind of data. ``words`` has colours for the names of kinds whose
    marks have too little contrast for words.
    """

    ink: str
    muted: str
    grid: str
    background: str
    border: str
    area: str
    kinds: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


def _numbered(*colours: str) -> dict[str, str]:
    return {f"s{number}": colour for number, colour in enumerate(colours)}


LIGHT = Theme(
    ink="#1f2328",
    muted="#59636e",
    grid="#d8dee4",
    background="#ffffff",
    border="#d0d7de",
    area="#f0f2f5",
    kinds=_numbered("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a"),
)
DARK = Theme(
    ink="#e6edf3",
    muted="#9da7b3",
    grid="#2b323b",
    background="#0d1117",
    border="#30363d",
    area="#1b222b",
    kinds=_numbered("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#9198a1"),
)


def series_kind(number: int) -> str:
    """Kind of the series with this number in ``LIGHT`` and ``DARK``; the colours repeat."""
    return f"s{number % len(LIGHT.kinds)}"


_SHAPES = """\
{s} .head {{ font-size: 15px }}
{s} .head, {s} .strong {{ font-weight: 600 }}
{s} .name {{ font-weight: 700 }}
{s} .tick {{ font-variant-numeric: tabular-nums }}
{s} .line {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
{s} .lead {{ fill: none }}
{s} .guide {{ stroke-dasharray: 3 3 }}
{s} .axis {{ stroke-opacity: 0.6 }}
{s} .whisker {{ fill: none; stroke-width: 1.2; opacity: 0.6 }}
{s} .faint {{ opacity: 0.3 }}
{s} .ring, {s} .hollow {{ fill: none; stroke-width: 2 }}
{s} .halo {{ paint-order: stroke; stroke-width: 4; stroke-linejoin: round }}
{s} .touch {{ fill: transparent }}
{s} rect.fill:hover {{ opacity: 0.8 }}
"""

_COLOURS = """\
{s} .back {{ fill: {t.background}; stroke: {t.border} }}
{s} text {{ fill: {t.muted} }}
{s} .head, {s} .strong, {s} .ink {{ fill: {t.ink} }}
{s} .halo {{ stroke: {t.background} }}
{s} .grid {{ stroke: {t.grid} }}
{s} .axis, {s} .guide {{ stroke: {t.muted} }}
{s} .whisker, {s} .ring, {s} .hollow {{ stroke: {t.ink} }}
{s} .hollow {{ fill: {t.background} }}
{s} .area, {s} .touch:hover {{ fill: {t.area} }}
"""

_FONT = 'font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'


@dataclass(frozen=True, slots=True)
class Style:
    """CSS for the drawings of one class.

    Every rule starts with ``.scope``: in a notebook, the CSS of one drawing reaches the whole page.
    ``dark`` is for readers with a dark theme; ``None`` where the page changes the variables that
    ``light`` refers to.
    """

    scope: str
    light: Theme = LIGHT
    dark: Theme | None = DARK

    @property
    def css(self) -> str:
        rules = _SHAPES.format(s=f".{self.scope}") + self._colours(self.light)
        if self.dark is not None:
            rules += f"@media (prefers-color-scheme: dark) {{\n{self._colours(self.dark)}}}\n"
        return rules

    def _colours(self, theme: Theme) -> str:
        s = f".{self.scope}"
        rules = _COLOURS.format(s=s, t=theme)
        for kind, colour in theme.kinds.items():
            rules += (
                f"{s} .line.{kind}, {s} .lead.{kind}, {s} .whisker.{kind} {{ stroke: {colour} }}\n"
                f"{s} .fill.{kind}, {s} .faint.{kind}, {s} .name.{kind} {{ fill: {colour} }}\n"
            )
        for kind, colour in theme.words.items():
            rules += f"{s} .name.{kind} {{ fill: {colour} }}\n"
        return rules


# Marks


class Drawing:
    """Marks in the order in which they are drawn. Coordinates are pixels; words are escaped."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def document(self, style: Style, title: str, description: str = "") -> str:
        """The drawing as a file of its own, with its colours and on a card."""
        size = f'width="{px(self.width)}" height="{px(self.height)}"'
        described = [f"<desc>{escaped(description)}</desc>"] if description else []
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {self._view_box} {size} '
                f'class="{style.scope}" role="img">',
                f"<title>{escaped(title)}</title>",
                *described,
                f"<style>\n.{style.scope} {{ {_FONT} }}\n{style.css}</style>",
                f'<rect class="back" x="0.5" y="0.5" width="{px(self.width - 1)}" '
                f'height="{px(self.height - 1)}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            )
        )

    def inline(self, scope: str, name: str, label: str) -> str:
        """The drawing as a part of a page that has the CSS of ``scope``; ``label`` is read out."""
        start = (
            f'<svg class="{scope}" id="plot-{name}" {self._view_box} role="img" '
            f'aria-label="{escaped(label)}">'
        )
        return "\n".join((start, *self._parts, "</svg>"))

    @property
    def _view_box(self) -> str:
        return f'viewBox="0 0 {px(self.width)} {px(self.height)}"'

    def _add(
        self, tag: str, kind: str, content: str = "", title: str = "", **attributes: float | str
    ) -> None:
        shown = "".join(
            f' {name.replace("_", "-")}="{escaped(value) if isinstance(value, str) else px(value)}"'
            for name, value in {"class": kind, **attributes}.items()
            if value != ""
        )
        inner = escaped(content) + (f"<title>{escaped(title)}</title>" if title else "")
        self._parts.append(f"<{tag}{shown}>{inner}</{tag}>" if inner else f"<{tag}{shown}/>")

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: Anchor = "start"
    ) -> None:
        """Words that start, end or have their middle at ``x``, on a baseline at ``y``."""
        self._add("text", kind, words, x=x, y=y, text_anchor="" if anchor == "start" else anchor)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def path(
        self, places: Sequence[PixelPlace], kind: str, *, dash: str = "", closed: bool = False
    ) -> None:
        """A line through places; ``dash`` lists the lengths of its dashes and gaps."""
        data = "M" + "L".join(f"{px(x)} {px(y)}" for x, y in places) + ("Z" if closed else "")
        self._add("path", kind, d=data, stroke_dasharray=dash)

    def area(self, places: Sequence[PixelPlace], bottom: float, kind: str = "area") -> None:
        """The area between a line and ``bottom``."""
        corners = ((places[0][0], bottom), *places, (places[-1][0], bottom))
        self.path(corners, kind, closed=True)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        title: str = "",
        radius: float = 2,
    ) -> None:
        """A bar; ``title`` is shown when it is pointed at."""
        width, height = max(0.0, width), max(0.0, height)
        self._add("rect", kind, title=title, x=x, y=y, width=width, height=height, rx=radius or "")

    def circle(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        self._add("circle", kind, title=title, cx=x, cy=y, r=radius)

    def whisker(
        self, begin: PixelPlace, end: PixelPlace, kind: str = "whisker", *, cap: float = 0.0
    ) -> None:
        """A level or upright line for a spread; ``cap``: half the width of its end strokes."""
        data = f"M{px(begin[0])} {px(begin[1])}L{px(end[0])} {px(end[1])}"
        upright = begin[0] == end[0]
        for x, y in (begin, end) if cap else ():
            data += (
                f"M{px(x - cap)} {px(y)}h{px(2 * cap)}"
                if upright
                else f"M{px(x)} {px(y - cap)}v{px(2 * cap)}"
            )
        self._add("path", kind, d=data)

    @contextmanager
    def clipped(self, name: str, box: PlotBox) -> Iterator[None]:
        """Show only what lies in ``box`` of the marks added inside the ``with`` block."""
        self._parts.append(f'<clipPath id="{name}">')
        self._add("rect", "", x=box.left, y=box.top, width=box.width, height=box.height)
        self._parts.append(f'</clipPath>\n<g clip-path="url(#{name})">')
        yield
        self._parts.append("</g>")

    def heading(self, title: str, subtitle: str = "") -> None:
        """The title of a standalone drawing, and a line below it."""
        self.text(MARGIN, MARGIN + 10, title, "head")
        if subtitle:
            self.text(MARGIN, MARGIN + 28, subtitle)

    def x_axis(
        self, field: PlotArea, title: str, ticks: Sequence[Tick], *, grid: bool = False
    ) -> None:
        """The axis below a field; ``grid`` draws a line up from every tick."""
        left, top, right, bottom = field.box
        for value, label in ticks:
            x = field.x(value)
            if grid:
                self.line(x, top, x, bottom, "grid")
            self.line(x, bottom, x, bottom + 4, "axis")
            self.text(x, bottom + 18, label, "tick", "middle")
        self.line(left, bottom, right, bottom, "axis")
        self.text((left + right) / 2, bottom + 37, title, anchor="middle")

    def y_axis(self, field: PlotArea, title: str, ticks: Sequence[Tick]) -> None:
        """The axis beside a field: a line across for every tick, and the title above."""
        left, top, right, _ = field.box
        if title:
            self.text(left - TITLE_INDENT, top - 12, title)
        for value, label in ticks:
            self.line(left, field.y(value), right, field.y(value), "grid")
            self.text(left - 7, field.y(value) + 4, label, "tick", "end")

    def legend(self, entries: Sequence[tuple[str, str]], right: float, y: float) -> None:
        """A line that ends at ``right`` and names the colours: pairs of a kind and its meaning."""
        x = right
        for kind, words in reversed(entries):
            x -= text_width(words)
            self.text(x, y, words, "ink")
            self.circle(x - 10, y - 4.5, 4.5, f"fill {kind}")
            x -= 30

    def point_labels(self, box: PlotBox, labels: Sequence[tuple[PixelPlace, str]]) -> None:
        """Words beside points, where they cover neither points nor each other if there is room.

        An empty label only keeps others off its point.
        """
        taken = [PlotBox(x - 5, y - 5, x + 5, y + 5) for (x, y), _ in labels]
        for (x, y), words in labels:
            if not words:
                continue
            width = text_width(words)
            choices = [
                PlotBox(left, y + down - LINE_HEIGHT / 2, left + width, y + down + LINE_HEIGHT / 2)
                for down in (-10, 11, -25, 26, -40, 41)
                for left in (x + 8, x - 8 - width)
            ]
            inside = [at for at in choices if at.left >= box.left and at.right <= box.right]
            free = (
                at for at in inside or choices if not any(at.overlaps(other) for other in taken)
            )
            place = next(free, (inside or choices)[0])
            taken.append(place)
            self.text(place.left, place.bottom - 4, words, "ink")
