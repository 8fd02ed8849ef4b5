"""A feed with another batch size than the group's: it cuts or joins the group's batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.engine.feed import Queue, Ready
from penstock.node.copy_desk import NodeCopyDesk
from penstock.node.member import NodeFeed
from penstock.order import BatchKeys, Cursor, Deal
from penstock.tree import fill

Pieces = list[tuple[tuple[int, int], int, int]]
"""The rows of the group's batches that make up one batch: ((epoch, number), first row, end row)."""


class RecutFeed:
    """A feed of batches of ``size`` samples, made from the group's batches of ``unit`` samples.

    ``size`` divides ``unit`` or is a multiple of it. A part of one batch is a view of it; parts of
    several are copied together in this process. ``deal`` deals the group's batches to this member.
    If a batch does not match them, as after a resume with another batch size, the node is asked for
    that batch itself.
    """

    def __init__(self, inner: NodeFeed, deal: Deal, size: int, unit: int) -> None:
        self._inner = inner
        self._deal = replace(deal, batch_size=unit, drop_last=False)
        self._size = size
        self._unit = unit
        self._todo: deque[tuple[BatchKeys, Pieces]] = deque()
        self._units: dict[tuple[int, int], Ready] = {}

    @property
    def restarts(self) -> int:
        return self._inner.restarts

    def start(
        self,
        batches: Iterator[BatchKeys],
        *,
        any_thread: bool = False,
        most_ahead: int | None = None,
    ) -> None:
        self._todo.clear()
        self._units.clear()
        self._inner.start(self._units_of(batches))

    def settled(self) -> bool:
        return self._inner.settled()

    def ready(self) -> bool:
        return self._inner.ready()

    def queue(self) -> Queue:
        return self._inner.queue()

    def next(self) -> Ready | None:
        while not self._complete():
            unit = self._inner.next()
            if unit is None:
                return None
            self._units[unit.batch_keys.epoch, unit.batch_keys.number] = unit
        plan, pieces = self._todo.popleft()
        ready = self._cut(plan, pieces)
        later = {name for _, others in self._todo for name, _, _ in others}
        last = pieces[-1][0]
        for name in [name for name in self._units if name not in later and name <= last]:
            # The last one may be needed by a batch that has not been planned yet.
            if name != last or pieces[-1][2] >= self._unit:
                del self._units[name]
        return ready

    def refresh(self) -> None:
        self._inner.refresh()

    def copy_desk(self) -> NodeCopyDesk:
        """See ``SharedFeed``."""
        return self._inner.copy_desk()

    def close(self) -> None:
        self._units.clear()
        self._inner.close()

    def _complete(self) -> bool:
        return bool(self._todo) and all(name in self._units for name, _, _ in self._todo[0][1])

    def _units_of(self, plans: Iterator[BatchKeys]) -> Iterator[BatchKeys]:
        """The group's batches that these are made of; consecutive batches share theirs."""
        last: tuple[int, int] | None = None
        for plan in plans:
            made_of = self._made_of(plan)
            if made_of is None:
                own = plan._replace(number=-1 - plan.number)
                self._todo.append((plan, [((own.epoch, own.number), 0, len(plan.indices))]))
                yield own
                continue
            units, pieces = made_of
            self._todo.append((plan, pieces))
            for unit in units:
                if (unit.epoch, unit.number) != last:
                    last = (unit.epoch, unit.number)
                    yield unit

    def _made_of(self, plan: BatchKeys) -> tuple[list[BatchKeys], Pieces] | None:
        """The group's batches that a batch is made of; ``None`` if their samples differ."""
        start = plan.number * self._size
        stop = start + len(plan.indices)
        first, count = start // self._unit, -(-stop // self._unit) - start // self._unit
        position = first * self._unit * self._deal.world
        dealt = self._deal.batches(Cursor(plan.epoch, position, first))
        units = [unit for unit, _ in zip(dealt, range(count), strict=False)]
        pieces, indices = [], []
        for unit in units:
            at = unit.number * self._unit
            begin, end = max(start - at, 0), min(stop - at, len(unit.indices))
            pieces.append(((unit.epoch, unit.number), begin, end))
            indices.append(unit.indices[begin:end])
        if not units or not np.array_equal(np.concatenate(indices), plan.indices):
            return None
        return units, pieces

    def _cut(self, plan: BatchKeys, pieces: Pieces) -> Ready:
        parts = []
        for name, begin, end in pieces:
            unit = self._units[name]
            leaves, skeleton = flatten_batch(unit.value)
            parts.append((skeleton, [leaf[begin:end] for leaf in leaves]))
        skeleton = parts[0][0]
        if len(parts) == 1:
            leaves = parts[0][1]
        else:
            leaves = [_joined(column) for column in zip(*(part for _, part in parts), strict=True)]
        rows = len(plan.indices)
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return Ready(plan, fill(skeleton, leaves), rows, nbytes)


def flatten_batch(value: Any) -> tuple[list[Any], Any]:
    """The columns of a batch, and its skeleton. A column of texts is a list."""
    leaves: list[Any] = []
    return leaves, _columns(value, leaves)


def _columns(node: Any, leaves: list[Any]) -> Any:
    if isinstance(node, list) and node and isinstance(node[0], (str, bytes)):
        leaves.append(node)
        return len(leaves) - 1
    if isinstance(node, (tuple, list)) or hasattr(node, "keys"):
        inner, skeleton = _one_level(node)
        return fill(skeleton, [_columns(child, leaves) for child in inner])
    leaves.append(node)
    return len(leaves) - 1


def _one_level(node: Any) -> tuple[list[Any], Any]:
    if hasattr(node, "keys"):
        return list(node.values()), {key: i for i, key in enumerate(node)}
    made = [*range(len(node))]
    return list(node), type(node)._make(made) if hasattr(node, "_make") else type(node)(made)


def _joined(column: tuple[Any, ...]) -> Any:
    if isinstance(column[0], list):
        return [value for part in column for value in part]
    return np.concatenate(column)
