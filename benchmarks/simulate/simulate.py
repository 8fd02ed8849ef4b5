"""Simulations: Penstock's own policy code, on a virtual clock, with any number of machines."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.plot import add_plot_argument
from benchmarks.harness.report import Result
from benchmarks.simulate import fusionflow, placement, reservoir

SIMULATIONS: dict[str, Callable[[Namespace], Result]] = {
    "placement": placement.run,
    "fusionflow": fusionflow.run,
    "reservoir": reservoir.run,
}
"""By name: what ``python -m benchmarks simulate NAME`` runs."""


def run(options: Namespace) -> Result:
    return SIMULATIONS[options.what](options)


def sizes(text: str) -> list[int]:
    """Numbers of machines, such as ``8,64``. One machine is no cluster."""
    found = [count(part.strip()) for part in text.split(",")]
    if min(found) < 2:
        raise ArgumentTypeError(f"{text!r}: a cluster has at least 2 machines")
    return found


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=tuple(SIMULATIONS),
        default="placement",
        help="placement: owners of samples, membership and requests of a cluster (default); "
        "fusionflow: CPU and device together, beside the results of the paper; "
        "reservoir: how far samples travel, by the window",
    )
    add_plot_argument(parser)
    parser.add_argument(
        "--machines",
        type=sizes,
        default=[2, 8, 64, 256, 1000],
        metavar="LIST",
        help="numbers of machines (2,8,64,256,1000)",
    )
    parser.add_argument(
        "--indices", type=count, default=1_000_000, help="samples of the data (1000000)"
    )
    parser.add_argument(
        "--sample-bytes", type=count, default=110_000, help="mean size of a sample (110000)"
    )
    parser.add_argument(
        "--rate",
        type=positive,
        default=20_000.0,
        help="samples that each machine needs a second: 8 accelerators of 2,500 (20000)",
    )
    parser.add_argument(
        "--request-cost",
        type=positive,
        default=0.28e-3,
        metavar="SECONDS",
        help="CPU time of a request on both sides; 0.28 ms is an empty Flight call (0.00028)",
    )
    parser.set_defaults(batch=256)


BENCHMARK = Benchmark(
    "simulate",
    "the decisions of a cluster, or of CPU and device together, on a virtual clock",
    run,
    _arguments,
)
