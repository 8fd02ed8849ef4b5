"""What a loader iterates: the engine of its own process, or a member's line to the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from penstock.order import BatchKeys


class Ready(NamedTuple):
    """A batch as it is handed out; ``rows`` is smaller than asked where samples were skipped.

    ``ended``: there is no batch, because the stream that was to give it is exhausted.
    """

    plan: BatchKeys
    value: Any
    rows: int
    nbytes: int
    ended: bool = False


class Queue(NamedTuple):
    """The batches of a feed that are not delivered yet.

    ``ready``: the next batch can be taken at once. ``slots`` and ``slot_bytes``: the memory that
    batches take, those included that the training loop still holds.
    """

    finished: int = 0
    unfinished: int = 0
    ready: bool = False
    slots: int = 0
    slot_bytes: int = 0


class Feed(Protocol):
    """Batches in order. Used from one thread at a time."""

    @property
    def restarts(self) -> int:
        """How many workers, or nodes, died and were replaced."""

    def start(self, batches: Iterator[BatchKeys]) -> None:
        """Prepare these batches from now on, and drop what was asked for before."""

    def next(self) -> Ready | None:
        """The next batch, or ``None`` after the last. Waits for it."""

    def settled(self) -> bool:
        """Whether the next epoch may be begun early; asked once whenever the loader starts."""

    def refresh(self) -> None:
        """Let workers see what was changed in the dataset since they were started."""

    def queue(self) -> Queue:
        """How many batches wait, and the memory they take."""

    def close(self) -> None:
        """End the workers, or leave the node."""
