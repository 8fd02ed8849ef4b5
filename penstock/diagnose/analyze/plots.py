"""The plots of a report, drawn as SVG by hand: no library, and colours of the reader's theme."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.diagnose.analyze.axes import (
    BYTES,
    LEFT,
    RIGHT,
    SECONDS,
    WIDTH,
    Axis,
    Unit,
    across,
    cut,
    dot,
    line,
    long_unit,
    px,
    rect,
    svg,
    text,
    unit_of,
    up,
)
from penstock.diagnose.analyze.report import PhaseName
from penstock.diagnose.analyze.series import (
    Bar,
    Curves,
    Histogram,
    RateLine,
    Stack,
    WaitBar,
    phases_of,
)

ONE = Unit("", 1)
FIELD_TOP, FIELD_BOTTOM, HEIGHT = 40, 246, 290

KINDS = {"F": "fetch", "P": "prep", "G": "compute", "speed": "speed"}

PHASE_KINDS: dict[PhaseName, str] = {
    "replay": "compute",
    "cached": "prep",
    "cold": "fetch",
    "as it is": "plain",
}
"""Colours of phases: those of what comes in addition there."""


def stack_plot(stacks: Sequence[Stack], samples: int) -> str:
    """Bars from left to right: computing, then what it waits for."""
    most = max(one.whole for one in stacks)
    unit = long_unit(most)
    axis = Axis(0, most * 1.02, 4, WIDTH - 12)
    parts = []
    for number, one in enumerate(stacks):
        y = 20 + 62 * number
        speed = samples / one.whole
        whole = f"{one.whole / unit.scale:,.1f} {unit.name} · {speed:,.0f} samples/s"
        parts.append(text(4, y, cut(one.title, WIDTH - 30 - 7 * len(whole)), "strong"))
        parts.append(text(WIDTH - 12, y, whole, "tick", "end"))
        x = axis(0)
        for kind, seconds in (
            ("compute", one.compute),
            ("prep", one.prep),
            ("fetch", one.fetch),
        ):
            width = axis(seconds) - axis(0)
            named = kind if kind == "compute" else f"{kind} stall"
            title = (
                f"{one.title}: {named} {seconds / unit.scale:,.1f} {unit.name}, "
                f"{seconds / one.whole:.0%}"
            )
            if width > 0.3:
                parts.append(rect(x, y + 9, max(0.5, width - 1.5), 24, f"fill {kind}", title))
            x += width
    bottom = 20 + 62 * len(stacks) - 10
    parts += across(axis, unit, bottom, f"an epoch ({unit.name})")
    said = "; ".join(
        f"{one.title}: compute {one.compute:,.1f} s, prep stall {one.prep:,.1f} s, fetch stall "
        f"{one.fetch:,.1f} s"
        for one in stacks
    )
    return svg("epoch", bottom + 44, f"Seconds of an epoch. {said}", parts)


def cache_plot(curves: Curves) -> str:
    """Speed over the size of the cache."""
    unit = unit_of(curves.right, BYTES)
    return _curve_plot(curves, "cache", unit, f"cache ({unit.name})", "Speed against cache size")


def cores_plot(curves: Curves) -> str:
    """Speed over cores."""
    title = "cores, with a worker each"
    return _curve_plot(curves, "cores", ONE, title, "Speed against cores", whole=True)


def _curve_plot(
    curves: Curves, name: str, unit: Unit, title: str, label: str, whole: bool = False
) -> str:
    left = min(x for one in curves.lines for x, _ in one.points)
    x = Axis(left, curves.right, LEFT, WIDTH - RIGHT)
    y = Axis(0, curves.top, FIELD_BOTTOM, FIELD_TOP)
    parts = up(y, LEFT, WIDTH - RIGHT, "samples/s", ONE)
    parts += across(x, unit, FIELD_BOTTOM, title, whole)
    parts.append(
        f'<clipPath id="field-{name}"><rect x="{LEFT}" y="{FIELD_TOP - 3}" '
        f'width="{WIDTH - RIGHT - LEFT}" height="{FIELD_BOTTOM - FIELD_TOP + 3}"/></clipPath>'
    )
    parts.append(f'<g clip-path="url(#field-{name})">')
    speed = next(one for one in curves.lines if one.name == "speed")
    parts.append(_area(speed, x, y))
    # The speed comes last: it lies on the others wherever it is bound by them.
    parts += [_path(one, x, y) for one in curves.lines]
    parts.append("</g>")
    parts += _names(curves.lines, x, y)
    for one in speed.points:
        words = f"{_amount(one[0], unit)}: {one[1]:,.0f} samples/s"
        parts.append(dot(x(one[0]), y(one[1]), 7, "touch", words))
    said = f"{label}."
    if curves.enough is not None:
        at, reached = curves.enough
        amount = _amount(at, unit, name if unit is ONE else "")
        said += f" More stops helping at {amount}: {reached:,.0f} samples/s."
        parts.append(line(x(at), FIELD_BOTTOM, x(at), y(reached), "guide"))
        parts.append(dot(x(at), y(reached), 5, "fill speed", f"enough: {amount}"))
        side, anchor = (-8, "end") if x(at) > WIDTH / 2 else (8, "start")
        parts.append(text(x(at) + side, FIELD_BOTTOM - 9, f"enough: {amount}", "strong", anchor))
    if curves.present is not None:
        at, reached = curves.present
        said += f" Now {reached:,.0f} samples/s at {_amount(at, unit)}."
        parts.append(dot(x(at), y(reached), 5, "now", f"measured: {reached:,.0f} samples/s"))
        side, anchor = (-9, "end") if x(at) > WIDTH - 90 else (9, "start")
        parts.append(text(x(at) + side, y(reached) + 17, "now", "strong", anchor))
    return svg(name, HEIGHT, said, parts)


def _amount(value: float, unit: Unit, word: str = "") -> str:
    """``5.4 GB``, ``6 cores``."""
    if unit is ONE:
        return f"{value:,.0f} {word}".strip()
    return f"{value / unit.scale:,.1f} {unit.name}"


def _path(one: RateLine, x: Axis, y: Axis) -> str:
    places = " L".join(f"{px(x(at))} {px(y(value))}" for at, value in one.points)
    return f'<path d="M{places}" class="line {KINDS[one.name]}"/>'


def _area(one: RateLine, x: Axis, y: Axis) -> str:
    places = " L".join(f"{px(x(at))} {px(y(value))}" for at, value in one.points)
    first, last = one.points[0][0], one.points[-1][0]
    low = px(y(0))
    return f'<path d="M{px(x(first))} {low} L{places} L{px(x(last))} {low} Z" class="area"/>'


def _names(lines: Sequence[RateLine], x: Axis, y: Axis) -> list[str]:
    """A letter at the end of each line, or where it leaves the field; none on another."""
    placed: list[tuple[float, float, str]] = []
    for one in lines:
        if one.name == "speed":
            continue
        inside = [point for point in one.points if point[1] <= y.high]
        if one.points[-1][1] <= y.high:
            placed.append((WIDTH - RIGHT + 6, y(one.points[-1][1]) + 4, one.name))
        elif inside:
            placed.append((x(inside[-1][0]) + 4, FIELD_TOP - 8, one.name))
    found, taken = [], 0.0
    for at, height, name in sorted(placed, key=lambda one: one[1]):
        beside = at > WIDTH - RIGHT
        height = max(height, taken) if beside else height
        taken = height + 15 if beside else taken
        found.append(text(at, height, name, f"name {KINDS[name]}"))
    return found


def bar_plot(bars: Sequence[Bar]) -> str:
    """A bar for each operation, with its name above it."""
    axis = Axis(0, max(bar.value for bar in bars) or 1.0, 4, WIDTH - 12)
    whole = sum(bar.value for bar in bars) or 1.0
    parts = []
    for number, bar in enumerate(bars):
        y = 18 + 40 * number
        value = f"{bar.value:,.3g} ms · {bar.value / whole:.0%}"
        parts.append(text(4, y, cut(bar.name, WIDTH - 40 - 7 * len(value)), "strong"))
        parts.append(text(WIDTH - 12, y, value, "tick", "end"))
        title = f"{bar.name}: {value}{' (' + bar.detail + ')' if bar.detail else ''}"
        parts.append(rect(4, y + 6, max(1.0, axis(bar.value) - 4), 13, "fill prep", title))
    bottom = 18 + 40 * len(bars) - 12
    parts.append(text(WIDTH / 2, bottom + 12, "ms a sample on one core", "label", "middle"))
    said = ", ".join(f"{bar.name} {bar.value:,.3g} ms" for bar in bars)
    return svg("operations", bottom + 20, f"Time a sample by operation: {said}", parts)


def histogram_plot(found: Histogram) -> str:
    """How often preparing a batch took how long."""
    low, high = found.edges[0], found.edges[-1]
    if found.allowed is not None and low - (high - low) <= found.allowed <= high + (high - low):
        low, high = min(low, found.allowed * 0.995), max(high, found.allowed * 1.005)
    unit = unit_of(high, SECONDS)
    x = Axis(low, high, LEFT, WIDTH - RIGHT)
    # A third of the field is left to the words above the bars.
    y = Axis(0, max(found.counts) * 1.45, FIELD_BOTTOM, FIELD_TOP)
    parts = up(y, LEFT, WIDTH - RIGHT, "batches", ONE, whole=True)
    parts += across(x, unit, FIELD_BOTTOM, f"preparing a batch ({unit.name})")
    edges = zip(found.edges, found.edges[1:], strict=False)
    for (begin, end), count in zip(edges, found.counts, strict=True):
        title = f"{begin / unit.scale:,.4g} to {end / unit.scale:,.4g} {unit.name}: {count} batches"
        width = x(end) - x(begin)
        if count:
            parts.append(
                rect(
                    x(begin) + 0.5, y(count), width - 1, FIELD_BOTTOM - y(count), "fill prep", title
                )
            )
    row = FIELD_TOP + 2
    for words, at in (
        ("median", found.median),
        ("95 %", found.late),
        ("time there is", found.allowed),
    ):
        if at is None or not low <= at <= high:
            continue
        kind = "limit" if words == "time there is" else "guide"
        parts.append(line(x(at), FIELD_BOTTOM, x(at), row - 6, kind))
        side, anchor = (-5, "end") if x(at) > WIDTH / 2 else (5, "start")
        parts.append(text(x(at) + side, row + 5, words, "strong", anchor))
        row += 17
    said = (
        f"Preparing a batch took {found.median / unit.scale:,.3g} {unit.name} in the median; 95 % "
        f"took less than {found.late / unit.scale:,.3g} {unit.name}."
    )
    return svg("batches", HEIGHT, said, parts)


def timeline_plot(bars: Sequence[WaitBar]) -> str:
    """How long the loop waited for each batch, phase by phase."""
    end = bars[-1].end
    most = max(bar.longest for bar in bars) or 1e-3
    unit, seconds = unit_of(most, SECONDS), long_unit(end)
    x = Axis(0, end, LEFT, WIDTH - RIGHT)
    y = Axis(0, most * 1.2, FIELD_BOTTOM, FIELD_TOP)
    parts = up(y, LEFT, WIDTH - RIGHT, f"wait for a batch ({unit.name})", unit)
    parts += across(x, seconds, FIELD_BOTTOM, f"time in the loop ({seconds.name})")
    for bar in bars:
        kind = PHASE_KINDS.get(bar.phase, "plain")
        width = max(0.8, x(bar.end) - x(bar.begin) - 0.7)
        steps = f"{bar.steps} steps" if bar.steps > 1 else "1 step"
        title = f"{bar.phase}, {steps}: waited {bar.mean / unit.scale:,.3g} {unit.name}"
        if bar.steps > 1:
            title += f" on average, {bar.longest / unit.scale:,.3g} at most"
            height = FIELD_BOTTOM - y(bar.longest)
            parts.append(rect(x(bar.begin), y(bar.longest), width, height, f"faint {kind}", "", 0))
        height = max(1.0, FIELD_BOTTOM - y(bar.mean))
        parts.append(
            rect(x(bar.begin), FIELD_BOTTOM - height, width, height, f"fill {kind}", title, 0)
        )
    for number, (phase, begin, last) in enumerate(phases_of(bars)):
        if number:
            parts.append(line(x(begin), FIELD_TOP, x(begin), FIELD_BOTTOM, "guide"))
        if x(last) - x(begin) > 8 * len(phase):
            middle = (x(begin) + x(last)) / 2
            parts.append(text(middle, FIELD_TOP + 12, phase, "strong", "middle"))
    said = "; ".join(
        f"{phase}: {_mean(bars, phase) / unit.scale:,.3g} {unit.name} on average"
        for phase in dict.fromkeys(bar.phase for bar in bars)
    )
    return svg("waits", HEIGHT, f"Waits for batches. {said}", parts)


def _mean(bars: Sequence[WaitBar], phase: PhaseName) -> float:
    own = [bar for bar in bars if bar.phase == phase]
    return sum(bar.mean * bar.steps for bar in own) / sum(bar.steps for bar in own)
