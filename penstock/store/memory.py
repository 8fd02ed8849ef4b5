"""Where samples are kept in memory: in this process's own, or where other processes see them."""

from __future__ import annotations

import uuid

from penstock.store.heap import Heap
from penstock.store.rundir import RunDir
from penstock.store.store import Store

AnyStore = Store | Heap


def memory_store(budget: int, overshoot: int | None = None, *, shared: bool) -> AnyStore:
    """A new store; ``shared`` where processes other than this one use it."""
    if not shared:
        return Heap(budget, overshoot=overshoot)
    return Store(RunDir.current().path / uuid.uuid4().hex, budget, overshoot=overshoot)
