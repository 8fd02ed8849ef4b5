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
    from penstock.diagnose.analyze.report import Report

EXAMPLE = """\
examples:
  penstock analyze -- python train.py --epochs 90
  penstock analyze --seconds 120 --output today -- torchrun --nproc-per-node 4 train.py
  penstock analyze --cache 64GB --continue -- python train.py

The script is not edited. Its training loop runs as it is for some steps, then on a batch that is
replayed (how fast is the accelerator?), on data that is cached (how fast is preparation?) and on
data that must be fetched. Then the script ends; with --continue it goes on, with its models put
back to where they were. What was found is printed, and written as a report for `penstock what-if`
and as a page for a browser.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tells why training waits, and what would help."
    parser.epilog = EXAMPLE
    parser.usage = "penstock analyze [options] -- COMMAND ..."
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="time for all phases together (60)"
    )
    parser.add_argument(
        "--cache", metavar="SIZE", help="measure cold reads as if so much were cached"
    )
    parser.add_argument(
        "--loader", type=int, metavar="N", help="the N-th loader that a training loop asks"
    )
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="let the script go on afterwards"
    )
    parser.add_argument(
        "--output",
        metavar="NAME",
        default="report",
        help="write NAME.json and NAME.html (report)",
    )
    parser.add_argument("--json", action="store_true", help="print the report, for programs")
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
        found = _found(place)
        if not found:
            why = _nothing(place) or unseen(command)
            sys.stderr.write(f"penstock: there is nothing to report. {why}\n")
            return code or 1
    report = replace(merged(found), command=shlex.join(command))
    _show(report, arguments.output, as_json=arguments.json)
    return code


def _nothing(place: Path) -> str:
    """Why no process has a report; nothing where none was reached."""
    from penstock.inject import processes
    from penstock.inject.analysis import EARLY

    steps = [int(one.read_text() or 0) for one in place.glob(f"{EARLY}*")]
    if steps:
        return (
            f"The script was over after {max(steps)} steps, before all was measured. Let it train "
            "longer (more epochs), or give fewer --seconds."
        )
    if processes(place):
        return (
            "No training loop asked a loader for batches: loops are taken for training where "
            "gradients are enabled."
        )
    return ""


def _found(place: Path) -> list[Report]:
    from penstock.diagnose.analyze.report import Report

    return [Report.load(one) for one in sorted(place.glob("report-*.json"))]


def merged(found: list[Report]) -> Report:
    """The report of the slowest rank, with those of the others, which wait for it."""
    from penstock.diagnose.analyze.stalls import rank_speeds, slowest

    ranks = sorted(found, key=lambda one: one.setup.rank)
    all_of_them = replace(ranks[0], ranks=tuple(ranks[1:]))
    last = slowest(rank_speeds(all_of_them))
    if last is None or last.report is all_of_them:
        return all_of_them
    others = tuple(one for one in ranks if one is not last.report)
    return replace(last.report, ranks=others)


def _show(report: Report, output: str, *, as_json: bool) -> None:
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
        raise ReportError(f"{error.filename} cannot be written: {error.strerror}.") from error
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
        return
    for line in lines_of(report, found):
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"\nThe report is in {data} (for `penstock what-if`) and {page}.\n")
