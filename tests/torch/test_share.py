"""``share`` in the drop-in: jobs get the batches each would get alone, prepared only once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import penstock.torch
from penstock.errors import PipelineError
from penstock.node.member import DEPTH
from penstock.torch import DataLoader
from tests.node.conftest import own_node, service_here
from tests.support.members import WarmJob, group, jobs, prepared_once
from tests.support.warm import start
from tests.torch.noisy import Noisy


@pytest.fixture(scope="module", autouse=True)
def frugal_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One node with one worker for all tests, in this process: each process imports torch.

    For the same reason it loads no pipeline on trial, which takes a process for each group. Each
    test has groups with names of its own: a group may outlive its test for a moment.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        own_node(tmp_path_factory.mktemp("node"), patch) as directory,
    ):
        patch.setattr("penstock.node.load.load_on_trial", lambda *_: None)
        with service_here(directory, workers=1, clock=time.monotonic):
            yield


def seen(loader: Any, epochs: int = 1) -> list[list[str]]:
    """A digest of every batch, epoch by epoch."""
    return [[digest(batch) for batch in loader] for _ in range(epochs)]


def digest(batch: Any) -> str:
    state = hashlib.sha256()

    def walk(value: Any) -> None:
        state.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            state.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value):
                state.update(key.encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for child in value:
                walk(child)
        else:
            state.update(repr(value).encode())

    walk(batch)
    return state.hexdigest()


JOB = """
import hashlib, json, sys
import torch
from torch.utils.data import Dataset
from penstock.torch import DataLoader

class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(8, 8) + index, index

share, epochs = sys.argv[1] or None, int(sys.argv[2])
print(json.dumps("ready"), flush=True)
input()
with DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, share=share) as loader:
    for epoch in range(epochs):
        batches = []
        for x, index in loader:
            batches.append([index.tolist(), hashlib.sha256(x.numpy().tobytes()).hexdigest()])
            x.zero_()  # the batch is a copy of this job, so no other job may see this
        print(json.dumps(batches), flush=True)
    input()
"""


def test_two_jobs_see_what_one_sees_alone_and_each_batch_is_prepared_once() -> None:
    names = ["", "two jobs", "two jobs"]
    with jobs(*(WarmJob(JOB, name, 2) for name in names)) as started:
        for job in started:
            assert job.read() == "ready"
        for job in started:
            job.go()
        alone, *shared = ([job.read() for _ in range(2)] for job in started)
        assert shared == [alone, alone]
        for epoch in alone:
            assert sorted(i for indices, _ in epoch for i in indices) == list(range(40))
        assert len(group("two jobs")["members"]) == 2
        assert prepared_once("two jobs", 20)
        assert group("two jobs")["given"] >= 40


WAYS: dict[str, dict[str, Any]] = {
    "echo": {"shuffle": True, "echo": 2, "echo_at": "batch"},
    "drop_last": {
        "shuffle": True,
        "drop_last": True,
        "num_workers": 2,
        "on_error": "skip",
        "timeout": 60,
        "prefetch_factor": 2,
    },
    "no batches": {"batch_size": None},
    "collate_fn": {"collate_fn": len},
}


def test_a_shared_loader_delivers_what_the_same_one_delivers_alone() -> None:
    ways = {name: {"batch_size": 5, "seed": 1, **way} for name, way in WAYS.items()}
    for name, way in ways.items():
        with DataLoader(Noisy(), **way) as loader:
            expected = seen(loader, 2)
        with DataLoader(Noisy(), **way, share=name, lag="wait") as loader:
            assert seen(loader, 2) == expected, name
            assert len(loader) == len(expected[0])


def test_jobs_share_the_batches_of_a_sampler() -> None:
    data = TensorDataset(torch.arange(30), torch.arange(30.0))
    weighted: dict[str, Any] = {
        "sampler": WeightedRandomSampler([1.0] * 30, 18),
        "batch_size": 4,
    }
    batches: dict[str, Any] = {
        "batch_sampler": BatchSampler(SequentialSampler(data), 7, drop_last=False)
    }
    for name, how in (("weighted", weighted), ("batches", batches)):
        with DataLoader(data, seed=2, **how) as loader:
            expected = seen(loader)
        with (
            DataLoader(data, seed=2, share=name, **how) as one,
            DataLoader(data, seed=2, share=name, **how) as other,
        ):
            pairs = [(digest(a), digest(b)) for a, b in zip(one, other, strict=True)]
            assert pairs == [(x, x) for x in expected[0]]
            assert prepared_once(name, len(pairs))


def test_a_job_that_changes_its_tensors_changes_nothing_for_the_others() -> None:
    data = TensorDataset(torch.arange(40.0))
    expected = [[4.0 * b + i for i in range(4)] for b in range(10)]
    with (
        DataLoader(data, batch_size=4, share="changed tensors") as one,
        DataLoader(data, batch_size=4, share="changed tensors") as other,
    ):
        kept = []
        for (mine,), (theirs,), plain in zip(one, other, expected, strict=True):
            kept.append(mine)
            mine += 1000
            assert theirs.tolist() == plain
            theirs.zero_()
        for mine, plain in zip(kept, expected, strict=True):
            assert mine.tolist() == [x + 1000 for x in plain]
        # The next epoch uses the same slots, and overwrites what the jobs wrote there.
        assert [theirs.tolist() for (theirs,) in other] == expected


def test_jobs_with_different_numbers_of_workers_share() -> None:
    data = TensorDataset(torch.arange(12))
    with (
        DataLoader(data, batch_size=4, share="different workers", num_workers=0, timeout=60) as one,
        DataLoader(data, batch_size=4, share="different workers", num_workers="auto") as other,
    ):
        assert [(a.tolist(), b.tolist()) for (a,), (b,) in zip(one, other, strict=True)] == [
            ([i, i + 1, i + 2, i + 3],) * 2 for i in (0, 4, 8)
        ]
        assert prepared_once("different workers", 3)


def test_a_group_has_one_cache() -> None:
    data = [(np.full(4, i, np.float32), i) for i in range(12)]
    options: dict[str, Any] = {"batch_size": 4, "seed": 0, "share": "one cache", "cache": "1MB"}
    with DataLoader(data, **options) as one, DataLoader(data, **options) as other:
        for _ in range(2):
            assert [digest(a) == digest(b) for a, b in zip(one, other, strict=True)] == [True] * 3
        (cache,) = group("one cache")["caches"]
        assert (cache["samples"], cache["misses"]) == (12, 12)
        assert cache["hits"] >= 12


def test_a_checkpoint_can_be_resumed_with_and_without_share() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    with DataLoader(Noisy(), **options) as loader:
        (expected,) = seen(loader)
    for before, after in (("checkpoint", None), (None, "checkpoint")):
        with DataLoader(Noisy(), share=before, **options) as loader:
            epoch = iter(loader)
            begun = [digest(next(epoch)) for _ in range(2)]
            state = loader.state_dict()
        with DataLoader(Noisy(), share=after, **options) as loader:
            loader.load_state_dict(state)
            assert begun + seen(loader)[0] == expected


def test_penstock_torch_loader_takes_share_too() -> None:
    pipeline = penstock.from_dataset(np.arange(12.0)).batch(4)
    with penstock.torch.loader(pipeline, share="pipeline", seed=0) as loader:
        batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert sorted(torch.cat(batches).tolist()) == list(range(12))


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (Stream(), {}, "share='search' on an IterableDataset: its samples have no index"),
        ([1, 2], {"worker_init_fn": print}, "worker_init_fn with share='search': the workers"),
        ([1, 2], {"in_order": False}, "in_order=False with share='search'"),
        ([1, 2], {"lag": "hurry"}, "lag is 'hurry'; give one of 'detach', 'wait'"),
        ([1, 2], {"join": "late"}, "join is 'late'; give one of 'live', 'start'"),
        ([1, 2], {"echo": "auto", "echo_at": "batch"}, "share='search' with \"auto\""),
    ],
    ids=["stream", "worker_init_fn", "in_order", "lag", "join", "auto"],
)
def test_what_cannot_be_shared_is_refused(dataset: Any, options: Any, why: str) -> None:
    with pytest.raises(PipelineError, match="^(DataLoader: )?" + why):
        DataLoader(dataset, share="search", **options)


@pytest.mark.parametrize(
    ("scale", "seed", "differs"),
    [(1.0, 2, "seed was 1 and is 2"), (2.0, 1, "the data is not the same")],
    ids=["seed", "data"],
)
def test_a_job_with_another_seed_or_dataset_is_refused(
    scale: float, seed: int, differs: str
) -> None:
    with (
        DataLoader(Noisy(), share=differs, seed=1) as one,
        DataLoader(Noisy(scale=scale), share=differs, seed=seed) as other,
    ):
        next(iter(one))
        with pytest.raises(PipelineError, match=differs):
            next(iter(other))


def test_a_dataset_changed_after_the_first_epoch_causes_a_warning() -> None:
    data = Noisy()
    with DataLoader(data, batch_size=8, share="changed dataset", seed=1) as loader:
        before = seen(loader, 2)
        data.scale = 3.0
        with pytest.warns(UserWarning, match="dataset was changed after the first epoch"):
            seen(loader)
        assert seen(loader) != before[:1]  # warns only once: a warning is an error in tests
    data = Noisy()
    with DataLoader(data, share="persistent workers", seed=1, persistent_workers=True) as loader:
        next(iter(loader))
        data.scale = 3.0
        next(iter(loader))


RANK = """
import json, os, sys
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset
from penstock.torch import DataLoader
from penstock.node.client import request_status

torch.manual_seed(int(os.environ["RANK"]))  # seeds of ranks may differ
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store",
    rank=int(os.environ["RANK"]), world_size=2)
data = TensorDataset(torch.arange(40))
results = {}
ways = {"plain": {"shuffle": True}, "sampler": {"sampler": DistributedSampler(data)}}
for name, how in ways.items():
    with DataLoader(data, batch_size=4, share=name, seed=1, **how) as loader:
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            epochs.append([x for (batch,) in loader for x in batch.tolist()])
        dist.barrier()  # no rank leaves the group before all ranks have read its status
        (group,) = [group for group in request_status()["groups"] if group["name"] == name]
        dist.barrier()
    results[name] = {
        "epochs": epochs,
        "prepared": group["prepared"],
        "parts": sorted(member["part"] for member in group["members"]),
    }
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(results, file)
dist.destroy_process_group()
"""


def start_rank(script: Path, rank: int, world: int) -> ForkServerProcess:
    """Start a rank with the environment that torchrun gives it."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        # Otherwise a rank may leave while another one still connects to it.
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    place = script.parent
    return start(script, [str(place)], {**os.environ, **variables}, place / f"errors-{rank}")


def test_ranks_take_disjoint_parts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK)
    processes = [start_rank(script, rank, 2) for rank in range(2)]
    for process in processes:
        process.join(500)
    errors = "\n".join((tmp_path / f"errors-{rank}").read_text() for rank in range(2))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0], errors
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for how in ("plain", "sampler"):
        ranks = [result[how] for result in results]
        for epoch in range(2):
            parts = [rank["epochs"][epoch] for rank in ranks]
            assert Counter(parts[0] + parts[1]) == Counter(range(40))
            assert len(parts[0]) == len(parts[1]) == 20
        # Each batch was prepared once, for its rank; so were a few batches of the next epoch.
        assert 20 <= ranks[0]["prepared"] <= 20 + 2 * DEPTH
    assert results[0]["plain"]["parts"] == ["0/2 x 4", "1/2 x 4"]
