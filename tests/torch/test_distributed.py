"""Rank and world size come from torch.distributed; all ranks together see each sample once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.utils.data import TensorDataset
from penstock.torch import DataLoader

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(rank)  # seeds of ranks may differ
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True)
print(json.dumps([[x for (batch,) in loader for x in batch.tolist()] for _ in range(2)]))
loader.close()
dist.destroy_process_group()
"""


def test_without_a_sampler_ranks_take_disjoint_parts(tmp_path: Path) -> None:
    world = 2
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(world), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    parts = [json.loads(process.communicate(timeout=150)[0]) for process in processes]
    for epoch in range(2):
        seen = [x for part in parts for x in part[epoch]]
        assert sorted(seen) == list(range(40))
        assert len(parts[0][epoch]) == 20
    assert parts[0][0] != parts[0][1]
