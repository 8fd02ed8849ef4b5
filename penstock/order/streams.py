"""The plan of a stream: each worker reads a stream of its own, and the workers take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock.errors import StateError
from penstock.order.cursor import Cursor
from penstock.order.plan import BatchKeys, Plan
from penstock.serialize import pack, unpack


class Streams(Plan):
    """Deals batches of ``rows`` samples to ``workers`` streams in turn, without ended streams.

    ``BatchKeys.number`` counts the batches of one stream, ``BatchKeys.stream``. ``length`` returns
    the number of samples, or ``None`` if it is unknown. The plan remembers how many batches each
    stream has delivered, because a cursor has only their sum, and the last state of a stream that
    has states.

    >>> streams = Streams(workers=2, rows=3)
    >>> dealt = streams.batches(Cursor())
    >>> [(batch.stream, batch.number) for batch, _ in zip(dealt, range(3))]
    [(0, 0), (1, 0), (0, 1)]
    """

    source_name = "a stream"

    def __init__(
        self,
        workers: int,
        rows: int,
        *,
        drop_last: bool = False,
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._rows = rows
        self._drop_last = drop_last
        self.fewest_rows = rows if drop_last else 1
        self._length = length
        self._delivered = [0] * max(1, workers)
        self._turn = 0
        self._ended: set[int] = set()
        self._states: dict[int, tuple[int, bytes]] = {}
        """By stream, the number of a batch, and the packed state of the stream before it."""

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        if not cursor.batch:
            self._delivered = [0] * len(self._delivered)
            self._turn = 0
            self._ended, self._states = set(), {}
        else:
            self._ended = set(self._ended)  # another deal may still be under way
        epoch = cursor.epoch if self.key_epoch is None else self.key_epoch
        return self._deal(epoch, list(self._delivered), self._turn, dict(self._states))

    def _deal(
        self, epoch: int, numbers: list[int], turn: int, states: dict[int, tuple[int, bytes]]
    ) -> Iterator[BatchKeys]:
        ended, workers = self._ended, len(numbers)
        while len(ended) < workers:
            stream, turn = turn % workers, turn + 1
            if stream in ended:
                continue
            number = numbers[stream]
            numbers[stream] += 1
            indices = np.full(self._rows, stream, dtype=np.int64)
            resumed = states.pop(stream, None)
            yield BatchKeys(epoch, number, indices, None, stream=stream, resumed=resumed)

    def ended(self, batch: BatchKeys) -> None:
        if batch.stream is not None:
            self._ended.add(batch.stream)

    def length(self, cursor: Cursor) -> int | None:
        samples = self._length()
        if samples is None:
            return None
        batches = samples // self._rows if self._drop_last else -(-samples // self._rows)
        return max(0, batches - cursor.batch)

    def left(self, cursor: Cursor) -> int | None:
        """Always ``None``: a stream may end before or after the length it states."""
        return None

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        if batch.stream is not None:
            self._delivered[batch.stream] = batch.number + 1
            self._turn = batch.stream + 1
            if batch.reached:
                self._states[batch.stream] = batch.number + 1, batch.reached
            elif batch.reached is not None:
                self.ended(batch)
        return cursor._replace(batch=cursor.batch + 1)

    def epoch_state(self, epoch: int) -> dict[str, Any]:
        state: dict[str, Any] = {"delivered": list(self._delivered), "turn": self._turn}
        if self._ended:
            state["ended"] = sorted(self._ended)
        if self._states:
            state["states"] = [
                {"stream": stream, "batch": number, "state": unpack(packed)}
                for stream, (number, packed) in sorted(self._states.items())
            ]
        return state if self.key_epoch is None else {**state, "key_epoch": self.key_epoch}

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        super().check_state(epoch_state, first)
        state = epoch_state if isinstance(epoch_state, Mapping) else {}
        delivered, turn = state.get("delivered"), state.get("turn")
        if not isinstance(delivered, list) or not isinstance(turn, int):
            raise StateError(
                "the checkpoint does not say how far each stream was read: it is damaged, or was "
                "taken with a source that is not a stream. Resume with the source it was taken "
                "with, or start anew."
            )
        if len(delivered) != len(self._delivered):
            raise StateError(
                f"the checkpoint was taken with {len(delivered)} streams, one for each worker, and "
                f"this loader has {len(self._delivered)}, so it cannot go on where each stream "
                f"stopped. Give the loader workers={len(delivered)}."
            )

    def restore(self, epoch_state: Any) -> None:
        self.check_state(epoch_state)
        self._delivered = [int(count) for count in epoch_state["delivered"]]
        self._turn = int(epoch_state["turn"])
        self._ended = set(epoch_state.get("ended", ()))
        self._states = {
            saved["stream"]: (saved["batch"], bytes(pack(saved["state"]).tobytes()))
            for saved in epoch_state.get("states", ())
        }
        self.key_epoch = epoch_state.get("key_epoch")
