"""The page of a report: one HTML file without external resources, in light and dark colours."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.config import show_size
from penstock.diagnose.analyze import plots, series
from penstock.diagnose.analyze.judge import plural, result_of
from penstock.diagnose.analyze.report import AnalysisReport, Phase
from penstock.diagnose.analyze.result import Result
from penstock.diagnose.analyze.stalls import rank_speeds, slowest
from penstock.diagnose.analyze.text import (
    NAMES,
    RANK_HEADS,
    RATES,
    blame_lines,
    cache_words,
    ended_early,
    gain_words,
    grouped,
    interval_words,
    meaning,
    nothing_words,
    rank_cells,
    rate_rows,
    remarks,
    slowest_words,
    verdict,
)
from penstock.diagnose.analyze.what_if import MOST_CORES, Forecast, Saturation, saturation
from penstock.host.text import percent

if TYPE_CHECKING:
    from penstock.diagnose.analyze.remedies import Remedy

STACK_LEGEND = (("compute", "compute"), ("prep", "prep stall"), ("fetch", "fetch stall"))
CURVE_LEGEND = (
    ("speed", "predicted speed"),
    ("fetch", "F fetch"),
    ("prep", "P prep"),
    ("compute", "G ingestion"),
)


EXAMPLE = "penstock what-if report.json --cache 0..64GB --cores 4,8,16"


def page_of(
    report: AnalysisReport, remedies: Sequence[Remedy] = (), result: Result | None = None
) -> str:
    """The HTML of the page, from the same result as the text."""
    result = result or result_of(report)
    forecast = Forecast(report, result.trust)
    bound = result.bound or "no"
    title = f"{bound}-bound" if result.bound else "no verdict"
    title += f": {report.command or report.setup.loader}"
    parts = [
        _head(report, result),
        _remedies(remedies, result),
        _plots(report, result, forecast, remedies),
        _section("Rates", _rates(report, result)),
        _section("Phases", _phases(report)),
        _section("Ranks", _ranks(report)),
        _section("How far to trust this", _list([*remarks(report, result), *result.warnings])),
        _section("Notes", _list(report.notes)),
        f"<footer>Other cases: <code>{EXAMPLE}</code></footer>",
    ]
    # Only the script of this page may run, whatever the shown command line contains.
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


def _head(report: AnalysisReport, result: Result) -> str:
    title, _, rest = verdict(result).partition(": ")
    facts = " · ".join(escape(fact) for fact in _facts(report))
    made = " · ".join(escape(text) for text in (report.machine, report.made) if text)
    command = f"<p><code>{escape(report.command)}</code></p>" if report.command else ""
    shares, speed = result.shares, result.speed
    tiles = []
    if shares is not None:
        tiles += [
            ("compute", percent(shares.compute), "of the time computing"),
            ("prep", percent(shares.prep.value), "stalled on prep"),
            ("fetch", percent(shares.fetch.value), "stalled on fetch"),
        ]
        if shares.contention.value >= 0.01:
            tiles.append(("plain", percent(shares.contention.value), "steps slowed by workers"))
    if speed is not None:
        tiles.append(("plain", f"{speed.value:,.0f}", "samples/s, measured"))
    bound = result.bound if result.bound in ("compute", "prep", "fetch") else "plain"
    interrupted = ended_early(result) if result.interrupted else ""
    words = [interrupted, *meaning(report, result), *blame_lines(report)]
    lead = " ".join(word for word in words if word)
    rest = f"{rest[:1].upper()}{rest[1:]}" + ("" if rest.endswith(".") else ".") if rest else ""
    shown = "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
        for kind, value, words in tiles
    )
    return (
        '<header>\n<p class="eyebrow">Penstock analysis'
        + (f" · {made}" if made else "")
        + f'</p>\n<h1 class="is-{bound}">{escape(title.capitalize())}</h1>\n'
        f'<p class="lead">{escape(rest)} {escape(lead)}</p>\n{command}'
        f'<p class="facts">{facts}</p>\n<div class="tiles">{shown}</div>\n</header>'
    )


def _facts(report: AnalysisReport) -> list[str]:
    setup = report.setup
    workers = (
        "no workers" if not setup.workers else f"{plural(setup.workers, 'worker')} ({setup.kind})"
    )
    found = [
        setup.loader,
        f"{setup.samples:,} samples in batches of {setup.batch}",
        workers,
        plural(setup.cores, "core"),
        f"accelerator: {setup.accelerator}",
    ]
    if setup.sample_bytes:
        data = setup.sample_bytes * setup.samples
        found.append(f"{show_size(setup.sample_bytes)} per sample, {show_size(data)} in all")
        found.append(cache_words(report))
    if setup.world > 1:
        host = f" on {report.host}" if report.host else ""
        found.append(f"rank {setup.rank} of {setup.world}{host}")
    return found


def _remedies(remedies: Sequence[Remedy], result: Result) -> str:
    alone, hardware, shared = grouped(remedies)
    if not remedies and result.bound is None:
        return ""
    parts = ["<section>\n<h2>What would help</h2>"]
    if alone:
        parts.append(_cards(alone, result, best_first=True))
    else:
        parts.append(f"<p>{nothing_words(result)}</p>")
    if hardware:
        parts.append("<h3>Other hardware</h3>\n" + _cards(hardware, result))
    if shared:
        parts.append("<h3>If several jobs run on this machine</h3>\n" + _cards(shared, result))
    return "\n".join([*parts, "</section>"])


def _cards(remedies: Sequence[Remedy], result: Result, *, best_first: bool = False) -> str:
    """The remedies as a list; what can be copied is a command or code, and never prose."""
    shown = []
    for number, remedy in enumerate(remedies):
        best = " best" if best_first and number == 0 else ""
        said = [remedy.why[:1].upper() + remedy.why[1:], remedy.condition]
        why = "".join(f"<p>{escape(words)}</p>" for words in said if words)
        blocks = "".join(
            f'<div class="code"><pre><code>{escape(code)}</code></pre>'
            '<button type="button" class="copy">Copy</button></div>'
            for code in (remedy.command, remedy.code)
            if code
        )
        title = escape(remedy.title[:1].upper() + remedy.title[1:])
        known = result.trust.numbers and remedy.certain
        gain = f"{remedy.gain:.2f}&times;" if known else "?"
        shown.append(
            f'<li class="card remedy{best}"><div class="gain">{gain}</div>'
            f"<div><h3>{title}</h3><p>{escape(gain_words(remedy, result))}</p>"
            f"{why}{blocks}</div></li>"
        )
    return '<ol class="remedies">\n' + "\n".join(shown) + "\n</ol>"


def _plots(
    report: AnalysisReport, result: Result, forecast: Forecast, remedies: Sequence[Remedy]
) -> str:
    found = []
    first = next(iter(grouped(remedies)[0]), None)
    best = None
    if first is not None and first.certain and result.trust.numbers:
        best = (f"with {first.title}", forecast(first.change))
    stacks = series.stacks(report, result, forecast() if result.trust.numbers else None, best)
    if stacks:
        found.append(
            _figure(
                "Where an epoch goes",
                "Computing, and what it waits for.",
                STACK_LEGEND,
                plots.stack_plot(stacks, report.setup.samples),
            )
        )
    bars = series.operations(report)
    if bars:
        words = "Time of one core per sample, in the order of the pipeline."
        found.append(_figure("Time per operation", words, (), plots.bar_plot(bars)))
    if result.trust.numbers:
        enough = saturation(forecast)
        over_cache = series.over_cache(forecast, enough)
        if over_cache is not None:
            plot = plots.cache_plot(over_cache)
            words = _cache_words(forecast, enough)
            found.append(_figure("Speed against cache", words, CURVE_LEGEND, plot))
        plot = plots.cores_plot(series.over_cores(forecast, enough))
        found.append(_figure("Speed against cores", _cores_words(enough), CURVE_LEGEND, plot))
    times = series.batch_times(report)
    if times is not None:
        found.append(
            _figure("Preparing a batch", _batch_words(times), (), plots.histogram_plot(times))
        )
    waits = series.timeline(report)
    if waits:
        phases = dict.fromkeys(bar.phase for bar in waits)
        legend = tuple((plots.PHASE_KINDS.get(phase, "plain"), phase) for phase in phases)
        words = "How long the loop waited for each batch, phase by phase."
        found.append(_figure("Waits", words, legend, plots.timeline_plot(waits)))
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
        return "A cache of raw samples does not help: training does not wait for fetching."
    share = percent(enough.cache / forecast.data)
    return f"More cache stops helping at {show_size(enough.cache)}, {share} of the data."


def _cores_words(enough: Saturation) -> str:
    if enough.cores is None:
        return f"More cores help, up to the {MOST_CORES} that were tried."
    if enough.cores == 1:
        return "More cores do not help."
    return f"With everything else as it is, more cores stop helping at {enough.cores}."


def _batch_words(found: series.Histogram) -> str:
    median = f"A worker takes {found.median * 1e3:,.3g} ms per batch (median)"
    if found.allowed is None:
        return f"{median}."
    return f"{median}; with {found.allowed * 1e3:,.3g} ms the accelerator would not wait."


def _section(title: str, inner: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{inner}\n</section>" if inner else ""


def _rates(report: AnalysisReport, result: Result) -> str:
    rows = []
    for row in rate_rows(report, result):
        nbytes = "" if row.nbytes is None else f"{row.nbytes / 1e6:,.0f}"
        name = f"{row.letter} {NAMES[row.letter]}\n{RATES[row.letter]}"
        value = f"{row.rate.value:,.0f}"
        rows.append([name, value, interval_words(row), nbytes])
    return _table(["rate", "samples/s", "95 % interval", "MB/s"], rows, 1)


def _phases(report: AnalysisReport) -> str:
    def row(phase: Phase) -> list[str]:
        return [
            phase.name,
            f"{phase.rate.value:,.0f}",
            f"{phase.rate.low:,.0f} to {phase.rate.high:,.0f}",
            f"±\u00a0{phase.rate.spread * 100:.1f}\u00a0%",
            f"{phase.steps:,}",
            f"{phase.seconds:,.1f}",
            "" if phase.enough else "the time was up",
        ]

    heads = ["phase", "samples/s", "95 % interval", "", "steps", "seconds", ""]
    return _table(heads, [row(phase) for phase in report.phases], 1)


def _ranks(report: AnalysisReport) -> str:
    if not report.ranks:
        return ""
    ranks = rank_speeds(report)
    last = slowest(ranks)
    rows = []
    for rank in ranks:
        cells = rank_cells(rank, ranks)
        cells[0] += " (slowest)" if rank is last else ""
        rows.append(cells)
    return f"<p>{escape(slowest_words(ranks))}</p>\n{_table(RANK_HEADS, rows, 2)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """An HTML table without its empty columns; ``numbers``: the first column with numbers.

    The second line of a cell is shown in small letters.
    """
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]

    def lines(text: str) -> str:
        first, _, second = map(escape, text.partition("\n"))
        return f"{first}<small>{second}</small>" if second else first

    def cells(row: Sequence[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}"
            + (' class="number"' if at >= numbers else "")
            + f">{lines(row[at])}</{tag}>"
            for at in kept
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="card scroll" tabindex="0"><table>\n<thead><tr>{cells(heads, "th")}</tr>'
        f"</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
        if rows
        else ""
    )


def _list(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return '<ul class="notes">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f6f9; --card: #ffffff; --ink: #1a2230; --muted: #566174; --edge: #dde2ea;
  --grid: #e6eaf0; --code: #f0f3f7; --accent: #15509e; --area: rgba(26, 34, 48, 0.06);
  --compute: #0d6a92; --prep: #8f5500; --fetch: #b02441; --plain: #566174;
  --compute-fill: #2b93bd; --prep-fill: #e39a2d; --fetch-fill: #d64a63; --plain-fill: #8793a5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e131a; --card: #161d27; --ink: #e7ecf3; --muted: #a0acbd; --edge: #2a3443;
    --grid: #242e3b; --code: #0f151d; --accent: #8fbcff; --area: rgba(231, 236, 243, 0.07);
    --compute: #62bfe4; --prep: #f2b14b; --fetch: #ff8b9b; --plain: #a0acbd;
    --compute-fill: #3d9fc7; --prep-fill: #dd9a35; --fetch-fill: #e2606f; --plain-fill: #74819a;
  }
}
* { box-sizing: border-box }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
    "DejaVu Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 56px }
h1 { font-size: clamp(1.9rem, 5vw, 2.7rem); line-height: 1.15; margin: 2px 0 8px;
  letter-spacing: -0.02em }
h2 { font-size: 1.25rem; margin: 40px 0 14px; letter-spacing: -0.01em }
h3 { font-size: 1rem; margin: 0 }
p { margin: 0 0 8px }
.eyebrow { color: var(--muted); font-size: 0.85rem; margin: 0 }
.lead { font-size: 1.1rem; max-width: 46em }
.facts { color: var(--muted); font-size: 0.9rem; overflow-wrap: anywhere }
.is-compute { color: var(--compute) } .is-prep { color: var(--prep) }
.is-fetch { color: var(--fetch) }
code, pre { font: 0.88rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace }
pre { margin: 0; padding: 12px 14px; background: var(--code); border: 1px solid var(--edge);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; flex: 1; min-width: 0 }
.tiles { display: grid; gap: 12px; margin: 22px 0 0; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) }
.tile, .card, figure { background: var(--card); border: 1px solid var(--edge);
  border-radius: 12px }
.tile { padding: 12px 16px; border-top: 4px solid var(--plain-fill) }
.tile.compute { border-top-color: var(--compute-fill) }
.tile.prep { border-top-color: var(--prep-fill) }
.tile.fetch { border-top-color: var(--fetch-fill) }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums }
.tile span { color: var(--muted); font-size: 0.9rem }
.plots { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)) }
figure { margin: 0; padding: 16px 18px 10px; min-width: 0 }
figcaption p { color: var(--muted); font-size: 0.9rem; margin: 2px 0 8px }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 6px;
  padding: 0; font-size: 0.85rem; color: var(--muted) }
.legend li { display: flex; align-items: center; gap: 6px }
.legend i { width: 16px; height: 10px; border-radius: 2px; background: var(--plain-fill) }
.legend .compute { background: var(--compute-fill) }
.legend .prep { background: var(--prep-fill) }
.legend .fetch { background: var(--fetch-fill) }
.legend .speed { background: var(--ink); height: 3px }
.plot { display: block; width: 100%; height: auto; font-size: 13px; font-family: inherit;
  overflow: visible }
.remedies + h3 { margin: 22px 0 10px }
.remedies { list-style: none; margin: 0; padding: 0; display: grid; gap: 12px }
.remedy { padding: 14px 18px; display: grid; gap: 4px 20px; grid-template-columns: 6.2em 1fr }
.remedy > div { min-width: 0 }
.remedy .gain { font-size: 1.25rem; font-weight: 700; color: var(--accent);
  font-variant-numeric: tabular-nums; white-space: nowrap }
.remedy.best { border-color: var(--accent); border-width: 2px }
.remedy.best .gain { font-size: 1.9rem; line-height: 1.2 }
.remedy p { color: var(--muted); font-size: 0.95rem }
.code { display: flex; gap: 8px; align-items: start; margin: 6px 0 4px }
button { font: inherit; font-size: 0.85rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--edge); border-radius: 8px; padding: 8px 12px; cursor: pointer }
button:hover { border-color: var(--accent) }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
.scroll { overflow-x: auto; padding: 4px 16px }
table { border-collapse: collapse; width: 100%; font-size: 0.93rem;
  font-variant-numeric: tabular-nums }
th { text-align: left; font-weight: 600; color: var(--muted); white-space: nowrap }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--edge) }
tr:last-child td { border-bottom: 0 }
td small { display: block; color: var(--muted); font-size: 0.8125rem }
td.number, th.number { text-align: right; white-space: nowrap }
td:last-child, th:last-child { padding-right: 0 }
.notes { margin: 0; padding-left: 1.2em }
footer { margin-top: 40px; color: var(--muted); font-size: 0.85rem }
@media (max-width: 560px) {
  main { padding: 18px 12px 40px }
  figure { padding: 14px 12px 8px }
  .plot { font-size: 15px }
  .remedy { grid-template-columns: 1fr; padding: 12px 14px }
  th, td, td.number, th.number { padding-right: 8px; white-space: normal }
  table { font-size: 0.8125rem }
  .code { flex-direction: column; align-items: stretch }
}
@media print { .copy { display: none } figure, .card { break-inside: avoid } }
"""

SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
"""
