"""``penstock analyze``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
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
  penstock analyze --try -- python train.py             and measure the two best remedies

on several machines:
  penstock analyze -- torchrun --nnodes 2 ... train.py      on every machine
  penstock analyze --combine DIRECTORY                      with the reports of all of them

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
        "--try",
        dest="try_seconds",
        type=float,
        nargs="?",
        const=3.0,
        metavar="S",
        help="after the analysis run the two best remedies in the training loop, in turns with the "
        "script's own loader, 3 turns of S seconds each (3), and show what they bring",
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
    parser.add_argument(
        "--combine",
        metavar="DIR",
        action="append",
        help="run nothing; combine the reports of several machines in this directory",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from penstock import config
    from penstock.diagnose.analyze.combine import combine, missing
    from penstock.inject import environment, launch, processes, reports, unseen, words
    from penstock.inject.analysis import BEGUN
    from penstock.inject.loop_wait import LoopWait

    if arguments.combine:
        return _combine(arguments)
    command = words(arguments.command)
    if arguments.cache is not None:
        config.size(arguments.cache, "--cache")
    if not arguments.seconds > 0:
        raise ReportError(f"--seconds is {arguments.seconds:g}; give a number above 0.")
    if arguments.try_seconds is not None and not arguments.try_seconds > 0:
        raise ReportError(f"--try is {arguments.try_seconds:g}; give a number of seconds above 0.")
    settings = {
        "seconds": arguments.seconds,
        "cache": arguments.cache,
        "loader": arguments.loader,
        "continue": arguments.go_on,
        "try": arguments.try_seconds,
        "root": os.getpid(),
    }
    with reports() as place:
        variables = environment("analyze", {**settings, "reports": str(place)})
        waiting = LoopWait(
            lambda: bool(processes(place)),
            lambda: any(place.glob(f"{BEGUN}*")),
            _say,
            arguments.seconds,
            time.monotonic,
        )
        code = launch(command, variables, waiting)
        ranks = _load_reports(place)
        if not ranks:
            if waiting.ended:
                return code or 1
            why = _why_no_report(place) or unseen(command)
            sys.stderr.write(f"penstock: the analysis has no result. {why}\n")
            return code or 1
    report = replace(combine(ranks), command=shlex.join(command))
    partial = bool(missing([report]))
    output = arguments.output
    if partial:
        # On a file system that the machines share, they must not overwrite each other's report.
        # Containers and copied machines may all have the same name.
        output += f"-{report.host}-rank{min(rank.setup.rank for rank in ranks)}"
    _show(report, output, as_json=arguments.json)
    if partial and not arguments.json:
        here = len(report.ranks) + 1
        sys.stdout.write(
            f"\nThis is a part of the job: {here} of {report.setup.world} ranks ran here. Run the "
            "same command on the other machines, put\ntheir reports into one directory, and "
            "combine them: penstock analyze --combine DIRECTORY\n"
        )
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"penstock: {text}\n")
    sys.stderr.flush()


def _combine(arguments: argparse.Namespace) -> int:
    """Show the reports of several machines as one."""
    from penstock.diagnose.analyze.combine import combine, load_reports

    if arguments.command:
        raise ReportError(
            "--combine reads reports that were written before, and runs no command. Leave "
            f"{shlex.join(arguments.command)!r} out."
        )
    found = load_reports(Path(path) for path in arguments.combine)
    _show(combine(found.values()), arguments.output, as_json=arguments.json)
    return 0


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


def _show(report: AnalysisReport, output: str, *, as_json: bool) -> None:
    import json

    from penstock.diagnose.analyze.judge import result_of
    from penstock.diagnose.analyze.page import page_of
    from penstock.diagnose.analyze.remedies import remedies
    from penstock.diagnose.analyze.text import lines_of

    result = result_of(report)
    # An interrupted analysis has not tried any.
    found = [] if result.interrupted else remedies(report, result=result)
    data, page = Path(f"{output}.json"), Path(f"{output}.html")
    try:
        report.save(data)
        page.write_text(page_of(report, found, result), encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"cannot write {error.filename}: {error.strerror}. Give another --output."
        ) from error
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
        return
    for line in lines_of(report, found, result):
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"\nThe report is in {data} (for `penstock what-if`) and {page}.\n")
