"""Stores of samples by integer key: in the memory of this process, or in LMDB for several."""

from __future__ import annotations

from penstock.store.claim import Claims, FileClaims, ThreadClaims, claims_of
from penstock.store.heap_store import HeapStore
from penstock.store.lmdb_store import LmdbStore
from penstock.store.rundir import RunDir, collect_stale, stale
from penstock.store.sample_store import SampleStore, memory_store
from penstock.store.value import Value, cost

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
