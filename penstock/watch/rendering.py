"""Running loaders as people read them: courses in, lines of text out."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import show_size
from penstock.host.text import aligned, many, span
from penstock.stats import BadSample, Stats
from penstock.watch.live import Course
from penstock.watch.rates import StopRate
from penstock.watch.snapshot import Snapshot, Standing, each_once

WIDTH = 20
"""Characters of a bar."""

SHORT, QUIET = 1.0, 5.0
"""Seconds of waiting, and seconds without a batch, after which that is worth a word."""

LISTED, LONGEST = 3, 80
"""How many bad samples are named, and with how many characters of what was wrong."""


def lines_of(courses: Sequence[Course], *, plain: bool = False) -> list[str]:
    """A block for each loader; ``plain`` draws bars of characters that every terminal has."""
    out: list[str] = []
    for course in courses:
        out += ([""] if out else []) + _block(course, plain)
    return [printable(line) for line in out]


def printable(line: str) -> str:
    """Without what would move the cursor: a file may have any name.

    >>> printable("a\\x1b[2Jb\\n")
    'a [2Jb '
    """
    return "".join(one if one.isprintable() else " " for one in line)


def bar(share: float, width: int = WIDTH, *, plain: bool = False) -> str:
    """A share of the whole, as a bar.

    >>> bar(0.25, 8), bar(0.25, 8, plain=True)
    ('██░░░░░░', '##......')
    """
    full = round(min(1.0, max(0.0, share)) * width)
    on, off = ("#", ".") if plain else ("█", "░")
    return on * full + off * (width - full)


def _block(course: Course, plain: bool) -> list[str]:
    last, now, overall = course.last, course.now, course.overall
    stats, standing = last.stats, last.standing
    drawn = bar(now.stall, plain=plain)
    speed = f"{now.samples_per_second:,.0f} samples/s, {now.batches_per_second:,.1f} batches/s"
    facts = [
        ("at", _place(standing) + _quiet(course)),
        ("stall", f"{drawn} {now.stall:.0%} now, {overall.stall:.0%} since it began"),
        ("speed", f"{speed}, {show_size(now.bytes_read_per_second)}/s read"),
        ("queue", _queue(standing)),
        *([("workers", _workers(stats, now.utilisation))] if stats.pool.kind != "node" else []),
        *(_caches(stats, now.hits)),
        *(_reuse(stats)),
    ]
    if stats.bad:
        facts.append(("bad", f"{many(stats.bad, 'sample')}{_again(stats)}"))
        facts += [("", _bad(one)) for one in each_once(stats.bad_samples)[-LISTED:]]
    stops = [stop for stop in now.stops if stop.seconds_per_sample is not None]
    table = aligned(_stops(stops, plain), right={1, 2}) if stops else []
    title = f"process {last.pid}, loader {last.number}: {last.command}"
    return [title, f"  {standing.name}", *_indented(aligned(facts, right=set()) + table)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _place(standing: Standing) -> str:
    length = "" if standing.batches is None else f" of {standing.batches:,}"
    rank = f", rank {standing.rank} of {standing.world}" if standing.world > 1 else ""
    share = f", shares {standing.share}" if standing.share else ""
    return f"epoch {standing.epoch}, batch {standing.batch:,}{length}{rank}{share}"


def _quiet(course: Course) -> str:
    last: Snapshot = course.last
    if last.waiting is not None:
        waited = course.seen - last.waiting
        return f"; it waits for a batch, for {span(waited)} now" if waited >= SHORT else ""
    age = course.seen - last.written
    return f"; no batch was taken for {span(age)}" if age >= QUIET else ""


def _queue(standing: Standing) -> str:
    ready = f"{many(standing.finished, 'batch', 'batches')} ready"
    slots = f"{many(standing.slots, 'slot')} in use"
    size = f", {show_size(standing.slot_bytes)}" if standing.slot_bytes else ""
    return f"{ready}, {standing.unfinished:,} in the making; {slots}{size}"


def _workers(stats: Stats, utilisation: float) -> str:
    pool = stats.pool
    kinds = {"threads": "thread", "processes": "process"}
    who = "none, the loop itself"
    if pool.kind != "none":
        who = many(pool.workers, kinds.get(pool.kind, pool.kind), pool.kind)
    restarts = f", {many(pool.restarts, 'restart')}" if pool.restarts else ""
    return f"{who}, busy {utilisation:.0%} of the time{restarts}"


def _caches(stats: Stats, hits: Sequence[float | None]) -> list[tuple[str, str]]:
    rows = []
    for number, (one, share) in enumerate(zip(stats.caches, hits, strict=True)):
        name = "cache" if len(stats.caches) == 1 else f"cache {number}"
        found = "not asked now" if share is None else f"{share:.0%} hits now"
        full = ", full" if one.full else ""
        held = f"{show_size(one.used)} of {show_size(one.budget)}{full}"
        rows.append((name, f"{found}; {many(one.admitted, 'sample')}, {held}"))
    return rows


def _reuse(stats: Stats) -> list[tuple[str, str]]:
    rows = []
    if stats.refurbish is not None:
        one = stats.refurbish
        told = f"{one.reused:,} reused, {one.fresh:,} fresh; {show_size(one.used)} kept"
        rows.append(("refurbish", told))
    if stats.echo is not None:
        made = f"{stats.echo.fresh:,} samples made to {stats.echo.delivered:,}"
        rows.append(("echo", f"{made}, factor {stats.echo.factor:g}"))
    return rows


def _again(stats: Stats) -> str:
    return f", {many(stats.retries, 'task')} done again" if stats.retries else ""


def _bad(one: BadSample) -> str:
    error = one.error.splitlines()[0] if one.error else "?"
    error = error if len(error) <= LONGEST else error[: LONGEST - 3] + "..."
    return f"{one.name} (index {one.index}) in {one.stage}: {error}"


def _stops(stops: Sequence[StopRate], plain: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("stop", "samples/s", "ms/sample", "share of the work")]
    for stop in stops:
        cost = 1e3 * (stop.seconds_per_sample or 0.0)
        drawn = f"{bar(stop.share, 10, plain=plain)} {stop.share:.0%}"
        rows.append((stop.name, f"{stop.samples_per_second:,.0f}", f"{cost:,.3f}", drawn))
    return rows
