"""The loaders that this process has in use, by number."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.loader import Loader

_lock = threading.Lock()
_loaders: dict[int, weakref.ref[Loader]] = {}


def add(loader: Loader, number: int) -> None:
    with _lock:
        _loaders[number] = weakref.ref(loader)


def loaders() -> list[tuple[int, Loader]]:
    """Those that are still there, and open."""
    found = []
    with _lock:
        for number, known in list(_loaders.items()):
            loader = known()
            if loader is None or loader.closed:
                del _loaders[number]
            else:
                found.append((number, loader))
    return found


def _after_fork() -> None:
    # What a fork has are copies of loaders that it may not use; and nobody would open the lock.
    global _lock
    _lock = threading.Lock()
    _loaders.clear()


os.register_at_fork(after_in_child=_after_fork)
