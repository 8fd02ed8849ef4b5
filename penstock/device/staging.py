"""Host memory for what the device needs, registered with it once and used again."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

from penstock.device.contract import Unregister
from penstock.engine.slots import Register

PAGE = 4096


class Staging:
    """Buffers of one size. One that has to be larger makes all later ones as large.

    A buffer is used again when the last reference to it is gone.

    >>> staging = Staging(lambda address, nbytes: None)
    >>> staging.reserve(2, 1000)
    >>> first, second = staging.take(10), staging.take(1000)
    >>> del first
    >>> third = staging.take(500)
    >>> len(third), staging.made
    (500, 2)
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []
        # A reference ends wherever the garbage collector runs, even in ``take``: appending to a
        # deque is safe there without a lock.
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._ends: dict[int, Unregister | None] = {}
        self.size = 0
        """The bytes of a buffer."""
        self.made = 0
        """Buffers made so far."""

    def reserve(self, count: int, nbytes: int) -> None:
        """Make ``count`` buffers of at least ``nbytes`` bytes, beforehand."""
        with self._lock:
            self._grow(nbytes)
            while len(self._free) < count:
                self._free.append(self._make())

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this many bytes."""
        with self._lock:
            self._grow(nbytes)
            while self._returned:
                memory = self._returned.popleft()
                if memory.nbytes >= self.size and memory.ctypes.data in self._ends:
                    self._free.append(memory)
                else:
                    self._drop(memory)
            memory = self._free.pop() if self._free else self._make()
        buffer = memory[:nbytes]
        weakref.finalize(buffer, self._returned.append, memory).atexit = False
        return buffer

    def _grow(self, nbytes: int) -> None:
        if nbytes > self.size:
            # A quarter more, so that a slightly larger one needs no new memory.
            self.size = -(-(nbytes + nbytes // 4) // PAGE) * PAGE
            while self._free:
                self._drop(self._free.pop())

    def _make(self) -> NDArray[np.uint8]:
        self.made += 1
        memory = np.frombuffer(mmap.mmap(-1, max(PAGE, self.size)), np.uint8)
        self._ends[memory.ctypes.data] = self._register(memory.ctypes.data, memory.nbytes)
        return memory

    def _drop(self, memory: NDArray[np.uint8]) -> None:
        end = self._ends.pop(memory.ctypes.data, None)
        if end is not None:
            end()

    def close(self) -> None:
        """End all registrations. Nothing may copy from the buffers any more."""
        with self._lock:
            self._free.clear()
            for end in self._ends.values():
                if end is not None:
                    end()
            self._ends.clear()
