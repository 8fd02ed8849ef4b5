"""What making a batch costs: rows written into a slot, or a collate called."""

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

MOST_ROWS = 64
MOST_BYTES = 64 << 20
"""Rows and bytes that are written in turn: more than a CPU's cache holds, as in a loader."""


class Batching:
    """Puts samples where a loader would, a few rows of it.

    As a loader does, it writes a sample into its row at once where all are of one layout; what is
    padded, collated or does not stack waits for the others.
    """

    def __init__(self, batch: Batch, clocks: Clocks) -> None:
        self.batch = batch
        self.trouble = ""
        """Why there is no batch, in words."""
        self._rows = 1
        self._clocks = clocks
        self._layout: Layout | None = None
        self._columns: list[Any] = []
        self._waiting: list[Any] = []
        self._row = 0
        self._given: list[NDArray[Any]] = []
        self._in_place = batch.collate is None
        self._made: Any = None

    def aim(self, rows: Rows, samples: int) -> None:
        """Let the last stop write the next samples straight into their rows, where it can."""
        self._given = []
        if not self._in_place or self._layout is None or samples > self._rows:
            return
        if self._row + samples > self._rows:
            self._row = 0
        rows.aim(self._columns, self._layout.skeleton, self._row)
        self._given = rows.given

    def put(self, samples: list[Any]) -> Spent:
        """Write these, or have them wait."""
        if not self._in_place:
            self._waiting.extend(samples)
            return Spent()
        if self._layout is None and not self._lay_out(samples):
            self._waiting.extend(samples)
            return Spent()
        started = self._clocks.now()
        for place, sample in enumerate(samples):
            given = self._given[place] if place < len(self._given) else None
            if not self._write(sample, given):
                # Samples differ in layout; the loader then stacks whole batches, and says why
                # where it cannot.
                self._in_place = False
                self._waiting.append(sample)
        return self._clocks.now().minus(started)

    def end(self) -> Spent:
        """Make batches of those that wait; the round is over."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self.trouble:
            return Spent()
        collate = self.batch.collate or stack
        started = self._clocks.now()
        for first in range(0, len(waiting), self.batch.size):
            try:
                made = collate(waiting[first : first + self.batch.size])
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
                self._made = made
        return self._clocks.now().minus(started)

    @property
    def needs_process(self) -> str:
        mine = self.batch.collate is None or isinstance(self.batch.collate, Pad)
        return "" if mine else "collate may hold the GIL"

    def leaves(self) -> tuple[str, int]:
        """What a batch is, and its bytes."""
        if self._layout is None:
            return describe([self._made]) if self._made is not None else ("", 0)
        size = self.batch.size
        arrays = [leaf for leaf in self._layout.leaves if leaf.dtype is not None]
        large = [leaf for leaf in arrays if leaf.shape] or arrays
        words = [f"{leaf.dtype} {'x'.join(map(str, (size, *leaf.shape)))}" for leaf in large]
        return ", ".join(words), sum(leaf.nbytes for leaf in self._layout.leaves) * size

    def _lay_out(self, samples: list[Any]) -> bool:
        one = Layout.of(samples[0], 1)
        if one is None:
            self._in_place = False
            return False
        self._rows = max(1, min(MOST_ROWS, MOST_BYTES // one.nbytes))
        layout = self._layout = replace(one, rows=self._rows)
        self._columns = layout.columns(Slot(0, layout.nbytes, shared=False).map)
        for column in self._columns:
            if column is not None:
                column[:] = 0  # a loader uses its slots again; only the first batches pay for pages
        return True

    def _write(self, sample: Any, given: NDArray[Any] | None) -> bool:
        layout = self._layout
        if layout is None:
            return False
        try:
            leaves = leaves_like(sample, layout.skeleton)
        except ValueError:
            return False
        row, self._row = self._row, (self._row + 1) % self._rows
        for value, column, leaf in zip(leaves, self._columns, layout.leaves, strict=True):
            if column is None or (given is not None and value is given):
                continue
            plain = as_array(value)
            if plain is None or plain.shape != leaf.shape or plain.dtype != leaf.dtype:
                return False
            column[row] = plain
        return True
