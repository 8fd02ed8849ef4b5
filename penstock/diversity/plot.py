"""Diversity as a drawing: share of different samples over reuse, a line for every split.

SVG is written by hand, so that it needs no library and follows the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from penstock.diversity.report import Diversity, DiversityRow
from penstock.diversity.theorem import WEAK

_LETTER = 7.0
"""Pixels of an average letter, in the widest of the fonts that a reader may have."""
_LEFT, _TOP, _WIDE, _HIGH, _BOTTOM = 58.0, 76.0, 400.0, 230.0, 56.0
_APART = 18.0
"""Pixels between two labels, so that they do not touch."""

_LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
_DARK = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#9198a1")

# In a notebook the style of a drawing reaches the whole page: every rule names its own class.
_STYLE = """\
  .diversity text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
  .diversity text { fill: #1f2328 }
  .diversity .head { font-size: 15px; font-weight: 600 }
  .diversity .quiet { fill: #59636e }
  .diversity .back { fill: #ffffff; stroke: #d0d7de }
  .diversity .grid { stroke: #d0d7de; fill: none }
  .diversity .weak { stroke-dasharray: 6 4 }
  .diversity .line { fill: none; stroke-width: 2 }
  .diversity .ring { fill: none; stroke: #1f2328; stroke-width: 2 }
"""
_NIGHT = """\
    .diversity text { fill: #e6edf3 }
    .diversity .quiet { fill: #9da7b3 }
    .diversity .back { fill: #0d1117; stroke: #30363d }
    .diversity .grid { stroke: #30363d }
    .diversity .ring { stroke: #e6edf3 }
"""


def svg(d: Diversity) -> str:
    """The drawing."""
    lines = [d.of(split) for split in d.splits]
    labels = [_label(rows) for rows in lines]
    longest = max(map(len, labels), default=0)
    high = max(_TOP + _HIGH + _BOTTOM, _TOP + len(lines) * _APART + _BOTTOM)
    wide = _LEFT + _WIDE + 30 + longest * _LETTER + 16
    epochs = f"{d.epochs:,} epoch" + ("" if d.epochs == 1 else "s")
    title = f"Different samples that reuse leaves, in {epochs}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" '
            f'width="{wide:.0f}" height="{high:.0f}" class="diversity" role="img">',
            f"<title>{title}</title>",
            f"<desc>{escape(_told(d, labels))}</desc>",
            f"<style>\n{_STYLE}{_colours(_LIGHT)}",
            f"  @media (prefers-color-scheme: dark) {{\n{_NIGHT}{_colours(_DARK)}  }}\n</style>",
            f'<rect class="back" x="0.5" y="0.5" width="{wide - 1:.0f}" height="{high - 1:.0f}" '
            'rx="8"/>',
            f'<text class="head" x="18" y="28">{title}</text>',
            f'<text class="quiet" x="18" y="46">{escape(_notes(d))}</text>',
            *_axes(lines),
            *_curves(lines),
            *_named(lines, labels),
            "</svg>\n",
        )
    )


def _axes(lines: Sequence[Sequence[DiversityRow]]) -> list[str]:
    out = []
    for percent in (0, 25, 50, 75, 100):
        y = _y(percent / 100)
        out.append(f'<path class="grid" d="M{_LEFT:.0f} {y:.1f}h{_WIDE:.0f}"/>')
        out.append(
            f'<text class="quiet" x="{_LEFT - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">'
            f"{percent}%</text>"
        )
    reuses = [row.reuse for row in lines[0]] if lines else []
    base = _y(0.0) + 20
    for place, reuse in enumerate(reuses):
        x = _x(place, len(reuses))
        out.append(f'<text x="{x:.1f}" y="{base:.1f}" text-anchor="middle">{reuse}</text>')
    out.append(
        f'<text class="quiet" x="{_LEFT + _WIDE / 2:.0f}" y="{base + 20:.1f}" '
        'text-anchor="middle">reuse: how often a kept sample is used</text>'
    )
    return out


def _curves(lines: Sequence[Sequence[DiversityRow]]) -> list[str]:
    out = []
    for number, rows in enumerate(lines):
        colour = f"c{number % len(_LIGHT)}"
        points = [(_x(i, len(rows)), _y(row.share)) for i, row in enumerate(rows)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        weak = " weak" if rows[0].weak else ""
        out.append(f'<path class="line {colour}{weak}" d="M{path}"/>')
        for (x, y), row in zip(points, rows, strict=True):
            out.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
            if row.here:
                out.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
    return out


def _named(lines: Sequence[Sequence[DiversityRow]], labels: Sequence[str]) -> list[str]:
    """Labels at the ends of the lines, pushed apart where these are close."""
    order = sorted(range(len(lines)), key=lambda i: (-lines[i][-1].share, i))
    places: list[float] = []
    for number in order:
        y = _y(lines[number][-1].share)
        places.append(max(y, places[-1] + _APART) if places else y)
    # What was pushed below the plot pushes back.
    limit = max(_y(0.0), _TOP + (len(lines) - 1) * _APART)
    for at in range(len(places) - 1, -1, -1):
        places[at] = min(places[at], limit)
        limit = places[at] - _APART
    out = []
    end = _LEFT + _WIDE
    for number, place in zip(order, places, strict=True):
        colour = f"c{number % len(_LIGHT)}"
        out.append(
            f'<path class="lead {colour}" d="M{end - 16:.0f} {_y(lines[number][-1].share):.1f}'
            f'L{end + 14:.0f} {place:.1f}h8"/>'
        )
        out.append(f'<text x="{end + 28:.0f}" y="{place + 4:.1f}">{escape(labels[number])}</text>')
    return out


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


def _told(d: Diversity, labels: Sequence[str]) -> str:
    """The drawing in words, for those who cannot see it."""
    return " ".join(
        f"{label}: " + ", ".join(f"{row.share:.0%} at {row.reuse}" for row in d.of(split)) + "."
        for label, split in zip(labels, d.splits, strict=True)
    )


def _colours(colours: Sequence[str]) -> str:
    return "".join(
        f"  .diversity .line.c{n}, .diversity .lead.c{n} {{ stroke: {colour}; fill: none }} "
        f".diversity .dot.c{n} {{ fill: {colour} }}\n"
        for n, colour in enumerate(colours)
    )


def _x(place: int, many: int) -> float:
    return _LEFT + 16 + (_WIDE - 32) * (place / (many - 1) if many > 1 else 0.5)


def _y(share: float) -> float:
    return _TOP + _HIGH * (1.0 - share)
