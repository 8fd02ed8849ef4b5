"""What making a batch costs: writing rows into a slot, or calling a collate function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from penstock.diagnose.profile.describing import describe
from penstock.diagnose.profile.probes import Clocks, Spent
from penstock.engine.slots import Layout, Slot
from penstock.stops.batch import Batch, Misfit, Pad, stack
from penstock.stops.stop import Rows
from penstock.tree import as_array, leaves_like

MAX_ROWS = 64
MAX_BYTES = 64 << 20
"""Limits of the slot: larger than a CPU's cache, as in a loader."""


class Batching:
    """Puts samples into a few rows of a batch, as a loader does.

    If all samples have one layout, each is written into its row at once. Samples that are padded,
    collated or differ in layout wait until the end of the round.
    """

    def __init__(self, batch: Batch, clocks: Clocks) -> None:
        self.batch = batch
        self.trouble = ""
        """Why these samples make no batch, as a message; empty if they do."""
        self._rows = 1
        self._clocks = clocks
        self._layout: Layout | None = None
        self._columns: list[Any] = []
        self._waiting: list[Any] = []
        self._row = 0
        self._aimed: list[NDArray[Any]] = []
        self._in_place = batch.collate is None
        self._collated: Any = None

    def aim(self, rows: Rows, samples: int) -> None:
        """Let the last stop write the next samples straight into their rows, if it can."""
        self._aimed = []
        if not self._in_place or self._layout is None or samples > self._rows:
            return
        if self._row + samples > self._rows:
            self._row = 0
        rows.aim(self._columns, self._layout.skeleton, self._row)
        self._aimed = rows.given

    def put(self, samples: list[Any]) -> Spent:
        """Write samples into their rows, or let them wait; return the time."""
        if not self._in_place:
            self._waiting.extend(samples)
            return Spent()
        if self._layout is None and not self._make_layout(samples):
            self._waiting.extend(samples)
            return Spent()
        started = self._clocks.now()
        for place, sample in enumerate(samples):
            aimed = self._aimed[place] if place < len(self._aimed) else None
            if not self._write(sample, aimed):
                # Samples differ in layout. A loader then stacks whole batches, and raises if they
                # do not stack.
                self._in_place = False
                self._waiting.append(sample)
        return self._clocks.now().minus(started)

    def end(self) -> Spent:
        """End the round: make batches of the waiting samples; return the time."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self.trouble:
            return Spent()
        collate = self.batch.collate or stack
        started = self._clocks.now()
        for first in range(0, len(waiting), self.batch.size):
            try:
                collated = collate(waiting[first : first + self.batch.size])
            except Misfit as misfit:
                self.trouble = (
                    f"batch() cannot stack these samples: {misfit}. Bring them to one shape with "
                    "a map (resize, crop), or use batch(..., pad=0)."
                )
                return Spent()
            except Exception as error:
                self.trouble = f"collate failed: {type(error).__name__}: {error}"
                return Spent()
            if len(waiting) - first >= self.batch.size:
                self._collated = collated
        return self._clocks.now().minus(started)

    @property
    def needs_process(self) -> str:
        own = self.batch.collate is None or isinstance(self.batch.collate, Pad)
        return "" if own else "collate may hold the GIL"

    def output(self) -> tuple[str, int]:
        """Type and shape of a batch, and its size in bytes."""
        if self._layout is None:
            return describe([self._collated]) if self._collated is not None else ("", 0)
        size = self.batch.size
        arrays = [leaf for leaf in self._layout.leaves if leaf.dtype is not None]
        large = [leaf for leaf in arrays if leaf.shape] or arrays
        words = [f"{leaf.dtype} {'x'.join(map(str, (size, *leaf.shape)))}" for leaf in large]
        return ", ".join(words), sum(leaf.nbytes for leaf in self._layout.leaves) * size

    def _make_layout(self, samples: list[Any]) -> bool:
        row_layout = Layout.of(samples[0], 1)
        if row_layout is None:
            self._in_place = False
            return False
        self._rows = max(1, min(MAX_ROWS, MAX_BYTES // row_layout.nbytes))
        layout = self._layout = replace(row_layout, rows=self._rows)
        self._columns = layout.columns(Slot(0, layout.nbytes, shared=False).map)
        for column in self._columns:
            if column is not None:
                # Touch the pages: a loader reuses its slots, so only the first batches pay for
                # page faults.
                column[:] = 0
        return True

    def _write(self, sample: Any, aimed: NDArray[Any] | None) -> bool:
        layout = self._layout
        if layout is None:
            return False
        try:
            leaves = leaves_like(sample, layout.skeleton)
        except ValueError:
            return False
        row, self._row = self._row, (self._row + 1) % self._rows
        for value, column, leaf in zip(leaves, self._columns, layout.leaves, strict=True):
            if column is None or (aimed is not None and value is aimed):
                continue
            array = as_array(value)
            if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
                return False
            column[row] = array
        return True
