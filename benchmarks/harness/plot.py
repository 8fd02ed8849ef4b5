"""Points on two axes with their spread, scattered or joined by lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.arguments import drawing
from penstock.diagnose.svg import (
    LIGHT,
    LINE_HEIGHT,
    MARGIN,
    Drawing,
    PlotArea,
    PlotBox,
    Scale,
    Style,
    series_kind,
)

WIDTH, HEIGHT = 800, 420
BOX = PlotBox(68, 74, 776, 360)
STYLE = Style("benchmark-plot")


class Range(NamedTuple):
    """A value, and the lowest and highest one measured."""

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
    """A plot to draw. ``zero`` starts the vertical axis at 0; ``notes`` stand below the plot."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    zero: bool = False
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--chart`` to a benchmark that draws its own plot."""
    parser.add_argument(
        "--chart", dest="plot", type=drawing, metavar="FILE", help="draw it, as .svg or .png"
    )


def write(path: Path, figure: Figure) -> None:
    """Draw a figure into a file. A figure without points is not drawn: its table says why."""
    if not figure.points:
        return
    if path.suffix == ".png":
        _write_png(path, figure)
    else:
        path.write_text(svg(figure))


def svg(figure: Figure) -> str:
    """The figure as an SVG document."""
    field = PlotArea(
        BOX,
        Scale.around(_ends(point.x for point in figure.points), BOX.left, BOX.right),
        Scale.around(
            _ends(point.y for point in figure.points), BOX.bottom, BOX.top, from_zero=figure.zero
        ),
    )
    notes = len(figure.notes)
    plot = Drawing(WIDTH, HEIGHT + (LINE_HEIGHT * notes + 6 if notes else 0))
    plot.heading(figure.title)
    plot.y_axis(field, figure.y, field.y.ticks())
    plot.x_axis(field, figure.x, field.x.ticks(), grid=True)
    entries = [(series_kind(n), series.title) for n, series in enumerate(figure.series)]
    plot.legend(entries, BOX.right, BOX.top - 12)
    for number, series in enumerate(figure.series):
        _draw(plot, field, series, series_kind(number))
    labels = [(_place(field, point), point.label) for point in figure.points]
    plot.point_labels(BOX, labels)
    for number, note in enumerate(figure.notes):
        plot.text(MARGIN, HEIGHT + 6 + LINE_HEIGHT * number, note)
    return plot.document(STYLE, figure.title)


def _ends(ranges: Iterator[Range]) -> Iterator[float]:
    for span in ranges:
        yield span.low
        yield span.high


def _place(field: PlotArea, point: Point) -> tuple[float, float]:
    return field.place(point.x.middle, point.y.middle)


def _draw(plot: Drawing, field: PlotArea, series: Series, kind: str) -> None:
    if series.joined:
        plot.path([_place(field, point) for point in series.points], f"line {kind}")
    for point in series.points:
        x, y = _place(field, point)
        if point.x.low < point.x.high:
            ends = (field.x(point.x.low), y), (field.x(point.x.high), y)
            plot.whisker(*ends, f"whisker {kind}")
        if point.y.low < point.y.high:
            ends = (x, field.y(point.y.low)), (x, field.y(point.y.high))
            plot.whisker(*ends, f"whisker {kind}")
        plot.circle(x, y, 4.5, f"fill {kind}")


def _write_png(path: Path, figure: Figure) -> None:
    """A PNG, for readers without SVG. Needs matplotlib."""
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
            color=LIGHT.kinds[series_kind(number)],
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
