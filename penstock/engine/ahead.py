"""Batches on their way to the training loop, on which a background thread still works.

Pinning and copying to a device are such work. The thread of the loop takes the batches from the
feed, because samplers and datasets may run there; it only does not wait for the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from penstock.engine.feed import Ready
from penstock.stats import Meter

DEPTH = 2
"""Batches that are taken ahead. One is enough for a loop with even steps; torch takes all that its
workers have prepared."""


class Background(Protocol):
    """The work on batches that is done ahead of the loop."""

    def convert(self, value: Any) -> Any:
        """Begin the work on the value of a batch. Called in the background thread.

        The result does not refer to the memory of the batch.
        """

    def settle(self) -> None:
        """Wait until the memory of the last converted batch is no longer read.

        Called in the background thread, when the loop can take the batch already.
        """

    def hand_out(self, converted: Any) -> Any:
        """The batch as the loop gets it. Called in the thread of the loop."""


class _Conversion:
    """A batch to convert, and then the result. Cheaper than a ``Future``: it has one waiter."""

    __slots__ = ("_running", "cancelled", "converted", "error", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.converted: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self, convert: Callable[[Any], Any]) -> None:
        try:
            self.converted = convert(self.value)
        except BaseException as error:  # raised in the thread of the loop
            self.error = error
        # The slot of the batch goes back as soon as the copy is made.
        self.value = None
        self._running.release()

    def result(self) -> Any:
        """Wait for the conversion."""
        with self._running:
            pass
        if self.error is not None:
            raise self.error
        return self.converted


def _convert_all(work: SimpleQueue[_Conversion | None], background: Background) -> None:
    """What the background thread runs. It does not refer to ``Ahead``, which may be forgotten."""
    while (conversion := work.get()) is not None:
        if not conversion.cancelled:
            conversion.run(background.convert)
            # The event of a copy that failed raises its error again in ``hand_out``.
            with contextlib.suppress(Exception):
                background.settle()
        del conversion


class _Taken(NamedTuple):
    """A batch that was taken from the feed: its conversion, or the error of taking it."""

    ready: Ready | None
    value: _Conversion | None = None
    error: Exception | None = None


class Ahead:
    """Takes batches a little before the loop needs them, and converts them in a background thread.

    ``begin`` is called in the thread of the loop when the first batch is there, and returns the
    work to do. Batches and errors keep their order. Used from one thread at a time.
    """

    def __init__(self, begin: Callable[[], Background] | None = None, depth: int = DEPTH) -> None:
        self._begin = begin
        self._depth = depth
        self._background: Background | None = None
        self._work: SimpleQueue[_Conversion | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._taken: deque[_Taken] = deque()

    def __len__(self) -> int:
        """The number of batches that were taken and not handed out."""
        return len(self._taken)

    def next(
        self,
        take: Callable[[], Ready | None],
        may_take: Callable[[int], bool],
        meter: Meter,
    ) -> Ready | None:
        """The next batch, converted; ``None`` after the last.

        ``take`` returns the next batch of the feed. ``may_take``: whether it would return one at
        once that still belongs to the epoch, given the number of batches taken before it.
        ``meter``: counts the wait for the background thread.
        """
        if not self._taken:
            self._taken.append(self._submit(take()))
        first = self._taken.popleft()
        if first.error is not None:
            raise first.error
        while self._goes_on(first) and len(self._taken) < self._depth:
            if not may_take(1 + len(self._taken)):
                break
            try:
                self._taken.append(self._submit(take()))
            except Exception as error:  # of a later batch: raised in its place
                self._taken.append(_Taken(None, error=error))
        if first.ready is None or first.value is None or self._background is None:
            return first.ready
        started = meter.clock()
        try:
            converted = first.value.result()
        finally:
            meter.waited(meter.clock() - started)
        return first.ready._replace(value=self._background.hand_out(converted))

    def _goes_on(self, first: _Taken) -> bool:
        """Whether the feed may have more batches: nothing follows its end, or an error."""
        return (self._taken[-1] if self._taken else first).ready is not None

    def _submit(self, ready: Ready | None) -> _Taken:
        if ready is None or not ready.rows:
            return _Taken(ready)
        if self._background is None:
            assert self._begin is not None
            self._background = self._begin()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_convert_all,
                args=(self._work, self._background),
                name="penstock-ahead_0",
                daemon=True,
            )
            self._thread.start()
        conversion = _Conversion(ready.value)
        self._work.put(conversion)
        return _Taken(ready._replace(value=None), conversion)

    def begin_with(self, begin: Callable[[], Background]) -> None:
        """Do other work with the batches of a new feed, and forget those that were taken."""
        self.close()
        self._begin, self._background = begin, None

    def clear(self) -> None:
        """Forget the batches that were not handed out."""
        for taken in self._taken:
            if taken.value is not None:
                taken.value.cancelled = True
        self._taken.clear()

    def close(self) -> None:
        """End the thread."""
        self.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join()
