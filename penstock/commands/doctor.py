"""``penstock doctor``."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace

from penstock.errors import MissingExtraError

EXAMPLE = """\
examples:
  penstock doctor                        look, and change nothing
  penstock doctor --fix                  also free what killed runs have left in memory
  penstock doctor --json > machine.json  for scripts, and to attach to a report of a bug

Exits with 1 if a problem was found, which would stop a plain training run, and with 0 otherwise.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows what this machine offers to training jobs, what is missing or set wrongly, and "
        "what to do about it."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--fix", action="store_true", help="collect what killed runs have left behind in memory"
    )
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "penstock doctor needs rich, which Penstock is installed with: pip install rich"
        ) from error

    from penstock.diagnose.doctor import report
    from penstock.diagnose.doctor.checks import check
    from penstock.diagnose.doctor.facts import collect_leftovers, gather
    from penstock.diagnose.doctor.finding import Level

    # On the other stream, so that what is piped or saved holds the report alone.
    aside = Console(stderr=True)
    waiting = (
        aside.status("Looking at this machine and its packages")
        if aside.is_terminal
        else nullcontext()
    )
    with waiting:
        facts = gather()
        if arguments.fix:
            facts = replace(facts, leftovers=collect_leftovers(facts.leftovers))
    findings = check(facts)
    if arguments.json:
        sys.stdout.write(report.as_json(facts, findings) + "\n")
    else:
        report.show(findings, Console())
    return 1 if report.worst(findings) is Level.PROBLEM else 0
