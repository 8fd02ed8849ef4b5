"""PyTorch, JAX and NumPy in one group: all read the same batches, without a copy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from penstock.node.directory import NodeDirectory
from tests.support.members import Job, group, jobs, prepared_once

N, BATCH, EPOCHS = 48, 8, 2

ROAD = """
import numpy as np
import penstock as ps

def image(index, rng):
    return rng.integers(0, 256, (16, 16, 3), dtype=np.uint8), np.float32(index)

road = ps.from_dataset(np.arange(48)).map(image).batch(8)
"""

# Each script sets ``loader``, and ``read``, which returns a batch in the types of its framework and
# whether it uses the memory of the batch.
NUMPY = """
loader = road.loader(share="all", seed=1)

def read(batch):
    images, labels = batch
    return images, labels, True
"""

TORCH = """
import torch
import penstock.torch
loader = penstock.torch.loader(road, share="all", seed=1)

def read(batch):
    images, labels = batch
    assert isinstance(images, torch.Tensor)
    return images, labels, images.data_ptr() % 64 == 0
"""

JAX = """
import jax
loader = road.loader(share="all", seed=1)
double = jax.jit(lambda images: images * 2)

def read(batch):
    images, labels = (jax.dlpack.from_dlpack(one) for one in batch)
    same = images.unsafe_buffer_pointer() == batch[0].ctypes.data
    # Still running when the next batch is requested, as in a training loop. Not more than one: a
    # loop that keeps many batches gets copies.
    if results:
        results[-1][0].block_until_ready()
    results.append((double(images), batch[0].copy()))
    return images, labels, same
"""

LOOP = """
import hashlib, json, sys
import numpy as np
results = []
print(json.dumps("ready"), flush=True)
input()
with loader:
    for epoch in range(2):
        found = []
        for batch in loader:
            images, labels, same = read(batch)
            digest = hashlib.sha256(np.asarray(images).tobytes()).hexdigest()
            found.append([np.asarray(labels).tolist(), digest, bool(same)])
        print(json.dumps(found), flush=True)
    for doubled, plain in results:
        assert np.array_equal(np.asarray(doubled), plain * 2)
    print(json.dumps(len(results)), flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def road(node_directory: NodeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the module that all jobs import their pipeline from."""
    (tmp_path / "road.py").write_text(ROAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def require(*names: str) -> None:
    """Skip the test if a framework is not installed, without importing it."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_jobs_of_three_frameworks_share_one_preparation() -> None:
    require("torch", "jax")
    scripts = ["from road import road\n" + own + LOOP for own in (NUMPY, TORCH, JAX)]
    with jobs(*map(Job, scripts)) as started:
        assert [job.read() for job in started] == ["ready"] * 3
        for job in started:
            job.go()
        seen = [[job.read() for _ in range(EPOCHS)] for job in started]
        assert [job.read() for job in started] == [0, 0, EPOCHS * N // BATCH]
        assert len(group("all")["members"]) == 3
        assert prepared_once("all", EPOCHS * N // BATCH)
    assert seen[0] == seen[1] == seen[2]
    for epoch in seen[0]:
        assert sorted(label for labels, _, _ in epoch for label in labels) == list(range(N))
        assert all(same for _, _, same in epoch), "a copy was made"


KEEP = """
import gc, json
import jax
import numpy as np

loader = road.loader(share="all", seed=1)
with loader:
    batches = iter(loader)
    kept = [jax.dlpack.from_dlpack(next(batches)[0]) for _ in range(2)]
    gc.collect()  # now only JAX holds them
    before = [np.asarray(one).copy() for one in kept]
    rest = [images.copy() for images, _ in batches] + [images.copy() for images, _ in loader]
    after = [np.asarray(one) for one in kept]
    print(json.dumps([len(rest), [np.array_equal(a, b) for a, b in zip(before, after)]]))
"""


def test_a_batch_that_jax_holds_is_not_overwritten() -> None:
    require("jax")
    with jobs(Job("from road import road\n" + KEEP)) as (job,):
        assert job.read() == [2 * N // BATCH - 2, [True, True]]
