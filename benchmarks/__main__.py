"""``python -m benchmarks NAME`` runs one benchmark and prints its table; options write JSON and a
chart. ``python -m benchmarks chart FILE...`` draws a chart from JSON files of earlier runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    cache,
    checkpoint,
    coefficients,
    cooperate,
    files,
    handing,
    loop,
    machines,
    memory,
    overhead,
    remote,
    shards,
    start,
)
from benchmarks.analyze import analyze
from benchmarks.audio import audio
from benchmarks.cluster import cluster
from benchmarks.echo import echo
from benchmarks.faults import faults
from benchmarks.fed import fed
from benchmarks.harness import chart as charts
from benchmarks.harness.arguments import count, drawing, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.report import show, write_json
from benchmarks.interference import interference
from benchmarks.jobs import jobs
from benchmarks.load import load, randaugment
from benchmarks.reuse import accuracy, encode, refurbish
from benchmarks.simulate import simulate
from benchmarks.soak import soak
from benchmarks.storage import objects, oneaccess, storage
from benchmarks.wide import wide

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        overhead,
        load,
        randaugment,
        audio,
        cache,
        refurbish,
        encode,
        accuracy,
        echo,
        jobs,
        cluster,
        remote,
        fed,
        faults,
        soak,
        analyze,
        memory,
        start,
        wide,
        interference,
        loop,
        handing,
        checkpoint,
        files,
        coefficients,
        shards,
        storage,
        oneaccess,
        objects,
        simulate,
        cooperate,
        machines,
    )
}


def parse(argv: Sequence[str]) -> tuple[Benchmark, argparse.Namespace]:
    """The benchmark named on the command line, and its options. Exits on invalid arguments."""
    names = "\n".join(f"  {name:12} {benchmark.line}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure Penstock and its peers. Run it on an idle machine, and compare only "
        "ratios between machines.",
        epilog=f"benchmarks:\n{names}\n\npython -m benchmarks NAME --help shows its options.\n"
        "python -m benchmarks chart FILE.json... --chart FILE draws a chart of earlier runs.\n"
        "scripts/bench-setup installs the peers, each in its own environment.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="name of a benchmark")
    if not argv or argv[0] in ("-h", "--help"):
        parser.parse_args(argv or ["--help"])
    name = argv[0]
    if name not in BENCHMARKS:
        parser.error(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    chosen = BENCHMARKS[name]
    own = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=chosen.line)
    own.add_argument(
        "--data",
        type=_data(chosen.files),
        metavar="PATH" if chosen.files else "DIR",
        required=chosen.needs_data,
        help=chosen.data,
    )
    if chosen.peers:
        own.add_argument(
            "--peers",
            type=_peers(chosen.peers),
            default=chosen.peers,
            metavar="LIST",
            help=f"all (default), none, or a comma-separated list of: {', '.join(chosen.peers)}",
        )
        own.add_argument(
            "--chart", type=drawing, metavar="FILE", help="draw a chart, as .svg or .png"
        )
    own.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON")
    own.add_argument("--rounds", type=count, default=5, help="rounds of each race (5)")
    own.add_argument(
        "--seconds",
        type=positive,
        default=chosen.seconds,
        help=f"measured seconds of each run ({chosen.seconds:g})",
    )
    own.add_argument(
        "--warm-up",
        type=positive,
        default=3.0,
        metavar="SECONDS",
        help="seconds before each measurement; increase it if workers start slowly (3)",
    )
    own.add_argument(
        "--samples", type=count, help="end each run after this many samples, instead of --seconds"
    )
    own.add_argument("--workers", type=count, default=2, help="workers of each loader (2)")
    own.add_argument("--batch", type=count, default=64, help="samples in a batch (64)")
    chosen.arguments(own)
    return chosen, own.parse_args(argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark. The exit code is 1 if its result is invalid."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "chart":
        return redraw(argv[1:])
    chosen, options = parse(argv)
    result = chosen.run(options)
    show(result)
    if options.json is not None:
        write_json(options.json, chosen.name, vars(options), result)
    if getattr(options, "chart", None) is not None:
        charts.write(options.chart, result.data)
    return 1 if result.wrong else 0


def redraw(argv: Sequence[str]) -> int:
    """Draw a chart from the JSON files of earlier runs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks chart",
        description="Draw a chart from files written with --json.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--chart", type=drawing, metavar="FILE", required=True)
    options = parser.parse_args(argv)
    data: dict[str, object] = {}
    for file in options.files:
        data.update(json.loads(file.read_text())["data"])
    charts.write(options.chart, data)
    return 0


def _peers(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def peers(text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return known if text == "all" else ()
        names = tuple(name.strip() for name in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"there is no peer {name!r} in this benchmark; there are: {', '.join(known)}"
                )
        return names

    return peers


def _data(files: tuple[str, ...]) -> Callable[[str], Path]:
    def data(text: str) -> Path:
        path = Path(text).resolve()
        if path.is_dir() or (path.suffix in files and path.is_file()):
            return path
        nor = f", nor an existing file that ends in {' or '.join(files)}" if files else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder{nor}")

    return data


if __name__ == "__main__":
    sys.exit(main())
