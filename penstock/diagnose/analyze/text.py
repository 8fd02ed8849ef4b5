"""A report as lines for a terminal, and the words that terminal and page share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import show_size
from penstock.diagnose.analyze.judge import CAUSES, more_workers_help, result_of
from penstock.diagnose.analyze.report import AnalysisReport, Interval, Phase, PhaseName, Rate
from penstock.diagnose.analyze.result import MODEL_OFF, Bound, Result
from penstock.diagnose.analyze.stalls import RankSpeed, rank_speeds, slowest, slowest_host
from penstock.host.text import percent

if TYPE_CHECKING:
    from penstock.diagnose.analyze.remedies import Remedy

MEANING: dict[Bound, str] = {
    "compute": "Loading keeps up: only a faster accelerator, or less work in a step, makes "
    "training faster.",
    "prep": "Workers do not decode and augment samples as fast as the accelerator takes them.",
    "latency": "Workers wait most of their time instead of computing: more workers help, more "
    "cores do not.",
    "fetch": "Storage does not deliver samples as fast as the accelerator takes them.",
    "contention": "Workers take cores from the training step: it takes longer while they work.",
}
"""The meaning of each verdict, in a sentence."""

ALSO_COMPUTE = (
    "Workers wait most of their time instead of computing: more workers help, as long as cores are "
    "free for what they compute."
)
"""The meaning of ``latency`` where workers compute, too."""

COMPUTES = 0.1
"""Workers that are on a core, or queue for one, for less than this share of the time need none."""

IN_TURN = (
    "Workers wait most of their time instead of computing, for each other or for the same server: "
    "neither more workers nor more cores help."
)
"""The meaning of ``latency`` where more workers were not faster."""

NO_WORKERS = (
    "The training process prepares its batches itself, between its steps: it has no workers."
)
"""The meaning of ``prep`` and ``latency`` without workers."""

NAMES = {"G": "ingestion", "P": "prep", "S": "storage", "C": "cache", "F": "fetch"}
"""The names of the rates."""

RATES = {
    "G": "how fast the accelerator takes samples",
    "P": "how fast workers prepare them",
    "S": "how fast storage delivers them",
    "C": "how fast a cache in memory does",
    "F": "how fast they are fetched with the present cache",
}

PHASES: dict[str, PhaseName] = {"G": "replay", "P": "prep", "S": "storage", "C": "cache"}
"""The phase that measures a rate."""

COLD = 0.9
"""Reads count as cold if at least this share of their bytes came from the device."""

SURE = 0.02
"""Intervals narrower than this are not printed beside a share."""


def lines_of(
    report: AnalysisReport, remedies: Sequence[Remedy] = (), result: Result | None = None
) -> list[str]:
    """The verdict, the rates behind it, and the remedies, the most useful first."""
    result = result or result_of(report)
    return [
        *([ended_early(result)] if result.interrupted else []),
        verdict(result),
        *meaning(report, result),
        *blame_lines(report),
        "",
        *rate_lines(report, result),
        *remarks(report, result),
        *(f"{_sentence(warning)}" for warning in result.warnings),
        "",
        *remedy_lines(remedies, result),
        *rank_lines(report),
        *(f"note: {note}" for note in report.notes),
    ]


def ended_early(result: Result) -> str:
    """Why the analysis did not come to its end."""
    return f"The analysis ended early: {result.interrupted}."


def verdict(result: Result) -> str:
    """The bottleneck of training, and the share of time it costs."""
    found, shares = result.verdict, result.shares
    if found.bound is None:
        return f"no verdict: {found.refusal}"
    if shares is None:
        return f"{found.bound}-bound"
    # Round the parts first, so that the shown parts add up to the shown total.
    fetch, prep = round(shares.fetch.value * 100), round(shares.prep.value * 100)
    unsure = _unsure(shares.fetch, shares.prep)
    if found.bound == "contention":
        held = round(shares.contention.value * 100)
        said = f"contention-bound: workers slow the training step by {held} % of the time"
        return f"{said}{_unsure(shares.contention)}; it waits {fetch + prep} % for batches"
    said = f"{found.bound}-bound: the accelerator stands still {fetch + prep} % of the time{unsure}"
    if found.bound == "fetch":
        return f"{said}: {fetch} % stalled on fetch, {prep} % on prep"
    if found.bound in ("prep", "latency"):
        return f"{said}: {prep} % stalled on prep, {fetch} % on fetch"
    return said


def _unsure(*parts: Interval) -> str:
    """The interval of a sum of shares, if it is wide."""
    low, high = sum(part.low for part in parts), min(1.0, sum(part.high for part in parts))
    if high - low <= 2 * SURE:
        return ""
    return f" ({low * 100:.0f} to {high * 100:.0f} %)"


def meaning(report: AnalysisReport, result: Result) -> list[str]:
    """What the verdict means, the figures that decide, and what workers wait for."""
    found = result.verdict
    if found.bound is None:
        return []
    lines = [_meaning(found.bound, report, result)]
    if found.cause:
        cause = f"Workers {CAUSES.get(found.cause, found.cause)}"
        lines.append(f"{cause}: {found.place}." if found.place else f"{cause}.")
    lines += [
        f"Almost as large: {other}. {_meaning(other, report, result)}" for other in found.also
    ]
    if found.reason:
        lines.append(_sentence(found.reason))
    return lines


def _meaning(bound: Bound, report: AnalysisReport, result: Result) -> str:
    if bound in ("prep", "latency") and not report.setup.workers:
        return NO_WORKERS
    if bound == "latency" and (result.verdict.cause == "lock" or not more_workers_help(report)):
        return IN_TURN
    use = result.workers
    if bound == "latency" and use is not None and use.computing + use.queueing > COMPUTES:
        return ALSO_COMPUTE
    return MEANING[bound]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


class RateRow(NamedTuple):
    """One rate: its letter, samples per second, whether its phase was short, bytes per second."""

    letter: str
    rate: Rate
    enough: bool
    nbytes: float | None


def rate_rows(report: AnalysisReport, result: Result) -> list[RateRow]:
    """The rates of the result, in the order of ``NAMES``."""
    size, known = report.setup.sample_bytes, result.rates.known()
    rows = []
    for letter in NAMES:
        rate = known.get(letter)
        if rate is None or not 0 < rate.value < math.inf or (letter in "SCF" and not size):
            continue
        phase = report.phase(PHASES[letter]) if letter in PHASES else None
        enough = phase is None or phase.enough
        rows.append(RateRow(letter, rate, enough, rate.value * size if letter in "SC" else None))
    return rows


def rate_lines(report: AnalysisReport, result: Result) -> list[str]:
    """The rates in columns."""
    rows = rate_rows(report, result)
    values = [show_rate(row.rate.value) for row in rows]
    width = max(map(len, values), default=0)
    found = []
    for row, value in zip(rows, values, strict=True):
        line = f"  {row.letter}  {NAMES[row.letter]:<9}  {value:>{width}} samples/s"
        words = interval_words(row)
        line += f"  ({words})" if words else ""
        if row.nbytes is not None:
            line += f"  {row.nbytes / 1e6:,.0f} MB/s"
        if row.letter == "F":
            line += f"  with {cache_words(report)}"
        found.append(line)
    return found


def interval_words(row: RateRow) -> str:
    """The 95 % confidence interval of a rate, in words; empty if it is not known."""
    rate = row.rate
    if rate.low == rate.high:
        return ""
    wide = "" if row.enough else ", still wide when the time was up"
    return f"{show_rate(rate.low)} to {_high(rate)}{wide}"


def _high(rate: Rate) -> str:
    """The upper end of an interval; times of steps that vary widely do not tell it."""
    return show_rate(rate.high) if rate.high < FAR * rate.value else "unknown"


def show_rate(value: float) -> str:
    """Samples per second; slow ones with a fraction.

    >>> show_rate(1234.5), show_rate(0.567)
    ('1,234', '0.57')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


FAR = 4.0
"""An interval that reaches beyond this multiple of a rate says nothing about its upper end."""


def interval(phase: Phase) -> str:
    """The 95 % confidence interval of a phase, in words."""
    return interval_words(RateRow("", phase.rate, phase.enough, None))


def cache_words(report: AnalysisReport) -> str:
    """``no cache``, or the size of the present cache and its share of the data."""
    setup = report.setup
    if not setup.cache:
        return "no cache"
    share = percent(setup.cached_share(setup.cache))
    return f"a cache of {show_size(setup.cache)}, {share} of the data"


def remarks(report: AnalysisReport, result: Result) -> list[str]:
    """Remarks on how far the figures can be trusted."""
    found, trust = [], result.trust
    if trust.measured is not None:
        rate = trust.measured
        said = f"Training runs at {show_rate(rate.value)} samples/s"
        known = rate.low < rate.high < math.inf
        said += f" ({show_rate(rate.low)} to {_high(rate)})" if known else ""
        error = trust.modelled / rate.value - 1
        if trust.modelled > 0 and abs(error) <= MODEL_OFF:  # else it is the first of the reasons
            too = "fast" if error > 0 else "slow"
            said += (
                f"; the model says {show_rate(trust.modelled)}, {abs(error) * 100:.1f} % too {too}"
            )
        if trust.numbers:
            said += ". Predictions are scaled to the measured speed"
            said += f", and are within {trust.error * 100:.0f} %"
        found.append(f"{said}.")
    found += [_sentence(reason) for reason in trust.reasons]
    if result.warm > 0 and result.rates.S is not None:
        found.append(
            f"Memory serves {percent(result.warm)} of the present reads (the page cache); S is the "
            "speed of cold storage."
        )
    if report.device_reads is not None:
        cold = f"Cold reads: {percent(report.device_reads)} of the bytes came from the device"
        if report.device_reads < COLD:
            cold += ", the others from memory: storage is slower than S says"
        found.append(f"{cold}.")
    if report.costs.copy > 0:
        share = report.costs.copy / report.costs.compute
        found.append(f"Moving batches to the device takes {percent(share)} of a step.")
    use = result.workers
    if use is not None and use.idle < 1:
        parts = {"compute": use.computing, "wait for a core": use.queueing}
        parts |= {CAUSES.get(name, name): share for name, share in use.waits.items()}
        shown = [f"{words} {percent(share)}" for words, share in parts.items() if share >= 0.01]
        found.append(f"Of their time workers {', '.join([*shown, f'idle {percent(use.idle)}'])}.")
    return found


def remedy_lines(remedies: Sequence[Remedy], result: Result) -> list[str]:
    """The remedies in the order of their gain; other hardware and several jobs come after."""
    alone, hardware, shared = grouped(remedies)
    if not remedies:
        return [nothing_words(result)] if result.bound is not None else []
    found: list[str] = []
    if alone:
        best, *others = alone
        found += [
            f"{best_words(best)}: {best.title}: {gain_words(best, result)}",
            *_how(best, 2),
        ]
        if others:
            found += ["", "Then:"]
        for other in others:
            found += [f"  {other.title}: {gain_words(other, result)}", *_how(other, 4)]
    else:
        found.append(nothing_words(result))
    if hardware:
        found += ["", "Other hardware:"]
    for remedy in hardware:
        found += [f"  {remedy.title}: {gain_words(remedy, result)}", *_how(remedy, 4)]
    for remedy in shared:
        found += ["", f"{_sentence(remedy.why)}", f"  {gain_words(remedy, result)}"]
        found += [f"    {line}" for line in how_lines(remedy)]
    return found


def best_words(best: Remedy) -> str:
    """How the first remedy is introduced."""
    if best.repeats:
        return "Only with repeated samples"
    return "Most useful" if best.certain or best.measured is not None else "May be useful"


def _how(remedy: Remedy, indent: int) -> list[str]:
    space = " " * indent
    lines = [f"{space}{remedy.why}"] if remedy.why else []
    if remedy.condition:
        lines.append(f"{space}{remedy.condition}")
    return [*lines, *(f"{space}  {line}" for line in how_lines(remedy))]


def how_lines(remedy: Remedy) -> list[str]:
    """The command without an edit if there is one, else the code."""
    return [remedy.command] if remedy.command else remedy.code.splitlines()


def nothing_words(result: Result) -> str:
    """What is said where there is no remedy."""
    if result.bound == "compute":
        return "Nothing to do: no change of the loader makes training faster."
    return "No remedy was found that would help."


def grouped(remedies: Sequence[Remedy]) -> tuple[list[Remedy], list[Remedy], list[Remedy]]:
    """The remedies by gain: of the loader, other hardware, and those for several jobs."""
    alone: list[Remedy] = []
    hardware: list[Remedy] = []
    shared: list[Remedy] = []
    for remedy in sorted(remedies, key=lambda remedy: remedy.rank):
        if remedy.change.share:
            shared.append(remedy)
        elif remedy.change.cores is not None or remedy.change.storage is not None:
            hardware.append(remedy)
        else:
            alone.append(remedy)
    return alone, hardware, shared


def gain_words(remedy: Remedy, result: Result | None = None) -> str:
    """How much faster, relative to what, and what was measured.

    ``2.10 times as fast (1.90 to 2.30; 1,880 instead of 900 samples/s, then prep-bound)``
    """
    after = remedy.prediction
    measured = ""
    if remedy.measured is not None:
        measured = f"measured {remedy.measured:.2f} times as fast"
    if not remedy.certain:
        return measured or "how much it helps depends on the load of the machine"
    if result is not None and not result.trust.numbers:
        return measured or "helps; how much is not known"
    said = f"{remedy.gain:.2f} times as {'many steps' if remedy.repeats else 'fast'}"
    if measured:
        said = f"{measured}, predicted {remedy.gain:.2f}"
    details = []
    if remedy.high > remedy.low and remedy.gain > 0:
        details.append(f"{remedy.low:.2f} to {remedy.high:.2f}")
    speed, baseline = remedy.speed or after.speed, remedy.baseline
    if remedy.change.share:
        each = f"{speed:,.0f}"
        each += f" instead of {baseline:,.0f}" if baseline else ""
        details.append(f"each of {remedy.change.jobs} jobs {each} samples/s")
    elif remedy.repeats:
        details.append("no more fresh samples")
    elif baseline:
        details.append(f"{speed:,.0f} instead of {baseline:,.0f} samples/s")
    else:
        details.append(f"{speed:,.0f} samples/s")
    return f"{said} ({'; '.join(details)}, then {_bound_after(remedy, result)}-bound)"


def _bound_after(remedy: Remedy, result: Result | None) -> Bound:
    """The bottleneck with a remedy; workers that mostly wait do so with it, too."""
    bound = remedy.prediction.bound
    use = None if result is None else result.workers
    if bound != "prep" or result is None or result.bound != "latency" or use is None:
        return bound
    cores = max((one.cores for one in result.machine), default=0)
    needed = (remedy.change.workers or 0) * (use.computing + use.queueing)
    return "latency" if needed <= cores or not cores else "prep"


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
