"""The open loaders of this process, by number."""

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
    """All loaders that are still open, with their numbers."""
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
    # A fork has copies of the loaders, which it must not use. The lock may have been held by
    # another thread at the fork, and would then never be released.
    global _lock
    _lock = threading.Lock()
    _loaders.clear()


os.register_at_fork(after_in_child=_after_fork)
