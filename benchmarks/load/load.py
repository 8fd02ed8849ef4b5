"""Photographs to training batches: read, decode, crop at random, flip, stack."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import Contestant, peer_names
from benchmarks.harness.photographs import (
    BY_HAND,
    DALI,
    DALI_PLAIN,
    DROP_IN,
    FFCV,
    GRAIN,
    LITDATA,
    PIL,
    PIPELINE,
    SPDL,
    TF_DATA,
    WEBDATASET,
    raced,
)
from benchmarks.harness.race_table import Versus, against_peers, joined
from benchmarks.harness.report import Found
from benchmarks.harness.workloads import Photos
from benchmarks.peers import penstock_pipeline

# The first is what most scripts do, and so what the others' batches are compared with.
PEERS = (
    PIL,
    BY_HAND,
    DALI,
    DALI_PLAIN,
    GRAIN,
    SPDL,
    TF_DATA,
    FFCV,
    WEBDATASET,
    LITDATA,
)

NO_KERNEL = replace(
    PIPELINE,
    title="Penstock pipeline, no kernel",
    environment=(("PENSTOCK_NO_KERNEL", "1"),),
)

ONE_WORKER, TWO_WORKERS = (
    Contestant(
        f"Penstock pipeline, {workers}",
        partial(penstock_pipeline.photos, workers=number),
        PIPELINE.needs,
        ours=True,
    )
    for number, workers in ((1, "1 worker"), (2, "2 workers"))
)
SCALING = Versus("rate / 1 worker", "rate", True, 1.85)


def run(options: Namespace) -> Found:
    pixels = Photos(options.data, "uint8", options.batch, options.workers)
    numbers = replace(pixels, form="float32")
    return joined(
        [
            # The drop-in takes over transforms that end in a float tensor: it has no uint8 form.
            raced(
                "load, uint8",
                (*PEERS, PIPELINE, NO_KERNEL),
                pixels,
                options,
                against_peers(1.3, {NO_KERNEL.title: 1.0}),
            ),
            raced(
                "load, float32",
                (*PEERS, PIPELINE, NO_KERNEL, DROP_IN),
                numbers,
                options,
                against_peers(1.7, {NO_KERNEL.title: 1.0, DROP_IN.title: 1.3}),
            ),
            raced(
                "load, scaling",
                (ONE_WORKER, TWO_WORKERS),
                pixels,
                options,
                (SCALING,),
                beside=(ONE_WORKER.title,),
            ),
        ]
    )


BENCHMARK = Benchmark(
    "load",
    "JPEG folders to batches: decode, crop at random, flip",
    run,
    needs_data=True,
    peers=peer_names(PEERS),
)
