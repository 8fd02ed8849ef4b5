"""Stores of samples by integer key: in the memory of this process, or in LMDB for several."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.store.claim import Claims, FileClaims, ThreadClaims, claims_of
from penstock.store.heap_store import HeapStore
from penstock.store.rundir import RunDir, collect_stale, stale
from penstock.store.sample_store import SampleStore, memory_store
from penstock.store.value import Value, cost

if TYPE_CHECKING:
    from penstock.store.lmdb_store import LmdbStore

__all__ = [
    "Claims",
    "FileClaims",
    "HeapStore",
    "LmdbStore",
    "RunDir",
    "SampleStore",
    "ThreadClaims",
    "Value",
    "claims_of",
    "collect_stale",
    "cost",
    "memory_store",
    "stale",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: most loaders keep nothing on disk, and 8 modules belong to it.
    if name != "LmdbStore":
        raise AttributeError(f"module 'penstock.store' has no attribute {name!r}")
    return importlib.import_module("penstock.store.lmdb_store").LmdbStore
