"""Code for the worker processes of torch users, which must not import torch by itself.

Importing torch takes seconds. A worker whose dataset never uses it starts without it.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.engine.pools.runner import Work, WorkerInfo
from penstock.keyed import plain_states

_log = logging.getLogger("penstock.torch")
_NAMES = {"python": "random", "numpy": "NumPy", "torch": "torch"}


class TorchWorkerSetup:
    """Sets up a worker process before its first task, as torch sets up its own workers."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn
        self.base_seed: int | None = None
        """The seed that was drawn for the workers of an epoch, as torch draws it."""
        self._first_seed: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Always the first: workers that are no forks stay, as long as what they got is the same.
        if self._first_seed is None:
            self._first_seed = self.base_seed
        return {**self.__dict__, "base_seed": self._first_seed}

    def __call__(self, info: WorkerInfo, work: Work) -> None:
        if "torch" in sys.modules:
            self._set_up_torch(info, work)
        if self._worker_init_fn is not None:
            call_init(self._worker_init_fn, info.id)

    def _set_up_torch(self, info: WorkerInfo, work: Work) -> None:
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        # A forked worker has the generators of its parent, in the same state as all other workers.
        seed = (info.seed if self.base_seed is None else self.base_seed) + info.id
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        source = work.road.source
        # get_worker_info() reads this; torch has no public way to set it.
        torch_worker: Any = importlib.import_module("torch.utils.data._utils.worker")
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=info.id,
            num_workers=info.count,
            seed=seed,
            dataset=getattr(source, "dataset", None),
        )


def call_init(worker_init_fn: Callable[[int], None], worker: int) -> None:
    """Call it as torch does. Warn, in one of the workers, of seeds that will have no effect.

    Seeds made from ``torch.initial_seed()``, as torch's documentation recommends, repeat what a
    worker has already, and both loaders repeat with them.
    """
    if worker != 0:
        worker_init_fn(worker)
        return
    before = plain_states()
    worker_init_fn(worker)
    after = plain_states()
    changed = {name for name in _NAMES if before[name] is not None and after[name] != before[name]}
    torch = sys.modules.get("torch")
    if "python" in changed and torch is not None:
        # They seed it by the lower bits, because NumPy takes no others.
        lower = random.Random(torch.initial_seed() % 2**32)
        changed -= {"python"} if after["python"] == lower.getstate() else set()
    if changed:
        _log.warning(
            "worker_init_fn seeded %s, but Penstock seeds each sample by itself, so these seeds do "
            "not decide its random numbers. To repeat a run, call torch.manual_seed in the script, "
            "or give the loader seed= or generator=.",
            " and ".join(_NAMES[name] for name in _NAMES if name in changed),
        )


def default_collate(samples: list[Any]) -> Any:
    """Collate samples that do not stack in place as torch does."""
    return importlib.import_module("torch.utils.data").default_collate(samples)
