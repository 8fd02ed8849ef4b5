"""How far samples travel with a reservoir, by the size of its window: the order alone, no data."""

from __future__ import annotations

from argparse import Namespace

import numpy as np

from benchmarks.harness.plot import Figure, Point, Range, Series, write
from benchmarks.harness.report import Result, Table
from penstock.order.reservoir import ReservoirOnce, Streamed

SHARDS, IN_SHARD = 64, 1000
WINDOWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sizes of the window, in shards."""

BATCH = 256


def travelled(window: int, seed: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], float]:
    """Shards that each sample travels, from its place in the sequence to its place in the epoch,
    and the number of different shards in a batch, on average. ``window``: in shards."""
    n = SHARDS * IN_SHARD
    order = ReservoirOnce(Streamed((IN_SHARD,) * SHARDS, window * IN_SHARD, 1))
    drawn = order.indices(n, seed, 0)
    position = np.empty(n, dtype=np.int64)
    position[order.streamed.samples(seed, 0, np.arange(n))] = np.arange(n)
    distance = np.abs(np.arange(n) - position[drawn]) / IN_SHARD
    batches = (drawn[: n // BATCH * BATCH] // IN_SHARD).reshape(-1, BATCH)
    return distance, float(np.mean([len(np.unique(batch)) for batch in batches]))


def run(options: Namespace) -> Result:
    rows, points = [], []
    for window in WINDOWS:
        distance, in_batch = travelled(window, seed=0)
        low, middle, high = (float(q) for q in np.quantile(distance, (0.1, 0.5, 0.9)))
        points.append(Point(Range(window, window, window), Range(middle, low, high)))
        rows.append(
            (
                f"{window}",
                f"{window / SHARDS:.0%}",
                *(f"{value:.1f}" for value in (low, middle, high, in_batch)),
            )
        )
    columns = (
        "window, shards",
        "of all",
        "10 %",
        "median",
        "90 %",
        f"shards in a batch of {BATCH}",
    )
    title = f"how far samples travel, in shards ({SHARDS} shards of {IN_SHARD:,} samples)"
    if options.plot is not None:
        write(options.plot, figure(points))
    return Result((Table(title, columns, tuple(rows)),))


def figure(points: list[Point]) -> Figure:
    return Figure(
        "How far samples travel with a reservoir",
        "window, in shards",
        "shards travelled",
        (Series("median, and 10 % to 90 % of all samples", tuple(points), joined=True),),
        zero=True,
        notes=(f"{SHARDS} shards; a window of all of them shuffles the whole epoch",),
    )
