"""Photographs to training batches with RandAugment, as in current ImageNet training."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import peer_names
from benchmarks.harness.photographs import (
    BY_HAND,
    DALI,
    DROP_IN,
    GRAIN,
    LITDATA,
    PIL,
    PIPELINE,
    SPDL,
    TENSORS,
    WEBDATASET,
    race_photos,
)
from benchmarks.harness.race_table import against_peers
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import Photos

# FFCV and tf.data have no RandAugment.
PEERS = (PIL, TENSORS, BY_HAND, DALI, GRAIN, SPDL, WEBDATASET, LITDATA)


def run(options: Namespace) -> Result:
    work = Photos(options.data, "float32", options.batch, options.workers, augment=True)
    return race_photos(
        "randaugment", (*PEERS, PIPELINE, DROP_IN), work, options, against_peers(3.0)
    )


BENCHMARK = Benchmark(
    "randaugment",
    "JPEG folders to normalised batches, with RandAugment(2, 9)",
    run,
    needs_data=True,
    peers=peer_names(PEERS),
)
