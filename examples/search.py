"""Searches hyper-parameters with Optuna, several trials at a time, all fed by one preparation.

    python examples/search.py --data CIFAR10.parquet --share search-1
    python examples/search.py --data CIFAR10.parquet --compare

The data is a Parquet file with a column ``image`` (the bytes of image files) and a column
``label``. Four jobs, each a process of its own, work on one study in a file; with ``--share`` they
have their batches prepared once for all. ``--compare`` runs the search without and with it, and
shows what both cost. Both find the same: parameters are drawn from the seed before the first
trial, and the batches of a trial depend on the seed alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from numpy.typing import NDArray
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

import penstock as ps
import penstock.torch
from penstock.node.look import look

SIDE = 32


@dataclass(frozen=True)
class Part:
    """An order that deals some rows of the file: for training, in a new sequence every epoch."""

    rows: int
    test: bool = False

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        train, test = np.split(np.random.default_rng(seed).permutation(n), [n * 4 // 5])
        if self.test:
            return test[: self.rows // 5]
        return np.random.default_rng((seed, epoch)).permutation(train[: self.rows])


def road(data: Path, batch: int, *, augment: bool) -> ps.Pipeline:
    """From bytes to pixels."""
    pipeline = ps.from_parquet(data, columns=["image", "label"]).map(ps.image.decode())
    if augment:
        pipeline = (
            pipeline.map(ps.image.random_crop(SIDE, padding=4))
            .map(ps.image.random_flip())
            .map(ps.image.rand_augment(2, 9))
        )
    return pipeline.batch(batch)


def pixels(batch: Any) -> torch.Tensor:
    """What a network sees. Batches are kept and shared as bytes, a quarter of this."""
    return batch["image"].permute(0, 3, 1, 2).float() / 127.5 - 1


def network(width: int, classes: int = 10) -> nn.Module:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *block(3, width),
        *block(width, 2 * width),
        *block(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(4 * width * (SIDE // 8) ** 2, classes),
    )


def accuracy(model: nn.Module, test: ps.Pipeline, given: argparse.Namespace) -> float:
    """The share of test images that are told right."""
    model.eval()
    right = seen = 0
    order = Part(given.rows, test=True)
    with (
        torch.no_grad(),
        penstock.torch.loader(test, workers=0, order=order, seed=given.seed) as loader,
    ):
        for batch in loader:
            right += int((model(pixels(batch)).argmax(1) == batch["label"]).sum())
            seen += len(batch["label"])
    return right / seen


def drawn(given: argparse.Namespace) -> list[dict[str, Any]]:
    """What the trials try. A sampler would ask which trials have ended, and that is a race."""
    rng = np.random.default_rng(given.seed)
    return [
        {
            "rate": float(10 ** rng.uniform(-3.5, -1.5)),
            "decay": float(10 ** rng.uniform(-5, -2)),
            "width": int(rng.choice([8, 12])),
        }
        for _ in range(given.trials)
    ]


def train(trial: optuna.Trial, data: ps.Pipeline, given: argparse.Namespace) -> nn.Module:
    """A network of this trial's parameters, trained."""
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    decay = trial.suggest_float("decay", 1e-6, 1e-1, log=True)
    torch.manual_seed(given.seed)
    model = network(trial.suggest_int("width", 4, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    with penstock.torch.loader(
        data, order=Part(given.rows), seed=given.seed, share=given.share, join="start"
    ) as loader:
        for _ in range(given.epochs):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(pixels(batch)), batch["label"].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model


def storage(study: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(study)))


def work(given: argparse.Namespace) -> None:
    """One job: its part of the trials of a study that is there already."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = road(given.data, given.batch, augment=True)
    test = road(given.data, 256, augment=False)
    study = optuna.load_study(study_name="search", storage=storage(given.study))
    study.optimize(
        lambda trial: accuracy(train(trial, data, given), test, given), n_trials=given.work
    )


@dataclass(frozen=True)
class Found:
    """What a search came to, and what it cost. ``cpu`` is that of the jobs and of the node."""

    parameters: list[dict[str, Any]]
    accuracies: list[float]
    wall: float
    cpu: float


def search(given: argparse.Namespace, share: str | None) -> Found:
    """Start the jobs, wait for them, and see what they found."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "study.log"
        study = optuna.create_study(
            study_name="search", storage=storage(journal), direction="maximize"
        )
        for parameters in drawn(given):
            study.enqueue_trial(parameters)
        command = [sys.executable, __file__, "--study", str(journal), "--data", str(given.data)]
        for name in ("rows", "epochs", "batch", "seed"):
            command += [f"--{name}", str(getattr(given, name))]
        if share is not None:
            command += ["--share", share]
        before, spent, started = look(), children_cpu(), time.perf_counter()
        parts = np.array_split(np.arange(given.trials), given.jobs)
        jobs = [subprocess.Popen([*command, "--work", str(len(part))]) for part in parts]
        failed = [job for job in jobs if job.wait()]
        if failed:
            sys.exit(f"{len(failed)} of {len(jobs)} jobs have failed")
        wall, cpu = time.perf_counter() - started, children_cpu() - spent
        if share is not None:
            cpu += node_cpu(before)
        trials = study.trials
        values = [0.0 if trial.value is None else trial.value for trial in trials]
        return Found([trial.params for trial in trials], values, wall, cpu)


def children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def node_cpu(before: dict[str, Any] | None) -> float:
    """Seconds that the node, which is nobody's child, has spent since."""
    now = look()
    if now is None:
        return 0.0
    same = before is not None and before["pid"] == now["pid"]
    return float(now["cpu"]) - (float(before["cpu"]) if before is not None and same else 0.0)


def main(arguments: list[str] | None = None) -> list[Found]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a Parquet file")
    parser.add_argument("--share", metavar="NAME", help="prepare once for all jobs")
    parser.add_argument("--compare", action="store_true", help="search without and with share")
    parser.add_argument("--jobs", type=int, default=4, help="trials at a time")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rows", type=int, default=12_000, help="images of an epoch")
    parser.add_argument("--epochs", type=int, default=4, help="of each trial")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)  # be one of its jobs
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)  # so many trials of it
    given = parser.parse_args(arguments)
    if given.study is not None:
        work(given)
        return []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = []
    for share in [None, given.share or "search"] if given.compare else [given.share]:
        found.append(search(given, share))
        print(f"{'alone' if share is None else f'share={share}':16} {told(found[-1])}")
    if given.compare:
        alone, shared = found
        same = (alone.parameters, alone.accuracies) == (shared.parameters, shared.accuracies)
        print(
            f"with share {alone.wall / shared.wall:.2f} times as fast, for "
            f"{shared.cpu / alone.cpu:.0%} of the CPU time; "
            f"{'every trial came to the same' if same else 'TRIALS CAME TO SOMETHING ELSE'}"
        )
    return found


def told(found: Found) -> str:
    best = int(np.argmax(found.accuracies))
    chosen = ", ".join(f"{name} {x:.3g}" for name, x in sorted(found.parameters[best].items()))
    return (
        f"wall {found.wall:6.1f} s, CPU {found.cpu:6.1f} s; best is trial {best}, "
        f"{found.accuracies[best]:.2%} right with {chosen}"
    )


if __name__ == "__main__":
    main()
