"""Close on garbage collection or exit, in the creating process only."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Closes(Protocol):
    def close(self) -> None: ...


def close_at_exit(owner: object, *parts: Closes) -> Callable[[], object]:
    """Close these, in order, when the owner is garbage collected or the program exits.

    The returned function closes them at once. They are closed only once.
    """
    creator = os.getpid()

    def close() -> None:
        if os.getpid() == creator:  # a forked child has copies, and must not close the originals
            for part in parts:
                part.close()

    return weakref.finalize(owner, close)
