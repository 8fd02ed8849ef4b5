"""A member's connection to one node: its messages, and the slots that the node has sent."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from penstock.engine.pools.wire import MappedSlots, Wire
from penstock.engine.slots import Layout, Register, map_shared
from penstock.node.protocol import VOCABULARY, BatchGiven, LeaveGroup, Released, Several, Took
from penstock.node.state import BatchName
from penstock.serialize import unpack
from penstock.tree import fill

Leases = dict[object, weakref.ref[Any]]
"""A weak reference to the buffer of each batch that the training loop still uses."""


class Connection:
    """Sends and receives messages, and keeps the slots and the layout that the node has sent.

    ``register``: registers the memory of slots with a device. Then batches are only read, to copy
    them there: nobody in this process may write to them.
    """

    def __init__(self, wire: Wire, register: Register | None = None) -> None:
        self.wire = wire
        self._register = register
        self._known = MappedSlots()
        self._slots: dict[int, _MappedSlot] = {}
        self._layout: Layout | None = None
        self._unsent: deque[tuple[Any, ...]] = deque()
        self._recent: tuple[BatchName, ...] = ()
        self._used: dict[object, tuple[BatchName, weakref.ref[Any]]] = {}
        """The batches of this connection that the process still uses."""
        self._leaving = False
        self._pid = os.getpid()
        _connections.add(self)

    def queue(self, message: tuple[Any, ...]) -> None:
        """Send a message with the next ``flush``."""
        self._unsent.append(message)

    def flush(self) -> None:
        """Send all queued messages as one, because each message wakes the node."""
        queued = []
        while self._unsent:
            queued.append(self._unsent.popleft())
        if len(queued) > 1:
            self.wire.send(Several([VOCABULARY.pack(message) for message in queued]))
        elif queued:
            self.wire.send(queued[0])

    def tidy(self) -> None:
        """Prepare views of free slots before the next batch comes: later the loop would wait."""
        for slot in self._slots.values():
            mapping = slot.mapping
            if mapping is not None and mapping.state == "stale":
                mapping.refresh()
                if self._layout is not None and mapping.size >= self._layout.places[-1]:
                    buffer = mapping.buffer()
                    columns = self._layout.columns(buffer)
                    mapping.views = _SlotViews(self._layout, buffer, columns)

    def taken(self, name: BatchName) -> None:
        """Report that the training loop has taken a batch.

        The message is queued: as a rule the loop soon releases the batch before and asks for the
        next, and the three messages are then sent together.
        """
        self._recent = (*self._recent, name)[-2:]
        self.queue(Took(*name[1:]))

    def release(self, name: BatchName, *, getpid: Callable[[], int] = os.getpid) -> None:
        """Report that this process no longer uses a batch.

        The garbage collector calls this at any point of the program, so it must neither block nor
        take a lock. It may also run at the end of the interpreter, after ``os`` is gone.
        """
        if getpid() != self._pid:
            return  # a forked process releases only its copies
        message = Released(*name[1:])
        if name in self._recent[:1] and not self._leaving:
            self._unsent.append(message)
            return
        try:
            self.wire.post(message)
        except BlockingIOError:
            self._unsent.append(message)
        except OSError:
            pass  # the node has ended, and its record of held batches with it

    def value(self, name: BatchName, given: BatchGiven, fds: list[int], leases: Leases) -> Any:
        """The batch that the node has given. It is released when the last view of it is gone.

        ``leases`` gets an entry for it until then.
        """
        rows, nbytes, beside = given.rows, given.nbytes, given.beside
        if given.layout is not None:
            self._layout = unpack(given.layout)
        if given.slot is None:
            self.release(name)
            return None
        layout = None if given.whole else self._layout
        slot = self._slot(given.slot, fds)
        mapping = slot.current(nbytes if layout is None else layout.places[-1])
        views, mapping.views = mapping.views, None
        if layout is None:
            return unpack(memoryview(self._lease(mapping, name, leases)).cast("B")[:nbytes])
        if views is not None and views.layout is layout and rows == layout.rows:
            self._lease(mapping, name, leases, views.buffer)
            leaves = views.columns
        else:
            leaves = layout.columns(self._lease(mapping, name, leases), rows)
        for leaf, objects in (unpack(beside) if beside is not None else {}).items():
            leaves[leaf] = objects
        return fill(layout.skeleton, leaves)

    def _slot(self, number: int, fds: list[int]) -> _MappedSlot:
        known, forgotten = self._known.touch(number)
        if not known:
            self._slots[number] = _MappedSlot(fds[0], self._register)
        if forgotten is not None:
            del self._slots[forgotten]
        return self._slots[number]

    def _lease(self, mapping: _Mapping, name: BatchName, leases: Leases, buffer: Any = None) -> Any:
        """A buffer over the mapping. When the last view of it is gone, the batch is released."""
        buffer = mapping.buffer() if buffer is None else buffer
        lease = object()
        mapping.state = "leased"

        def end(_: object, *, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
            if finalizing():
                return  # the names of modules are gone; the node notices that the process ends
            leases.pop(lease, None)
            mapping.state = "stale"
            self.release(name)
            self._used.pop(lease, None)
            if self._leaving and not self._used:
                self.close()

        leases[lease] = weakref.ref(buffer, end)
        self._used[lease] = (name, leases[lease])
        return buffer

    def leave(self) -> None:
        """Leave the group. The connection is closed when the process uses none of its batches.

        Until then the node counts their memory, and puts no other batch into it.
        """
        self._leaving = True
        if self._used:
            # The batches may live longer than the loader that this connection belongs to.
            _left.add(self)
            try:
                self._discard_unread()
                used = [list(name[1:]) for name, _ in list(self._used.values())]
                self.queue(LeaveGroup(used))
                self.flush()
            except OSError:
                self.close()  # the node has ended
        if not self._used:
            self.close()

    def _discard_unread(self) -> None:
        """Read what the node has sent already: unread batches would keep their memory."""
        self.wire.socket.setblocking(False)
        try:
            while (received := self.wire.receive()) is not None:
                for fd in received[1]:
                    os.close(fd)
        except BlockingIOError:
            pass
        finally:
            self.wire.socket.setblocking(True)

    def close(self) -> None:
        _left.discard(self)
        self._slots.clear()
        self.wire.close()


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()

_left: set[Connection] = set()
"""Connections of loaders that were closed while their batches were in use."""


def _close_after_fork() -> None:
    # While the child has a copy of the socket, the node cannot see that this member has gone.
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_after_fork)


class _SlotViews(NamedTuple):
    """Views of a slot, made in advance for a batch of this layout."""

    layout: Layout
    buffer: Any
    columns: list[Any]


class _MappedSlot:
    """A slot of the node: its descriptor, and the mapping for its next batch."""

    def __init__(self, fd: int, register: Register | None) -> None:
        self.fd = fd
        self.mapping: _Mapping | None = None
        self._register = register
        weakref.finalize(self, os.close, fd)

    def current(self, needed: int) -> _Mapping:
        """A mapping that shows what the node has put into the slot, of at least ``needed`` bytes.

        The node gives a slot again while its batch is in use if the loader goes back to this batch.
        Each of them then has a mapping, and the earlier one is unmapped when its batch is gone.
        """
        mapping = self.mapping
        if mapping is None or mapping.state == "leased" or needed > mapping.size:
            self.mapping = mapping = self._map()
        elif mapping.state == "stale":
            mapping.refresh()
        return mapping

    def _map(self) -> _Mapping:
        if self._register is None:
            return _PrivateMapping(self.fd)
        return _RegisteredMapping(self.fd, self._register)


class _Mapping:
    """A mapping of a slot, for one batch at a time.

    ``state``: ``"leased"`` while a batch uses the mapping; ``"stale"`` when the batch is gone, and
    the mapping may still show what was written there; ``"clean"`` if it shows the slot.
    """

    def __init__(self, size: int, memory: mmap.mmap) -> None:
        self.size = size
        self.map = memory
        self.state: Literal["clean", "leased", "stale"] = "clean"
        self.views: _SlotViews | None = None

    def refresh(self) -> None:
        """Show the slot again, not what was written here. No batch may use the mapping."""
        raise NotImplementedError

    def buffer(self) -> Any:
        return (ctypes.c_char * self.size).from_buffer(self.map)


class _PrivateMapping(_Mapping):
    """A private mapping: only the batch that uses it has what is written."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        super().__init__(size, mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=writable))

    def refresh(self) -> None:
        self.map.madvise(mmap.MADV_DONTNEED)
        self.state = "clean"


class _RegisteredMapping(_Mapping):
    """A mapping that is registered with a device, for which its pages must stay the same.

    So it shares the pages of the slot. A private one would have pages of its own, which registering
    makes, and would never again show what the node writes.
    """

    def __init__(self, fd: int, register: Register) -> None:
        size = os.fstat(fd).st_size
        memory = map_shared(fd, size)
        memory.register(register)
        super().__init__(size, memory)

    def refresh(self) -> None:
        self.state = "clean"
