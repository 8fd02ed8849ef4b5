"""Points on two axes, with their spread: scattered, or joined to a line.

SVG by hand, in the dress of ``chart``: it needs no library and follows the reader's theme.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.harness.arguments import drawing
from benchmarks.harness.chart import LETTER, MARGIN, STYLE, WIDTH

HEIGHT = 420
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 74, 52
"""Pixels around the axes: numbers, titles, and what the colours mean."""

LINE = 15
"""Pixels from one line of words to the next."""

COLOURS = ("#1a7fe0", "#e0701a", "#6e7781", "#2da44e")
DARK = ("#3b8eea", "#f0883e", "#8d96a0", "#3fb950")

OWN_STYLE = "".join(
    f"  .s{number} {{ stroke: {light}; fill: {light} }}\n"
    f"  @media (prefers-color-scheme: dark) {{ .s{number} {{ stroke: {dark}; fill: {dark} }} }}\n"
    for number, (light, dark) in enumerate(zip(COLOURS, DARK, strict=True))
)
OWN_STYLE += (
    "  .grid { stroke: #8d96a0; stroke-width: 1; opacity: 0.25 }\n"
    "  .line { fill: none; stroke-width: 1.8 }\n"
    "  .spread { stroke-width: 1.2; opacity: 0.6 }\n"
)


class Range(NamedTuple):
    """Where something lies, and the least and most it was."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    x: Range
    y: Range
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one colour; ``joined`` draws a line through them."""

    title: str
    points: tuple[Point, ...]
    joined: bool = False


@dataclass(frozen=True)
class Figure:
    """``zero`` lets the vertical axis begin there; ``notes`` stand below the plot."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    zero: bool = False
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]


@dataclass(frozen=True)
class Axis:
    """From values to pixels. ``begin`` may lie beyond ``end``: upwards pixels become fewer."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def over(cls, ranges: Sequence[Range], begin: float, end: float, zero: bool = False) -> Axis:
        low = min(one.low for one in ranges)
        high = max(one.high for one in ranges)
        room = 0.1 * ((high - low) or abs(high) or 1.0)
        return cls(0.0 if zero else low - room, high + room, begin, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> Iterator[float]:
        """Some four to eight round values."""
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * size for size in (1, 2, 2.5, 5, 10) if unit * size >= rough)
        number = math.ceil(self.low / step)
        while number * step <= self.high:
            yield number * step
            number += 1


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    """``--chart`` for a benchmark that draws what it found itself."""
    parser.add_argument(
        "--chart", dest="plot", type=drawing, metavar="FILE", help="draw it, as .svg or .png"
    )


def write(path: Path, figure: Figure) -> None:
    """Draw it. A figure without points is left undrawn: its table says why there are none."""
    if not figure.points:
        return
    if path.suffix == ".png":
        _write_png(path, figure)
    else:
        path.write_text(svg(figure))


def svg(figure: Figure) -> str:
    """The figure as SVG."""
    height = HEIGHT + LINE * len(figure.notes)
    across = Axis.over([point.x for point in figure.points], LEFT, WIDTH - RIGHT)
    up = Axis.over([point.y for point in figure.points], HEIGHT - BOTTOM, TOP, figure.zero)
    lines = [*_axes(figure, across, up), *_legend(figure)]
    for number, series in enumerate(figure.series):
        lines += _drawn(series, number % len(COLOURS), across, up)
    lines += _labels(figure.points, across, up)
    for number, note in enumerate(figure.notes):
        y = HEIGHT - 4 + LINE * number
        lines.append(f'<text class="quiet" x="{MARGIN}" y="{y}">{escape(note)}</text>')
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(figure.title)}</title>",
            f"<style>\n{STYLE}{OWN_STYLE}</style>",
            f'<rect class="back" width="{WIDTH}" height="{height}" rx="8"/>',
            *lines,
            "</svg>\n",
        )
    )


def _axes(figure: Figure, across: Axis, up: Axis) -> Iterator[str]:
    yield f'<text class="head" x="{MARGIN}" y="{MARGIN + 8}">{escape(figure.title)}</text>'
    yield f'<text class="quiet" x="{MARGIN}" y="{TOP - 12}">{escape(figure.y)}</text>'
    yield (
        f'<text class="quiet" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 36}" text-anchor="end">'
        f"{escape(figure.x)}</text>"
    )
    for value in up.ticks():
        y = up(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{_number(value)}</text>'
    for value in across.ticks():
        x = across(value)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield (
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{_number(value)}</text>"
        )


def _legend(figure: Figure) -> Iterator[str]:
    x = float(WIDTH - RIGHT)
    for number, series in reversed(list(enumerate(figure.series))):
        x -= len(series.title) * LETTER
        yield f'<text x="{x:.1f}" y="{TOP - 12}">{escape(series.title)}</text>'
        x -= 10
        yield f'<circle class="s{number % len(COLOURS)}" cx="{x:.1f}" cy="{TOP - 16.5}" r="4.5"/>'
        x -= 18


def _drawn(series: Series, colour: int, across: Axis, up: Axis) -> Iterator[str]:
    places = [(across(point.x.middle), up(point.y.middle)) for point in series.points]
    if series.joined:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield f'<path class="line s{colour}" style="fill: none" d="M{path}"/>'
    for point, (x, y) in zip(series.points, places, strict=True):
        spread = ""
        if point.x.low < point.x.high:
            spread += f"M{across(point.x.low):.1f} {y:.1f}H{across(point.x.high):.1f}"
        if point.y.low < point.y.high:
            spread += f"M{x:.1f} {up(point.y.low):.1f}V{up(point.y.high):.1f}"
        if spread:
            yield f'<path class="spread s{colour}" d="{spread}"/>'
        yield f'<circle class="s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def _labels(points: Sequence[Point], across: Axis, up: Axis) -> Iterator[str]:
    """Beside its point, where it covers neither a point nor another label if that can be."""
    taken = []
    for point in points:
        x, y = across(point.x.middle), up(point.y.middle)
        taken.append(_Box(x - 5, y - 5, x + 5, y + 5))
    for point in points:
        if not point.label:
            continue
        x, y = across(point.x.middle), up(point.y.middle)
        box = _beside(x, y, len(point.label) * LETTER, taken)
        taken.append(box)
        yield f'<text x="{box.left:.1f}" y="{box.bottom - 4:.1f}">{escape(point.label)}</text>'


def _beside(x: float, y: float, width: float, taken: Sequence[_Box]) -> _Box:
    inside = _Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    places = [
        _Box(left, y + down - LINE / 2, left + width, y + down + LINE / 2)
        for down in (-10, 11, -25, 26, -40, 41)
        for left in (x + 8, x - 8 - width)
    ]
    fitting = [
        box for box in places if box.left >= inside.left and box.right <= inside.right
    ] or places
    free = (box for box in fitting if not any(box.meets(other) for other in taken))
    return next(free, fitting[0])


def _number(value: float) -> str:
    # Ticks are multiples of a round step, and so may carry the last bits of a product.
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 9):g}"


def _write_png(path: Path, figure: Figure) -> None:
    """For what takes no SVG; needs matplotlib."""
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(9, 5), layout="constrained")
    axes = drawing.subplots()
    for number, series in enumerate(figure.series):
        x, y = [point.x for point in series.points], [point.y for point in series.points]
        axes.errorbar(
            [one.middle for one in x],
            [one.middle for one in y],
            xerr=[[one.middle - one.low for one in x], [one.high - one.middle for one in x]],
            yerr=[[one.middle - one.low for one in y], [one.high - one.middle for one in y]],
            fmt="o-" if series.joined else "o",
            color=COLOURS[number % len(COLOURS)],
            label=series.title,
        )
        for point in series.points:
            place = (point.x.middle, point.y.middle)
            axes.annotate(point.label, place, (6, 5), textcoords="offset points", fontsize=8)
    if figure.zero:
        axes.set_ylim(bottom=0)
    axes.set_title("\n".join((figure.title, *figure.notes)), loc="left", fontsize=10)
    axes.set_xlabel(figure.x)
    axes.set_ylabel(figure.y)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(path, dpi=150)
