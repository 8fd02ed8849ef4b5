"""The command ``penstock doctor``."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace

from penstock.errors import MissingExtraError

EXAMPLE = """\
examples:
  penstock doctor                        check this machine, change nothing
  penstock doctor --fix                  also free the memory that killed runs left behind
  penstock doctor --json > machine.json  for scripts and bug reports

The exit code is 1 if the doctor found a problem that would stop a plain training run, else 0.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks this machine and its Python packages, and reports what is missing or "
        "misconfigured for training jobs and how to fix it."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--fix", action="store_true", help="free the memory that killed runs left behind"
    )
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "penstock doctor needs rich, which is installed with Penstock: pip install rich"
        ) from error

    from penstock.diagnose.doctor import report
    from penstock.diagnose.doctor.checks import check
    from penstock.diagnose.doctor.facts import collect_leftovers, gather

    # On stderr, so that piped or saved output has the report only.
    console = Console(stderr=True)
    spinner = (
        console.status("Checking this machine and its packages")
        if console.is_terminal
        else nullcontext()
    )
    with spinner:
        facts = gather()
        if arguments.fix:
            facts = replace(facts, leftovers=collect_leftovers(facts.leftovers))
    findings = check(facts)
    if arguments.json:
        sys.stdout.write(report.as_json(facts, findings) + "\n")
    else:
        report.show(findings, Console())
    return 1 if report.worst(findings) is report.Level.PROBLEM else 0
