"""Trains with Ray Train: several workers, whose loaders share one cache.

    RAY_AUTH_MODE=token python examples/ray_train.py --data photos/train

The data is a folder of classes, each a folder of JPEGs, which all machines see under this path. The
example connects to the Ray cluster of ``RAY_ADDRESS``, or starts one on this machine. It prints how
many samples all ranks together had in each epoch: every sample once, if the workers divide the data
evenly.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import penstock as ps


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = ps.from_folder(settings["data"]).cache("1GB").map(ps.image.decode())
    data = data.map(ps.image.random_resized_crop(64)).batch(settings["batch"])
    # In a worker of Ray, "auto" means the machines of Ray, which places a node on each of them.
    with data.loader(seed=0, rank=rank, world=world, cluster="auto") as loader:
        for epoch in range(settings["epochs"]):
            seen = torch.zeros(1, dtype=torch.int64)
            for _images, labels in loader:
                seen += len(labels)  # the training step comes here
            torch.distributed.all_reduce(seen)
            if rank == 0:
                print(f"epoch {epoch}: {int(seen)} samples on {world} ranks", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of classes of JPEGs")
    parser.add_argument("--workers", type=int, default=2, help="workers of Ray Train (2)")
    parser.add_argument("--batch", type=int, default=8, help="samples in a batch (8)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs (2)")
    options = parser.parse_args()
    settings = {"data": options.data, "batch": options.batch, "epochs": options.epochs}
    scaling = ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=settings, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
