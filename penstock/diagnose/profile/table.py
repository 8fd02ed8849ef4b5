"""A profile as text: plain lines that read well in a terminal and in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import chain

from penstock.config import show_size
from penstock.diagnose.profile.result import Profile, Row

_WIDTH = 100
_LEAVES = 30
_LISTED = 5

Line = tuple[str, ...]
_TITLES: Line = ("ms/sample", "CPU ms", "share", "leaves", "size", "random", "runs in")
_NOTHING: Line = ("",) * len(_TITLES)
_RIGHT = {1, 2, 3, 5}


def show(profile: Profile) -> str:
    """The whole report."""
    many = f"{profile.rounds} round" + ("" if profile.rounds == 1 else "s")
    out = [f"{profile.samples:,} of {profile.source}, one thread, {many}", ""]
    apart = profile.fused is not profile.written
    blocks = [("as written" if apart else "stop", profile.written)]
    if apart:
        blocks.append(("as it runs", profile.fused))
    lines = [_lines(title, rows) for title, rows in blocks]
    if not any(row.needs_process for row in (*profile.written, *profile.fused)):
        lines = [[line[:-1] for line in block] for block in lines]
    widths = [max(map(len, column)) for column in zip(*chain(*lines), strict=True)]
    for block in lines:
        out += [_join(line, widths) for line in block] + [""]
    out += _conclusions(profile, apart)
    return "\n".join(line.rstrip() for line in out)


def _lines(title: str, rows: Sequence[Row]) -> list[Line]:
    lines: list[Line] = [(title, *_TITLES)]
    for row in rows:
        # What runs in one step has a long name; one below the other they read as written.
        name, *others = row.name.split("+") if row.kind == "fused" else [row.name]
        lines.append(_line(row, name))
        lines += [(f"  + {other}", *_NOTHING) for other in others]
        if row.hit_ms is not None:
            shown = ("  a hit instead", _ms(row.hit_ms), _ms(row.hit_cpu_ms or 0.0))
            lines.append((*shown, *_NOTHING[2:]))
        lines += [_line(part, f"  {part.name}") for part in row.parts]
    total, cpu = sum(row.ms for row in rows), sum(row.cpu_ms for row in rows)
    lines.append(("total", _ms(total), _ms(cpu), *_NOTHING[2:]))
    return lines


def _line(row: Row, name: str) -> Line:
    part = row.kind == "part"
    return (
        name,
        _ms(row.ms),
        _ms(row.cpu_ms),
        _percent(row.share),
        textwrap.shorten(row.leaves, _LEAVES, placeholder=" ..."),
        show_size(row.nbytes) if row.nbytes else "",
        "yes" if row.random else "",
        "" if part else "processes" if row.needs_process else "threads",
    )


def _join(line: Line, widths: Sequence[int]) -> str:
    cells = [
        text.rjust(width) if place in _RIGHT else text.ljust(width)
        for place, (text, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells)


def _conclusions(profile: Profile, apart: bool) -> list[str]:
    out = []
    if apart:
        part = profile.saved / profile.total_written if profile.total_written > 0 else 0.0
        verb = "saves" if profile.saved >= 0 else "costs"
        cpu = sum(r.cpu_ms for r in profile.written) - sum(r.cpu_ms for r in profile.fused)
        out.append(
            f"fused: {verb} {_ms(abs(profile.saved))} ms a sample ({abs(part):.0%}), "
            f"{_ms(cpu)} ms of CPU"
        )
    out.append(f"speed: {_speeds(profile, profile.total_fused)}")
    cached = profile.total_cached
    if cached is not None:
        held = _held([row for row in profile.fused if row.holds is not None])
        out.append(f"later epochs, {held}: {_speeds(profile, cached)}")
    out.append(f"loader: {profile.workers}")
    slowest = profile.slowest
    out.append(f"slowest: {slowest.name}, {_percent(slowest.share)} of the time")
    if profile.hint:
        out += textwrap.wrap(f"hint: {profile.hint}", _WIDTH, subsequent_indent="  ")
    for note in profile.notes:
        out += textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")
    if profile.bad:
        out.append(f"bad: {profile.bad} samples failed and were left out")
        for sample in profile.bad_samples[:_LISTED]:
            out.append(f"  {sample.name} in {sample.stage}: {sample.error.splitlines()[0]}")
        if profile.bad > _LISTED:
            out.append(f"  and {profile.bad - _LISTED} more")
    return out


def _speeds(profile: Profile, ms: float) -> str:
    if ms <= 0:
        return "too fast to measure"
    one = 1e3 / ms
    cores = f", at most {_rate(one * profile.cores)} on {profile.cores}"
    return f"{_rate(one)} samples/s on one core" + (cores if profile.cores > 1 else "")


def _held(rows: Sequence[Row]) -> str:
    shares = [row.holds or 0.0 for row in rows]
    if any(row.kind != "cache" for row in rows):
        found = (f"{_percent(row.holds or 0.0)} from {row.name}" for row in rows)
        return "with " + " and ".join(found)
    if all(share >= 1 for share in shares):
        return "all in the cache" if len(rows) == 1 else "all in the caches"
    return "with " + " and ".join(map(_percent, shares)) + " in the cache"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _ms(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
