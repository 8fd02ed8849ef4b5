"""Reads stored values as ``bytes``, which compare with the bytes that were stored."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.store import SampleStore


def get(store: SampleStore, key: int) -> bytes | None:
    """The value under one key; ``None`` if there is none."""
    return get_many(store, [key])[0]


def get_many(store: SampleStore, keys: Sequence[int]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in store.get_many(keys)]


def get_tagged(store: SampleStore, keys: Sequence[int], tags: Sequence[int]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in store.get_tagged(keys, tags)]
