"""Reservoir sampling: shards are read in sequence, and samples leave a window in random order.

A window of ``w`` slots holds the first ``w`` samples of the sequence. In step ``t`` a random slot
``j[t]`` gives its sample away and takes the next one of the sequence, number ``w + t``; when the
sequence has ended, the rest leaves in random order. So the sample that leaves in step ``t`` came
into its slot in the last step before ``t`` that drew the same slot, or was there from the start.
That needs no simulation from the start of the epoch: only the draws back to that step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.keyed import Key, Keyed
from penstock.order.order import Order, whole

_Indices = NDArray[np.int64]

BLOCK = 4096
"""Draws that are made together, by one generator: 0.1 ms."""

_BLOCKS_KEPT = 8
_EPOCHS_KEPT = 4
"""Epochs whose windows are kept: those of two loaders, and the next ones if they begin early."""

AUTO_SHARDS = 8
"""Shards in the window of ``"auto"``: at any time, samples of this number of shards are mixed.
docs/order.md shows how far samples travel."""


@dataclass(frozen=True)
class Reservoir:
    """Shards in random sequence, each read from its start to its end, mixed by a window of samples.

    ``window``: the number of samples in the window; ``"auto"``: those of eight shards. ``replace``:
    samples stay in the window when they are drawn, as the OneAccess paper has it, so that some come
    several times in an epoch and others not at all; without it, every sample comes once. ``lanes``:
    how many shards are read side by side. If it is a multiple of the number of ranks, each rank
    reads shards of its own. ``shards``: the number of samples in each shard; by default those of
    the source.

    Everything is a function of (seed, epoch, shards, window, lanes). The window itself is never
    saved: a resume computes it.

    >>> order = Reservoir(window=3, shards=(4, 4))
    >>> order.indices(8, seed=0, epoch=0).tolist()
    [6, 7, 0, 5, 4, 3, 1, 2]
    """

    window: int | Literal["auto"] = "auto"
    replace: bool = False
    lanes: int = 1
    shards: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.window != "auto":
            whole("window", self.window, 1)
        whole("lanes", self.lanes, 1)
        if self.shards is not None:
            counts = tuple(whole("a number of samples in shards", n, 0) for n in self.shards)
            object.__setattr__(self, "shards", counts)

    def over(self, shards: NDArray[np.int64] | None, source: str) -> Order:
        """This order for a source with these shards. Raises PipelineError if it has none."""
        given = self.shards if self.shards is not None else shards
        if given is None:
            raise PipelineError(
                f"Reservoir on {source}, which has no shards to read in sequence. Use it with "
                "from_tar, from_mds or from_parquet, give the number of samples in each part with "
                "shards=(...), or leave order= out to shuffle all samples."
            )
        counts = np.asarray(given, dtype=np.int64)
        counts = counts[counts > 0]
        if self.window == "auto":
            window = max(1, int(AUTO_SHARDS * counts.mean())) if len(counts) else 1
        else:
            window = self.window
        kind = ReservoirWithReplacement if self.replace else ReservoirOnce
        return kind(Streamed(tuple(counts.tolist()), window, self.lanes))

    def indices(self, n: int, seed: int, epoch: int) -> _Indices:
        return self.over(None, "a source").indices(n, seed, epoch)


@dataclass(frozen=True)
class Streamed:
    """The sequence of samples before they are mixed: shards in random order, cut into lanes."""

    shards: tuple[int, ...]
    window: int
    lanes: int
    _starts: _Indices = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", np.cumsum([0, *self.shards], dtype=np.int64))

    @property
    def n(self) -> int:
        return int(self._starts[-1])

    def check(self, n: int) -> None:
        if n != self.n:
            raise PipelineError(
                f"The shards of Reservoir have {self.n} samples together, but the source has {n}. "
                "Leave shards= out to use those of the source."
            )

    def samples(self, seed: int, epoch: int, positions: _Indices) -> _Indices:
        """The samples at these positions of the sequence."""
        permutation, ends = _shard_sequence(self.shards, seed, epoch)
        place = ends.searchsorted(positions, side="right")
        before = np.concatenate(([0], ends))[place]
        found: _Indices = self._starts[permutation[place]] + positions - before
        return found

    def span(self, lane: int) -> tuple[int, int]:
        """The first position of a lane, and the number of its samples; lanes differ by one."""
        each, more = divmod(self.n, self.lanes)
        return lane * each + min(lane, more), each + (lane < more)

    def slots(self, lane: int) -> int:
        """The size of the window of a lane."""
        return max(1, min(self.window // self.lanes or 1, self.span(lane)[1]))

    def lane_window(self, lane: int, seed: int, epoch: int) -> _LaneWindow:
        """The window of a lane in an epoch. It decides nothing, but saves computing it again."""
        windows = _windows(self.n, self.window, self.lanes, seed, epoch)
        found = windows.get(lane)
        if found is None:
            made = _LaneWindow(self.slots(lane), self.span(lane)[1], seed, epoch, lane)
            found = windows.setdefault(lane, made)
        return found

    def entering(self, seed: int, epoch: int, first: int, last: int) -> _Indices:
        """The samples of all lanes from number ``first`` to before ``last``, in sequence."""
        parts = []
        for lane in range(self.lanes):
            start, count = self.span(lane)
            parts.append(np.arange(start + min(first, count), start + min(last, count)))
        return self.samples(seed, epoch, np.concatenate(parts))


@lru_cache(maxsize=8)
def _shard_sequence(shards: tuple[int, ...], seed: int, epoch: int) -> tuple[_Indices, _Indices]:
    """The sequence of the shards in an epoch, and the position after the last sample of each."""
    generator = Keyed(seed, "order/reservoir/shards").fresh(Key(index=0, epoch=epoch))
    permutation = generator.permutation(len(shards))
    ends = np.cumsum(np.array(shards, dtype=np.int64)[permutation])
    return permutation, ends


@dataclass(frozen=True)
class ReservoirOnce:
    """Every sample once. Places of the epoch take turns over the lanes."""

    streamed: Streamed

    def indices(self, n: int, seed: int, epoch: int) -> _Indices:
        return self.at(n, seed, epoch, np.arange(n, dtype=np.int64))

    def at(self, n: int, seed: int, epoch: int, places: _Indices) -> _Indices:
        streamed = self.streamed
        streamed.check(n)
        positions = np.empty(len(places), dtype=np.int64)
        lanes = places % streamed.lanes
        for lane in np.unique(lanes).tolist():
            start, _ = streamed.span(lane)
            mine = np.flatnonzero(lanes == lane)
            walk = streamed.lane_window(lane, seed, epoch)
            positions[mine] = start + walk.leaving(places[mine] // streamed.lanes)
        return streamed.samples(seed, epoch, positions)

    def length(self, n: int) -> int:
        self.streamed.check(n)
        return n


@dataclass(frozen=True)
class ReservoirWithReplacement:
    """Samples drawn stay in the window until the sequence pushes them out of their slot."""

    streamed: Streamed

    def indices(self, n: int, seed: int, epoch: int) -> _Indices:
        streamed = self.streamed
        streamed.check(n)
        positions = np.empty(n, dtype=np.int64)
        for lane in range(min(streamed.lanes, n)):
            start, count = streamed.span(lane)
            positions[lane :: streamed.lanes] = start + _drawn_with_replacement(
                streamed.slots(lane), count, seed, epoch, lane
            )
        return streamed.samples(seed, epoch, positions)

    def length(self, n: int) -> int:
        self.streamed.check(n)
        return n


class _LaneWindow:
    """The window of one lane in one epoch: which sample of the lane leaves in which step.

    It keeps the window after the last block it computed, because blocks are mostly asked for in
    order. Any other block starts from a window that is found by looking back.
    """

    def __init__(self, slots: int, count: int, seed: int, epoch: int, lane: int) -> None:
        self._slots = slots
        self._steps = count - slots
        """Steps in which a sample comes in; after them the rest of the window leaves."""
        self._blocks = -(-self._steps // BLOCK)
        self._keyed, self._epoch = Keyed(seed, f"order/reservoir/{lane}"), epoch
        self._lock = threading.Lock()
        self._block = 0
        self._window = np.arange(slots, dtype=np.int64)
        self._recent: OrderedDict[int, _Indices] = OrderedDict()

    def leaving(self, steps: _Indices) -> _Indices:
        """The numbers of the samples that leave in these steps."""
        out = np.empty(len(steps), dtype=np.int64)
        blocks = np.minimum(steps // BLOCK, self._blocks)
        blocks[steps >= self._steps] = self._blocks
        with self._lock:
            for block in np.unique(blocks).tolist():
                mine = blocks == block
                first = self._steps if block == self._blocks else block * BLOCK
                out[mine] = self._outputs(block)[steps[mine] - first]
        return out

    def _outputs(self, block: int) -> _Indices:
        """The samples that leave in a block; the block after the last one is the rest."""
        kept = self._recent.get(block)
        if kept is not None:
            return kept
        self._go_to(block)
        outputs = self._rest() if block == self._blocks else self._advance()
        self._recent[block] = outputs
        if len(self._recent) > _BLOCKS_KEPT:
            self._recent.popitem(last=False)
        return outputs

    def _draws(self, block: int) -> _Indices:
        generator = self._keyed.fresh(Key(index=block, epoch=self._epoch))
        size = min(BLOCK, self._steps - block * BLOCK)
        return generator.integers(0, self._slots, size=size, dtype=np.int64)

    def _advance(self) -> _Indices:
        """Compute the current block, and go to the one after it."""
        first = self._block * BLOCK
        draws = self._draws(self._block)
        incoming = self._slots + first + np.arange(len(draws), dtype=np.int64)
        by_slot = np.argsort(draws, kind="stable")
        again = draws[by_slot[1:]] == draws[by_slot[:-1]]
        outputs = self._window[draws]
        outputs[by_slot[1:][again]] = incoming[by_slot[:-1][again]]
        self._window[draws] = incoming  # of equal slots the last one counts
        self._block += 1
        return outputs

    def _rest(self) -> _Indices:
        generator = self._keyed.fresh(Key(index=self._blocks, epoch=self._epoch, replica=1))
        return self._window[generator.permutation(self._slots)]

    def _go_to(self, block: int) -> None:
        """Make ``_window`` the window before this block."""
        if block == self._block:
            return
        window = np.full(self._slots, -1, dtype=np.int64)
        left, at = self._slots, block
        while left and at:
            at -= 1
            draws = self._draws(at)[::-1]
            slots, last = np.unique(draws, return_index=True)
            new = window[slots] < 0
            step = at * BLOCK + len(draws) - 1 - last[new]
            window[slots[new]] = self._slots + step
            left -= int(new.sum())
        untouched = np.flatnonzero(window < 0)
        window[untouched] = untouched
        self._window, self._block = window, block


@lru_cache(maxsize=_EPOCHS_KEPT)
def _windows(n: int, window: int, lanes: int, seed: int, epoch: int) -> dict[int, _LaneWindow]:
    """The windows of the lanes of an epoch that were made so far."""
    return {}


def _drawn_with_replacement(slots: int, count: int, seed: int, epoch: int, lane: int) -> _Indices:
    """The numbers of the samples that are drawn in all steps of a lane."""
    keyed = Keyed(seed, f"order/reservoir/replace/{lane}")
    window = np.arange(slots, dtype=np.int64)
    out = np.empty(count, dtype=np.int64)
    for block, first in enumerate(range(0, count, BLOCK)):
        generator = keyed.fresh(Key(index=block, epoch=epoch))
        steps = np.arange(min(BLOCK, count - first), dtype=np.int64)
        drawn = generator.integers(0, slots, size=len(steps), dtype=np.int64)
        coming = steps[: max(0, min(len(steps), count - slots - first))]
        into = generator.integers(0, slots, size=len(coming), dtype=np.int64)
        # The sample in a slot came in the last step before this one that went into the slot.
        arrivals = np.sort(into * BLOCK + coming)
        place = arrivals.searchsorted(drawn * BLOCK + steps) - 1
        chosen = window[drawn]
        if len(arrivals):
            found = (place >= 0) & (arrivals[place] // BLOCK == drawn)
            chosen[found] = slots + first + arrivals[place[found]] % BLOCK
            window[into] = slots + first + coming
        out[first : first + len(steps)] = chosen
    return out
