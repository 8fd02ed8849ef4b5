"""The contract of what a loader iterates: its own engine, or its connection to the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from penstock.order import BatchKeys


class Ready(NamedTuple):
    """A batch as it is handed out.

    ``rows``: samples in it, fewer than in ``batch_keys`` if bad samples were skipped. ``ended``:
    there is no batch, because the stream that should have given it is exhausted.
    """

    batch_keys: BatchKeys
    value: Any
    rows: int
    nbytes: int
    ended: bool = False


class Queue(NamedTuple):
    """The batches of a feed that are not delivered yet.

    ``ready``: the next batch can be taken at once. ``slots`` and ``slot_bytes``: the memory that
    batches take, including the batches that the training loop still holds.
    """

    finished: int = 0
    unfinished: int = 0
    ready: bool = False
    slots: int = 0
    slot_bytes: int = 0


class Feed(Protocol):
    """Prepares batches and hands them out in order. Used from one thread at a time."""

    @property
    def restarts(self) -> int:
        """The number of workers, or nodes, that died and were replaced."""

    def start(
        self,
        batches: Iterator[BatchKeys],
        *,
        any_thread: bool = False,
        most_ahead: int | None = None,
    ) -> None:
        """Prepare these batches from now on, and drop the batches of an earlier call.

        ``any_thread``: other threads may iterate ``batches``, not only the caller of ``next``.
        ``most_ahead``: see ``Plan``.
        """

    def next(self) -> Ready | None:
        """Wait for the next batch and return it; ``None`` after the last."""

    def settled(self) -> bool:
        """Whether the next epoch may begin early. Called once before each ``start``."""

    def refresh(self) -> None:
        """Restart the workers if the dataset was changed since they were started."""

    def ready(self) -> bool:
        """Whether ``next`` would return at once. Asked by the loop for every batch, so cheap."""

    def queue(self) -> Queue:
        """The number of batches not delivered yet, and the memory that batches take."""

    def close(self) -> None:
        """End the workers, or leave the node."""
