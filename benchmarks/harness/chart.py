"""Races as bars: one panel for each race, the best on top, ours in colour, from least to most.

SVG is written by hand, so that it needs no library and follows the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.harness.measure import Spread

SUFFIXES = (".svg", ".png")

WIDTH = 800
BAR, GAP, HEAD, MARGIN = 18, 9, 40, 18
LETTER = 7.3
"""Pixels of an average letter, in the widest of the fonts that a reader may have."""
VALUE = 62
"""Pixels for the number behind the longest bar."""

STYLE = """\
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
  .back { fill: #ffffff }
  .head { font-size: 15px; font-weight: 600 }
  .quiet { fill: #656d76 }
  .ours { font-weight: 600 }
  rect.peer { fill: #b6c0ca }
  rect.ours { fill: #1a7fe0 }
  .whisker { stroke: #1f2328; stroke-width: 1.2; fill: none; opacity: 0.6 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .back { fill: #0d1117 }
    .quiet { fill: #8d96a0 }
    rect.peer { fill: #4b5663 }
    rect.ours { fill: #3b8eea }
    .whisker { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True)
class Bar:
    """One contestant: how fast, or why it did not run."""

    title: str
    ours: bool
    spread: Spread | None
    why_not: str = ""


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
    """What there is to draw in the data of a benchmark. A race that only ours ran in is left out
    where there are others."""
    found = [_panel(name, lanes) for name, lanes in data.items() if _is_race(lanes)]
    drawn = [panel for panel in found if any(bar.spread for bar in panel.bars)]
    return [panel for panel in drawn if not all(bar.ours for bar in panel.bars)] or drawn


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Draw all races in the data."""
    found = panels(data)
    if not found:
        raise ValueError(f"nothing to draw in {path}: no contestant of any race came home")
    if path.suffix == ".png":
        _write_png(path, found)
    else:
        path.write_text(svg(found))


def svg(found: Sequence[Panel]) -> str:
    """The panels, one below the other."""
    longest = max(len(bar.title) for panel in found for bar in panel.bars)
    left = MARGIN + longest * LETTER + 10
    lines: list[str] = []
    top = float(MARGIN)
    for panel in found:
        lines += _drawn(panel, left, top)
        top += HEAD + len(panel.bars) * (BAR + GAP) + MARGIN
    about = escape("; ".join(panel.title for panel in found))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" '
            f'width="{WIDTH}" height="{top:.0f}" role="img">',
            f"<title>{about}</title>",
            f"<style>\n{STYLE}</style>",
            f'<rect class="back" width="{WIDTH}" height="{top:.0f}" rx="8"/>',
            *lines,
            "</svg>\n",
        )
    )


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


def _drawn(panel: Panel, left: float, top: float) -> list[str]:
    scale = (WIDTH - MARGIN - VALUE - left) / (panel.most or 1.0)
    begin = len(panel.title) * LETTER * 1.3 + MARGIN + 12
    lines = [
        f'<text class="head" x="{MARGIN}" y="{top + 18:.1f}">{escape(panel.title)}</text>',
        f'<text class="quiet" x="{begin:.1f}" y="{top + 18:.1f}">{escape(panel.unit)}</text>',
    ]
    for place, bar in enumerate(panel.bars):
        y = top + HEAD + place * (BAR + GAP)
        middle, base = y + BAR / 2, y + BAR / 2 + 4.5
        kind = "ours" if bar.ours else "peer"
        if bar.spread is None:
            room = int((WIDTH - MARGIN - left) / LETTER)
            why = bar.why_not if len(bar.why_not) <= room else bar.why_not[: room - 3] + "..."
            lines.append(_label(bar.title, f"{kind} quiet", left, base))
            lines.append(f'<text class="quiet" x="{left:.1f}" y="{base}">{escape(why)}</text>')
            continue
        low, wide, high = (
            left + value * scale for value in (bar.spread.low, bar.spread.median, bar.spread.high)
        )
        lines += [
            _label(bar.title, kind, left, base),
            f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{wide - left:.1f}" '
            f'height="{BAR}" rx="2"/>',
            f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}'
            f'M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"/>',
            f'<text class="{kind}" x="{max(wide, high) + 7:.1f}" y="{base}">'
            f"{_number(bar.spread.median)}</text>",
        ]
    return lines


def _label(title: str, kind: str, left: float, base: float) -> str:
    return (
        f'<text class="{kind}" x="{left - 10:.1f}" y="{base}" text-anchor="end">'
        f"{escape(title)}</text>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _write_png(path: Path, found: Sequence[Panel]) -> None:
    """For what takes no SVG; needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [len(panel.bars) for panel in found]
    figure = Figure(figsize=(9, sum(0.32 * count + 0.7 for count in rows)), layout="constrained")
    for axes, panel in zip(
        figure.subplots(len(found), squeeze=False, height_ratios=rows)[:, 0], found, strict=True
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
                color="#1a7fe0" if bar.ours else "#b6c0ca",
                ecolor="#555555",
                capsize=3,
            )
            axes.text(high, place, f"  {_number(middle)}", va="center", fontsize=8)
        axes.set_yticks(range(len(panel.bars)), [bar.title for bar in panel.bars])
        axes.set_xlim(0, panel.most * 1.12)
        # The first on top, and room for those without a bar.
        axes.set_ylim(len(panel.bars) - 0.5, -0.5)
        axes.set_title(f"{panel.title}: {panel.unit}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
