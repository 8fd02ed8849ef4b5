"""Photographs to training batches: read, decode, random crop, flip, stack."""

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
    race_photos,
)
from benchmarks.harness.race_table import Versus, against_peers, join_results
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import Photos
from benchmarks.peers import penstock_pipeline

# The first is what most scripts do. The batches of the others are compared with its batches.
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


def run(options: Namespace) -> Result:
    pixels = Photos(options.data, "uint8", options.batch, options.workers)
    numbers = replace(pixels, form="float32")
    return join_results(
        [
            # Not the drop-in: it replaces only transforms that end in a float tensor.
            race_photos(
                "load, uint8",
                (*PEERS, PIPELINE, NO_KERNEL),
                pixels,
                options,
                against_peers(1.3, {NO_KERNEL.title: 1.0}),
            ),
            race_photos(
                "load, float32",
                (*PEERS, PIPELINE, NO_KERNEL, DROP_IN),
                numbers,
                options,
                against_peers(1.7, {NO_KERNEL.title: 1.0, DROP_IN.title: 1.3}),
            ),
            race_photos(
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
    "JPEG folders to batches: decode, random crop, flip",
    run,
    needs_data=True,
    peers=peer_names(PEERS),
)
