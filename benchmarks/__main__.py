"""``python -m benchmarks NAME``: runs one benchmark, prints its table, writes JSON if asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cache, load, memory, overhead, start
from benchmarks.benchmark import Benchmark, count
from benchmarks.report import show, write_json

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK for module in (overhead, load, cache, memory, start)
}


def parse(argv: Sequence[str]) -> tuple[Benchmark, argparse.Namespace]:
    """The benchmark that was asked for, and its options. Exits on what makes no sense."""
    names = "\n".join(f"  {name:10} {found.line}" for name, found in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure Penstock beside its peers. Run it on a quiet machine; only ratios "
        "travel from one machine to another.",
        epilog=f"benchmarks:\n{names}\n\npython -m benchmarks NAME --help shows what NAME takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="which benchmark")
    if not argv or argv[0] in ("-h", "--help"):
        parser.parse_args(argv or ["--help"])
    name = argv[0]
    if name not in BENCHMARKS:
        parser.error(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    chosen = BENCHMARKS[name]
    own = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=chosen.line)
    own.add_argument(
        "--data",
        type=_folder,
        metavar="DIR",
        required=chosen.needs_data,
        help="folder of classes, each a folder of JPEGs",
    )
    own.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    own.add_argument("--rounds", type=count, default=5, help="rounds of a race (5)")
    own.add_argument("--seconds", type=_seconds, default=4.0, help="of each run (4)")
    own.add_argument(
        "--warm-up",
        type=_seconds,
        default=3.0,
        metavar="SECONDS",
        help="before each run; give more where starting worker processes takes longer (3)",
    )
    own.add_argument("--samples", type=count, help="end each run after so many instead")
    own.add_argument("--workers", type=count, default=2, help="of every loader (2)")
    own.add_argument("--batch", type=count, default=64, help="samples in a batch (64)")
    chosen.arguments(own)
    return chosen, own.parse_args(argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    chosen, options = parse(sys.argv[1:] if argv is None else argv)
    found = chosen.run(options)
    show(found)
    if options.json is not None:
        write_json(options.json, chosen.name, vars(options), found)
    return 1 if found.wrong else 0


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return path


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
