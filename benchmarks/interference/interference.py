"""The time of a training step beside each loader: do its threads take the GIL from the loop?

The loop has a core to itself, so only what happens inside its process can slow it down.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import Contestant, Lane, Make, Prepare, peer_names, race, select
from benchmarks.harness.photographs import BY_HAND, DALI, DROP_IN, GRAIN, PIL, PIPELINE, SPDL
from benchmarks.harness.race_table import Column, Versus, join_results, race_result
from benchmarks.harness.report import Result
from benchmarks.harness.sameness import first_leaf
from benchmarks.harness.workloads import Arrays, Photos
from benchmarks.interference.loop import Interference, Paced, split_cores
from benchmarks.peers import (
    grain_threads,
    penstock_device,
    penstock_dropin,
    penstock_pipeline,
    torch_dataloader,
)

DECODED, ASLEEP = 700.0, 5000.0
"""Samples a second: photographs that are really decoded, and samples whose work is a sleep."""

NAP = 0.7e-3
"""Seconds of native work for a sample that is asleep: those of a photograph with the kernel."""

MOST = 1.05
"""The step may take this many times what it takes beside the same work in another process."""


KEPT_UP = 0.95
"""A contestant keeps up if it gives this share of the samples that are asked for."""


class Batches:
    """The same batch for ever; ``process`` is ended by ``close``."""

    def __init__(self, samples: int, process: Any = None) -> None:
        self._batch = np.zeros(samples, np.uint8)
        self._process = process

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join()


def alone(work: Any) -> Make:
    """No loader at all."""
    return lambda: Batches(work.batch)


def beside_process(work: Any, prepare: Prepare[Any], rate: float) -> Make:
    """The loader works in an unrelated process, and the loop gets nothing from it."""
    context = multiprocessing.get_context("spawn")

    def make() -> Batches:
        ready = context.Event()
        process = context.Process(target=consume, args=(prepare, work, rate, ready), daemon=True)
        process.start()
        while not ready.wait(0.5):
            if not process.is_alive():
                raise RuntimeError("the process beside the loop has ended")
        return Batches(work.batch, process)

    return make


def consume(prepare: Prepare[Any], work: Any, rate: float, ready: Any) -> None:
    """Take batches at a rate until the process is ended."""
    loader = prepare(work)()
    pace = Paced(rate, time.perf_counter())
    while True:
        for batch in loader:
            ready.set()
            pace.taken(len(first_leaf(batch)), time.perf_counter())
            del batch
            while not pace.due(time.perf_counter()):
                time.sleep(1e-3)


ALONE = Contestant("the step alone", alone, ("torch",), ours=True)
BESIDE = "Penstock in an unrelated process"


def _beside(prepare: Prepare[Any], rate: float) -> Contestant[Any]:
    prepared = partial(beside_process, prepare=prepare, rate=rate)
    return Contestant(BESIDE, prepared, ("torch",), ours=True)


def _with_torch(contestant: Contestant[Any]) -> Contestant[Any]:
    """The loop needs torch in the environment of every contestant."""
    return replace(contestant, needs=tuple(dict.fromkeys((*contestant.needs, "torch"))))


PHOTO_PEERS = tuple(_with_torch(peer) for peer in (PIL, BY_HAND, DALI, GRAIN, SPDL))
ARRAY_PEERS = (
    Contestant("torch DataLoader", torch_dataloader.arrays, ("torch",), env="torch"),
    Contestant("Grain, threads", grain_threads.arrays, ("grain", "torch"), env="grain"),
)
TO_DEVICE = Contestant(
    "Penstock pipeline, to a fake device", penstock_device.photos, ("torch",), ours=True
)
OURS = (_with_torch(PIPELINE), TO_DEVICE, _with_torch(DROP_IN))
OUR_ARRAYS = (
    Contestant("Penstock pipeline, threads", penstock_pipeline.arrays, ("torch",), ours=True),
    Contestant(
        "Penstock pipeline, processes",
        partial(penstock_pipeline.arrays, kind="processes"),
        ("torch",),
        ours=True,
    ),
    Contestant("Penstock drop-in", penstock_dropin.arrays, ("torch",), ours=True),
)

COLUMNS = (
    Column("step us", "step", "{:,.0f}", 1e6),
    Column("median us", "median", "{:,.0f}", 1e6),
    Column("loop's CPU per batch us", "take", "{:,.0f}", 1e6),
    Column("samples/s", "rate", "{:,.0f}"),
)
VERSUS = (Versus("step / beside a process", "step", False, MOST),)


def run(options: Namespace) -> Result:
    split_cores(os.sched_getaffinity(0))
    photos = Photos(options.data, "float32", options.batch, options.workers)
    naps = Arrays((8,), 1_000_000, options.batch, options.asleep_workers, nap=NAP)
    return join_results(
        [
            _race(
                f"interference, {DECODED:,.0f} photographs a second",
                (ALONE, _beside(penstock_pipeline.photos, DECODED), *PHOTO_PEERS, *OURS),
                photos,
                DECODED,
                options,
            ),
            _race(
                f"interference, {ASLEEP:,.0f} samples a second, asleep",
                (ALONE, _beside(penstock_pipeline.arrays, ASLEEP), *ARRAY_PEERS, *OUR_ARRAYS),
                naps,
                ASLEEP,
                options,
            ),
        ]
    )


def _race(
    name: str,
    contestants: Sequence[Contestant[Any]],
    work: Any,
    rate: float,
    options: Namespace,
) -> Result:
    lanes = race(
        name,
        select(contestants, options.peers),
        work,
        Interference(rate, options.seconds, options.warm_up),
        rounds=options.rounds,
        timeout=240 + 2 * options.warm_up + 4 * options.seconds,
    )
    title = f"{name}: batches of {work.batch}, {work.workers} workers, {options.rounds} rounds"
    compared = [lane.title for lane in lanes]
    result = race_result(name, title, lanes, COLUMNS, VERSUS, (BESIDE,), compared)
    notes = (*result.notes, *best_peer(name, lanes), *too_slow(name, lanes, rate))
    return replace(result, notes=notes)


def best_peer(name: str, lanes: Sequence[Lane]) -> list[str]:
    """A line that compares Penstock's best step with that of the best peer."""
    baselines = (ALONE.title, BESIDE)
    ours = [lane for lane in lanes if lane.ours and lane.runs and lane.title not in baselines]
    peers = [lane for lane in lanes if not lane.ours and lane.runs]
    if not ours or not peers:
        return []

    def step(lane: Lane) -> float:
        return lane.spread("step").median

    mine, theirs = min(ours, key=step), min(peers, key=step)
    ratio = step(mine) / step(theirs)
    return [f"{name}: {mine.title}: the step takes {ratio:.2f} times that beside {theirs.title}"]


def too_slow(name: str, lanes: Sequence[Lane], rate: float) -> list[str]:
    """A line for each contestant that did not keep up, whose step says little then."""
    return [
        f"{name}: {lane.title}: gave {lane.spread('rate').median:,.0f} samples a second, not "
        f"{rate:,.0f}: its step cannot be compared"
        for lane in lanes
        if lane.runs and lane.spread("rate").median < KEPT_UP * rate
    ]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--asleep-workers", type=count, default=8, help="workers of the loaders that sleep (8)"
    )


BENCHMARK = Benchmark(
    "interference",
    "the time of a training step of small operations beside each loader",
    run,
    _arguments,
    needs_data=True,
    peers=peer_names((*PHOTO_PEERS, *ARRAY_PEERS)),
)
