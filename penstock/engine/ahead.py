"""Batches on their way to the training loop, on which a background thread still works.

Pinning and copying to a device are such work. The background thread also takes the batches from the
feed where it may. Where samplers or datasets run when a batch is taken, the thread of the loop
takes it, and only does not wait for the copy.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from penstock.engine.feed import Ready
from penstock.order import BatchKeys
from penstock.stats import Meter

DEPTH = 2
"""Batches that are taken ahead. One is enough for a loop with even steps; torch takes all that its
workers have prepared."""


class Background(Protocol):
    """The work on batches that is done ahead of the loop."""

    def convert(self, value: Any, keys: BatchKeys) -> Any:
        """Begin the work on the value of a batch. Called in the background thread.

        The result does not refer to the memory of the batch.
        """

    def settle(self) -> None:
        """Wait until the memory of the last converted batch is no longer read.

        Called in the background thread, when the loop can take the batch already.
        """

    def hand_out(self, converted: Any) -> Any:
        """The batch as the loop gets it. Called in the thread of the loop."""

    def close(self) -> None:
        """There are no more batches. Called after the background thread has ended."""


class _Conversion:
    """A batch to convert, and then the result. Cheaper than a ``Future``: it has one waiter."""

    __slots__ = ("_keys", "_running", "cancelled", "converted", "error", "over", "value")

    def __init__(self, value: Any, keys: BatchKeys) -> None:
        self.value = value
        self._keys = keys
        self.converted: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.over = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self, convert: Callable[[Any, BatchKeys], Any]) -> None:
        try:
            self.converted = convert(self.value, self._keys)
        except BaseException as error:  # raised in the thread of the loop
            self.error = error
        # The slot of the batch goes back as soon as the copy is made.
        self.value = None
        self.over = True
        self._running.release()

    def wait(self) -> None:
        """Wait for the conversion."""
        with self._running:
            pass

    def result(self) -> Any:
        """What ``convert`` returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.converted


class _Taken(NamedTuple):
    """A batch that was taken from the feed: its conversion, or the error of taking it."""

    ready: Ready | None
    value: _Conversion | None = None
    error: Exception | None = None


def _taken(ready: Ready | None) -> _Taken:
    if ready is None or not ready.rows:
        return _Taken(ready)
    return _Taken(ready._replace(value=None), _Conversion(ready.value, ready.batch_keys))


class _Line:
    """The batches that were taken and not handed out, in order.

    The loop and the background thread share it. Both count batches from the start, so that neither
    needs a lock to know how many may be taken.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.batches: deque[_Taken] = deque()
        self.take_ready: Callable[[], Ready | None] | None = None
        """Takes the next batch if it is ready; ``None``: only the loop may take batches."""
        self.taking = threading.Lock()
        """Held by whoever takes a batch from the feed."""
        self.taken = 0
        """Batches that were taken. Changed with the lock ``taking``."""
        self.failed = False
        """Taking one failed in the background thread. Changed with the lock ``taking``."""
        self.handed_out = 0
        """Batches that were handed out. Changed by the loop."""
        self.limit = 0
        """Batches that may be taken in all. Changed by the loop."""

    def add(self, taken: _Taken) -> _Taken:
        self.batches.append(taken)
        self.taken += 1
        return taken

    def take_ahead(self) -> _Taken | None:
        """Take a batch in the background thread; ``None``: there is none, or no room for it."""
        # While the loop takes a batch itself, it waits for it. It asks for more afterwards.
        if not self.taking.acquire(blocking=False):
            return None
        try:
            if self.take_ready is None or self.failed or not self._room():
                return None
            try:
                ready = self.take_ready()
            except Exception as error:  # raised in the thread of the loop
                self.failed = True
                return self.add(_Taken(None, error=error))
            return None if ready is None else self.add(_taken(ready))
        finally:
            self.taking.release()

    def _room(self) -> bool:
        return self.taken < min(self.limit, self.handed_out + self.depth)

    def clear(self) -> None:
        """Forget all batches, and take none ahead until the loop asks for a batch."""
        with self.taking:
            for taken in self.batches:
                if taken.value is not None:
                    taken.value.cancelled = True
            self.batches.clear()
            self.failed = False
            self.limit = self.handed_out = self.taken


_FILL = object()
"""Tells the background thread to take batches that are ready."""


def _convert_all(work: SimpleQueue[Any], line: _Line, background: Background) -> None:
    """What the background thread runs. It does not refer to ``Ahead``, which may be forgotten."""
    while (item := work.get()) is not None:
        if item is _FILL:
            while (taken := line.take_ahead()) is not None:
                if taken.value is not None:
                    _convert(taken.value, background)
                del taken
        else:
            _convert(item, background)
        del item


def _convert(conversion: _Conversion, background: Background) -> None:
    if not conversion.cancelled:
        conversion.run(background.convert)
        # The event of a copy that failed raises its error again in ``hand_out``.
        with contextlib.suppress(Exception):
            background.settle()


class Ahead:
    """Takes batches a little before the loop needs them, and converts them in a background thread.

    ``begin`` is called in the thread of the loop when the first batch is there, and returns the
    work to do. Batches and errors keep their order. Used from one thread at a time.
    """

    def __init__(self, begin: Callable[[], Background] | None = None, depth: int = DEPTH) -> None:
        self._begin = begin
        self._background: Background | None = None
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._depth = depth
        self._line = _Line(depth)

    def __len__(self) -> int:
        """The number of batches that were taken and not handed out."""
        return len(self._line.batches)

    def take_ready(self, left: int | None) -> Ready | None:
        """The next batch if it is converted; ``None``: ``next`` waits for it.

        ``left``: batches that are left of the epoch; ``None`` if not known. It does the same as
        ``next``, in few calls: the training loop pays for each of them.
        """
        line = self._line
        batches = line.batches
        if not batches or line.take_ready is None:
            return None
        ready, conversion, _ = batches[0]
        if ready is None or conversion is None or not conversion.over:
            return None
        line.limit = sys.maxsize if left is None else line.handed_out + left
        batches.popleft()
        line.handed_out += 1
        self._work.put(_FILL)
        return self._hand_out(ready, conversion)

    def next(
        self,
        take: Callable[[], Ready | None],
        ready: Callable[[], bool],
        left: int | None,
        meter: Meter,
    ) -> Ready | None:
        """The next batch, converted; ``None`` after the last.

        ``take`` waits for the next batch of the feed. ``ready``: whether it would return at once.
        ``left``: see ``take_ready``. ``meter``: counts the wait for the background thread.
        """
        line = self._line
        batches = line.batches
        line.limit = sys.maxsize if left is None else line.handed_out + left
        if not batches:
            with line.taking:
                # The background thread may have taken it meanwhile.
                if not batches:
                    self._submit(line.add(_taken(take())))
        first = batches.popleft()
        line.handed_out += 1
        if first.error is not None:
            raise first.error
        if line.take_ready is None:
            self._take_more(first, take, ready)
        elif self._thread is not None:
            self._work.put(_FILL)
        if first.ready is None or first.value is None:
            return first.ready
        started = meter.clock()
        try:
            first.value.wait()
        finally:
            meter.waited(meter.clock() - started)
        return self._hand_out(first.ready, first.value)

    def _hand_out(self, ready: Ready, conversion: _Conversion) -> Ready:
        background = self._background
        assert background is not None
        value = background.hand_out(conversion.result())
        # ``_replace`` takes several times as long.
        return Ready(ready.batch_keys, value, ready.rows, ready.nbytes, ready.ended)

    def _take_more(
        self, first: _Taken, take: Callable[[], Ready | None], ready: Callable[[], bool]
    ) -> None:
        """Take batches that are ready, in the thread of the loop."""
        line = self._line
        while line.taken < min(line.limit, line.handed_out + line.depth):
            # Nothing follows the end of the feed, or an error.
            if (line.batches[-1] if line.batches else first).ready is None or not ready():
                return
            try:
                self._submit(line.add(_taken(take())))
            except Exception as error:  # of a later batch: raised in its place
                line.add(_Taken(None, error=error))

    def _submit(self, taken: _Taken) -> None:
        if taken.value is None:
            return
        if self._background is None:
            assert self._begin is not None
            self._background = self._begin()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_convert_all,
                args=(self._work, self._line, self._background),
                name="penstock-ahead_0",
                daemon=True,
            )
            self._thread.start()
        self._work.put(taken.value)

    def begin_with(self, begin: Callable[[], Background]) -> None:
        """Do other work with the batches of a new feed, and forget those that were taken."""
        self.close()
        self._begin = begin

    def take_from(self, take_ready: Callable[[], Ready | None] | None) -> None:
        """Take batches of a feed that begins, and forget those that were taken.

        ``take_ready`` is called in the background thread, and returns the next batch if it is
        ready. ``None``: only the thread of the loop may take batches.
        """
        self.clear()
        self._line.take_ready = take_ready

    def leave_of(self, most_ahead: int | None) -> int | None:
        """How many of the batches that may be dealt ahead (see ``Plan``) the feed may have.

        The batches that are taken ahead are the others.
        """
        depth = self._depth if most_ahead is None else min(self._depth, max(0, most_ahead - 1))
        self._line.depth = depth
        return None if most_ahead is None else most_ahead - depth

    def clear(self) -> None:
        """Forget the batches that were not handed out."""
        self._line.clear()

    def close(self) -> None:
        """End the thread."""
        self.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()
        background, self._background = self._background, None
        if background is not None:
            background.close()
