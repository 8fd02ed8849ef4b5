"""A soak: jobs of all kinds on one node join, leave, pause, crash and resume at random, while
workers, the node, disks and stores fail. Nobody may lose a sample, hang, grow or leave anything."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.soak.schedule import KINDS
from benchmarks.soak.supervisor import SoakReport, SoakSettings, Supervisor, as_data

MOST_JOBS = 6


def run(options: Namespace) -> Result:
    settings = SoakSettings(
        options.seconds,
        options.seed,
        min(options.jobs, MOST_JOBS),
        options.workers,
        options.hang,
        options.events,
        options.without,
    )
    progress(f"soak: seed {settings.seed}, {settings.seconds:g} s, {settings.jobs} jobs at a time")
    supervisor = Supervisor(settings, lambda line: progress(f"soak: {line}"))
    return make_result(supervisor.run(), settings)


def make_result(report: SoakReport, settings: SoakSettings) -> Result:
    """The table of a soak. Every defect makes the result invalid."""
    verdict = report.verdict
    rows = [
        ("jobs judged", f"{report.jobs:,}"),
        ("batches judged", f"{report.batches:,}"),
        ("samples received", f"{verdict.samples:,}"),
        ("samples lost", str(verdict.lost)),
        ("samples repeated", str(verdict.repeated)),
        ("batches that differ from an undisturbed loader's", str(verdict.different)),
        ("hung", str(report.hung)),
        ("longest wait of a job for a batch, s", f"{report.longest_wait:.1f}"),
    ]
    rows += [(f"event: {kind}", str(number)) for kind, number in sorted(report.counts.items())]
    rows += [(f"event: {kind}", f"skipped: {why}") for kind, why in report.skipped.items()]
    for name, quantities in report.growth.items():
        for quantity, found in quantities.items():
            change = f"{found.begin:,.0f} to {found.end:,.0f}"
            rows.append((f"{quantity} of {name}", f"{change} (bound: +{found.bound:,.0f})"))
    rows.append(("defects", str(len(report.defects))))
    wrong = [f"soak: {defect}" for defect in report.defects]
    if report.kept:
        wrong.append(f"soak: seed {settings.seed}; logs are in {report.kept}")
    notes = (
        f"soak: hung counts jobs without a batch for {settings.hang:g} s of a process that does "
        "a fixed amount of work beside them, so a busy machine is no hang",
        "soak: memory in bytes, and descriptors, are medians of the first and the last quarter of "
        "the second half of the measurements",
    )
    title = f"soak: seed {settings.seed}, {settings.seconds:g} s, {settings.jobs} jobs at a time"
    table = Table(title, ("", "value"), tuple(rows))
    return Result((table,), notes, tuple(wrong), {"soak": as_data(report)})


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in KINDS:
            raise ArgumentTypeError(f"there is no event {name!r}; there are: {', '.join(KINDS)}")
    return names


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (0)")
    parser.add_argument(
        "--jobs", type=count, default=4, help=f"jobs at a time (4; at most {MOST_JOBS})"
    )
    parser.add_argument("--events", type=count, help="end after this many events")
    parser.add_argument(
        "--hang",
        type=positive,
        default=60.0,
        metavar="SECONDS",
        help="seconds without a batch after which a job is taken to hang (60)",
    )
    parser.add_argument(
        "--without",
        type=_kinds,
        default=(),
        metavar="LIST",
        help=f"leave out these kinds of events, of: {', '.join(KINDS)}",
    )


BENCHMARK = Benchmark(
    "soak",
    "random faults of jobs of all kinds on one node: nothing is lost, hangs, grows or is left",
    run,
    _arguments,
    seconds=3600.0,
)
