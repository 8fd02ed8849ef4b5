"""``penstock analyze``."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ReportError

if TYPE_CHECKING:
    from penstock.diagnose.analyze.report import AnalysisReport

EXAMPLE = """\
examples:
  penstock analyze -- python train.py --epochs 90
  penstock analyze --seconds 120 --output today -- torchrun --nproc-per-node 4 train.py
  penstock analyze --cache 64GB --continue -- python train.py

The script is not edited. Its training loop runs some steps with its own batches, then with cached
samples (how fast is preparation?), with one batch that is replayed (how fast is the accelerator?),
and with samples that must be read from storage. Then the script ends; with --continue its models
are restored and it goes on. The result is printed, and written as a report for `penstock what-if`
and as a page for a browser.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Find out why training waits, and what would help."
    parser.epilog = EXAMPLE
    parser.usage = "penstock analyze [options] -- COMMAND ..."
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="time for all phases together (60)"
    )
    parser.add_argument(
        "--cache", metavar="SIZE", help="measure cold reads as if a cache of this size were full"
    )
    parser.add_argument(
        "--loader", type=int, metavar="N", help="analyse the N-th loader that a training loop uses"
    )
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="continue the script after the analysis",
    )
    parser.add_argument(
        "--output",
        metavar="NAME",
        default="report",
        help="write NAME.json and NAME.html (report)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from penstock import config
    from penstock.inject import environment, launch, reports, unseen, words

    command = words(arguments.command)
    if arguments.cache is not None:
        config.size(arguments.cache, "--cache")
    if not arguments.seconds > 0:
        raise ReportError(f"--seconds is {arguments.seconds:g}; give a number above 0.")
    settings = {
        "seconds": arguments.seconds,
        "cache": arguments.cache,
        "loader": arguments.loader,
        "continue": arguments.go_on,
    }
    with reports() as place:
        code = launch(command, environment("analyze", {**settings, "reports": str(place)}))
        ranks = _load_reports(place)
        if not ranks:
            why = _why_no_report(place) or unseen(command)
            sys.stderr.write(f"penstock: the analysis has no result. {why}\n")
            return code or 1
    report = replace(merge_ranks(ranks), command=shlex.join(command))
    _show(report, arguments.output, as_json=arguments.json)
    return code


def _why_no_report(place: Path) -> str:
    """Why no process wrote a report; empty if no process of the command loaded Penstock."""
    from penstock.inject import processes
    from penstock.inject.analysis import EARLY

    steps = [int(path.read_text() or 0) for path in place.glob(f"{EARLY}*")]
    if steps:
        return (
            f"The script ended after {max(steps)} steps, before all phases were measured. Let it "
            "train longer (more epochs), or give fewer --seconds."
        )
    if processes(place):
        return (
            "No training loop took batches from a loader. A loop counts as training if gradients "
            "are enabled."
        )
    return ""


def _load_reports(place: Path) -> list[AnalysisReport]:
    from penstock.diagnose.analyze.report import AnalysisReport

    return [AnalysisReport.load(path) for path in sorted(place.glob("report-*.json"))]


def merge_ranks(reports: list[AnalysisReport]) -> AnalysisReport:
    """The report of the slowest rank, with those of the other ranks, which wait for it."""
    from penstock.diagnose.analyze.stalls import rank_speeds, slowest

    ranks = sorted(reports, key=lambda report: report.setup.rank)
    first = replace(ranks[0], ranks=tuple(ranks[1:]))
    last = slowest(rank_speeds(first))
    if last is None or last.report is first:
        return first
    others = tuple(report for report in ranks if report is not last.report)
    return replace(last.report, ranks=others)


def _show(report: AnalysisReport, output: str, *, as_json: bool) -> None:
    import json

    from penstock.diagnose.analyze.page import page_of
    from penstock.diagnose.analyze.remedies import remedies
    from penstock.diagnose.analyze.text import lines_of

    found = remedies(report)
    data, page = Path(f"{output}.json"), Path(f"{output}.html")
    try:
        report.save(data)
        page.write_text(page_of(report, found), encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"cannot write {error.filename}: {error.strerror}. Give another --output."
        ) from error
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
        return
    for line in lines_of(report, found):
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"\nThe report is in {data} (for `penstock what-if`) and {page}.\n")
