"""``penstock what-if``: reads the options, and prints one change, a table or a grid."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.config import show_size, size
from penstock.device.forecast import LEAST_SPEED
from penstock.diagnose.analyze.assumptions import assumptions
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.model import Change
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.result import Trust
from penstock.diagnose.analyze.stalls import rank_speeds, slowest
from penstock.diagnose.analyze.what_if import (
    ENOUGH,
    MOST_CORES,
    Forecast,
    PredictionRow,
    Prices,
    Saturation,
    Values,
    check_options,
    fixed_change,
    prediction_rows,
    saturation,
    varied,
    with_cores,
)
from penstock.errors import PipelineError, ReportError

EXAMPLE = """\
examples:
  penstock what-if report.json                              the present run, and what is enough
  penstock what-if report.json --cache 64GB --cores 16      one change
  penstock what-if report.json --cache 0..64GB              a table
  penstock what-if report.json --cache 0..64GB:8GB --storage 100,500,2000MB/s     a grid
  penstock what-if report.json --jobs 8 --share             eight jobs share one preparation
  penstock what-if report.json --machines 1,2,4,8 --network 10Gb/s      machines share caches
  penstock what-if report.json --remote-cores 32 --network 10Gb/s       other machines prepare
  penstock what-if report.json --device-prep 2x,5x,10x      the device prepares a share
  penstock what-if report.json --batch 32,64,128,256 --other report-256.json    batch sizes
  penstock what-if report.json --cache 64GB --epochs 1,3,90             the first epoch spread out
  penstock what-if report.json --page-cache 32GB                        thrashing of the page cache
  penstock what-if report.json --latency 5..100ms --requests 64         a bucket
  penstock what-if report.json --cores 2,4,8,16 --price-accelerator 2 --price-core 0.04

A VALUE is one value, a list (1,2,4,8), a range (0..64GB) or a range with a step (0..64GB:8GB). At
most two options may have more than one value. A number without a unit takes the unit of the last
number. Each core has one worker unless --workers is given.
"""

OPTIONS = {
    "cache": "size of a cache of raw samples in memory, such as 64GB",
    "cores": "number of cores, with a worker each unless --workers is given",
    "workers": "number of workers",
    "storage": "speed of the storage, such as 500MB/s",
    "accelerator": "speed of the accelerator as a factor, such as 2x",
    "reuse": "uses of each partly augmented sample (refurbish)",
    "echo": "uses of each batch (echo)",
    "jobs": "jobs that run at once on this machine",
    "offload": "number of last operations that run on the device",
    "machines": "machines that divide the data and share their caches",
    "network": "speed of the link of each machine, such as 10Gb/s or 1.2GB/s",
    "remote_cores": "cores of other machines that prepare samples for one machine",
    "device_prep": "speed, relative to one worker, with which the device prepares a share of each "
    "batch while training waits; 10x if no value is given",
    "batch": "samples of a batch",
    "epochs": "number of epochs, the first of which finds all caches empty; shows their mean",
    "page_cache": "memory in which the operating system keeps the files read last, such as 32GB",
    "latency": "time until the first byte of a sample arrives, such as 30ms (object storage)",
    "requests": "with --latency: samples that are fetched at once, ahead of the workers",
}

DEVICE_PREP = "10x"
"""The speed of a device if none is given: an assumption, to be replaced by a measurement."""

FLAGS = ("share", "penstock", "shared_storage")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict from a report of `penstock analyze` how fast training would be with another "
        "cache, other cores, storage or accelerator, with reuse, echo or sharing, and on several "
        "machines. Shows the "
        "bottleneck, and the cost of an epoch if prices are given."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "report", metavar="REPORT.json", help="report written by `penstock analyze`"
    )
    for name, line in OPTIONS.items():
        optional = {"nargs": "?", "const": DEVICE_PREP} if name == "device_prep" else {}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="VALUE", help=line, **optional)  # type: ignore[arg-type]
    parser.add_argument(
        "--other",
        metavar="REPORT.json",
        help="with --batch: a report of the same script with another batch size, which tells how "
        "much of a step does not depend on the batch",
    )
    parser.add_argument(
        "--share", action="store_true", help="with --jobs: the jobs share one preparation"
    )
    parser.add_argument(
        "--penstock", action="store_true", help="use Penstock's loader in place of torch's"
    )
    parser.add_argument(
        "--shared-storage",
        action="store_true",
        help="with --machines: all of them read from one storage, instead of one each",
    )
    for name, line in (
        ("", "an hour of the whole machine, such as 2.5/h"),
        ("-accelerator", "an hour of each accelerator"),
        ("-core", "an hour of a core"),
        ("-cache-gb", "an hour of a gigabyte of cache"),
    ):
        parser.add_argument(f"--price{name}", metavar="PRICE", help=f"price of {line}")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    options = read_options(arguments)
    check_options(options)
    if arguments.other is not None and arguments.batch is None:
        raise PipelineError("--other belongs to --batch; give both, such as --batch 64,128,256.")
    prices = read_prices(arguments)
    report = AnalysisReport.load(Path(arguments.report))
    if report.ranks:
        # The other ranks wait for the slowest, so a change that helps it helps all.
        last = slowest(rank_speeds(report))
        report = report if last is None else last.report
    if arguments.other is not None:
        report = with_fixed_part(report, AnalysisReport.load(Path(arguments.other)))
    trust = trusted(report)
    forecast = Forecast(report, trust)
    (present,) = prediction_rows(forecast, [], prices)
    rows = prediction_rows(forecast, options, prices)
    enough = saturation(forecast, fixed_change(options))
    if arguments.json:
        sys.stdout.write(as_json(forecast, present, rows, enough) + "\n")
    else:
        lines = lines_of(forecast, options, present, rows, enough)
        lines += assumptions(forecast, options, rows)
        if trust is not None and trust.measured is not None:
            lines.append(
                f"Scaled to the {trust.measured.value:,.0f} samples/s that were measured; within "
                f"{trust.error:.0%}."
            )
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def trusted(report: AnalysisReport) -> Trust | None:
    """How far predictions can be trusted; ``None`` for a report without any phase.

    Raises ReportError where the analysis itself gives no predictions.
    """
    if not report.phases:  # written by hand
        return None
    trust = result_of(report).trust
    if not trust.numbers:
        reasons = " ".join(reason[0].upper() + reason[1:] for reason in trust.reasons)
        raise ReportError(
            f"Nothing can be predicted from this report. {reasons} Run `penstock analyze` again, "
            "for longer and with less beside it."
        )
    return trust


def with_fixed_part(report: AnalysisReport, other: AnalysisReport) -> AnalysisReport:
    """The report with the part of a step that does not depend on the batch.

    It comes from the steps of another report, with another batch size.
    """
    one, two = report.setup.batch, other.setup.batch
    if one == two:
        raise PipelineError(
            f"--other is a report with the same batch size, {one}. Analyse the script with another "
            "batch size, and give that report."
        )
    if (report.setup.samples, report.setup.accelerator) != (
        other.setup.samples,
        other.setup.accelerator,
    ):
        raise PipelineError(
            f"--other is a report of {other.setup.samples:,} samples on {other.setup.accelerator}, "
            f"and REPORT.json one of {report.setup.samples:,} on {report.setup.accelerator}. Give "
            "two reports of one script that differ only in their batch size."
        )
    step, step_of_other = one * report.costs.compute, two * other.costs.compute
    each = (step_of_other - step) / (two - one)
    # A line through two noisy points: neither part of a step is negative.
    fixed = min(max(0.0, step - one * each), step)
    return replace(report, costs=replace(report.costs, fixed=fixed))


# Reading options.

MOST_VALUES = 200
"""Most values of a range: a longer table is unreadable, and each value takes time to predict."""

DEFAULT_STEPS = 8
"""Steps of a range that is given without a step."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """How the numbers of an option are read: the parser, the least number, and an example."""

    read: Callable[[str, str], float]
    least: float
    whole: bool
    example: str


def _bytes(text: str, option: str) -> float:
    return size(text, option)


def _bytes_per_second(text: str, option: str) -> float:
    try:
        return float(size(re.sub(r"\s*/\s*s(ec)?\s*$", "", text), option))
    except PipelineError:
        raise PipelineError(
            f"{option} is {text!r}; give bytes per second, such as 500MB/s or 2GiB/s."
        ) from None


def _network(text: str, option: str) -> float:
    """Bytes per second. ``b`` means bits, and ``B`` bytes, as usual for networks."""
    bits = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kKMGT]?)b(?:it)?(?:/s|ps)\s*", text)
    if bits is not None:
        scale = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[bits[2].upper()]
        return float(bits[1]) * scale / 8
    try:
        return _bytes_per_second(text, option)
    except PipelineError:
        raise PipelineError(
            f"{option} is {text!r}; give bits or bytes per second, such as 10Gb/s or 1.2GB/s."
        ) from None


def _seconds(text: str, option: str) -> float:
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)\s*", text)
    if found is None:
        raise PipelineError(f"{option} is {text!r}; give a time, such as 30ms or 0.1s.")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def _factor(text: str, option: str) -> float:
    if not re.fullmatch(r"\s*-?[0-9]*\.?[0-9]+\s*x?\s*", text.lower()):
        raise PipelineError(f"{option} is {text!r}; give a factor, such as 2x or 1.5.")
    return float(text.strip().lower().removesuffix("x"))


def _count(text: str, option: str) -> float:
    if not re.fullmatch(r"\s*-?\d+\s*", text):
        raise PipelineError(f"{option} is {text!r}; give a whole number.")
    return int(text)


BYTES = Quantity(_bytes, 0, True, "64GB")
BYTES_PER_SECOND = Quantity(_bytes_per_second, 1, False, "500MB/s")
NETWORK = Quantity(_network, 1, False, "10Gb/s")
FACTOR = Quantity(_factor, 1e-9, False, "2x")
DEVICE_SPEED = Quantity(_factor, LEAST_SPEED, False, "10x")
FACTOR_FROM_1 = Quantity(_factor, 1, False, "2")
SECONDS = Quantity(_seconds, 0, False, "30ms")
COUNT = Quantity(_count, 1, True, "8")
COUNT_FROM_0 = Quantity(_count, 0, True, "4")


def read_values(text: str, option: str, quantity: Quantity) -> tuple[float, ...]:
    """The values of an option, given as one value, a list or a range.

    >>> read_values("1,2,4", "--cores", COUNT), read_values("2..4", "--cores", COUNT)
    ((1, 2, 4), (2, 3, 4))
    >>> read_values("0..64GB:32GB", "--cache", BYTES)
    (0, 32000000000, 64000000000)

    A number without a unit takes the unit of the last number.

    >>> read_values("8,16GB", "--cache", BYTES)
    (8000000000, 16000000000)
    """
    if ".." in text:
        ends, colon, step = text.partition(":")
        low, _, high = ends.partition("..")
        numbers = _range(text, option, quantity, low, high, step if colon else None)
    elif ":" in text:
        raise PipelineError(
            f"{option} is {text!r}; only a range can have a step, as in 0..{quantity.example}:"
            f"{quantity.example}."
        )
    else:
        parts = text.split(",")
        numbers = [quantity.read(_with_unit(part, parts[-1]), option) for part in parts]
    if min(numbers) < quantity.least:
        raise PipelineError(
            f"{option} is {text!r}; give at least {quantity.least:g}."
            if quantity.least >= LEAST_SPEED or quantity.least == 0
            else f"{option} is {text!r}; it must be above 0."
        )
    return tuple(dict.fromkeys(numbers))


def _range(
    text: str, option: str, quantity: Quantity, low: str, high: str, step: str | None
) -> list[float]:
    if not low.strip() or not high.strip() or (step is not None and not step.strip()):
        raise PipelineError(
            f"{option} is {text!r}; a range is written 0..{quantity.example}, and with a step "
            f"0..{quantity.example}:{quantity.example}."
        )
    first, last = quantity.read(_with_unit(low, high), option), quantity.read(high, option)
    if last <= first:
        raise PipelineError(
            f"{option} is {text!r}; a range goes from the smaller value to the larger."
        )
    if step is None:
        # Show all of a few whole numbers; of other ranges some values are enough.
        every = quantity.whole and last - first <= 2 * DEFAULT_STEPS
        count = round(last - first) if every else DEFAULT_STEPS
        numbers = [first + (last - first) * n / count for n in range(count + 1)]
    else:
        by = quantity.read(_with_unit(step, high), option)
        if by <= 0:
            raise PipelineError(f"{option} is {text!r}; its step must be above 0.")
        if (last - first) / by > MOST_VALUES:
            raise PipelineError(
                f"{option} is {text!r}: more than {MOST_VALUES} values. Give a larger step."
            )
        # The small addition keeps the end of 1..2:0.1 despite rounding errors.
        numbers = [first + by * n for n in range(int((last - first) / by + 1e-9) + 1)]
    return [round(number) if quantity.whole else number for number in numbers]


def _with_unit(text: str, other: str) -> str:
    """A number without a unit gets the unit of ``other``; 0 needs no unit."""
    if not re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*", text) or float(text) == 0:
        return text
    unit = re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*(.*)", other)
    return text if unit is None else text.strip() + unit[1]


def read_options(arguments: argparse.Namespace) -> list[Values]:
    """The options of the command line, in the order of the help."""
    quantities = {
        "cache": BYTES,
        "cores": COUNT,
        "workers": COUNT_FROM_0,
        "storage": BYTES_PER_SECOND,
        "accelerator": FACTOR,
        "reuse": COUNT,
        "echo": FACTOR_FROM_1,
        "jobs": COUNT,
        "offload": COUNT_FROM_0,
        "machines": COUNT,
        "network": NETWORK,
        "remote_cores": COUNT_FROM_0,
        "device_prep": DEVICE_SPEED,
        "batch": COUNT,
        "epochs": COUNT,
        "page_cache": BYTES,
        "latency": SECONDS,
        "requests": COUNT_FROM_0,
    }
    options = []
    for name, quantity in quantities.items():
        text = getattr(arguments, name)
        if text is not None:
            option = f"--{name.replace('_', '-')}"
            options.append(Values(name, read_values(text, option, quantity)))
    return options + [Values(name, (True,)) for name in FLAGS if getattr(arguments, name)]


def read_prices(arguments: argparse.Namespace) -> Prices | None:
    """The prices of the command line; ``None`` if there are none."""
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


def _price(text: str, option: str) -> float:
    option = option.replace("_", "-")
    try:
        price = float(text.strip().removesuffix("/h"))
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise PipelineError(f"{option} is {text!r}; give a price per hour, such as 2.5 or 2.5/h.")
    return price


# Printing.

UNITS: dict[str, Callable[[float], str]] = {
    "cache": show_size,
    "storage": lambda value: f"{show_size(value)}/s",
    "network": lambda value: f"{value * 8 / 1e9:g} Gb/s",
    "accelerator": lambda value: f"{value:g}x",
    "echo": lambda value: f"{value:g}",
    "device_prep": lambda value: f"{value:g}x",
    "page_cache": show_size,
    "latency": lambda value: f"{value * 1e3:g} ms",
}


def words(name: str) -> str:
    """The name of an option in a sentence."""
    return name.replace("_", " ")


def show(name: str, value: float) -> str:
    """The value of an option, formatted with its unit."""
    return UNITS[name](value) if name in UNITS else f"{value:g}"


def lines_of(
    forecast: Forecast,
    options: Sequence[Values],
    present: PredictionRow,
    rows: Sequence[PredictionRow],
    enough: Saturation,
) -> list[str]:
    """The whole output for some options, as lines."""
    ranges = varied(options)
    change = change_words(options)
    if len(ranges) == 2:
        lines = [*([change] if change else []), *grid(ranges, rows)]
    elif ranges:
        lines = [*([change] if change else []), *table(ranges[0], rows)]
    else:
        titled = [("as it is", present), *([(change, rows[0])] if options else [])]
        lines = _columns(["", *HEADS], [[title, *_cells(row)] for title, row in titled])
    return [*lines, "", *enough_lines(forecast, enough, fixed_change(options))]


def change_words(options: Sequence[Values]) -> str:
    """The options with one value, in words: ``cache 64.0 GB, cores 16``."""
    return ", ".join(
        words(option.name)
        if option.values[0] is True
        else f"{words(option.name)} {show(option.name, option.values[0])}"
        for option in options
        if len(option.values) == 1
    )


HEADS = (
    "samples/s",
    "all machines",
    "gain",
    "stalled on fetch",
    "on prep",
    "on network",
    "bound",
    "epoch",
    "cost",
)
"""Columns without any value are not shown."""


def table(option: Values, rows: Sequence[PredictionRow]) -> list[str]:
    """One line for each value of a range."""
    cells = [
        [show(option.name, value), *_cells(row)]
        for value, row in zip(option.values, rows, strict=True)
    ]
    return _columns([words(option.name), *HEADS], cells)


def grid(options: Sequence[Values], rows: Sequence[PredictionRow]) -> list[str]:
    """Speed, and the cost of an epoch, over two ranges; a letter names the bottleneck."""
    down, across = options
    width = len(across.values)
    chunks = [rows[at : at + width] for at in range(0, len(rows), width)]
    corner = f"{words(down.name)} \\ {words(across.name)}"
    heads = [corner, *(show(across.name, value) for value in across.values)]

    def part(title: str, cell: Callable[[PredictionRow], str]) -> list[str]:
        body = [
            [show(down.name, value), *map(cell, chunk)]
            for value, chunk in zip(down.values, chunks, strict=True)
        ]
        return [title, *_columns(heads, body)]

    several = any(row.change.machines > 1 or row.change.remote_cores for row in rows)
    network_word = ", f(etch) or n(etwork)" if several else " or f(etch)"
    lines = part(
        f"samples/s, bound by c(ompute), p(rep){network_word}",
        lambda row: (
            f"{row.prediction.speed:,.0f} {row.prediction.bound[0]}" if row.certain else UNCERTAIN
        ),
    )
    if rows[0].cost is not None:
        lines += [
            "",
            *part("cost of an epoch", lambda row: _cost(row.cost) if row.certain else UNCERTAIN),
        ]
    return lines


UNCERTAIN = "?"
"""Printed in place of a speed that depends too much on the cores that other programs leave."""


def enough_lines(forecast: Forecast, enough: Saturation, change: Change) -> list[str]:
    """Lines on the points beyond which more cache and more cores stop helping, with a change."""
    lines = []
    if enough.cache is None:
        lines.append("Cache: unknown, because the number of bytes read per sample is unknown.")
    elif enough.cache == 0:
        lines.append("A cache of raw samples does not help: training does not wait for fetching.")
    else:
        lines.append(
            f"More cache stops helping at {show_size(enough.cache)} of {show_size(forecast.data)}: "
            f"{enough.cache_speed:,.0f} samples/s."
        )
    if forecast.uncertain(with_cores(forecast.report, change, enough.cores or MOST_CORES)):
        lines.append("More cores may help: how many depends on those that other programs keep.")
    elif enough.cores is None:
        lines.append(f"More cores help, up to the {MOST_CORES} that were tried.")
    else:
        lines.append(
            f"More cores stop helping at {enough.cores}: {enough.cores_speed:,.0f} samples/s."
        )
    lines.append(f"(Stops helping: any further amount adds less than {ENOUGH:.0%}.)")
    return lines


def as_json(
    forecast: Forecast, present: PredictionRow, rows: Sequence[PredictionRow], enough: Saturation
) -> str:
    """The output as JSON."""
    return json.dumps(
        {
            "present": present.to_dict(),
            "rows": [row.to_dict() for row in rows],
            "enough": asdict(enough),
            "data_bytes": forecast.data,
        },
        indent=1,
    )


def _cells(row: PredictionRow) -> list[str]:
    prediction = row.prediction
    if not row.certain:
        return [UNCERTAIN] + [""] * (len(HEADS) - 1)
    return [
        f"{prediction.speed:,.0f}",
        f"{prediction.all_machines:,.0f}" if prediction.machines > 1 else "",
        f"{row.gain:.2f}x",
        f"{prediction.fetch_stall:.0%}",
        f"{prediction.prep_stall:.0%}",
        f"{prediction.network_stall:.0%}" if prediction.network else "",
        prediction.bound,
        f"{prediction.epoch:,.1f} s",
        _cost(row.cost),
    ]


def _cost(cost: float | None) -> str:
    if cost is None:
        return ""
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.4f}"


def _columns(heads: list[str], body: list[list[str]]) -> list[str]:
    """Lines with aligned columns; columns without any value are left out."""
    kept = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in body)]
    widths = [max(len(row[at]) for row in [heads, *body]) for at in kept]
    return [
        "  ".join(
            f"{row[at]:<{width}}" if at == 0 else f"{row[at]:>{width}}"
            for at, width in zip(kept, widths, strict=True)
        ).rstrip()
        for row in [heads, *body]
    ]
