"""The overhead of loaders: samples are in memory already, so nothing else takes time."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.courses import Throughput
from benchmarks.harness.measure import Contestant, peer_names, race, select
from benchmarks.harness.race_table import COLUMNS, Versus, join_results, race_result
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import Arrays
from benchmarks.peers import grain_threads, penstock_dropin, penstock_pipeline, torch_dataloader

CONTESTANTS = (
    Contestant("torch DataLoader", torch_dataloader.arrays, ("torch",), env="torch"),
    Contestant("Grain, threads", grain_threads.arrays, ("grain",), env="grain"),
    Contestant("Grain, no threads", grain_threads.arrays_without_threads, ("grain",), env="grain"),
    Contestant("Penstock pipeline, threads", penstock_pipeline.arrays, (), ours=True),
    Contestant("Penstock drop-in", penstock_dropin.arrays, ("torch",), ours=True),
    Contestant(
        "Penstock drop-in, random=False", penstock_dropin.arrays_not_random, ("torch",), ours=True
    ),
)


def run(options: Namespace) -> Result:
    parts = []
    # (name, shape of a sample, number of samples, samples inspected, target for the rate)
    for name, shape, length, checked, target in (
        ("overhead, large", (3, 224, 224), 50_000, 256, 2.0),
        ("overhead, small", (), 1_000_000, 8192, 1.5),
    ):
        work = Arrays(shape, length, options.batch, options.workers)
        size = "x".join(map(str, shape)) or "one"
        lanes = race(
            name,
            select(CONTESTANTS, options.peers),
            work,
            Throughput(options.seconds, checked, options.samples, options.warm_up),
            rounds=options.rounds,
            timeout=120 + options.warm_up + 10 * options.seconds,
        )
        title = (
            f"{name} samples: {length:,} of {size} float32, shuffled, batches of {work.batch}, "
            f"{work.workers} workers"
        )
        versus = (
            Versus("rate / best peer", "rate", True, target),
            Versus("CPU / best peer", "cpu", False),
            Versus("first / best peer", "first", False, 1.0),
        )
        parts.append(race_result(name, title, lanes, COLUMNS, versus))
    return join_results(parts)


BENCHMARK = Benchmark(
    "overhead",
    "overhead of the loaders: samples in memory, no decoding",
    run,
    peers=peer_names(CONTESTANTS),
)
