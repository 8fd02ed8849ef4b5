"""PyTorch's DataLoader over arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import ArrayDataset, Arrays, loader_options


def arrays(work: Arrays) -> Make:
    """With persistent workers, as its documentation advises."""
    return _loader(work)


def restarting(work: Arrays) -> Make:
    """With default options: workers are started for every epoch."""
    return _loader(work, persistent_workers=False)


def without_workers(work: Arrays) -> Make:
    """Without workers."""
    return _loader(replace(work, workers=0))


def _loader(work: Arrays, **changes: Any) -> Make:
    from torch.utils.data import DataLoader

    data = ArrayDataset(work)
    return lambda: DataLoader(data, **{**loader_options(work), **changes})
