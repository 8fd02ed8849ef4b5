"""A trainer with Penstock: ``cluster="auto"``, as a user's script has it."""

from __future__ import annotations

import sys
from pathlib import Path

import penstock as ps
from benchmarks.cluster.work import CutFiles
from benchmarks.fed.work import FedWork, TrainerLog
from benchmarks.harness.processes import die_with_parent


def train(work: FedWork, rank: int, log: TrainerLog) -> None:
    if work.kind == "decoded":
        pipeline = (
            ps.from_files(work.paths(), labels=list(range(work.samples)))
            .map(ps.image.decode())
            .map(ps.image.random_resized_crop(224))
            .map(ps.image.random_flip())
        )
    else:
        pipeline = ps.Pipeline(CutFiles(work.paths(), work.size)).cache(work.cache)
    loader = pipeline.batch(work.batch).loader(rank=rank, world=work.world, seed=0, cluster="auto")
    with loader:
        for _ in range(work.epochs):
            for images, numbers in loader:
                log.taken(images, numbers)


if __name__ == "__main__":
    die_with_parent()
    train(FedWork.from_json(sys.argv[1]), int(sys.argv[2]), TrainerLog(Path(sys.argv[3]) / "log"))
