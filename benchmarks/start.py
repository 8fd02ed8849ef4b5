"""Time to the first batch of a loader, to the end of its first epoch, and to the first batch of its
second epoch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.courses import Starts
from benchmarks.harness.measure import Contestant, peer_names, race, select
from benchmarks.harness.race_table import FIRST, MEMORY, Column, join_results, race_result
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import Arrays, Photos
from benchmarks.peers import penstock_dropin, penstock_pipeline, torch_dataloader, torchvision_pil

SHAPES = ((), (3, 32, 32))
LENGTH = 16_384
CHECKED = 1024
CHECKED_PHOTOS = 64

EPOCH = Column("first epoch ms", "epoch", "{:,.0f}", 1e3)
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
    Contestant("Penstock drop-in", penstock_dropin.restarting, ("torch",), ours=True),
    Contestant("Penstock drop-in, persistent", penstock_dropin.arrays, ("torch",), ours=True),
    Contestant("Penstock drop-in, spawn", penstock_dropin.spawned, ("torch",), ours=True),
)
PHOTO_CONTESTANTS = (
    Contestant(
        "torch DataLoader", torchvision_pil.restarting, ("torch", "torchvision"), env="torch"
    ),
    Contestant(
        "Penstock drop-in, native=False",
        penstock_dropin.photos_by_torchvision,
        ("torch", "torchvision"),
        ours=True,
    ),
)


def run(options: Namespace) -> Result:
    parts = []
    for shape in SHAPES:
        work = Arrays(shape, LENGTH, options.batch, options.workers)
        size = "x".join(map(str, shape)) or "one"
        what = f"{LENGTH:,} samples of {size} float32"
        parts.append(_race("start", what, CONTESTANTS, work, CHECKED, options))
    if options.data is not None:
        photos = Photos(options.data, "float32", options.batch, options.workers)
        what = "photographs, PIL and torchvision"
        name = "start, photographs"
        parts.append(_race(name, what, PHOTO_CONTESTANTS, photos, CHECKED_PHOTOS, options))
    return join_results(parts)


def _race(
    name: str,
    what: str,
    contestants: Sequence[Contestant[Any]],
    work: Arrays | Photos,
    checked: int,
    options: Namespace,
) -> Result:
    chosen = select(contestants, options.peers)
    lanes = race(name, chosen, work, Starts(checked), rounds=options.rounds, timeout=180)
    title = f"{name}: {what}, shuffled, batches of {work.batch}, {work.workers} workers"
    return race_result(name, title, lanes, (FIRST, EPOCH, SECOND, MEMORY), ())


BENCHMARK = Benchmark(
    "start",
    "time to the first batch, to the end of the first epoch, and to the next epoch's first batch",
    run,
    peers=peer_names(CONTESTANTS),
    data="folder of classes, each a folder of JPEGs, to race with photographs too",
)
