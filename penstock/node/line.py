"""A member's connection to one node: messages, and the slots that came along."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.slots import Layout
from penstock.node.protocol import VOCABULARY, BatchGiven, Released, Several, Took
from penstock.node.state import Name
from penstock.serialize import unpack
from penstock.tree import fill

Leases = dict[object, weakref.ref[Any]]
"""What keeps watch over each batch that is still looked at."""


class Line:
    """A connection, and the slots and layouts that the node has sent on it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._known = MappedSlots()
        self._slots: dict[int, _Slot] = {}
        self._layout: Layout | None = None
        self._unsent: deque[tuple[Any, ...]] = deque()
        self._recent: tuple[Name, ...] = ()
        self._pid = os.getpid()
        _lines.add(self)

    def later(self, message: tuple[Any, ...]) -> None:
        """Send a message together with the next ones."""
        self._unsent.append(message)

    def flush(self) -> None:
        """Send all waiting messages as one: each one wakes the node."""
        waiting = []
        while self._unsent:
            waiting.append(self._unsent.popleft())
        if len(waiting) > 1:
            self.wire.send(Several([VOCABULARY.pack(message) for message in waiting]))
        elif waiting:
            self.wire.send(waiting[0])

    def tidy(self) -> None:
        """Prepare for the next batch before it comes: once it has come, the loop waits."""
        for slot in self._slots.values():
            if slot.stale:
                slot.freshen()
                if self._layout is not None and slot.size >= self._layout.places[-1]:
                    buffer = slot.buffer()
                    columns = self._layout.columns(buffer)
                    slot.made = _Made(self._layout, buffer, columns)

    def taken(self, name: Name) -> None:
        """The loop has this batch now. As a rule it releases the one before and soon asks for the
        next, so the message waits until then."""
        self._recent = (*self._recent, name)[-2:]
        self.later(Took(*name[1:]))

    def release(self, name: Name, *, getpid: Callable[[], int] = os.getpid) -> None:
        """Report that a batch is no longer looked at.

        Called wherever the garbage collector runs, so it waits for nothing and takes no lock; and
        at the end of the interpreter, after ``os`` is gone.
        """
        if getpid() != self._pid:
            return  # a fork releases copies of its own
        message = Released(*name[1:])
        if name in self._recent[:1]:
            self._unsent.append(message)
            return
        try:
            self.wire.post(message)
        except BlockingIOError:
            self._unsent.append(message)
        except OSError:
            pass  # the node is gone, and keeps no account any more

    def value(self, name: Name, given: BatchGiven, fds: list[int], leases: Leases) -> Any:
        """The batch that was given; it is released when the last view of it is gone.

        ``leases`` has an entry for each batch that is still looked at.
        """
        rows, nbytes, beside = given.rows, given.nbytes, given.beside
        if given.layout is not None:
            self._layout = unpack(given.layout)
        if given.slot is None:
            self.release(name)
            return None
        layout = None if given.whole else self._layout
        slot = self._slot(given.slot, fds, nbytes if layout is None else layout.places[-1])
        made, slot.made = slot.made, None
        if layout is None:
            return unpack(memoryview(self._lease(slot, name, leases)).cast("B")[:nbytes])
        if made is not None and made.layout is layout and rows == layout.rows:
            self._lease(slot, name, leases, made.buffer)
            leaves = made.columns
        else:
            leaves = layout.columns(self._lease(slot, name, leases), rows)
        for place, objects in (unpack(beside) if beside is not None else {}).items():
            leaves[place] = objects
        return fill(layout.skeleton, leaves)

    def _slot(self, number: int, fds: list[int], needed: int) -> _Slot:
        known, forgotten = self._known.touch(number)
        if not known:
            self._slots[number] = _Slot(fds[0])
        if forgotten is not None:
            del self._slots[forgotten]
        slot = self._slots[number]
        slot.freshen(needed)
        return slot

    def _lease(self, slot: _Slot, name: Name, leases: Leases, buffer: Any = None) -> Any:
        """A buffer over the slot, or this one, that says when nobody looks at it any more."""
        buffer = slot.buffer() if buffer is None else buffer
        release, number = self.release, object()

        def end(_: object) -> None:
            leases.pop(number, None)
            slot.stale = True
            release(name)

        leases[number] = weakref.ref(buffer, end)
        return buffer

    def close(self) -> None:
        self.wire.close()


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _after_fork() -> None:
    # A copy of the socket would keep the node from seeing that this member has gone.
    for line in list(_lines):
        line.close()


os.register_at_fork(after_in_child=_after_fork)


class _Made(NamedTuple):
    """Views of a slot that wait for a batch of this layout."""

    layout: Layout
    buffer: Any
    columns: list[Any]


class _Slot:
    """A slot of the node's, mapped so that what this job writes there is seen by nobody else."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0
        self.stale = False
        self.made: _Made | None = None
        weakref.finalize(self, os.close, fd)

    def freshen(self, needed: int = 0) -> None:
        """Look at what lies there now, not at what was written here over an earlier batch."""
        if needed > self.size:  # it is new, or a worker has made it longer
            size = os.fstat(self.fd).st_size
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            self.map = mmap.mmap(self.fd, size, flags=mmap.MAP_PRIVATE, prot=writable)
            self.size = size
        elif self.stale:
            self.map.madvise(mmap.MADV_DONTNEED)
        self.stale = False

    def buffer(self) -> Any:
        return (ctypes.c_char * self.size).from_buffer(self.map)
