"""Axes of a plot: from values to pixels, round ticks, and units that people read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480
"""Of every plot; the page scales them, so that letters stay readable from a phone to a desk."""

LEFT, RIGHT = 52, 26
"""Pixels beside a plot's field: for the numbers of its axis, and for the names of its lines."""

CHARACTER = 6.8
"""Pixels of a letter, about."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels. ``begin`` may lie beyond ``end``: upwards pixels become fewer."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, about: int = 5, whole: bool = False) -> list[float]:
        """Round values, some four to seven; with ``whole`` none between two whole numbers."""
        rough = (self.high - self.low) / about
        if rough <= 0 or not math.isfinite(rough):
            return [self.low]
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * size for size in (1, 2, 2.5, 5, 10) if unit * size >= rough * 0.999)
        step = max(1.0, round(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit, and what values are divided by to be in it."""

    name: str
    scale: float

    def __call__(self, value: float) -> str:
        return f"{value / self.scale:,.6g}"


def unit_of(most: float, units: Sequence[Unit]) -> Unit:
    """The largest unit in which the most is at least 1; the smallest where it never is."""
    return next((unit for unit in units if most >= unit.scale), units[-1])


BYTES = (Unit("TB", 1e12), Unit("GB", 1e9), Unit("MB", 1e6), Unit("KB", 1e3), Unit("bytes", 1))
SECONDS = (Unit("s", 1), Unit("ms", 1e-3), Unit("µs", 1e-6))
LONG = (Unit("hours", 7200), Unit("minutes", 180), Unit("s", 1), Unit("ms", 1e-3))


def long_unit(most: float) -> Unit:
    """For epochs: hours from two of them on, minutes from three on."""
    found = unit_of(most, LONG)
    return Unit(found.name, {"hours": 3600.0, "minutes": 60.0}.get(found.name, found.scale))


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    """Words at a place, escaped."""
    kinds = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{px(x)}" y="{px(y)}"{kinds}{anchors}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{px(x1)}" y1="{px(y1)}" x2="{px(x2)}" y2="{px(y2)}" class="{kind}"/>'


def rect(
    x: float, y: float, width: float, height: float, kind: str, title: str = "", radius: float = 2
) -> str:
    """A box that says its value when pointed at."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{px(x)}" y="{px(y)}" width="{px(max(0.0, width))}" height="{px(height)}" '
        f'rx="{px(radius)}" class="{kind}">{inner}</rect>'
    )


def dot(x: float, y: float, radius: float, kind: str, title: str) -> str:
    return (
        f'<circle cx="{px(x)}" cy="{px(y)}" r="{px(radius)}" class="{kind}">'
        f"<title>{escape(title)}</title></circle>"
    )


def across(axis: Axis, unit: Unit, y: float, title: str, whole: bool = False) -> list[str]:
    """The axis below a field."""
    scaled = Axis(axis.low / unit.scale, axis.high / unit.scale, axis.begin, axis.end)
    found = [line(axis.begin, y, axis.end, y, "axis")]
    for tick in scaled.ticks(whole=whole):
        found.append(line(scaled(tick), y, scaled(tick), y + 4, "axis"))
        found.append(text(scaled(tick), y + 18, f"{tick:,.6g}", "tick", "middle"))
    middle = (axis.begin + axis.end) / 2
    return [*found, text(middle, y + 37, title, "label", "middle")]


def up(
    axis: Axis, left: float, right: float, title: str, unit: Unit, whole: bool = False
) -> list[str]:
    """The axis beside a field, with lines across it, and its title above."""
    scaled = Axis(axis.low / unit.scale, axis.high / unit.scale, axis.begin, axis.end)
    found = [text(2, axis.end - 12, title, "label")]
    for tick in scaled.ticks(about=4, whole=whole):
        found.append(line(left, scaled(tick), right, scaled(tick), "grid"))
        found.append(text(left - 7, scaled(tick) + 4, f"{tick:,.6g}", "tick", "end"))
    return found


def svg(name: str, height: float, label: str, parts: Sequence[str]) -> str:
    """A plot: an image with a name that is read out."""
    inner = "\n".join(parts)
    return (
        f'<svg class="plot" id="plot-{name}" viewBox="0 0 {WIDTH} {px(height)}" role="img" '
        f'aria-label="{escape(label)}">\n{inner}\n</svg>'
    )


def cut(words: str, width: float) -> str:
    """Words that fit into so many pixels."""
    most = max(4, int(width / CHARACTER))
    return words if len(words) <= most else words[: most - 1] + "…"
