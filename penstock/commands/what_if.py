"""``penstock what-if``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.diagnose.analyze.ranges import Quantity
    from penstock.diagnose.analyze.what_if import Prices, Values

EXAMPLE = """\
examples:
  penstock what-if report.json                              the run as it is, and what is enough
  penstock what-if report.json --cache 64GB --cores 16      one change
  penstock what-if report.json --cache 0..64GB              a table
  penstock what-if report.json --cache 0..64GB:8GB --storage 100,500,2000MB/s     a grid
  penstock what-if report.json --jobs 8 --share             eight jobs on one preparation
  penstock what-if report.json --cores 2,4,8,16 --price-accelerator 2 --price-core 0.04

An option that takes a VALUE takes one, several (1,2,4,8), a range (0..64GB) or a range with a step
(0..64GB:8GB); at most two of them may have more than one. A number without a unit has that of the
last one. Cores have a worker each unless --workers says otherwise.
"""

OPTIONS = {
    "cache": "bytes kept in memory of what is read, such as 64GB",
    "cores": "cores, with a worker each unless --workers is given",
    "workers": "workers",
    "storage": "how fast storage is, such as 500MB/s",
    "accelerator": "how many times as fast the accelerator is, such as 2x",
    "reuse": "refurbish: how often a partly augmented sample is used",
    "echo": "echo: how often each sample is used",
    "jobs": "jobs that run at once on this machine",
    "offload": "how many of the last operations are done on the device",
}

FLAGS = ("share", "penstock")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts from a report of `penstock analyze` how fast training would be with another "
        "cache, other cores, storage or accelerator, with reuse, echo or sharing; what it would "
        "wait for; and what an epoch would cost."
    )
    parser.epilog = EXAMPLE
    parser.add_argument("report", metavar="REPORT.json", help="what `penstock analyze` has written")
    for name, line in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=line)
    parser.add_argument(
        "--share", action="store_true", help="with --jobs: they share one preparation"
    )
    parser.add_argument(
        "--penstock", action="store_true", help="with Penstock's loader in place of torch's"
    )
    for name, line in (
        ("", "an hour of the whole machine, such as 2.5/h"),
        ("-accelerator", "an hour of each accelerator"),
        ("-core", "an hour of a core"),
        ("-cache-gb", "an hour of a gigabyte of cache"),
    ):
        parser.add_argument(f"--price{name}", metavar="PRICE", help=f"what is paid for {line}")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from penstock.diagnose.analyze import what_if_table as table
    from penstock.diagnose.analyze.report import Report
    from penstock.diagnose.analyze.stalls import rank_speeds, slowest
    from penstock.diagnose.analyze.what_if import Forecast, check, fixed, rows, saturation, unheard

    options = read_options(arguments)
    check(options)
    prices = read_prices(arguments)
    report = Report.load(Path(arguments.report))
    if report.ranks:
        # The others wait for it, so what helps it helps all.
        last = slowest(rank_speeds(report))
        report = report if last is None else last.report
    forecast = Forecast(report)
    (present,) = rows(forecast, [], prices)
    found = rows(forecast, options, prices)
    enough = saturation(forecast, fixed(options))
    if arguments.json:
        sys.stdout.write(table.as_json(forecast, present, found, enough) + "\n")
    else:
        lines = table.lines(forecast, options, present, found, enough)
        lines += unheard(report, options)
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def read_options(arguments: argparse.Namespace) -> list[Values]:
    """The options that were given, in the order of the help."""
    from penstock.diagnose.analyze import ranges
    from penstock.diagnose.analyze.what_if import Values

    quantities: dict[str, Quantity] = {
        "cache": ranges.BYTES,
        "cores": ranges.COUNT,
        "workers": ranges.COUNT_FROM_0,
        "storage": ranges.BYTES_A_SECOND,
        "accelerator": ranges.FACTOR,
        "reuse": ranges.COUNT,
        "echo": ranges.AT_LEAST_ONCE,
        "jobs": ranges.COUNT,
        "offload": ranges.COUNT_FROM_0,
    }
    found = []
    for name, quantity in quantities.items():
        given = getattr(arguments, name)
        if given is not None:
            found.append(Values(name, ranges.values(given, f"--{name}", quantity)))
    return found + [Values(name, (True,)) for name in FLAGS if getattr(arguments, name)]


def read_prices(arguments: argparse.Namespace) -> Prices | None:
    """The prices that were given; ``None`` for none."""
    from penstock.diagnose.analyze.what_if import Prices

    given = {
        field: getattr(arguments, option)
        for field, option in (
            ("machine", "price"),
            ("accelerator", "price_accelerator"),
            ("core", "price_core"),
            ("cache_gb", "price_cache_gb"),
        )
    }
    if not any(text is not None for text in given.values()):
        return None
    return Prices(
        **{
            field: _price(text, "--price" + ("" if field == "machine" else f"-{field}"))
            for field, text in given.items()
            if text is not None
        }
    )


def _price(text: str, what: str) -> float:
    what = what.replace("_", "-")
    try:
        found = float(text.strip().removesuffix("/h"))
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise PipelineError(f"{what} is {text!r}; give what an hour costs, such as 2.5 or 2.5/h.")
    return found
