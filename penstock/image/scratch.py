"""Reusable memory for intermediate arrays, one per thread: new memory costs 0.05 ms an image."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray


class Scratch(threading.local):
    """A buffer of each thread. Each ``take`` in a thread may overwrite the array of the last one.

    Requests for more than ``most`` bytes get new memory, which is not kept.
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
