"""Bytes by key, kept in LMDB on the memory file system or on a disk, and shared by processes."""

from __future__ import annotations

from penstock.store.claim import Claims
from penstock.store.rundir import RunDir, collect_stale, stale
from penstock.store.store import Store
from penstock.store.value import Value, cost

__all__ = ["Claims", "RunDir", "Store", "Value", "collect_stale", "cost", "stale"]
