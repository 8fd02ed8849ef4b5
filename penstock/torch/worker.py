"""What runs in worker processes for torch users; loads torch only where the dataset has done so.

Importing torch takes seconds. A worker whose dataset never touches it starts without.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from penstock.engine.pools.runner import Work, WorkerInfo


class Init:
    """Sets up a worker before its first task as torch's own workers are."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn
        # Without a function of the user's, the training process may stand in for a worker.
        self.exclusive = worker_init_fn is not None

    def __call__(self, info: WorkerInfo, work: Work) -> None:
        if "torch" in sys.modules:
            self._tell_torch(info, work)
        if self._worker_init_fn is not None:
            self._worker_init_fn(info.id)

    def _tell_torch(self, info: WorkerInfo, work: Work) -> None:
        importlib.import_module("torch").set_num_threads(1)
        source = work.road.source
        # get_worker_info() reads this; torch has no public way to set it.
        torch_worker: Any = importlib.import_module("torch.utils.data._utils.worker")
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=info.id,
            num_workers=info.count,
            seed=info.seed + info.id,
            dataset=getattr(source, "dataset", None),
        )


def default_collate(samples: list[Any]) -> Any:
    """torch's own, for samples that do not stack in place."""
    return importlib.import_module("torch.utils.data").default_collate(samples)
