"""The command ``penstock doctor``."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace

from penstock.errors import MissingExtraError, PipelineError

EXAMPLE = """\
examples:
  penstock doctor                        check this machine, change nothing
  penstock doctor --fix                  also free the memory that killed runs left behind
  penstock doctor --json > machine.json  for scripts and bug reports
  penstock doctor --device               check what Penstock does with the GPU, on the GPU
  penstock doctor --device fake          the same checks on a fake device, without a GPU
  penstock doctor --storage s3://b/train measure a bucket or a folder: latency and rates

The exit code is 1 if the doctor found a problem that would stop a plain training run, else 0. With
--device it is 1 if a check failed, and 3 if there is no such device.
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
    parser.add_argument(
        "--device",
        nargs="?",
        const="cuda",
        metavar="NAME",
        help="only test the device: copies, streams, memory, bits and speed. NAME is cuda (the "
        "default), cuda:1, fake or cpu",
    )
    parser.add_argument(
        "--storage",
        metavar="PLACE",
        help="only measure a folder, or the URL of a bucket: how long one read takes, and how much "
        "many give. Reads up to 200 MB",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="a setting of the store for --storage, such as endpoint=https://...; may be repeated",
    )


def _option(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def run(arguments: argparse.Namespace) -> int:
    if arguments.device is not None:
        return test_device(arguments.device, as_json=arguments.json)
    if arguments.storage is not None:
        return measure_storage(arguments)
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


def test_device(name: str, *, as_json: bool) -> int:
    """Run the self-test of a device and print it; the exit code."""
    try:
        from penstock.torch import self_test
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'penstock doctor --device needs PyTorch: pip install "penstock[torch]"'
        ) from error
    try:
        results = self_test.run_checks(name)
    except PipelineError as error:
        sys.stderr.write(self_test.problem(error) + "\n")
        return self_test.NO_DEVICE
    if as_json:
        sys.stdout.write(self_test.as_json(name, results) + "\n")
    else:
        sys.stdout.write("\n".join(self_test.lines(name, results)) + "\n")
    return int(any(result.outcome == "failed" for result in results))


def measure_storage(arguments: argparse.Namespace) -> int:
    """Measure a folder or a bucket, and print what that means; the exit code."""
    from rich.console import Console

    from penstock.diagnose.doctor import report, storage

    rates = storage.measure(arguments.storage, dict(arguments.option))
    findings = storage.advice(rates)
    if arguments.json:
        sys.stdout.write(storage.as_json(rates, findings) + "\n")
    else:
        report.show(findings, Console())
    return 0
