"""PyTorch's DataLoader over arrays, with worker processes that stay between epochs."""

from __future__ import annotations

from benchmarks.measure import Make
from benchmarks.workloads import ArrayDataset, Arrays


def arrays(work: Arrays) -> Make:
    from torch.utils.data import DataLoader

    data = ArrayDataset(work)
    return lambda: DataLoader(
        data,
        batch_size=work.batch,
        shuffle=True,
        num_workers=work.workers,
        persistent_workers=work.workers > 0,
    )
