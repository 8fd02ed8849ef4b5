"""The JPEG index: where each row of blocks begins in a file, so that later crops go straight there.

Entropy-coded data has no table of contents: to reach a crop, a decoder must read everything above
it and to its left. The first time it does, the kernel records the position of each row of blocks.
In later epochs it starts at the recorded position, and a random crop takes a fifth less time. The
pixels have the same bits, because entries belong to exact contents: files are identified by a
128-bit hash of all their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock import config
from penstock.image import kernel

OVERHEAD = 180
"""Bytes of memory that a file takes in addition to its entries, as the kernel counts them."""

FEWEST_BYTES = 8_192
"""Smaller files are not indexed, here and in the kernel: there is little data to skip."""


class JpegIndex:
    """Index entries of many files, up to ``budget`` bytes. Files that came first stay.

    The compiled kernel holds them: its own worker threads use them without the GIL. If two threads
    add the same file, the longer entries stay.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: Any = kernel.index(budget)
        """The index of the compiled kernel."""

    def __len__(self) -> int:
        return len(self.held)

    @property
    def used(self) -> int:
        """Bytes that the entries take."""
        used: int = self.held.used
        return used

    def entries(self, key: bytes) -> bytes | None:
        """The entries of a file: empty if there are none yet, ``None`` if the budget is used up."""
        entries: bytes | None = self.held.entries(key)
        return entries

    def add(self, key: bytes, entries: bytes) -> None:
        """Store the entries of a file, unless as many are stored already."""
        self.held.add(key, entries)


_jpeg_index: JpegIndex | None = None


def process_index() -> JpegIndex:
    """The index of this process, which all its loaders share."""
    global _jpeg_index
    if _jpeg_index is None:
        _jpeg_index = JpegIndex(config.jpeg_index())
    return _jpeg_index


def regions(requests: Sequence[kernel.RegionRequest]) -> list[Exception | None]:
    """Like ``kernel.regions``, but faster for files that are in the index.

    Returns the error of each request, or ``None``.
    """
    jpeg_index = process_index()
    keys: list[bytes | None] = [None] * len(requests)
    if jpeg_index.budget:
        keys = [
            kernel.key(request.data) if len(request.data) >= FEWEST_BYTES else None
            for request in requests
        ]
    entries = [None if key is None else jpeg_index.entries(key) for key in keys]
    errors: list[Exception | None] = []
    for key, outcome in zip(keys, kernel.regions(requests, entries), strict=True):
        if key is not None and isinstance(outcome, bytes):
            jpeg_index.add(key, outcome)
        errors.append(outcome if isinstance(outcome, Exception) else None)
    return errors
