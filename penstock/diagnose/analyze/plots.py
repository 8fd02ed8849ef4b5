"""The plots of a report: SVG inside its page, in the colours of the page's theme."""

from __future__ import annotations

from collections.abc import Sequence

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
from penstock.diagnose.svg import (
    BYTES,
    PLAIN,
    SECONDS,
    Anchor,
    Drawing,
    PlotArea,
    PlotBox,
    Scale,
    Style,
    Theme,
    Unit,
    choose_unit,
    duration_unit,
    shorten,
    spread_apart,
    text_width,
)
from penstock.host.text import percent

WIDTH, HEIGHT = 480, 290
"""Size of a plot. The page scales it, so that letters stay readable from a phone to a desk."""

FIELD = PlotBox(52, 40, 454, 246)
LEFT, RIGHT = 4, WIDTH - 12
"""Where horizontal bars begin, and where the longest one ends."""

SCOPE = "plot"
THEME = Theme(
    ink="var(--ink)",
    muted="var(--muted)",
    grid="var(--grid)",
    background="var(--card)",
    border="var(--edge)",
    area="var(--area)",
    kinds={
        "compute": "var(--compute-fill)",
        "prep": "var(--prep-fill)",
        "fetch": "var(--fetch-fill)",
        "plain": "var(--plain-fill)",
        "speed": "var(--ink)",
    },
    words={
        "compute": "var(--compute)",
        "prep": "var(--prep)",
        "fetch": "var(--fetch)",
    },
)
CSS = (
    Style(SCOPE, THEME, dark=None).css
    + """\
.plot .line.speed { stroke-width: 2.6 }
.plot .line.limit { stroke: var(--compute); stroke-dasharray: 6 3 }
"""
)

KINDS = {"F": "fetch", "P": "prep", "G": "compute", "speed": "speed"}
DASHES = {"F": "6 4", "P": "2 3", "G": "10 4", "speed": ""}

PHASE_KINDS: dict[PhaseName, str] = {
    "replay": "compute",
    "cached": "prep",
    "cold": "fetch",
    "as it is": "plain",
}
"""Colour of a phase: that of the work which it adds to the phase before."""


def stack_plot(stacks: Sequence[Stack], samples: int) -> str:
    """A bar for each epoch, from left to right: computing, then the stalls."""
    longest = max(stack.whole for stack in stacks)
    unit = duration_unit(longest)
    bottom = 20 + 62 * len(stacks) - 10
    drawing = Drawing(WIDTH, bottom + 44)
    field = PlotArea.within(PlotBox(LEFT, 0, RIGHT, bottom), x=(0, longest * 1.02), y=(0, 1))
    for number, stack in enumerate(stacks):
        y = 20 + 62 * number
        speed = samples / stack.whole
        _bar_heading(
            drawing, y, stack.title, f"{_amount(stack.whole, unit)} · {speed:,.0f} samples/s"
        )
        begin = 0.0
        for kind, name, seconds in (
            ("compute", "compute", stack.compute),
            ("prep", "prep stall", stack.prep),
            ("fetch", "fetch stall", stack.fetch),
        ):
            title = (
                f"{stack.title}: {name} {_amount(seconds, unit)}, {percent(seconds / stack.whole)}"
            )
            left, right = field.x(begin), field.x(begin + seconds)
            if right - left > 0.3:
                drawing.rect(left, y + 9, max(0.5, right - left - 1.5), 24, f"fill {kind}", title)
            begin += seconds
    drawing.x_axis(field, f"an epoch ({unit.name})", field.x.ticks(unit))
    label = "; ".join(
        f"{stack.title}: compute {stack.compute:,.1f} s, prep stall {stack.prep:,.1f} s, "
        f"fetch stall {stack.fetch:,.1f} s"
        for stack in stacks
    )
    return drawing.inline(SCOPE, "epoch", f"Seconds of an epoch. {label}")


def bar_plot(bars: Sequence[Bar]) -> str:
    """A bar for each operation, with its name above it."""
    longest = max(bar.value for bar in bars) or 1.0
    whole = sum(bar.value for bar in bars) or 1.0
    scale = Scale(0, longest, 0, RIGHT - LEFT)
    bottom = 18 + 40 * len(bars) - 12
    drawing = Drawing(WIDTH, bottom + 20)
    for number, bar in enumerate(bars):
        y = 18 + 40 * number
        value = f"{bar.value:,.3g} ms · {percent(bar.value / whole)}"
        _bar_heading(drawing, y, bar.name, value)
        title = f"{bar.name}: {value}{' (' + bar.detail + ')' if bar.detail else ''}"
        drawing.rect(LEFT, y + 6, max(1.0, scale(bar.value)), 13, "fill prep", title)
    drawing.text(WIDTH / 2, bottom + 12, "ms a sample on one core", anchor="middle")
    label = ", ".join(f"{bar.name} {bar.value:,.3g} ms" for bar in bars)
    return drawing.inline(SCOPE, "operations", f"Time a sample by operation: {label}")


def _bar_heading(drawing: Drawing, y: float, title: str, value: str) -> None:
    """The title of a bar on the left, its value on the right."""
    room = RIGHT - LEFT - text_width(value) - 14
    drawing.text(LEFT, y, shorten(title, room, bold=True), "strong")
    drawing.text(RIGHT, y, value, "tick", "end")


def cache_plot(curves: Curves) -> str:
    """Speed over the size of the cache."""
    unit = choose_unit(curves.right, BYTES)
    return _curve_plot(curves, "cache", unit, f"cache ({unit.name})", "Speed against cache size")


def cores_plot(curves: Curves) -> str:
    """Speed over the number of cores."""
    title = "cores, with a worker each"
    return _curve_plot(curves, "cores", PLAIN, title, "Speed against cores", whole=True)


def _curve_plot(
    curves: Curves, name: str, unit: Unit, title: str, label: str, whole: bool = False
) -> str:
    left = min(x for line in curves.lines for x, _ in line.points)
    field = PlotArea.within(FIELD, x=(left, curves.right), y=(0, curves.top))
    drawing = Drawing(WIDTH, HEIGHT)
    drawing.y_axis(field, "samples/s", field.y.ticks(about=4))
    drawing.x_axis(field, title, field.x.ticks(unit, whole=whole))
    speed = next(line for line in curves.lines if line.name == "speed")
    with drawing.clipped(f"field-{name}", FIELD._replace(top=FIELD.top - 3)):
        drawing.area(field.places(speed.points), FIELD.bottom)
        # The speed comes last: it lies on the others wherever it is bound by them.
        for line in curves.lines:
            places = field.places(line.points)
            drawing.path(places, f"line {KINDS[line.name]}", dash=DASHES[line.name])
    _line_names(drawing, field, curves.lines)
    for x, value in speed.points:
        words = f"{_amount(x, unit)}: {value:,.0f} samples/s"
        drawing.circle(*field.place(x, value), 7, "touch", words)
    # From the least amount on more does not help: that is no amount that is enough.
    if curves.enough is not None and curves.enough[0] > left:
        at, reached = curves.enough
        amount = _amount(at, unit, name)
        label += f". More stops helping at {amount}: {reached:,.0f} samples/s"
        x, y = field.place(at, reached)
        drawing.line(x, FIELD.bottom, x, y, "guide")
        drawing.circle(x, y, 5, "fill speed", f"enough: {amount}")
        _beside(drawing, x, FIELD.bottom - 9, f"enough: {amount}", "strong", 8)
    if curves.present is not None:
        at, reached = curves.present
        label += f". Now {reached:,.0f} samples/s at {_amount(at, unit)}"
        x, y = field.place(at, reached)
        drawing.circle(x, y, 5, "hollow", f"measured: {reached:,.0f} samples/s")
        _beside(drawing, x, y + 17, "now", "strong", 9, turn=WIDTH - 90)
    return drawing.inline(SCOPE, name, f"{label}.")


def _amount(value: float, unit: Unit, word: str = "") -> str:
    """A value and its unit, or ``word`` for a unit without a name: ``5.4 GB``, ``6 cores``."""
    if not unit.name:
        return f"{value:,.0f} {word}".strip()
    return f"{value / unit.divisor:,.1f} {unit.name}"


def _beside(
    drawing: Drawing,
    x: float,
    y: float,
    words: str,
    kind: str,
    gap: float,
    turn: float = WIDTH / 2,
) -> None:
    """Words to the right of ``x``, or to the left of it where it lies beyond ``turn``."""
    anchor: Anchor = "end" if x > turn else "start"
    drawing.text(x - gap if x > turn else x + gap, y, words, kind, anchor)


def _line_names(drawing: Drawing, field: PlotArea, lines: Sequence[RateLine]) -> None:
    """A letter at the right end of each line, or above the place where it leaves the field."""
    ends: list[tuple[float, str]] = []
    for line in lines:
        if line.name == "speed":
            continue
        inside = [point for point in line.points if point[1] <= field.y.high]
        if line.points[-1][1] <= field.y.high:
            ends.append((field.y(line.points[-1][1]) + 4, line.name))
        elif inside:
            x = field.x(inside[-1][0])
            drawing.text(x + 4, FIELD.top - 8, line.name, f"name {KINDS[line.name]}")
    places = spread_apart([y for y, _ in ends], 15, FIELD.top, FIELD.bottom)
    for y, (_, name) in zip(places, ends, strict=True):
        drawing.text(FIELD.right + 6, y, name, f"name {KINDS[name]}")


def histogram_plot(times: Histogram) -> str:
    """How often preparing a batch took how long."""
    low, high = times.edges[0], times.edges[-1]
    if times.allowed is not None and low - (high - low) <= times.allowed <= high + (high - low):
        low, high = min(low, times.allowed * 0.995), max(high, times.allowed * 1.005)
    unit = choose_unit(high, SECONDS)
    # A third of the field is left to the words above the bars.
    field = PlotArea.within(FIELD, x=(low, high), y=(0, max(times.counts) * 1.45))
    drawing = Drawing(WIDTH, HEIGHT)
    drawing.y_axis(field, "batches", field.y.ticks(about=4, whole=True))
    drawing.x_axis(field, f"preparing a batch ({unit.name})", field.x.ticks(unit))
    for begin, end, count in zip(times.edges, times.edges[1:], times.counts, strict=False):
        span = f"{begin / unit.divisor:,.4g} to {end / unit.divisor:,.4g} {unit.name}"
        left, right, top = field.x(begin), field.x(end), field.y(count)
        if count:
            title = f"{span}: {count} batches"
            width, height = right - left - 1, FIELD.bottom - top
            drawing.rect(left + 0.5, top, width, height, "fill prep", title)
    marks: list[tuple[float, float, str, str]] = []
    for at, words, kind in (
        (times.median, "median", "guide"),
        (times.late, "95 %", "guide"),
        (times.allowed, "allowed", "line limit"),
    ):
        if at is not None and low <= at <= high:
            marks.append((field.x(at), FIELD.top + 17 * len(marks), words, kind))
    for x, y, _, kind in marks:
        drawing.line(x, FIELD.bottom, x, y - 4, kind)
    for x, y, words, _ in marks:
        _beside(drawing, x, y + 7, words, "strong halo", 5)
    label = (
        f"Preparing a batch took {times.median / unit.divisor:,.3g} {unit.name} in the median; "
        f"95 % took less than {times.late / unit.divisor:,.3g} {unit.name}."
    )
    return drawing.inline(SCOPE, "batches", label)


def timeline_plot(bars: Sequence[WaitBar]) -> str:
    """How long the loop waited for each batch, phase by phase."""
    end = bars[-1].end
    longest = max(bar.longest for bar in bars) or 1e-3
    unit, long_unit = choose_unit(longest, SECONDS), duration_unit(end)
    field = PlotArea.within(FIELD, x=(0, end), y=(0, longest * 1.2))
    drawing = Drawing(WIDTH, HEIGHT)
    drawing.y_axis(field, f"wait for a batch ({unit.name})", field.y.ticks(unit, about=4))
    drawing.x_axis(field, f"time in the loop ({long_unit.name})", field.x.ticks(long_unit))
    for bar in bars:
        kind = PHASE_KINDS.get(bar.phase, "plain")
        left = field.x(bar.begin)
        width = max(0.8, field.x(bar.end) - left - 0.7)
        steps = f"{bar.steps} steps" if bar.steps > 1 else "1 step"
        title = f"{bar.phase}, {steps}: waited {bar.mean / unit.divisor:,.3g} {unit.name}"
        if bar.steps > 1:
            title += f" on average, {bar.longest / unit.divisor:,.3g} at most"
            top = field.y(bar.longest)
            drawing.rect(left, top, width, FIELD.bottom - top, f"faint {kind}", radius=0)
        height = max(1.0, FIELD.bottom - field.y(bar.mean))
        drawing.rect(left, FIELD.bottom - height, width, height, f"fill {kind}", title, radius=0)
    for number, (phase, begin, last) in enumerate(phases_of(bars)):
        left, right = field.x(begin), field.x(last)
        if number:
            drawing.line(left, FIELD.top, left, FIELD.bottom, "guide")
        if right - left > text_width(phase, bold=True):
            drawing.text((left + right) / 2, FIELD.top + 12, phase, "strong", "middle")
    label = "; ".join(
        f"{phase}: {_mean_wait(bars, phase) / unit.divisor:,.3g} {unit.name} on average"
        for phase in dict.fromkeys(bar.phase for bar in bars)
    )
    return drawing.inline(SCOPE, "waits", f"Waits for batches. {label}")


def _mean_wait(bars: Sequence[WaitBar], phase: PhaseName) -> float:
    own = [bar for bar in bars if bar.phase == phase]
    return sum(bar.mean * bar.steps for bar in own) / sum(bar.steps for bar in own)
