"""Races as bars: one panel for each race, the best on top, Penstock's own lanes in colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Spread
from penstock.diagnose.svg import (
    DARK,
    HEAD_SIZE,
    LIGHT,
    MARGIN,
    Drawing,
    Scale,
    Style,
    shorten,
    text_width,
)

SUFFIXES = (".svg", ".png")

WIDTH = 800
BAR, GAP, HEAD = 18, 9, 40
"""Pixels: height of a bar, space below it, and height of a panel's title."""

STYLE = Style(
    "benchmark",
    replace(LIGHT, kinds={"ours": "#1a7fe0", "peer": "#b6c0ca"}),
    replace(DARK, kinds={"ours": "#3b8eea", "peer": "#4b5663"}),
)


@dataclass(frozen=True)
class Bar:
    """One contestant: its speed, or why it did not run."""

    title: str
    ours: bool
    spread: Spread | None
    why_not: str = ""

    @property
    def kind(self) -> str:
        return "ours" if self.ours else "peer"


@dataclass(frozen=True)
class Panel:
    """One race, the best first, those that did not run last."""

    title: str
    unit: str
    bars: tuple[Bar, ...]

    @property
    def most(self) -> float:
        return max(bar.spread.high for bar in self.bars if bar.spread is not None)


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """The races in the data of a benchmark.

    A race in which only Penstock ran is left out if there are races with other contestants.
    """
    races = [_panel(name, lanes) for name, lanes in data.items() if _is_race(lanes)]
    drawn = [panel for panel in races if any(bar.spread for bar in panel.bars)]
    return [panel for panel in drawn if not all(bar.ours for bar in panel.bars)] or drawn


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Draw all races in the data into a file."""
    races = panels(data)
    if not races:
        raise ValueError(f"nothing to draw in {path}: no contestant of any race came home")
    if path.suffix == ".png":
        _write_png(path, races)
    else:
        path.write_text(svg(races))


def svg(races: Sequence[Panel]) -> str:
    """The panels as an SVG document, one below the other."""
    bars = [bar for panel in races for bar in panel.bars]
    titles = max(text_width(bar.title, bold=bar.ours) for bar in bars)
    left = MARGIN + titles + 10
    drawing = Drawing(WIDTH, MARGIN + sum(_height(panel) for panel in races))
    top = MARGIN
    for panel in races:
        _draw(drawing, panel, left, top)
        top += _height(panel)
    return drawing.document(STYLE, "; ".join(panel.title for panel in races))


def _height(panel: Panel) -> float:
    return HEAD + len(panel.bars) * (BAR + GAP) + MARGIN


def _is_race(lanes: Any) -> bool:
    return isinstance(lanes, Mapping) and all(
        isinstance(lane, Mapping) and "rounds" in lane for lane in lanes.values()
    )


def _panel(name: str, lanes: Mapping[str, Any]) -> Panel:
    runs = [run["values"] for lane in lanes.values() for run in lane["rounds"].values()]
    rates = any("rate" in values for values in runs)
    key, scale = ("rate", 1.0) if rates else ("first", 1e3)
    bars = []
    for title, lane in lanes.items():
        values = [run["values"][key] * scale for run in lane["rounds"].values()]
        spread = Spread.of(values) if values else None
        bars.append(Bar(title, lane["ours"], spread, lane["why_not"]))
    ran = sorted(
        (bar for bar in bars if bar.spread is not None),
        key=lambda bar: bar.spread.median if bar.spread is not None else 0.0,
        reverse=rates,
    )
    absent = [bar for bar in bars if bar.spread is None]
    rounds = max((len(lane["rounds"]) for lane in lanes.values()), default=0)
    unit = "samples/s" if rates else "ms to the first batch, less is better"
    over = "one round" if rounds == 1 else f"median, least and most of {rounds} rounds"
    return Panel(name, f"{unit}; {over}", (*ran, *absent))


def _draw(drawing: Drawing, panel: Panel, left: float, top: float) -> None:
    values = [_number(bar.spread.median) for bar in panel.bars if bar.spread is not None]
    right = WIDTH - MARGIN - 7 - max(text_width(value, bold=True) for value in values)
    scale = Scale(0.0, panel.most, left, right)
    drawing.text(MARGIN, top + 18, panel.title, "head")
    after = MARGIN + text_width(panel.title, HEAD_SIZE, bold=True) + 12
    drawing.text(after, top + 18, panel.unit)
    for place, bar in enumerate(panel.bars):
        y = top + HEAD + place * (BAR + GAP)
        middle, base = y + BAR / 2, y + BAR / 2 + 4.5
        if bar.spread is None:
            drawing.text(left - 10, base, bar.title, anchor="end")
            drawing.text(left, base, shorten(bar.why_not, WIDTH - MARGIN - left))
            continue
        words = "strong" if bar.ours else "ink"
        low, median, high = bar.spread.low, bar.spread.median, bar.spread.high
        drawing.text(left - 10, base, bar.title, words, "end")
        drawing.rect(left, y, scale(median) - left, BAR, f"fill {bar.kind}")
        drawing.whisker((scale(low), middle), (scale(high), middle), cap=4)
        drawing.text(max(scale(median), scale(high)) + 7, base, _number(median), words)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _write_png(path: Path, races: Sequence[Panel]) -> None:
    """A PNG, for readers without SVG. Needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [len(panel.bars) for panel in races]
    figure = Figure(figsize=(9, sum(0.32 * count + 0.7 for count in rows)), layout="constrained")
    for axes, panel in zip(
        figure.subplots(len(races), squeeze=False, height_ratios=rows)[:, 0], races, strict=True
    ):
        for place, bar in enumerate(panel.bars):
            if bar.spread is None:
                axes.text(0, place, f" {bar.why_not}", va="center", fontsize=8, color="grey")
                continue
            middle, low, high = bar.spread.median, bar.spread.low, bar.spread.high
            axes.barh(
                place,
                middle,
                xerr=[[middle - low], [high - middle]],
                color=STYLE.light.kinds[bar.kind],
                ecolor="#555555",
                capsize=3,
            )
            axes.text(high, place, f"  {_number(middle)}", va="center", fontsize=8)
        axes.set_yticks(range(len(panel.bars)), [bar.title for bar in panel.bars])
        axes.set_xlim(0, panel.most * 1.12)
        # The first bar on top, and room for contestants without a bar.
        axes.set_ylim(len(panel.bars) - 0.5, -0.5)
        axes.set_title(f"{panel.title}: {panel.unit}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
