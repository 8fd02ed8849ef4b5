"""What a loader costs by itself: samples that are in memory already, so that nothing else is left."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.benchmark import Benchmark
from benchmarks.measure import Contestant, Length, race
from benchmarks.peers import grain_threads, penstock_dropin, penstock_pipeline, torch_dataloader
from benchmarks.race_table import Target, found, joined
from benchmarks.report import Found
from benchmarks.workloads import Arrays

CONTESTANTS = (
    Contestant("torch DataLoader", torch_dataloader.arrays, ("torch",)),
    Contestant("Grain, threads", grain_threads.arrays, ("grain",)),
    Contestant("Grain, no threads", grain_threads.arrays_without_threads, ("grain",)),
    Contestant("Penstock pipeline, threads", penstock_pipeline.arrays, (), ours=True),
    Contestant("Penstock drop-in", penstock_dropin.arrays, ("torch",), ours=True),
    Contestant(
        "Penstock drop-in, random=False", penstock_dropin.arrays_not_random, ("torch",), ours=True
    ),
)


def run(options: Namespace) -> Found:
    parts = []
    for name, shape, samples, checked, target in (
        ("large", (3, 224, 224), 50_000, 256, Target(2.0, sooner=True)),
        ("small", (), 1_000_000, 8192, Target(1.5, sooner=True)),
    ):
        work = Arrays(shape, samples, options.batch, options.workers)
        size = "x".join(map(str, shape)) or "one"
        title = (
            f"overhead, {name} samples ({size} float32), batches of {work.batch}, "
            f"{work.workers} workers"
        )
        lanes = race(
            f"overhead, {name}",
            CONTESTANTS,
            work,
            rounds=options.rounds,
            length=Length(options.seconds, options.samples),
            checked=checked,
        )
        parts.append(found(title, lanes, target))
    return joined(parts)


BENCHMARK = Benchmark("overhead", "loaders by themselves: samples in memory, no decoding", run)
