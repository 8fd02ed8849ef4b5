"""PyTorch's DataLoader over arrays."""

from __future__ import annotations

from benchmarks.measure import Make
from benchmarks.workloads import ArrayDataset, Arrays


def arrays(work: Arrays) -> Make:
    """With workers that stay between epochs, as its documentation advises."""
    return _loader(work, work.workers, persistent=True)


def restarting(work: Arrays) -> Make:
    """As it is by default: workers are started for every epoch."""
    return _loader(work, work.workers, persistent=False)


def alone(work: Arrays) -> Make:
    """Without workers."""
    return _loader(work, 0, persistent=False)


def _loader(work: Arrays, workers: int, *, persistent: bool) -> Make:
    from torch.utils.data import DataLoader

    data = ArrayDataset(work)
    return lambda: DataLoader(
        data,
        batch_size=work.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent,
    )
