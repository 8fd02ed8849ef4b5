"""Closing things when their owner is gone, however it went, and only in the process they are of."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Closes(Protocol):
    def close(self) -> None: ...


def close_at_exit(owner: object, *parts: Closes) -> Callable[[], object]:
    """Close these, in turn, when their owner is collected or the program ends, and only once."""

    home = os.getpid()

    def close() -> None:
        if os.getpid() == home:  # a fork has copies, and may go without touching the originals
            for part in parts:
                part.close()

    return weakref.finalize(owner, close)
