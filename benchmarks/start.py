"""Time to the first batch of a loader, and to the first batch of its second epoch."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.courses import Starts
from benchmarks.harness.measure import Contestant, peer_names, race, select
from benchmarks.harness.race_table import FIRST, MEMORY, Column, race_result
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import Arrays
from benchmarks.peers import penstock_dropin, penstock_pipeline, torch_dataloader

SHAPE = (3, 32, 32)
LENGTH = 16_384
CHECKED = 1024

SECOND = Column("second epoch's first batch ms", "second", "{:,.2f}", 1e3)
CONTESTANTS = (
    Contestant(
        "torch DataLoader, no workers", torch_dataloader.without_workers, ("torch",), env="torch"
    ),
    Contestant("torch DataLoader", torch_dataloader.restarting, ("torch",), env="torch"),
    Contestant("torch DataLoader, persistent", torch_dataloader.arrays, ("torch",), env="torch"),
    Contestant(
        "Penstock, no workers", partial(penstock_pipeline.arrays, kind="none"), (), ours=True
    ),
    Contestant("Penstock, threads", penstock_pipeline.arrays, (), ours=True),
    Contestant(
        "Penstock, processes", partial(penstock_pipeline.arrays, kind="processes"), (), ours=True
    ),
    Contestant("Penstock drop-in", penstock_dropin.arrays, ("torch",), ours=True),
)


def run(options: Namespace) -> Result:
    work = Arrays(SHAPE, LENGTH, options.batch, options.workers)
    contestants = select(CONTESTANTS, options.peers)
    lanes = race("start", contestants, work, Starts(CHECKED), rounds=options.rounds, timeout=180)
    size = "x".join(map(str, SHAPE))
    title = f"start: {LENGTH:,} samples of {size} float32, shuffled, batches of {work.batch}, "
    title += f"{work.workers} workers"
    return race_result("start", title, lanes, (FIRST, SECOND, MEMORY), ())


BENCHMARK = Benchmark(
    "start",
    "time to the first batch, and to the first batch of the second epoch",
    run,
    peers=peer_names(CONTESTANTS),
)
