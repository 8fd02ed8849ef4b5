"""The page of a report: one file that asks nobody for anything, readable in light and in dark."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.config import show_size
from penstock.diagnose.analyze import plots, series
from penstock.diagnose.analyze.model import Bound
from penstock.diagnose.analyze.page_style import SCRIPT, STYLE
from penstock.diagnose.analyze.report import Phase, Report
from penstock.diagnose.analyze.stalls import Stalls, measured_speed, rank_speeds, slowest, stalls_of
from penstock.diagnose.analyze.text import (
    MEANING,
    NAMES,
    RATES,
    cache_words,
    gain_words,
    interval,
    percent,
    ranked,
    rate,
    rate_rows,
    remarks,
    slowest_words,
    verdict,
)
from penstock.diagnose.analyze.what_if import Forecast, Saturation, saturation

if TYPE_CHECKING:
    from penstock.diagnose.analyze.model import Prediction
    from penstock.diagnose.analyze.remedies import Remedy

STACK_LEGEND = (("compute", "compute"), ("prep", "prep stall"), ("fetch", "fetch stall"))
CURVE_LEGEND = (
    ("speed", "predicted speed"),
    ("fetch", "F fetch"),
    ("prep", "P prep"),
    ("compute", "G ingestion"),
)


ASK = "penstock what-if report.json --cache 0..64GB --cores 4,8,16"


def page_of(report: Report, remedies: Sequence[Remedy] = ()) -> str:
    """The whole page."""
    forecast = Forecast(report)
    present, stalls = forecast(), stalls_of(report)
    remedies = ranked(remedies)
    title = f"{stalls.bound}-bound: {report.command or report.setup.loader}"
    parts = [
        _head(report, stalls, present),
        _remedies(remedies, stalls.bound),
        _plots(report, forecast, remedies),
        _section("Rates", _rates(report, present)),
        _section("Phases", _phases(report)),
        _section("Ranks", _ranks(report)),
        _section("How far to trust this", _list(remarks(report, stalls, present))),
        _section("Notes", _list(report.notes)),
        f"<footer>Other cases: <code>{ASK}</code></footer>",
    ]
    # Whatever a command line may contain, nothing but the script of this page is run.
    known = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{known}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{plots.CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _head(report: Report, stalls: Stalls, present: Prediction) -> str:
    said, _, rest = verdict(stalls).partition(": ")
    facts = " · ".join(escape(one) for one in _facts(report))
    made = " · ".join(escape(one) for one in (report.machine, report.made) if one)
    command = f"<p><code>{escape(report.command)}</code></p>" if report.command else ""
    speed = measured_speed(report)
    tiles = [
        ("compute", percent(1 - stalls.idle), "of the time computing"),
        ("prep", percent(stalls.prep_share), "stalled on prep"),
        ("fetch", percent(stalls.fetch_share), "stalled on fetch"),
        (
            "plain",
            f"{present.speed if speed is None else speed.rate.value:,.0f}",
            "samples/s" + (", predicted" if speed is None else ", measured"),
        ),
    ]
    shown = "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
        for kind, value, words in tiles
    )
    return (
        '<header>\n<p class="eyebrow">Penstock analysis'
        + (f" · {made}" if made else "")
        + f'</p>\n<h1 class="is-{stalls.bound}">{escape(said.capitalize())}</h1>\n'
        f'<p class="lead">{escape(rest[:1].upper() + rest[1:])}. '
        f"{escape(MEANING[stalls.bound])}</p>\n{command}"
        f'<p class="facts">{facts}</p>\n<div class="tiles">{shown}</div>\n</header>'
    )


def _facts(report: Report) -> list[str]:
    setup = report.setup
    workers = "no workers" if not setup.workers else f"{setup.workers} workers ({setup.kind})"
    found = [
        setup.loader,
        f"{setup.samples:,} samples in batches of {setup.batch}",
        workers,
        f"{setup.cores} cores",
        f"accelerator: {setup.accelerator}",
    ]
    if setup.sample_bytes:
        data = setup.sample_bytes * setup.samples
        found.append(f"{show_size(setup.sample_bytes)} a sample, {show_size(data)} in all")
        found.append(cache_words(report))
    if setup.world > 1:
        found.append(f"rank {setup.rank} of {setup.world}")
    return found


def _remedies(remedies: Sequence[Remedy], bound: Bound) -> str:
    if not remedies:
        said = "Nothing to do." if bound == "compute" else "No remedy was found that would help."
        return f"<section>\n<h2>What would help</h2>\n<p>{said}</p>\n</section>"
    shown = []
    for number, one in enumerate(remedies):
        best = " best" if number == 0 else ""
        why = f"<p>{escape(one.why)}</p>" if one.why else ""
        code = (
            f'<div class="code"><pre tabindex="0"><code>{escape(one.code)}</code></pre>'
            '<button type="button" class="copy">Copy</button></div>'
            if one.code
            else ""
        )
        title = escape(one.title[:1].upper() + one.title[1:])
        shown.append(
            f'<li class="card remedy{best}"><div class="gain">{one.gain:.2f}&times;</div>'
            f"<div><h3>{title}</h3><p>{escape(gain_words(one))}</p>"
            f"{why}{code}</div></li>"
        )
    return (
        '<section>\n<h2>What would help</h2>\n<ol class="remedies">\n'
        + "\n".join(shown)
        + "\n</ol>\n</section>"
    )


def _plots(report: Report, forecast: Forecast, remedies: Sequence[Remedy]) -> str:
    enough = saturation(forecast)
    first = next((one for one in remedies if not one.change.share), None)
    best = None if first is None else (f"with {first.title}", first.prediction)
    stacks = series.stacks(report, forecast(), best)
    found = [
        _figure(
            "Where an epoch goes",
            "Computing, and what it waits for.",
            STACK_LEGEND,
            plots.stack_plot(stacks, report.setup.samples),
        )
    ]
    bars = series.operations(report)
    if bars:
        said = "What one core spends on a sample, in the order of the road."
        found.append(_figure("Time per operation", said, (), plots.bar_plot(bars)))
    over_cache = series.over_cache(forecast, enough)
    if over_cache is not None:
        plot = plots.cache_plot(over_cache)
        found.append(
            _figure("Speed against cache", _cache_words(forecast, enough), CURVE_LEGEND, plot)
        )
    found.append(
        _figure(
            "Speed against cores",
            _cores_words(enough),
            CURVE_LEGEND,
            plots.cores_plot(series.over_cores(forecast, enough)),
        )
    )
    times = series.batch_times(report)
    if times is not None:
        found.append(
            _figure("Preparing a batch", _batch_words(times), (), plots.histogram_plot(times))
        )
    waits = series.timeline(report)
    if waits:
        phases = dict.fromkeys(bar.phase for bar in waits)
        legend = tuple((plots.PHASE_KINDS.get(one, "plain"), one) for one in phases)
        said = "How long the loop waited for each batch, phase by phase."
        found.append(_figure("Waits", said, legend, plots.timeline_plot(waits)))
    return (
        '<section>\n<h2>What was found</h2>\n<div class="plots">\n'
        + "\n".join(found)
        + "\n</div>\n</section>"
    )


def _figure(title: str, words: str, legend: Sequence[tuple[str, str]], plot: str) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in legend)
    shown = f'<ul class="legend">{items}</ul>' if items else ""
    return (
        f"<figure>\n<figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p></figcaption>\n"
        f"{shown}\n{plot}\n</figure>"
    )


def _cache_words(forecast: Forecast, enough: Saturation) -> str:
    if not enough.cache:
        return "A cache of what is read does not help: training does not wait for fetching."
    share = percent(enough.cache / forecast.data)
    return f"More cache stops helping at {show_size(enough.cache)}, {share} of the data."


def _cores_words(enough: Saturation) -> str:
    if enough.cores is None:
        return "More cores help as far as was looked."
    return f"With everything else as it is, more cores stop helping at {enough.cores}."


def _batch_words(found: series.Histogram) -> str:
    said = f"A worker takes {found.median * 1e3:,.3g} ms for a batch, in the median"
    if found.allowed is None:
        return f"{said}."
    return f"{said}; with {found.allowed * 1e3:,.3g} ms the accelerator would not wait."


def _section(title: str, inner: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{inner}\n</section>" if inner else ""


def _rates(report: Report, present: Prediction) -> str:
    rows = []
    for row in rate_rows(report, present):
        measured = "" if row.phase is None else interval(row.phase)
        nbytes = "" if row.nbytes is None else f"{row.nbytes / 1e6:,.0f}"
        name = f"{row.letter} {NAMES[row.letter]}"
        rows.append([name, RATES[row.letter], f"{row.value:,.0f}", measured, nbytes])
    return _table(["rate", "", "samples/s", "95 % interval", "MB/s"], rows, 2)


def _phases(report: Report) -> str:
    def row(one: Phase) -> list[str]:
        return [
            one.name,
            f"{one.rate.value:,.0f}",
            f"{one.rate.low:,.0f} to {one.rate.high:,.0f}",
            f"± {one.rate.spread * 100:.1f} %",
            f"{one.steps:,}",
            f"{one.seconds:,.1f}",
            "" if one.enough else "the time was up",
        ]

    heads = ["phase", "samples/s", "95 % interval", "", "steps", "seconds", ""]
    return _table(heads, [row(one) for one in report.phases], 1)


def _ranks(report: Report) -> str:
    if not report.ranks:
        return ""
    ranks = rank_speeds(report)
    last = slowest(ranks)
    rows = [
        [
            f"{one.report.setup.rank}{' (slowest)' if one is last else ''}",
            f"{one.stalls.speed:,.0f}",
            rate(one.loader),
            percent(one.stalls.fetch_share),
            percent(one.stalls.prep_share),
            one.stalls.bound,
        ]
        for one in ranks
    ]
    heads = ["rank", "samples/s", "loader alone", "stalled on fetch", "on prep", "bound"]
    return f"<p>{escape(slowest_words(ranks))}</p>\n{_table(heads, rows, 1)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """``numbers`` is the first column that holds numbers."""
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]

    def cells(row: Sequence[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}"
            + (' class="number"' if at >= numbers else "")
            + f">{escape(row[at])}</{tag}>"
            for at in kept
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="card scroll" tabindex="0"><table>\n<thead><tr>{cells(heads, "th")}</tr>'
        f"</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
        if rows
        else ""
    )


def _list(words: Sequence[str]) -> str:
    if not words:
        return ""
    return '<ul class="notes">' + "".join(f"<li>{escape(one)}</li>" for one in words) + "</ul>"
