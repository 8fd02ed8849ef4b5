"""Slots: shared memory in which batches are prepared in place, and a ring that uses it again.

A slot is a memfd: it has no name, so nothing is left behind when a process dies, and workers get it
as a descriptor. A delivered batch holds a lease on its slot: when its last array is garbage
collected, the slot goes back to the ring.

File descriptors are scarce: the usual limit is 1024 for a process. So a slot has one, a loop that
holds many batches holds few descriptors (``OPEN_SLOTS``), and batches are copied out of their slots
where no descriptor is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import mmap
import os
import resource
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable
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

OPEN_SLOTS = 64
"""Slots of a ring that keep their descriptor while the loop holds their batch. A slot beyond them
cannot be sent to workers again, so it is freed when the loop releases it."""

WINDOW, SPARE = 64, 2
"""Slots that were free throughout this many acquisitions are freed, except ``SPARE`` ones: the loop
held more batches before. A loop that holds the same number of batches all the time, give or take
``SPARE``, never gets a new slot."""

SPARE_DESCRIPTORS = 8
"""Descriptors that must be left when the loop is given the last slot: for the next slot and the
messages to workers. If they are not, the loop gets a copy."""

HUGE_PAGE = 2 << 20

Register = Callable[[int, int], Callable[[], None] | None]
"""Registers memory, by address and size, with a device; returns what ends that, if it succeeded."""


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
    row_nbytes: int = field(init=False, repr=False, compare=False)
    """The size of one row of all fields."""

    def __post_init__(self) -> None:
        sizes = [aligned(leaf.nbytes * self.rows) for leaf in self.leaves]
        object.__setattr__(self, "places", tuple(itertools.accumulate(sizes, initial=0)))
        object.__setattr__(self, "row_nbytes", sum(leaf.nbytes for leaf in self.leaves))

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
    """The descriptor of new shared memory that has no name. Raises OSError."""
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


class SlotMemory(mmap.mmap):
    """Mapped memory that may be registered with a device: that ends before it is unmapped."""

    _unregister: Callable[[], None] | None = None
    _pid = 0

    def register(self, register: Register) -> None:
        self._unregister, self._pid = register(self.address(), len(self)), os.getpid()

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    # Not a weak reference: its callback would be called after the memory is unmapped.
    def __del__(self) -> None:
        # Memory that was inherited by a fork is registered in the parent only.
        if self._unregister is not None and os.getpid() == self._pid:
            self._unregister()


def map_shared(fd: int, nbytes: int) -> SlotMemory:
    """Map shared memory. Unlike ``mmap.mmap(fd, ...)``, this keeps no second descriptor open."""
    # Python's mmap duplicates the descriptor (before 3.13 always). So let it reserve the addresses,
    # which it also unmaps at the end, and map the file over them.
    made = SlotMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = made.address()
    mapped = _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _SHARED_FIXED, fd, 0)
    if mapped != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return made


_MAP_FIXED = 0x10
"""The constant of the kernel's headers."""
_SHARED_FIXED = mmap.MAP_SHARED | _MAP_FIXED
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class Slot:
    """Memory for one batch; a shared slot is mapped by every worker that was sent its ``fd``.

    Raises OSError if shared memory cannot be had.
    """

    __slots__ = ("__weakref__", "_close", "_register", "fd", "id", "map", "size")

    def __init__(
        self, number: int, nbytes: int, *, shared: bool, register: Register | None = None
    ) -> None:
        self.id = number
        self.size = nbytes
        self.fd = -1
        self._register = register
        if shared:
            self.fd = shared_file(nbytes)
            self._close = weakref.finalize(self, os.close, self.fd)
            self.map = map_shared(self.fd, nbytes)
        else:
            self.map = _private_memory(nbytes)
        if register is not None:
            self.map.register(register)

    def buffer(self) -> Any:
        """A buffer over the memory, to which weak references are possible."""
        return (ctypes.c_char * self.size).from_buffer(self.map)

    def close_descriptor(self) -> None:
        """Keep the memory, but not its descriptor: no other process can map the slot any more."""
        self.fd = -1
        self._close()

    def refresh(self) -> None:
        """Map the slot again if a worker made it longer."""
        if self.fd < 0:
            return
        nbytes = os.fstat(self.fd).st_size
        if nbytes != self.size:
            self.map = map_shared(self.fd, nbytes)
            self.size = nbytes
            if self._register is not None:
                self.map.register(self._register)


def _private_memory(nbytes: int) -> SlotMemory:
    """Memory that only this process uses, in huge pages where the kernel supports them.

    Filling 38 MB for the first time costs 4 ms; shared memory, in 4 KB pages, costs 35 ms.
    """
    made = SlotMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge is not None and nbytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel built without them
            made.madvise(huge)
    return made


class _Lease(weakref.ref[Any]):
    """A weak reference to the buffer of a batch that the loop holds. ``slot``: its number."""

    __slots__ = ("slot",)
    slot: int


class Ring:
    """The slots of one loader. One thread at a time acquires; any thread may release at any time.

    ``budget``: bytes of all slots together. ``shared``: worker processes can map the slots.
    ``register``: registers the memory of each slot with a device.
    """

    def __init__(
        self, budget: int, *, shared: bool = True, register: Register | None = None
    ) -> None:
        self.budget = budget
        self.shared = shared
        self._register = register
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        # A lease ends wherever the garbage collector runs, even inside another release: appending
        # to a deque is safe there without a lock.
        self._returned: deque[int] = deque()
        self._forgotten: deque[int] = deque()
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()
        """Leases of batches that are gone, whose slots were not taken back yet."""
        self._next = 0
        self._acquired = 0
        self._fewest_free = 0
        self._warned = False
        _rings.add(self)

    @property
    def used(self) -> int:
        return sum(slot.size for slot in self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def acquire(self, nbytes: int, *, make: bool = True) -> Slot | None:
        """A slot of at least ``nbytes`` bytes.

        ``None``: no slot is free, and a new one would exceed the budget or the limit of file
        descriptors, or ``make`` is false.
        """
        self._take_back()
        for i, slot in enumerate(self._free):
            if slot.size >= nbytes:
                self._free.pop(i)
                self._shrink()
                return slot
        if not make:
            return None
        while self._free and self.used + nbytes > self.budget:
            del self._slots[self._free.pop().id]
        if len(self._slots) >= FEWEST and self.used + nbytes > self.budget:
            return None
        made = self._make(nbytes)
        if made is not None:
            self._slots[made.id] = made
            self._shrink()
        return made

    def _make(self, nbytes: int) -> Slot | None:
        """A new slot; ``None`` if no file descriptor is left for it."""
        self._next += 1
        while True:
            try:
                return Slot(self._next, nbytes, shared=self.shared, register=self._register)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            if not self._free:
                return None
            del self._slots[self._free.pop().id]  # it is too small, and has a descriptor

    def _shrink(self) -> None:
        """Free the slots that were not needed in the last ``WINDOW`` acquisitions."""
        self._fewest_free = min(self._fewest_free, len(self._free))
        self._acquired += 1
        if self._acquired % WINDOW == 0:
            for _ in range(self._fewest_free - SPARE):
                del self._slots[self._free.pop(0).id]
            self._fewest_free = len(self._free)

    def release(self, slot: Slot) -> None:
        """Give back a slot that was never leased."""
        self._returned.append(slot.id)

    def forget(self, slot: Slot) -> None:
        """Never hand out this slot again."""
        self._slots.pop(slot.id, None)

    def forget_later(self, slot: Slot) -> None:
        """Like ``forget``, from the next ``acquire`` on; from any thread, as ``release``."""
        self._forgotten.append(slot.id)

    def clear(self) -> None:
        """Forget all slots. Their memory is freed as soon as nothing else refers to it."""
        self._slots.clear()
        self._free.clear()
        self._returned.clear()
        self._forgotten.clear()
        self._leases.clear()
        self._ended.clear()

    @property
    def in_use(self) -> int:
        """How many slots hold a batch, or are held by the training loop."""
        held = len(self._slots) - len(self._free) - len(self._returned) - len(self._forgotten)
        return max(0, held - len(self._ended))

    @property
    def _held(self) -> int:
        """How many batches the loop holds."""
        return len(self._leases) - len(self._ended)

    def lease(self, slot: Slot, buffer: Any = None) -> Any:
        """A buffer over the slot; the slot returns to the ring when its last view is collected.

        ``buffer``: the one that ``slot.buffer`` returned earlier. Where file descriptors run out,
        the result is a copy, and the slot returns at once.
        """
        if slot.fd >= 0:
            held = len(self._leases) - len(self._ended)
            # If the loop holds all other slots, the next batch needs a new one.
            if len(self._slots) - held <= 1 and not _descriptors_left(slot.fd):
                return self._copy(slot)
            if held >= OPEN_SLOTS:
                slot.close_descriptor()
        if buffer is None:
            buffer = slot.buffer()
        # The callback runs in the training loop, which frees a batch: it is no Python function.
        lease = _Lease(buffer, self._ended.append)
        lease.slot = slot.id
        self._leases[slot.id] = lease
        return buffer

    def _copy(self, slot: Slot) -> Any:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"this process has reached its limit of {_descriptor_limit()} open files, so there "
                f"is no new memory that workers could write to. The training loop holds "
                f"{self._held} batches; from now on it gets copies of batches, which is "
                "slower. Raise the limit (ulimit -n), or hold fewer batches and files.",
                RuntimeWarning,
                stacklevel=2,
            )
        buffer = (ctypes.c_char * slot.size).from_buffer(bytearray(slot.map))
        self.release(slot)
        return buffer

    def exhausted(self, nbytes: int) -> SlotError:
        """The error for a batch of ``nbytes`` bytes that finds no slot."""
        held = self._held
        if self.used + nbytes <= self.budget:
            return SlotError(
                f"no memory for the next batch: this process has reached its limit of "
                f"{_descriptor_limit()} open files, and memory that workers can write to needs "
                f"one. The training loop holds {held} batches. Raise the limit (ulimit -n), or "
                "close files."
            )
        return SlotError(
            f"no memory for the next batch: the training loop still holds {held} batches, all "
            f"slots take {show_size(self.used)}, and one more of {show_size(nbytes)} would exceed "
            f"the memory budget of {show_size(self.budget)}. Copy what you keep of a batch "
            f"(batch.copy()), or give the loader a larger memory= (now {self.budget} bytes)."
        )

    def _take_back(self) -> None:
        while self._forgotten:
            self._slots.pop(self._forgotten.popleft(), None)
        while self._ended:
            lease = self._ended.popleft()
            self._leases.pop(lease.slot, None)
            self._returned.append(lease.slot)
        while self._returned:
            number = self._returned.popleft()
            slot = self._slots.get(number)
            if slot is None:
                continue
            if self.shared and slot.fd < 0:
                del self._slots[number]
            else:
                self._free.append(slot)


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()
"""All rings of this process."""


def _after_fork() -> None:
    # Only the parent uses its rings. Without this a child keeps the memory of slots that the
    # parent has freed. A batch that the loop holds stays: the child may read it.
    for ring in list(_rings):
        ring.clear()


os.register_at_fork(after_in_child=_after_fork)


def _descriptors_left(fd: int) -> bool:
    """Whether this process can open ``SPARE_DESCRIPTORS`` more files. ``fd``: any open file."""
    opened = []
    try:
        for _ in range(SPARE_DESCRIPTORS):
            opened.append(os.dup(fd))
    except OSError:
        return False
    finally:
        for other in opened:
            os.close(other)
    return True


def _descriptor_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
