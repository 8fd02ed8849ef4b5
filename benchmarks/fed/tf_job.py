"""A trainer with the tf.data service: a dispatcher on the first host, a worker on every host.

Batches are prepared by the workers of all hosts for whichever trainer asks: dynamic sharding, one
job for all trainers. They are not compressed, which would cost more than the links do.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.fed.work import FedWork, TrainerLog
from benchmarks.harness.processes import die_with_parent
from benchmarks.harness.workloads import Photos
from benchmarks.peers.tfdata import image_reader, options_for

PORT = 5050


def train(work: FedWork, rank: int, place: Path, addresses: list[str]) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    service = tf.data.experimental.service
    mine = f"{addresses[rank]}"
    servers = []
    if rank == 0:
        servers.append(service.DispatchServer(service.DispatcherConfig(port=PORT)))
    servers.append(
        service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=f"{addresses[0]}:{PORT}",
                worker_address=f"{mine}:{PORT + 1}",
                port=PORT + 1,
            )
        )
    )
    image = image_reader(tf, Photos(Path(work.data), "uint8", work.batch, work.workers))
    paths = work.paths()
    batches = (
        tf.data.Dataset.from_tensor_slices((paths, list(range(len(paths)))))
        .shuffle(len(paths))
        .repeat(work.epochs)
        .map(image, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(work.batch)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options_for(tf, work.workers))
        .apply(
            service.distribute(
                processing_mode=service.ShardingPolicy.DYNAMIC,
                service=f"grpc://{addresses[0]}:{PORT}",
                job_name="train",
                compression=None,
            )
        )
        .prefetch(tf.data.AUTOTUNE)
    )
    log = TrainerLog(place / "log")
    for images, numbers in batches.as_numpy_iterator():
        log.taken(images, numbers)
    # The worker and the dispatcher are in this process: other trainers may still need them.
    (place / "done").touch()
    while not all((place.parent / f"host-{n}" / "done").exists() for n in range(work.world)):
        time.sleep(0.05)


if __name__ == "__main__":
    die_with_parent()
    words = sys.argv[1:]
    train(FedWork.from_json(words[0]), int(words[1]), Path(words[2]), words[3].split(","))
