"""A fake device for tests: each stream is a thread, and wrong synchronisation is an error.

A GPU does not report a batch that is read before its copy is done, or host memory that is written
while it is copied: the values are wrong, now and then. This device makes such faults visible:

- Memory of the device holds ``POISON`` until it is written, and again after it is freed.
- A copy whose source was changed or given up after it began is a fault.
- Memory that two streams use, one of them writing, is a fault unless one of them, or the host, has
  waited for the other. So is new memory, for streams that have not waited for its own, and memory
  that is freed while another stream than its own uses it.
- A registration that overlaps another, or ends twice, is a fault.
- Memory that is freed while another process maps it holds ``POISON`` for that process too. To
  unmap it before the host knows that all work on it is done is a fault.
- ``pause`` stops the streams, so that a test decides when work happens; ``fail`` makes the next
  work of a stream fail.

It has a virtual clock: each stream adds up the seconds that ``Times`` states for its work. Nothing
waits for them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.device.contract import DeviceMemory, Event, StreamName, Unregister

POISON = 0xA5
"""Each byte of memory that is not written yet, or freed."""

STREAMS: tuple[StreamName, ...] = ("copy", "prep", "loop")


class Times(NamedTuple):
    """The constants of the virtual clock. No GPU was measured for them: they are round numbers.

    - ``launch``: seconds to begin a piece of work.
    - ``bus``: bytes a second from the host, as PCIe 3.0 with 16 lanes has.
    - ``prep``: bytes a second that work writes.
    """

    launch: float = 10e-6
    bus: float = 12e9
    prep: float = 50e9


class FakeEvent:
    """Done when its stream gets to it. ``at``: when that is, on the virtual clock."""

    def __init__(self, stream: _FakeStream, number: int, at: float) -> None:
        self.stream = stream
        self.number = number
        self.at = at
        self.fired = False
        """Whether it is done. Unlike ``done``, this does not tell the host so."""
        # The loop waits for an event of each batch, so this is cheaper than ``threading.Event``.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._error: BaseException | None = None

    def fire(self) -> None:
        self._error = self.stream.error
        self.fired = True
        self._pending.release()

    def passed(self) -> None:
        """Wait for it, as a stream does: an error is not its own."""
        if not self.fired:
            with self._pending:
                pass

    def done(self) -> bool:
        fired = self.fired
        if fired:
            self.stream.seen = max(self.stream.seen, self.number)
        return fired

    def wait(self) -> None:
        self.passed()
        self.stream.seen = max(self.stream.seen, self.number)
        if self._error is not None:
            # A new one: a traceback would keep its frames, and their memory, alive.
            raise type(self._error)(*self._error.args)


class _FakeStream:
    """A thread that does one piece of work after the other."""

    def __init__(self, name: StreamName) -> None:
        self.name = name
        self.number = 0
        """Pieces of work given so far."""
        self.seen = 0
        """The host knows that the work up to this number is done."""
        self.knows: dict[_FakeStream, int] = {}
        """By stream: its work up to this number is done before later work of this one begins."""
        self.time = 0.0
        self.error: BaseException | None = None
        self.fails: BaseException | None = None
        self.runs = threading.Event()
        self.runs.set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"fake-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            self.runs.wait()
            try:
                work()
            except BaseException as error:  # as on a GPU, events and later work report it
                self.error = error.with_traceback(None)
            del work

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def is_after(self, stream: _FakeStream, number: int) -> bool:
        """Whether new work of this stream begins after this work of another."""
        return stream is self or number <= max(stream.seen, self.knows.get(stream, 0))


class _Use(NamedTuple):
    """A piece of work that uses bytes of a buffer."""

    first: int
    end: int
    stream: _FakeStream
    number: int
    writes: bool


@dataclass(eq=False)
class _FakeBuffer:
    """Memory of the device: its bytes, the stream it belongs to, and who uses it."""

    raw: Any
    stream: _FakeStream
    uses: list[_Use] = field(default_factory=list)


class FakeDevice:
    """A device of ``capacity`` bytes. ``close`` ends its threads.

    ``shared``: other processes can map its memory.
    """

    name = "fake:0"

    def __init__(
        self, capacity: int = 1 << 30, times: Times | None = None, *, shared: bool = False
    ) -> None:
        self._capacity = capacity
        self._shared = shared
        self._files: dict[int, int] = {}
        """The file descriptor of shared memory, by its address."""
        self._times = times or Times()
        self.faults: list[str] = []
        """Wrong synchronisation that was found."""
        self.peak = 0
        """The most bytes that were in use at once."""
        self.allocations = 0
        """How often memory was allocated."""
        self.arrived = 0
        """Tensors that the training loop was given."""
        self.copied = 0
        """Bytes that were copied from the host."""
        self.registered: dict[int, int] = {}
        """Address and size of registered memory."""
        self._in_use = 0
        self._buffers: dict[int, _FakeBuffer] = {}
        self._lock = threading.RLock()
        self._streams = {name: _FakeStream(name) for name in STREAMS}

    def pause(self, *streams: StreamName) -> None:
        """Stop these streams, or all, before their next pieces of work."""
        for name in streams or STREAMS:
            self._streams[name].runs.clear()

    def go_on(self) -> None:
        """Let the streams work again."""
        for stream in self._streams.values():
            stream.runs.set()

    def fail(self, stream: StreamName, error: BaseException) -> None:
        """Make the next work of a stream fail."""
        self._streams[stream].fails = error

    def close(self) -> None:
        """End the threads, after all work that they were given."""
        self.go_on()
        for stream in self._streams.values():
            stream.close()

    @property
    def identity(self) -> str:
        """One for all fake devices whose memory other processes can map."""
        return self.name if self._shared else ""

    @property
    def seconds(self) -> float:
        """The virtual time at which all work is done."""
        return max(stream.time for stream in self._streams.values())

    def register(self, address: int, nbytes: int) -> Unregister:
        if any(address < start + size and start < address + nbytes for start, size in self._ranges):
            self.faults.append(f"memory at {address:#x} was registered twice")
        self.registered[address] = nbytes

        def unregister() -> None:
            if self.registered.pop(address, None) is None:
                self.faults.append(f"memory at {address:#x} was not registered")

        return unregister

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return list(self.registered.items())

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor lies in registered memory."""
        first, nbytes = tensor.data_ptr(), tensor.nbytes
        return any(a <= first and first + nbytes <= a + size for a, size in self._ranges)

    # Memory.

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: StreamName = "copy"
    ) -> torch.Tensor:
        return self._allocate(shape, dtype, stream)[0]

    def _allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: StreamName
    ) -> tuple[torch.Tensor, Any]:
        """New memory as a tensor, and its bytes, which do not count as a reference to it."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._take(nbytes)
        raw = self._shared_memory(nbytes) if self._shared and nbytes else np.empty(nbytes, np.uint8)
        raw.fill(POISON)
        # The owner is deleted when the last view of the memory is gone.
        owner = _Owner(raw, self._free)
        target = torch.from_numpy(np.asarray(owner)).view(dtype).reshape(tuple(shape))
        with self._lock:
            first, found = raw.ctypes.data, self._streams[stream]
            # Earlier work of this stream may still use the memory for what was freed.
            before = _Use(first, first + nbytes, found, found.number, writes=True)
            self._buffers[first] = _FakeBuffer(raw, found, [before])
        return target, raw

    def _shared_memory(self, nbytes: int) -> Any:
        fd = os.memfd_create("penstock-fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        raw = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self._files[raw.ctypes.data] = fd
        return raw

    def export(self, tensor: torch.Tensor) -> bytes:
        first = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
        fd = self._files.get(first)
        if fd is None:
            raise OSError(f"{self.name} cannot share this memory with other processes")
        layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return pickle.dumps((os.getpid(), fd, tensor.dtype, layout))

    def from_export(self, handle: bytes) -> torch.Tensor:
        pid, fd, dtype, layout = pickle.loads(handle)
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            raw = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        owner = _Owner(raw, self._unmap)
        tensor = torch.from_numpy(np.asarray(owner)).view(dtype).as_strided(*layout)
        with self._lock:
            self._buffers[raw.ctypes.data] = _FakeBuffer(raw, self._streams["copy"])
        return tensor

    def _unmap(self, raw: Any, address: int) -> None:
        """The memory of another process is not used any more."""
        with self._lock:
            buffer = self._buffers.pop(address, None)
            if buffer is None:
                return
            for use in buffer.uses:
                if use.number > use.stream.seen:
                    self.faults.append(
                        "memory of another process was unmapped while the stream "
                        f"{use.stream.name} used it"
                    )
            # So that a fault does not end the process.
            buffer.stream.put(partial(_keep, raw))

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if self._in_use + nbytes > self._capacity:
                raise torch.OutOfMemoryError(
                    f"the fake device has {self._capacity} bytes, {self._in_use} in use, and "
                    f"{nbytes} more are needed"
                )
            self.allocations += 1
            self._in_use += nbytes
            self.peak = max(self.peak, self._in_use)

    def _free(self, raw: Any, address: int) -> None:
        # Also for a copy in flight: its memory is used again only by later work of its stream.
        with self._lock:
            buffer = self._buffers.pop(address, None)
            self._in_use -= raw.nbytes
            for use in () if buffer is None else buffer.uses:
                if buffer is not None and not buffer.stream.is_after(use.stream, use.number):
                    self.faults.append(
                        f"memory of the stream {buffer.stream.name} was freed while the stream "
                        f"{use.stream.name} used it"
                    )
            fd = self._files.pop(address, None)
            if buffer is not None:
                # Whoever drops a tensor does not wait for its stream.
                buffer.stream.put(partial(_poison, raw, fd))

    def _use(
        self,
        stream: _FakeStream,
        number: int,
        tensors: Sequence[torch.Tensor],
        *,
        writes: bool,
    ) -> None:
        """Note that work ``number`` of a stream uses memory, and compare it with other uses."""
        for tensor in tensors:
            if not tensor.numel():
                continue
            first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            for start, buffer in self._buffers.items():
                if start <= first and end <= start + buffer.raw.nbytes:
                    break
            else:
                self.faults.append(f"the stream {stream.name} uses memory that is not the device's")
                continue
            for use in buffer.uses:
                overlaps = use.first < end and first < use.end and (writes or use.writes)
                if overlaps and not stream.is_after(use.stream, use.number):
                    self.faults.append(
                        f"the stream {stream.name} uses memory that the stream "
                        f"{use.stream.name} is still using"
                    )
            buffer.uses = [use for use in buffer.uses if use.number > use.stream.seen]
            buffer.uses.append(_Use(first, end, stream, number, writes))

    # Work.

    def _give(
        self,
        name: StreamName,
        work: Callable[[], None],
        seconds: float,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        with self._lock:
            stream = self._streams[name]
            stream.number += 1
            self._use(stream, stream.number, reads, writes=False)
            self._use(stream, stream.number, writes, writes=True)
            stream.time += self._times.launch + seconds
            fails, stream.fails = stream.fails, None
            stream.put(work if fails is None else _raising(fails))

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        target, raw = self._allocate(source.shape, source.dtype, "copy")

        def write(content: torch.Tensor) -> None:
            # As on a GPU, a copy in flight does not keep its target alive.
            raw[:] = _bytes(content).numpy()

        self._copy(target, source, "copy", write)
        return target

    def copy_to(
        self, target: torch.Tensor, source: torch.Tensor, stream: StreamName = "copy"
    ) -> None:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"{source.dtype} {source.shape} into {target.dtype} {target.shape}")

        def write(content: torch.Tensor) -> None:
            target.copy_(content)

        self._copy(target, source, stream, write)

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: StreamName,
        write: Callable[[torch.Tensor], None],
    ) -> None:
        expected = source.clone(memory_format=torch.contiguous_format)
        # Nor does it keep its source alive.
        alive = weakref.ref(source)
        self.copied += source.nbytes

        def work() -> None:
            found = alive()
            if found is None:
                self.faults.append("host memory was given up while it was copied to the device")
            elif not _same_bytes(found, expected):
                self.faults.append("host memory was written while it was copied to the device")
            write(expected)

        self._give(stream, work, source.nbytes / self._times.bus, (), (target,))

    def run(
        self,
        function: Callable[[], None],
        stream: StreamName,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        seconds = sum(tensor.nbytes for tensor in writes) / self._times.prep
        self._give(stream, function, seconds, reads, writes)

    def record(self, stream: StreamName = "copy") -> Event:
        with self._lock:
            found = self._streams[stream]
            event = FakeEvent(found, found.number, found.time)
            found.put(event.fire)
            return event

    def wait(self, stream: StreamName, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self._lock:
            found = self._streams[stream]
            if not event.fired:
                found.put(event.passed)
            found.time = max(found.time, event.at)
            found.knows[event.stream] = max(found.knows.get(event.stream, 0), event.number)

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        # Work that the loop gives its stream happens after the event. Here the loop reads the
        # tensors at once, so it waits for the event itself.
        event.wait()
        self.wait("loop", event)
        self.arrived += len(tensors)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._in_use, self._capacity)


class _Owner:
    """Memory of the device as an array. Arrays made of it refer to it.

    Its end is that of the memory. It costs the loop less than ``weakref.finalize``.
    """

    def __init__(self, raw: Any, free: Callable[[Any, int], None]) -> None:
        self.__array_interface__ = raw.__array_interface__
        self._raw, self._free, self._address = raw, free, raw.ctypes.data

    def __del__(self) -> None:
        self._free(self._raw, self._address)


def _raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def _keep(raw: Any) -> None:
    """Work that only refers to memory."""


def _poison(raw: Any, fd: int | None) -> None:
    raw.fill(POISON)
    if fd is not None:
        os.close(fd)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    # By bytes: NaN differs from itself.
    return bool(torch.equal(_bytes(left), _bytes(right)))
