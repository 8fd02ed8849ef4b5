"""A job of Ray Train with two workers; each writes the samples of every epoch to a file.

Arguments: number of samples, and a folder for the files, ``rank-0.json`` and ``rank-1.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import penstock as ps

EPOCHS = 2


def train(settings: dict[str, Any]) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = ps.from_dataset(np.arange(settings["samples"])).cache("1MB").batch(4)
    with data.loader(seed=1, rank=rank, world=world, cluster="auto") as loader:
        epochs = [[int(one) for batch in loader for one in batch] for _ in range(EPOCHS)]
    found = {"world": world, "epochs": epochs}
    Path(settings["place"], f"rank-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    settings = {"samples": int(sys.argv[1]), "place": sys.argv[2]}
    scaling = ScalingConfig(num_workers=2)
    run = RunConfig(storage_path=sys.argv[2])
    TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    main()
