"""Slots: shared memory in which batches are prepared in place, and a ring that uses it again.

A slot is a memfd: it has no name, so nothing is left behind when a process dies, and workers get it
as a descriptor. A delivered batch holds a lease on its slot: when its last array is garbage
collected, the slot goes back to the ring.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config import show_size
from penstock.errors import SlotError
from penstock.serialize import aligned
from penstock.tree import as_array, flatten

FEWEST = 3
"""Slots that a ring may have whatever its budget: for the batch that the loop uses, the one before,
which it may still hold, and the next one, in preparation."""

HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Leaf:
    """One field of a batch: rows of one shape and type, or (no type) a list of objects."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None

    @property
    def nbytes(self) -> int:
        if self.dtype is None:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each field of a batch lies in its slot.

    ``skeleton``: the structure of a sample, with the numbers of its ``leaves`` (fields).
    """

    skeleton: Any
    leaves: tuple[Leaf, ...]
    rows: int
    places: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The offset of each field, and the end of the last one."""

    def __post_init__(self) -> None:
        sizes = [aligned(leaf.nbytes * self.rows) for leaf in self.leaves]
        object.__setattr__(self, "places", tuple(itertools.accumulate(sizes, initial=0)))

    @property
    def nbytes(self) -> int:
        return max(1, self.places[-1])

    def columns(self, buffer: Any, rows: int | None = None) -> list[NDArray[Any] | None]:
        """Each field as an array over ``buffer``; ``None`` for a field of objects.

        ``rows``: the arrays have this many rows, and not all.
        """
        count = self.rows if rows is None else rows
        return [
            None
            if leaf.dtype is None
            else np.ndarray((count, *leaf.shape), leaf.dtype, buffer, place)
            for leaf, place in zip(self.leaves, self.places, strict=False)
        ]

    def new_columns(self, rows: int) -> list[NDArray[Any] | None]:
        """Columns of ``rows`` rows in newly allocated memory, outside of any slot."""
        return [
            None if leaf.dtype is None else np.empty((rows, *leaf.shape), leaf.dtype)
            for leaf in self.leaves
        ]

    @classmethod
    def of(cls, sample: Any, rows: int) -> Layout | None:
        """The layout for batches of samples like this one, or ``None`` if they do not stack."""
        values, skeleton = flatten(sample)
        leaves = []
        for value in values:
            if isinstance(value, (str, bytes)):
                leaves.append(Leaf((), None))
                continue
            array = as_array(value)
            if array is None:
                return None
            leaves.append(Leaf(array.shape, array.dtype))
        return cls(skeleton, tuple(leaves), rows)


def shared_file(nbytes: int) -> int:
    """The descriptor of new shared memory that has no name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


class Slot:
    """Memory for one batch; a shared slot is mapped by every worker that was sent its ``fd``."""

    __slots__ = ("__weakref__", "fd", "id", "map", "size")

    def __init__(self, number: int, nbytes: int, *, shared: bool) -> None:
        self.id = number
        self.size = nbytes
        self.fd = -1
        if shared:
            self.fd = shared_file(nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
            weakref.finalize(self, os.close, self.fd)
        else:
            self.map = _private_memory(nbytes)

    def refresh(self) -> None:
        """Map the slot again if a worker made it longer."""
        if self.fd < 0:
            return
        nbytes = os.fstat(self.fd).st_size
        if nbytes != self.size:
            self.map = mmap.mmap(self.fd, nbytes)
            self.size = nbytes


def _private_memory(nbytes: int) -> mmap.mmap:
    """Memory that only this process uses, in huge pages where the kernel supports them.

    Filling 38 MB for the first time costs 4 ms; shared memory, in 4 KB pages, costs 35 ms.
    """
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge is not None and nbytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel built without them
            made.madvise(huge)
    return made


class Ring:
    """The slots of one loader. One thread at a time acquires; any thread may release at any time.

    ``budget``: bytes of all slots together. ``shared``: worker processes can map the slots.
    """

    def __init__(self, budget: int, *, shared: bool = True) -> None:
        self.budget = budget
        self.shared = shared
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        # A lease ends wherever the garbage collector runs, even inside another release: appending
        # to a deque is safe there without a lock.
        self._returned: deque[int] = deque()
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._next = 0

    @property
    def used(self) -> int:
        return sum(slot.size for slot in self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def acquire(self, nbytes: int, *, make: bool = True) -> Slot | None:
        """A slot of at least ``nbytes`` bytes.

        ``None``: no slot is free, and a new one would exceed the budget, or ``make`` is false.
        """
        self._take_back()
        for i, slot in enumerate(self._free):
            if slot.size >= nbytes:
                return self._free.pop(i)
        if not make:
            return None
        while self._free and self.used + nbytes > self.budget:
            del self._slots[self._free.pop().id]
        if len(self._slots) >= FEWEST and self.used + nbytes > self.budget:
            return None
        self._next += 1
        slot = Slot(self._next, nbytes, shared=self.shared)
        self._slots[slot.id] = slot
        return slot

    def release(self, slot: Slot) -> None:
        """Give back a slot that was never leased."""
        self._returned.append(slot.id)

    def forget(self, slot: Slot) -> None:
        """Never hand out this slot again."""
        self._slots.pop(slot.id, None)

    def clear(self) -> None:
        """Forget all slots. Their memory is freed as soon as nothing else refers to it."""
        self._slots.clear()
        self._free.clear()
        self._returned.clear()

    @property
    def in_use(self) -> int:
        """How many slots hold a batch, or are held by the training loop."""
        return max(0, len(self._slots) - len(self._free) - len(self._returned))

    def lease(self, slot: Slot) -> Any:
        """A buffer over the slot; the slot returns to the ring when its last view is collected."""
        buffer = (ctypes.c_char * slot.size).from_buffer(slot.map)
        number, returned, leases = slot.id, self._returned, self._leases

        def end(_: object) -> None:
            leases.pop(number, None)
            returned.append(number)

        leases[number] = weakref.ref(buffer, end)
        return buffer

    def exhausted(self, nbytes: int) -> SlotError:
        """The error for a batch of ``nbytes`` bytes that finds no slot."""
        held = len(self._leases)
        return SlotError(
            f"no memory for the next batch: the training loop still holds {held} batches, all "
            f"slots take {show_size(self.used)}, and one more of {show_size(nbytes)} would exceed "
            f"the memory budget of {show_size(self.budget)}. Copy what you keep of a batch "
            f"(batch.copy()), or give the loader a larger memory= (now {self.budget} bytes)."
        )

    def _take_back(self) -> None:
        while self._returned:
            slot = self._slots.get(self._returned.popleft())
            if slot is not None:
                self._free.append(slot)
