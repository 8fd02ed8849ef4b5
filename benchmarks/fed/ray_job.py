"""Trainers with Ray Data: ``streaming_split`` over one actor on each host, as its guide advises.

Rows are read by tasks of Ray on all hosts. Decoding is by simplejpeg and OpenCV, as in the other
recipes by hand. Samples that are not decoded are put into Ray's object store once
(``materialize``): that is its cache. Each epoch has another order of blocks and a local shuffle of
four batches; ``random_shuffle`` would move all data in every epoch.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fed.work import FedWork, TrainerLog
from benchmarks.harness.processes import die_with_parent
from benchmarks.harness.workloads import Photos
from benchmarks.peers.by_hand import ByHand

PORT = 6379

BLOCK = 128
"""Samples of a block: 19 MB of decoded images. Ray's own advice is 1 to 128 MB."""


def reader(work: FedWork) -> Any:
    """A function from a row with a path to a row with an image."""
    if work.kind == "decoded":
        decode = ByHand(Photos(Path(work.data), "uint8", work.batch, work.workers))

        def image(row: dict[str, Any]) -> dict[str, Any]:
            data = Path(row["path"]).read_bytes()
            return {"image": decode(data, random), "number": row["number"]}

        return image

    def some_bytes(row: dict[str, Any]) -> dict[str, Any]:
        cut = np.zeros(work.size, np.uint8)
        with open(row["path"], "rb") as file:
            data = np.frombuffer(file.read(work.size), np.uint8)
        cut[: len(data)] = data
        return {"image": cut, "number": row["number"]}

    return some_bytes


def drive(work: FedWork, place: Path, addresses: list[str]) -> None:
    # Not ``import ray``: its own types do not know what its decorator adds to a class.
    ray: Any = import_module("ray")
    affinity: Any = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    ray.init(address=f"{addresses[0]}:{PORT}", _node_ip_address=addresses[0], log_to_driver=False)
    import_module("ray.data").DataContext.get_current().enable_progress_bars = False

    class Trainer:
        def train(self, rows: Any, log: str) -> None:
            taken = TrainerLog(Path(log))
            for _ in range(work.epochs):
                for batch in rows.iter_batches(
                    batch_size=work.batch,
                    batch_format="numpy",
                    prefetch_batches=4,
                    local_shuffle_buffer_size=4 * work.batch,
                ):
                    taken.taken(batch["image"], batch["number"])

    placed: Any = ray.remote(num_cpus=0)(Trainer)
    items = [{"path": path, "number": number} for number, path in enumerate(work.paths())]
    rows = ray.data.from_items(items, override_num_blocks=-(-len(items) // BLOCK))
    rows = rows.map(reader(work))
    if work.kind == "cached":
        rows = rows.materialize()
    split = rows.randomize_block_order().streaming_split(work.world, equal=False)
    node_of = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    trainers = [
        placed.options(scheduling_strategy=affinity(node_of[address], soft=False)).remote()
        for address in addresses
    ]
    ray.get(
        [
            trainer.train.remote(rows, str(place / f"host-{rank}" / "log"))
            for rank, (trainer, rows) in enumerate(zip(trainers, split, strict=True))
        ]
    )


if __name__ == "__main__":
    die_with_parent()
    drive(FedWork.from_json(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
