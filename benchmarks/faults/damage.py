"""Damage to a disk store: what a failing disk or a careless command leaves of its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

PAGE = 4096

EVERY = 4
"""One page in this many is damaged."""


def flip_pages(store: Path) -> None:
    """Flip all bits in the heads of some pages: branches and leaves of the index, and data."""
    for path in store.rglob("data.mdb"):
        with path.open("r+b", buffering=0) as file:
            # The first two pages describe the file. Damage to them is that of another case.
            for page in range(2, os.fstat(file.fileno()).st_size // PAGE, EVERY):
                head = os.pread(file.fileno(), 64, page * PAGE)
                os.pwrite(file.fileno(), bytes(byte ^ 0xFF for byte in head), page * PAGE)


def truncate(store: Path) -> None:
    for path in store.rglob("data.mdb"):
        os.truncate(path, 0)


def delete(store: Path) -> None:
    for path in store.rglob("data.mdb"):
        path.unlink(missing_ok=True)


def write_junk(store: Path) -> None:
    for path in store.rglob("state.json"):
        path.write_bytes(b"\xff junk {")


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "flip": flip_pages,
    "truncate": truncate,
    "delete": delete,
    "junk": write_junk,
}
