"""Memory that a thread keeps for what exists only on the way: new memory costs 0.05 ms an image."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray


class Scratch(threading.local):
    """Each thread's own; what was taken last is overwritten by what is taken next.

    More than ``most`` bytes are not kept, but made anew.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        if nbytes > self._most:
            return np.empty(nbytes, np.uint8)
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]
