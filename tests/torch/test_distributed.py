"""Ranks get disjoint parts, whenever the process group is initialised; each sample comes once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.ports import free_port
from tests.support.torchvision import customization
from tests.support.warm import start

SAMPLES = 40

START = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader
import penstock as ps
import penstock.torch
from penstock.torch import DataLoader

torch.set_num_threads(1)
rank, world, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
data = TensorDataset(torch.arange(40))
torch.manual_seed(rank)  # seeds of ranks may differ

def initialise():
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

def epochs(loader, count=2):
    flat = lambda batch: (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()
    return [[int(x) for batch in loader for x in flat(batch)] for _ in range(count)]

def report(found):
    with open(out, "w") as file:
        json.dump(found, file)
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what a launcher of these tests may have set.

    Without the barrier, a rank that has finished may leave while another one is still connecting
    to it, whose ``init_process_group`` then fails.
    """
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "SLURM_", "OMPI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DIST_INIT_BARRIER": "1"}
    return {**kept, "PYTHONPATH": path, **own, **more}


def run_ranks(script: str, place: Path, *, launched: bool = False, world: int = 2) -> list[Any]:
    """What each rank reports. ``launched``: the environment is that of torchrun."""
    program = place / "script.py"
    program.write_text(START + script)
    ranks = []
    for rank in range(world):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world)} if launched else {}
        words = [str(rank), str(world), str(place / "store"), str(place / f"out-{rank}")]
        ranks.append((words, clean_environment(**variables)))
    run_all(program, ranks, place)
    return [json.loads((place / f"out-{rank}").read_text()) for rank in range(world)]


def run_all(program: Path, ranks: list[tuple[list[str], dict[str, str]]], place: Path) -> None:
    """Run a program once for each of these arguments and environments, at the same time."""
    logs = [place / f"errors-{rank}" for rank in range(len(ranks))]
    processes = [start(program, *rank, log) for rank, log in zip(ranks, logs, strict=True)]
    try:
        for process in processes:
            process.join(500)
        errors = "\n".join(log.read_text() for log in logs)
        assert [process.exitcode for process in processes] == [0] * len(ranks), errors
    finally:
        for process in processes:
            process.kill()


def assert_disjoint(parts: list[list[list[int]]]) -> None:
    for dealt in zip(*parts, strict=True):
        assert sorted(x for part in dealt for x in part) == list(range(SAMPLES))
        assert len({len(part) for part in dealt}) == 1
    assert parts[0][0] != parts[0][1]


def test_without_a_sampler_ranks_take_disjoint_parts(tmp_path: Path) -> None:
    script = """
initialise()
loader = DataLoader(data, batch_size=4, shuffle=True)
report(epochs(loader))
loader.close()
"""
    assert_disjoint(run_ranks(script, tmp_path))


LATE = """
if kind == "drop-in":
    loader = DataLoader(data, batch_size=4, shuffle=True)
else:
    loader = penstock.torch.loader(ps.from_dataset(np.arange(40)).batch(4), workers=0)
before = repr(loader)
state = loader.state_dict()
initialise()
loader.load_state_dict(state)
found = {"length": len(loader), "epochs": epochs(loader)}
report({**found, "before": before, "after": repr(loader)})
loader.close()
"""


@pytest.mark.parametrize("kind", ["drop-in", "pipeline"])
def test_a_loader_made_before_the_process_group_takes_its_part(kind: str, tmp_path: Path) -> None:
    found = run_ranks(f"kind = {kind!r}\n{LATE}", tmp_path)
    assert_disjoint([rank["epochs"] for rank in found])
    for rank, report in enumerate(found):
        assert "rank not known yet" in report["before"]
        assert f"rank {rank} of 2" in report["after"]
        assert report["length"] == 5


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_and_length_are_those_of_torch_with_a_distributed_sampler(
    shuffle: bool, tmp_path: Path
) -> None:
    script = f"""
shuffle = {shuffle}
found = {{}}
data = TensorDataset(torch.arange(41))
own = DataLoader(data, batch_size=4, shuffle=shuffle)
initialise()
found["own"] = [len(own), *epochs(own)]
for name, kind in (("torch", TorchDataLoader), ("drop-in", DataLoader)):
    sampler = DistributedSampler(data, shuffle=shuffle)
    loader = kind(data, batch_size=4, sampler=sampler)
    found[name] = [len(loader), *epochs(loader)]
report(found)
own.close(), loader.close()
"""
    parts = run_ranks(script, tmp_path)
    for rank in parts:
        assert rank["torch"] == rank["drop-in"]
        assert rank["own"][0] == rank["torch"][0]
        assert [len(e) for e in rank["own"][1:]] == [len(e) for e in rank["torch"][1:]]
    for epoch in (1, 2):
        seen = [[x for rank in parts for x in rank[kind][epoch]] for kind in ("own", "torch")]
        assert [(len(all_of), set(all_of)) for all_of in seen] == [(42, set(range(41)))] * 2


def test_under_a_launcher_ranks_take_their_part_without_a_process_group(tmp_path: Path) -> None:
    script = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader = penstock.torch.loader(ps.from_dataset(np.arange(40)).batch(4), workers=0)
    length = len(loader)
    quiet = len(caught)
    found = epochs(loader)
    said = [str(w.message) for w in caught]
loader.close()
with DataLoader(data, batch_size=4, shuffle=True, seed=1, rank=0, world=1) as loader:
    everything = epochs(loader, 1)
report({"epochs": found, "length": length, "quiet": quiet, "said": said, "all": everything})
"""
    found = run_ranks(script, tmp_path, launched=True)
    assert_disjoint([rank["epochs"] for rank in found])
    for number, rank in enumerate(found):
        assert (rank["length"], rank["quiet"]) == (5, 0)
        (said,) = rank["said"]
        assert f"RANK={number}, WORLD_SIZE=2" in said
        assert sorted(rank["all"][0]) == list(range(SAMPLES))


def test_a_loader_used_before_the_process_group_takes_its_part_at_the_next_epoch(
    tmp_path: Path,
) -> None:
    script = """
with DataLoader(data, batch_size=4, shuffle=True) as loader:
    alone = [len(loader), *epochs(loader, 1)]
    initialise()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epoch = iter(loader)
        part = [int(x) for _ in range(2) for x in next(epoch)[0].tolist()]
        state = loader.state_dict()
        part += [int(x) for (batch,) in epoch for x in batch.tolist()]
        together = [part, *epochs(loader, 1)]
        said = [str(w.message) for w in caught]
    length, position = len(loader), loader._loader.epoch
with DataLoader(data, batch_size=4, shuffle=True) as resumed:
    resumed.load_state_dict(state)
    rest = epochs(resumed, 1)[0]
report({"alone": alone, "epochs": together, "said": said, "length": length,
        "position": position, "dealing": state["dealing"], "rest": rest})
"""
    found = run_ranks(script, tmp_path)
    assert_disjoint([rank["epochs"] for rank in found])
    for number, rank in enumerate(found):
        length, first = rank["alone"]
        assert (length, sorted(first)) == (10, list(range(SAMPLES)))
        (said,) = rank["said"]
        assert f"used as rank 0 of 1, and this process is now rank {number} of 2" in said
        assert (rank["length"], rank["position"], rank["dealing"]["world"]) == (5, 3, 2)
        assert rank["rest"] == rank["epochs"][0][8:]


def test_ranks_that_share_batches_attach_with_their_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "runtime"))
    script = """
pipeline = ps.from_dataset(np.arange(40)).batch(4)
loader = penstock.torch.loader(pipeline, seed=3, share="ranks", join="start")
initialise()
report(epochs(loader))
loader.close()
"""
    try:
        assert_disjoint(run_ranks(script, tmp_path))
    finally:
        stop = [sys.executable, "-m", "penstock", "stop", "--now"]
        subprocess.run(stop, env=clean_environment(), check=True, capture_output=True)


# Trainers. Their scripts make the loaders first, as most scripts do.

LIGHTNING = """
import json, os, sys, warnings
import lightning, torch
from penstock.torch import DataLoader

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = [[], []]

    def training_step(self, batch, _):
        self.seen[self.current_epoch] += [int(x) for x in batch[0].flatten().tolist()]
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = Model()
    trainer = lightning.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, loader)
    used = trainer.train_dataloader
    assert type(used) is DataLoader and used is not loader, used
    assert type(used.sampler) is torch.utils.data.DistributedSampler, used.sampler
    assert used.stats().batches == 10, used.stats()
    with open(f"{sys.argv[1]}-{trainer.global_rank}", "w") as file:
        json.dump(model.seen, file)
    loader.close()
"""

ACCELERATE = """
import json, os, sys, warnings
import torch
from accelerate import Accelerator
from penstock.torch import DataLoader

warnings.simplefilter("ignore")
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.arange(40))
loader = DataLoader(data, batch_size=4, shuffle=True)
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(loader)
seen = [[x for (batch,) in loader for x in batch.tolist()] for _ in range(2)]
assert loader.stats().batches == 10, loader.stats()
checked = accelerator.prepare(DataLoader(list(range(21)), batch_size=4))
gathered = [x for batch in checked for x in accelerator.gather_for_metrics(batch).tolist()]
assert sorted(gathered) == list(range(21)), gathered
with open(f"{sys.argv[1]}-{accelerator.process_index}", "w") as file:
    json.dump(seen, file)
loader.close()
accelerator.end_training()
"""


def place_for(script: str, library: str, place: Path) -> tuple[Path, Path, dict[str, str]]:
    """A program with this script, the stem of its output, and its environment."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program, out = place / "train.py", place / "seen"
    program.write_text(script)
    # Lightning imports torchvision if it is installed.
    (place / "sitecustomize.py").write_text(customization() or "")
    path = os.pathsep.join([str(place), clean_environment()["PYTHONPATH"]])
    return program, out, clean_environment(PYTHONPATH=path)


def seen_by_ranks(out: Path) -> list[Any]:
    return [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(2)]


def skip_without(library: str, variables: dict[str, str]) -> None:
    needed = [sys.executable, "-c", f"import {library}"]
    if subprocess.run(needed, env=variables, capture_output=True, check=False).returncode:
        pytest.skip(f"{library} cannot be imported here")


def test_lightning_gives_ranks_disjoint_parts(tmp_path: Path) -> None:
    program, out, variables = place_for(LIGHTNING, "lightning", tmp_path)
    # It starts the second rank itself.
    done = subprocess.run(
        [sys.executable, str(program), str(out)],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        timeout=500,
        check=False,
    )
    if done.returncode:
        skip_without("lightning", variables)
    assert done.returncode == 0, done.stderr.decode()
    assert_disjoint(seen_by_ranks(out))


def test_accelerate_gives_ranks_disjoint_parts(tmp_path: Path) -> None:
    program, out, variables = place_for(ACCELERATE, "accelerate", tmp_path)
    # What torchrun sets.
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        ([str(out)], {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    try:
        run_all(program, ranks, tmp_path)
    except AssertionError:
        skip_without("accelerate", variables)
        raise
    assert_disjoint(seen_by_ranks(out))
