"""Bytes by key, in this process's memory, or in LMDB where other processes and runs see them."""

from __future__ import annotations

from penstock.store.claim import Claims, Turns, claims_of
from penstock.store.heap import Heap
from penstock.store.memory import AnyStore, memory_store
from penstock.store.rundir import RunDir, collect_stale, stale
from penstock.store.store import Store
from penstock.store.value import Value, cost

__all__ = [
    "AnyStore",
    "Claims",
    "Heap",
    "RunDir",
    "Store",
    "Turns",
    "Value",
    "claims_of",
    "collect_stale",
    "cost",
    "memory_store",
    "stale",
]
