"""A report as lines for a terminal, and the words that terminal and page share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import show_size
from penstock.diagnose.analyze.model import Bound, Prediction, predict
from penstock.diagnose.analyze.report import AnalysisReport, Phase
from penstock.diagnose.analyze.stalls import (
    RankSpeed,
    Stalls,
    measured_speed,
    model_error,
    rank_speeds,
    slowest,
    slowest_host,
    stalls_of,
)

if TYPE_CHECKING:
    from penstock.diagnose.analyze.remedies import Remedy

MEANING: dict[Bound, str] = {
    "compute": "Loading keeps up: only a faster accelerator, or less work in a step, makes "
    "training faster.",
    "prep": "Workers do not decode and augment samples as fast as the accelerator takes them.",
    "fetch": "Storage does not deliver samples as fast as the accelerator takes them.",
    "network": "The network does not carry samples as fast as the accelerator takes them.",
}
"""The meaning of each verdict, in a sentence."""

NAMES = {"G": "ingestion", "P": "prep", "S": "storage", "C": "cache", "F": "fetch"}
"""The names of the rates."""

RATES = {
    "G": "how fast the accelerator takes samples",
    "P": "how fast workers prepare them",
    "S": "how fast storage delivers them",
    "C": "how fast a cache in memory does",
    "F": "how fast they are fetched with the present cache",
}

COLD = 0.9
"""Reads count as cold if at least this share of their bytes came from the device."""


def lines_of(report: AnalysisReport, remedies: Sequence[Remedy] = ()) -> list[str]:
    """The verdict, the rates behind it, and the remedies, the most useful first."""
    stalls, present = stalls_of(report), predict(report)
    return [
        verdict(stalls),
        MEANING[stalls.bound],
        *blame_lines(report),
        "",
        *rate_lines(report, present),
        *remarks(report, stalls, present),
        "",
        *remedy_lines(remedies, stalls.bound),
        *rank_lines(report),
        *(f"note: {note}" for note in report.notes),
    ]


def verdict(stalls: Stalls) -> str:
    """The bottleneck of training, and the share of time it costs.

    >>> verdict(Stalls(compute=4.6, prep=0.3, fetch=5.1))
    'fetch-bound: the accelerator stands still 54 % of the time: 51 % stalled on fetch, 3 % on prep'
    """
    # Round the parts first, so that the shown parts add up to the shown total.
    fetch, prep = round(stalls.fetch_share * 100), round(stalls.prep_share * 100)
    said = f"{stalls.bound}-bound: the accelerator stands still {fetch + prep} % of the time"
    if stalls.bound == "fetch":
        return f"{said}: {fetch} % stalled on fetch, {prep} % on prep"
    if stalls.bound == "prep":
        return f"{said}: {prep} % stalled on prep, {fetch} % on fetch"
    return said


class RateRow(NamedTuple):
    """One rate: its letter, samples per second, its phase if measured, and bytes per second."""

    letter: str
    value: float
    phase: Phase | None
    nbytes: float | None


def rate_rows(report: AnalysisReport, present: Prediction) -> list[RateRow]:
    """The rates G, P, S, C and F: measured if their phase was run, else from the model."""
    size, costs = report.setup.sample_bytes, report.costs
    found = [
        _row(report.phase("replay"), "G", present.ingestion),
        _row(report.phase("prep"), "P", present.prep_rate),
    ]
    if size:
        found += [
            _row(report.phase("storage"), "S", costs.storage / size, size),
            _row(report.phase("cache"), "C", costs.cache / size, size),
        ]
        found.append(RateRow("F", present.fetch_rate, None, None))
    return [row for row in found if 0 < row.value < math.inf]


def _row(phase: Phase | None, letter: str, model: float, size: float = 0.0) -> RateRow:
    value = model if phase is None else phase.rate.value
    return RateRow(letter, value, phase, value * size if size else None)


def rate_lines(report: AnalysisReport, present: Prediction) -> list[str]:
    """The rates in columns."""
    rows = rate_rows(report, present)
    values = [f"{row.value:,.0f}" for row in rows]
    width = max(map(len, values), default=0)
    found = []
    for row, value in zip(rows, values, strict=True):
        line = f"  {row.letter}  {NAMES[row.letter]:<9}  {value:>{width}} samples/s"
        if row.phase is not None:
            line += f"  ({interval(row.phase)})"
        if row.nbytes is not None:
            line += f"  {row.nbytes / 1e6:,.0f} MB/s"
        if row.letter == "F":
            line += f"  with {cache_words(report)}"
        found.append(line)
    return found


def interval(phase: Phase) -> str:
    """The 95 % confidence interval of a rate, in words."""
    wide = "" if phase.enough else ", still wide when the time was up"
    return f"{phase.rate.low:,.0f} to {phase.rate.high:,.0f}{wide}"


def cache_words(report: AnalysisReport) -> str:
    """``no cache``, or the size of the present cache and its share of the data."""
    setup = report.setup
    if not setup.cache:
        return "no cache"
    share = percent(setup.cached_share(setup.cache))
    return f"a cache of {show_size(setup.cache)}, {share} of the data"


def remarks(report: AnalysisReport, stalls: Stalls, present: Prediction) -> list[str]:
    """Remarks on how far the figures can be trusted."""
    found = []
    measured, error = measured_speed(report), model_error(report, present)
    if measured is not None and error is not None:
        found.append(
            f"Training runs at {measured.rate.value:,.0f} samples/s ({interval(measured)}); the "
            f"model says {present.speed:,.0f}, {abs(error) * 100:.1f} % "
            f"too {'fast' if error > 0 else 'slow'}."
        )
    if not stalls.measured:
        found.append("Not all phases were run: where one is missing, the model stands in for it.")
    if report.device_reads is not None:
        cold = f"Cold reads: {percent(report.device_reads)} of the bytes came from the device"
        if report.device_reads < COLD:
            cold += ", the others from memory: storage is slower than S says"
        found.append(f"{cold}.")
    if report.costs.copy > 0:
        share = report.costs.copy / report.costs.compute
        found.append(f"Moving batches to the device takes {percent(share)} of a step.")
    return found


def remedy_lines(remedies: Sequence[Remedy], bound: Bound) -> list[str]:
    """The most useful remedy with its code, then the others."""
    if not remedies:
        return [] if bound == "compute" else ["No remedy was found that would help."]
    best, *others = ranked(remedies)
    found = [
        f"Most useful: {best.title}: {gain_words(best)}",
        *([f"  {best.why}"] if best.why else []),
        *(f"    {line}" for line in best.code.splitlines()),
    ]
    if others:
        found += ["", "Then:"]
    for other in others:
        found += [f"  {other.title}: {gain_words(other)}"]
        found += [f"    {line}" for line in other.code.splitlines()]
    return found


def ranked(remedies: Sequence[Remedy]) -> list[Remedy]:
    """The remedies for a single run first, then sharing, which helps only if several jobs run."""
    return sorted(remedies, key=lambda remedy: remedy.change.share)


def gain_words(remedy: Remedy) -> str:
    """``2.1 times as fast (1,880 samples/s, then prep-bound)``."""
    after = remedy.prediction
    return (
        f"{remedy.gain:.2f} times as fast ({after.speed:,.0f} samples/s, then {after.bound}-bound)"
    )


RANK_HEADS = (
    "rank",
    "machine",
    "samples/s",
    "loader alone",
    "stalled on fetch",
    "on prep",
    "on other ranks",
    "bound",
)


def rank_cells(rank: RankSpeed, ranks: Sequence[RankSpeed]) -> list[str]:
    """The cells of a rank under ``RANK_HEADS``; empty ones of columns that do not matter."""
    several = len({one.report.host for one in ranks}) > 1
    waits = any(one.others_share >= 0.005 for one in ranks)
    return [
        f"{rank.report.setup.rank}",
        (rank.report.host or "?") if several else "",
        f"{rank.speed:,.0f}",
        rate(rank.loader),
        percent(rank.stalls.fetch_share * (1 - rank.others_share)),
        percent(rank.stalls.prep_share * (1 - rank.others_share)),
        percent(rank.others_share) if waits else "",
        rank.stalls.bound,
    ]


def rank_lines(report: AnalysisReport) -> list[str]:
    """A line for each rank, and the rank that the others wait for."""
    if not report.ranks:
        return []
    ranks = rank_speeds(report)
    body = [rank_cells(rank, ranks) for rank in ranks]
    kept = [at for at in range(len(RANK_HEADS)) if any(row[at] for row in body)]
    widths = [max(len(row[at]) for row in [list(RANK_HEADS), *body]) for at in kept]
    left = {RANK_HEADS.index("machine"), RANK_HEADS.index("bound")}
    found = [
        "  ".join(
            row[at].ljust(width) if at in left else row[at].rjust(width)
            for at, width in zip(kept, widths, strict=True)
        ).rstrip()
        for row in [list(RANK_HEADS), *body]
    ]
    return ["", *found, slowest_words(ranks)]


def blame_lines(report: AnalysisReport) -> list[str]:
    """Which rank or machine the verdict is about, if there are several."""
    if not report.ranks:
        return []
    ranks = rank_speeds(report)
    last = slowest(ranks)
    if last is None:
        return []
    hosts = len({rank.report.host for rank in ranks})
    machines = f" on {hosts} machines" if hosts > 1 else ""
    return [
        f"These figures are of {rank_name(last)}, the slowest of {len(ranks)} ranks{machines}: the "
        "others wait for it."
    ]


def rank_name(rank: RankSpeed) -> str:
    """``rank 3 on gpu-2``, or ``rank 3`` if the machine is unknown."""
    host = f" on {rank.report.host}" if rank.report.host else ""
    return f"rank {rank.report.setup.rank}{host}"


def slowest_words(ranks: Sequence[RankSpeed]) -> str:
    """A sentence on the rank that the others wait for."""
    last = slowest(ranks)
    if last is None:
        return "No rank is slower than the others."
    several = len({rank.report.host for rank in ranks}) > 1
    name = rank_name(last) if several else f"rank {last.report.setup.rank}"
    words = f"{name[:1].upper()}{name[1:]} is the slowest: the others wait for it."
    host = slowest_host(ranks)
    if host is not None:
        words += f" All ranks on {host} are slower than those on other machines."
    return words


def rate(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "unbounded"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
