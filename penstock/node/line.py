"""A member's line to one node: what is said on it, and the slots that came along."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.node.state import Name
from penstock.packing import unpack
from penstock.pools.wire import Known, Wire
from penstock.slots import Layout, leased_columns
from penstock.tree import fill

Leases = dict[object, weakref.ref[Any]]
"""What keeps watch over each batch that is still looked at."""


class Line:
    """A connection, and what the node at its other end has told this member so far."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._known = Known()
        self._slots: dict[int, _Slot] = {}
        self._layout: Layout | None = None
        self._unsent: deque[Sequence[Any]] = deque()
        self._recent: tuple[Name, ...] = ()
        self._pid = os.getpid()
        _lines.add(self)

    def later(self, message: Sequence[Any]) -> None:
        """Say it with what is said next."""
        self._unsent.append(message)

    def flush(self) -> None:
        """Say all that is left to say, in one message: each one wakes the node."""
        said = []
        while self._unsent:
            said.append(self._unsent.popleft())
        if len(said) > 1:
            self.wire.send(["all", said])
        elif said:
            self.wire.send(said[0])

    def taken(self, name: Name) -> None:
        """The loop has this batch now, and lets go of the one before as a rule: it comes back soon,
        and both can be said then."""
        self._recent = (*self._recent, name)[-2:]
        self.later(["took", *name[1:]])

    def release(self, name: Name, *, getpid: Callable[[], int] = os.getpid) -> None:
        """May be called wherever the collector runs, so it waits for nothing and no lock; and when
        the interpreter ends, after ``os`` is gone."""
        if getpid() != self._pid:
            return  # a fork lets go of copies of its own
        message = ["released", *name[1:]]
        if name in self._recent[:1]:
            self._unsent.append(message)
            return
        try:
            self.wire.post(message)
        except BlockingIOError:
            self._unsent.append(message)
        except OSError:
            pass  # the node is gone, and its books with it

    def value(self, name: Name, said: Sequence[Any], fds: list[int], leases: Leases) -> Any:
        """The batch that came; it is released when the last view of it is gone.

        ``leases`` has an entry for each batch that is still looked at.
        """
        slot, layout, whole, rows, nbytes, beside, _ = said
        if layout is not None:
            self._layout = unpack(layout)
        if slot is None:
            self.release(name)
            return None
        lease = self._lease(self._slot(slot, fds), name, leases)
        if whole or self._layout is None:
            return unpack(memoryview(lease).cast("B")[:nbytes])
        leaves: list[Any] = list(leased_columns(self._layout, lease, rows))
        for number, objects in (unpack(beside) if beside is not None else {}).items():
            leaves[number] = objects
        return fill(self._layout.skeleton, leaves)

    def _slot(self, number: int, fds: list[int]) -> _Slot:
        known, forgotten = self._known.touch(number)
        if known:
            self._slots[number].refresh()
        else:
            self._slots[number] = _Slot(fds[0])
        if forgotten is not None:
            del self._slots[forgotten]
        return self._slots[number]

    def _lease(self, slot: _Slot, name: Name, leases: Leases) -> Any:
        buffer = (ctypes.c_char * slot.size).from_buffer(slot.map)
        release, number = self.release, object()

        def end(_: object) -> None:
            leases.pop(number, None)
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


class _Slot:
    """A slot of the node's, mapped so that what this job writes there is seen by nobody else."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0
        weakref.finalize(self, os.close, fd)
        self.refresh()

    def refresh(self) -> None:
        """Look at what lies there now, not at what was written here over an earlier batch."""
        size = os.fstat(self.fd).st_size
        if size != self.size:
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            self.map = mmap.mmap(self.fd, size, flags=mmap.MAP_PRIVATE, prot=writable)
            self.size = size
        else:
            self.map.madvise(mmap.MADV_DONTNEED)
