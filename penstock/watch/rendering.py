"""Running loaders as lines of text, for ``penstock top``."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import show_size
from penstock.host.text import aligned, many, span
from penstock.stats import BadSample, Stats, device_line, mix_rows, prepared_by
from penstock.watch.rates import StopRate
from penstock.watch.snapshot import Standing, unique_bad_samples
from penstock.watch.view import LoaderHistory

WIDTH = 20
"""Width of a bar, in characters."""

SHORT, QUIET = 1.0, 5.0
"""Shortest wait for a batch, and shortest pause between batches, that are shown (seconds)."""

LISTED, LONGEST = 3, 80
"""Most bad samples that are listed, and longest error text for each, in characters."""


def lines_of(loaders: Sequence[LoaderHistory], *, ascii_only: bool = False) -> list[str]:
    """A block of lines for each loader. ``ascii_only`` draws the bars in ASCII."""
    lines: list[str] = []
    for loader in loaders:
        lines += ([""] if lines else []) + _block(loader, ascii_only)
    return [printable(line) for line in lines]


def printable(line: str) -> str:
    """The line with spaces in place of control characters, which file names may contain.

    >>> printable("a\\x1b[2Jb\\n")
    'a [2Jb '
    """
    return "".join(char if char.isprintable() else " " for char in line)


def bar(share: float, width: int = WIDTH, *, ascii_only: bool = False) -> str:
    """A share, 0 to 1, as a bar.

    >>> bar(0.25, 8), bar(0.25, 8, ascii_only=True)
    ('██░░░░░░', '##......')
    """
    full = round(min(1.0, max(0.0, share)) * width)
    filled, empty = ("#", ".") if ascii_only else ("█", "░")
    return filled * full + empty * (width - full)


def _block(loader: LoaderHistory, ascii_only: bool) -> list[str]:
    last, now, overall = loader.last, loader.now, loader.overall
    stats, standing = last.stats, last.standing
    stall = bar(now.stall, ascii_only=ascii_only)
    speed = f"{now.samples_per_second:,.0f} samples/s, {now.batches_per_second:,.1f} batches/s"
    facts = [
        ("at", _position(standing) + _pause(loader)),
        ("stall", f"{stall} {now.stall:.0%} now, {overall.stall:.0%} since the first batch"),
        ("speed", f"{speed}, {show_size(now.bytes_read_per_second)}/s read"),
        ("queue", _queue(standing)),
        *([("workers", _workers(stats, now.utilisation))] if stats.pool.kind != "node" else []),
        *([("prepared", prepared_by(stats))] if stats.machines else []),
        *(_caches(stats, now.hits)),
        *(_reuse(stats)),
        *mix_rows(stats),
    ]
    if stats.bad:
        facts.append(("bad", f"{many(stats.bad, 'sample')}{_retries(stats)}"))
        facts += [("", _bad(sample)) for sample in unique_bad_samples(stats.bad_samples)[-LISTED:]]
    stops = [stop for stop in now.stops if stop.seconds_per_sample is not None]
    table = aligned(_stops(stops, ascii_only), right={1, 2}) if stops else []
    title = f"process {last.pid}, loader {last.number}: {last.command}"
    return [title, f"  {standing.name}", *_indented(aligned(facts) + table)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _position(standing: Standing) -> str:
    length = "" if standing.batches is None else f" of {standing.batches:,}"
    rank = f", rank {standing.rank} of {standing.world}" if standing.world > 1 else ""
    share = f", shares {standing.share}" if standing.share else ""
    return f"epoch {standing.epoch}, batch {standing.batch:,}{length}{rank}{share}"


def _pause(loader: LoaderHistory) -> str:
    last = loader.last
    if last.waiting is not None:
        waited = loader.seen - last.waiting
        return f"; waiting for a batch for {span(waited)}" if waited >= SHORT else ""
    age = loader.seen - last.written
    return f"; no batch taken for {span(age)}" if age >= QUIET else ""


def _queue(standing: Standing) -> str:
    ready = f"{many(standing.finished, 'batch', 'batches')} ready"
    slots = f"{many(standing.slots, 'slot')} in use"
    size = f", {show_size(standing.slot_bytes)}" if standing.slot_bytes else ""
    return f"{ready}, {standing.unfinished:,} in preparation; {slots}{size}"


def _workers(stats: Stats, utilisation: float) -> str:
    pool = stats.pool
    kinds = {"threads": "thread", "processes": "process", "crew": "thread of a crew"}
    workers = "none, the training loop prepares the batches"
    if pool.kind != "none":
        plural = "threads of a crew" if pool.kind == "crew" else pool.kind
        workers = many(pool.workers, kinds.get(pool.kind, pool.kind), plural)
    restarts = f", {many(pool.restarts, 'restart')}" if pool.restarts else ""
    return f"{workers}, busy {utilisation:.0%} of the time{restarts}"


def _caches(stats: Stats, hits: Sequence[float | None]) -> list[tuple[str, str]]:
    rows = []
    for number, (cache, share) in enumerate(zip(stats.caches, hits, strict=True)):
        name = "cache" if len(stats.caches) == 1 else f"cache {number}"
        hit_rate = "no lookups now" if share is None else f"{share:.0%} hits now"
        full = ", full" if cache.full else ""
        held = f"{show_size(cache.used)} of {show_size(cache.budget)}{full}"
        rows.append((name, f"{hit_rate}; {many(cache.admitted, 'sample')}, {held}"))
    return rows


def _reuse(stats: Stats) -> list[tuple[str, str]]:
    rows = []
    refurbish, echo = stats.refurbish, stats.echo
    if stats.device is not None:
        rows.append(("device", device_line(stats.device)))
    if refurbish is not None:
        samples = f"{refurbish.reused:,} reused, {refurbish.fresh:,} fresh"
        rows.append(("refurbish", f"{samples}; {show_size(refurbish.used)} kept"))
    if echo is not None:
        samples = f"{echo.delivered:,} samples delivered from {echo.fresh:,} prepared"
        rows.append(("echo", f"{samples}, factor {echo.factor:g}"))
    return rows


def _retries(stats: Stats) -> str:
    return f", {many(stats.retries, 'task')} run again" if stats.retries else ""


def _bad(sample: BadSample) -> str:
    error = sample.error.splitlines()[0] if sample.error else "?"
    error = error if len(error) <= LONGEST else error[: LONGEST - 3] + "..."
    return f"{sample.name} (index {sample.index}) in {sample.stage}: {error}"


def _stops(stops: Sequence[StopRate], ascii_only: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("stage", "samples/s", "ms/sample", "share of work")]
    for stop in stops:
        cost = 1e3 * (stop.seconds_per_sample or 0.0)
        share = f"{bar(stop.share, 10, ascii_only=ascii_only)} {stop.share:.0%}"
        rows.append((stop.name, f"{stop.samples_per_second:,.0f}", f"{cost:,.3f}", share))
    return rows
