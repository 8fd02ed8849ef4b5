"""Memory growth over many epochs of a million tiny samples, with threads and with processes."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from benchmarks.harness.alone import AloneError, memory_of_tree, run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table

LOOKS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)
KINDS = ("threads", "processes")

BATCH = 4096
"""Samples per batch: large, so that epochs are short."""


def looks(epochs: int) -> list[int]:
    """The epochs after which memory is measured. Includes the last."""
    return sorted({number for number in LOOKS if number <= epochs} | {epochs})


def measure(kind: str, samples: int, epochs: int, workers: int) -> dict[int, int]:
    """Memory of the process tree after each epoch in ``looks(epochs)``. Runs in a fresh process."""
    import penstock as ps

    # Python objects: reference counts in a forked worker would copy their pages.
    data = [float(number) for number in range(samples)]
    measured = {}
    wanted = looks(epochs)
    pipeline = ps.from_dataset(data, random=False).batch(BATCH)
    with pipeline.loader(workers=workers, kind=kind) as loader:  # type: ignore[arg-type]
        for number in range(1, epochs + 1):
            for batch in loader:
                batch[0]
            if number in wanted:
                measured[number] = memory_of_tree(os.getpid())
    return measured


def run(options: Namespace) -> Result:
    wanted = looks(options.epochs)
    rows, notes, wrong = [], [], []
    data: dict[str, object] = {}
    for kind in KINDS:
        progress(f"memory: {options.epochs} epochs of {options.items:,} samples in {kind}")
        try:
            measured = run_alone(
                measure, kind, options.items, options.epochs, options.workers, timeout=3600
            ).value
        except AloneError as error:
            rows.append((kind, f"failed: {error}", *[""] * len(wanted)))
            wrong.append(f"memory: {kind} failed: {error}")
            continue
        growth = measured[wanted[-1]] - measured[wanted[0]]
        data[kind] = {"bytes": measured, "growth": growth}
        rows.append(
            (kind, *(f"{measured[n] / 1e6:,.1f}" for n in wanted), f"{growth / 1e6:+,.1f}"),
        )
        share = growth / measured[wanted[0]]
        notes.append(
            f"memory: {kind}: {growth / 1e6:+,.1f} MB ({share:+.1%}) from epoch {wanted[0]} "
            f"to {wanted[-1]}"
        )
    title = f"memory: PSS of all processes in MB, {options.items:,} samples, batches of {BATCH}, "
    title += f"{options.workers} workers"
    heads = ("workers", *(f"epoch {number}" for number in wanted), "growth")
    return Result((Table(title, heads, tuple(rows)),), tuple(notes), tuple(wrong), data)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--epochs", type=count, default=50, help="number of epochs (50)")
    parser.add_argument(
        "--items", type=count, default=1_000_000, help="number of samples (1000000)"
    )


BENCHMARK = Benchmark(
    "memory", "memory after many epochs over a million tiny samples", run, _arguments
)
