"""Time to the first batch of a loader, to the end of its first epoch, and to the first batch of its
second epoch. The same for a plain script, alone and by ``penstock run``."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.courses import Starts
from benchmarks.harness.measure import Contestant, peer_names, progress, race, select
from benchmarks.harness.race_table import FIRST, MEMORY, Column, join_results, race_result
from benchmarks.harness.report import Result, Table
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

SCRIPT_SAMPLES = 2048
SCRIPT = '''\
"""A training script that has never heard of Penstock."""
import json, resource, sys, time

begun, samples, batch, workers = float(sys.argv[1]), *map(int, sys.argv[2:])

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return samples

    def __getitem__(self, index):
        torch.full((64, 64), float(index)).sort()
        return torch.full((3, 32, 32), float(index)), index


def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


before = time.time()
loader = DataLoader(Images(), batch_size=batch, num_workers=workers)
first, total = None, 0
for images, labels in loader:
    first = first or time.time()
    total += int(images[:, 0, 0, 0].sum())
print(json.dumps({
    "script": first - begun, "first": first - before, "epoch": time.time() - before,
    "cpu": cpu(), "total": total,
}))
'''
SCRIPT_COMMANDS = {
    "torch DataLoader": (),
    "penstock run": ("-m", "penstock", "run", "--", sys.executable),
}
SCRIPT_COLUMNS = {
    "script": "start of the command to first batch ms",
    "first": "loader to first batch ms",
    "epoch": "loader to end of first epoch ms",
    "cpu": "CPU ms",
}


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
    parts.append(run_scripts(options.rounds, SCRIPT_SAMPLES, options.batch, options.workers))
    return join_results(parts)


def run_scripts(rounds: int, samples: int, batch: int, workers: int) -> Result:
    """Run a plain script, alone and by ``penstock run``, in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCRIPT_COMMANDS}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        given = [str(number) for number in (samples, batch, workers)]
        for _ in range(rounds):
            for name, command in SCRIPT_COMMANDS.items():
                progress(f"start, script: {name}")
                done = subprocess.run(
                    [sys.executable, *command, str(script), str(time.time()), *given],
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=False,
                )
                if done.returncode:
                    wrong.append(f"start, script: {name} failed: {done.stderr[-500:]}")
                    continue
                figures = json.loads(done.stdout.splitlines()[-1])
                if figures.pop("total") != samples * (samples - 1) // 2:
                    wrong.append(f"start, script: {name} lost or repeated samples")
                found[name].append(figures)
    rows = []
    for name, runs in found.items():
        medians = [statistics.median(run[key] for run in runs) for key in SCRIPT_COLUMNS if runs]
        shown = [f"{1e3 * seconds:,.0f}" for seconds in medians] or ["failed", "", "", ""]
        rows.append((name, *shown))
    title = f"start: a plain script, {samples:,} samples, batches of {batch}, {workers} workers"
    table = Table(title, ("command", *SCRIPT_COLUMNS.values()), tuple(rows))
    return Result((table,), (), tuple(wrong), {"script": found})


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
