"""The plot of a diversity report: share of different samples over reuse, a line for every split."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.diagnose.svg import (
    PERCENT,
    Drawing,
    PlotArea,
    PlotBox,
    Scale,
    Style,
    Tick,
    series_kind,
    spread_apart,
    text_width,
)
from penstock.diversity.report import Diversity, DiversityRow
from penstock.diversity.theorem import WEAK

_STYLE = Style("diversity")
_BOX = PlotBox(58, 76, 458, 306)
_BELOW = 56
"""Pixels below the field, for its axis."""
_LABEL_GAP = 18.0
"""Pixels from one label to the next, so that they do not touch."""


def svg(d: Diversity) -> str:
    """The plot as an SVG document."""
    lines = [d.of(split) for split in d.splits]
    labels = [_label(rows) for rows in lines]
    longest = max(map(text_width, labels), default=0.0)
    lowest = max(_BOX.bottom, _BOX.top + len(lines) * _LABEL_GAP)
    drawing = Drawing(round(_BOX.right + 46 + longest), lowest + _BELOW)
    epochs = f"{d.epochs:,} epoch" + ("" if d.epochs == 1 else "s")
    title = f"Different samples that reuse leaves, in {epochs}"
    drawing.heading(title, _notes(d))
    reuses = [row.reuse for row in lines[0]] if lines else []
    field = _field(len(reuses))
    drawing.y_axis(field, "", field.y.ticks(PERCENT, about=4, suffix="%"))
    ticks = [Tick(place, str(reuse)) for place, reuse in enumerate(reuses)]
    drawing.x_axis(field, "reuse: how often a kept sample is used", ticks)
    for number, rows in enumerate(lines):
        _draw_line(drawing, field, rows, series_kind(number))
    _draw_labels(drawing, field, lines, labels)
    return drawing.document(_STYLE, title, _description(d, labels))


def _field(reuses: int) -> PlotArea:
    """Reuses at equal distances, with room on both sides; a single one in the middle."""
    last = max(1, reuses - 1)
    x = Scale(0, last, _BOX.left + 16, _BOX.right - 16)
    if reuses == 1:
        x = Scale(-1, 1, x.begin, x.end)
    return PlotArea(_BOX, x, Scale(0, 1, _BOX.bottom, _BOX.top))


def _draw_line(drawing: Drawing, field: PlotArea, rows: Sequence[DiversityRow], kind: str) -> None:
    places = field.places((place, row.share) for place, row in enumerate(rows))
    drawing.path(places, f"line {kind}", dash="6 4" if rows[0].weak else "")
    for (x, y), row in zip(places, rows, strict=True):
        drawing.circle(x, y, 3.5, f"fill {kind}", f"{row.share:.1%} at reuse {row.reuse}")
        if row.here:
            drawing.circle(x, y, 8, "ring")


def _draw_labels(
    drawing: Drawing,
    field: PlotArea,
    lines: Sequence[Sequence[DiversityRow]],
    labels: Sequence[str],
) -> None:
    """Labels right of the ends of the lines, moved apart where the ends are close."""
    ends = [field.y(rows[-1].share) for rows in lines]
    lowest = max(_BOX.bottom, _BOX.top + (len(lines) - 1) * _LABEL_GAP)
    places = spread_apart(ends, _LABEL_GAP, _BOX.top, lowest)
    right = _BOX.right
    for number, (end, place, label) in enumerate(zip(ends, places, labels, strict=True)):
        lead = ((field.x.end, end), (right + 14, place), (right + 22, place))
        drawing.path(lead, f"lead {series_kind(number)}")
        drawing.text(right + 28, place + 4, label, "ink")


def _label(rows: Sequence[DiversityRow]) -> str:
    return f"{rows[0].below or 'the source'} (strength {rows[0].strength:.2f})"


def _notes(d: Diversity) -> str:
    if not d.rows:
        return "Nothing on this road is random"
    notes = ["refurbish() right below each random map"]
    if any(row.weak for row in d.rows):
        notes.append(f"dashed: a strength below {WEAK:g}")
    if any(row.here for row in d.rows):
        notes.append("ring: this pipeline")
    return "; ".join(notes)


def _description(d: Diversity, labels: Sequence[str]) -> str:
    """The plot in words, for screen readers."""
    return " ".join(
        f"{label}: " + ", ".join(f"{row.share:.0%} at {row.reuse}" for row in d.of(split)) + "."
        for label, split in zip(labels, d.splits, strict=True)
    )
