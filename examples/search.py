"""Searches hyper-parameters with Optuna: several trials at a time share one data preparation.

    python examples/search.py --data CIFAR10.parquet --share search-1
    python examples/search.py --data CIFAR10.parquet --compare

The data is a Parquet file with a column ``image`` (the bytes of image files) and a column
``label``. Four jobs, each in its own process, work on one study in a file. With ``--share`` each
batch is prepared once for all jobs. ``--compare`` runs the search without and with sharing, and
prints the time of both. Both have the same results: parameters are drawn from the seed before the
first trial, and the batches of a trial depend on the seed only.
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
from typing import Any, Literal

import numpy as np
import optuna
import torch
from numpy.typing import NDArray
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

import penstock as ps
import penstock.torch
from penstock.node.client import request_status

SIDE = 32


@dataclass(frozen=True)
class Subset:
    """An order over some rows of the file; those for training are shuffled every epoch."""

    rows: int
    test: bool = False

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        train, test = np.split(np.random.default_rng(seed).permutation(n), [n * 4 // 5])
        if self.test:
            return test[: self.rows // 5]
        return np.random.default_rng((seed, epoch)).permutation(train[: self.rows])


def make_pipeline(data: Path, batch: int, *, augment: bool) -> ps.Pipeline:
    """A pipeline from the bytes of image files to batches of uint8 pixels."""
    pipeline = ps.from_parquet(data, columns=["image", "label"]).map(ps.image.decode())
    if augment:
        pipeline = (
            pipeline.map(ps.image.random_crop(SIDE, padding=4))
            .map(ps.image.random_flip())
            .map(ps.image.rand_augment(2, 9))
        )
    return pipeline.batch(batch)


def pixels(batch: Any) -> torch.Tensor:
    """The images as floats for the network. Shared batches are uint8, a quarter of the size."""
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


def accuracy(model: nn.Module, test: ps.Pipeline, args: argparse.Namespace) -> float:
    """The share of test images that are classified correctly."""
    model.eval()
    correct = total = 0
    order = Subset(args.rows, test=True)
    with (
        torch.no_grad(),
        penstock.torch.loader(test, workers=0, order=order, seed=args.seed) as loader,
    ):
        for batch in loader:
            correct += int((model(pixels(batch)).argmax(1) == batch["label"]).sum())
            total += len(batch["label"])
    return correct / total


def draw_parameters(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The parameters of all trials.

    Optuna's samplers look at the trials that have ended, so with several jobs their result would
    depend on timing.
    """
    rng = np.random.default_rng(args.seed)
    return [
        {
            "rate": float(10 ** rng.uniform(-3.5, -1.5)),
            "decay": float(10 ** rng.uniform(-5, -2)),
            "width": int(rng.choice([8, 12])),
        }
        for _ in range(args.trials)
    ]


def train(trial: optuna.Trial, data: ps.Pipeline, args: argparse.Namespace) -> nn.Module:
    """Train a network with this trial's parameters."""
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    decay = trial.suggest_float("decay", 1e-6, 1e-1, log=True)
    torch.manual_seed(args.seed)
    model = network(trial.suggest_int("width", 4, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    join: Literal["live", "start"] = "live" if args.share is None else "start"
    with penstock.torch.loader(
        data, order=Subset(args.rows), seed=args.seed, share=args.share, join=join
    ) as loader:
        for _ in range(args.epochs):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(pixels(batch)), batch["label"].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model


def storage(study: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(study)))


def run_job(args: argparse.Namespace) -> None:
    """Run this job's share of the trials of an existing study."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = make_pipeline(args.data, args.batch, augment=True)
    test = make_pipeline(args.data, 256, augment=False)
    study = optuna.load_study(study_name="search", storage=storage(args.study))
    study.optimize(lambda trial: accuracy(train(trial, data, args), test, args), n_trials=args.work)


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search, and its time in seconds; ``cpu`` is that of the jobs and the node."""

    parameters: list[dict[str, Any]]
    accuracies: list[float]
    wall: float
    cpu: float


def search(args: argparse.Namespace, share: str | None) -> SearchResult:
    """Start the jobs, wait for them, and collect their results."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "study.log"
        study = optuna.create_study(
            study_name="search", storage=storage(journal), direction="maximize"
        )
        for parameters in draw_parameters(args):
            study.enqueue_trial(parameters)
        command = [sys.executable, __file__, "--study", str(journal), "--data", str(args.data)]
        for name in ("rows", "epochs", "batch", "seed"):
            command += [f"--{name}", str(getattr(args, name))]
        if share is not None:
            command += ["--share", share]
        before, spent, started = request_status(), children_cpu(), time.perf_counter()
        parts = np.array_split(np.arange(args.trials), args.jobs)
        jobs = [subprocess.Popen([*command, "--work", str(len(part))]) for part in parts]
        failed = [job for job in jobs if job.wait()]
        if failed:
            sys.exit(f"{len(failed)} of {len(jobs)} jobs failed")
        wall, cpu = time.perf_counter() - started, children_cpu() - spent
        if share is not None:
            cpu += node_cpu(before)
        trials = study.trials
        values = [0.0 if trial.value is None else trial.value for trial in trials]
        return SearchResult([trial.params for trial in trials], values, wall, cpu)


def children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def node_cpu(before: dict[str, Any] | None) -> float:
    """CPU seconds of the node since ``before``; it is not a child process of this one."""
    now = request_status()
    if now is None:
        return 0.0
    same = before is not None and before["pid"] == now["pid"]
    return float(now["cpu"]) - (float(before["cpu"]) if before is not None and same else 0.0)


def main(arguments: list[str] | None = None) -> list[SearchResult]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a Parquet file")
    parser.add_argument("--share", metavar="NAME", help="prepare each batch once for all jobs")
    parser.add_argument("--compare", action="store_true", help="search without and with sharing")
    parser.add_argument("--jobs", type=int, default=4, help="trials at a time")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rows", type=int, default=12_000, help="images in an epoch")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each trial")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)  # run as a job of this study
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)  # trials of this job
    args = parser.parse_args(arguments)
    if args.study is not None:
        run_job(args)
        return []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    results = []
    for share in [None, args.share or "search"] if args.compare else [args.share]:
        results.append(search(args, share))
        print(f"{'alone' if share is None else f'share={share}':16} {summary(results[-1])}")
    if args.compare:
        alone, shared = results
        same = (alone.parameters, alone.accuracies) == (shared.parameters, shared.accuracies)
        print(
            f"with share {alone.wall / shared.wall:.2f} times as fast, for "
            f"{shared.cpu / alone.cpu:.0%} of the CPU time; "
            f"{'every trial has the same result' if same else 'THE RESULTS DIFFER'}"
        )
    return results


def summary(result: SearchResult) -> str:
    best = int(np.argmax(result.accuracies))
    chosen = ", ".join(f"{name} {x:.3g}" for name, x in sorted(result.parameters[best].items()))
    return (
        f"wall {result.wall:6.1f} s, CPU {result.cpu:6.1f} s; best is trial {best}, "
        f"{result.accuracies[best]:.2%} correct with {chosen}"
    )


if __name__ == "__main__":
    main()
