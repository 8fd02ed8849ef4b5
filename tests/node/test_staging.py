"""The engine of a group: what it has done when it delivers a batch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.engine.build import Assembly, Recipe
from penstock.engine.feed import Ready
from penstock.engine.pools.choose import Choice
from penstock.node.staging import ChosenBatches, StagingEngine, WorkerLimit
from penstock.options import Options
from penstock.order.plan import BatchKeys
from penstock.stops.batch import stack
from penstock.store.shared import SharedStores


class Batches:
    """Some batches to prepare."""

    def __init__(self, count: int) -> None:
        self._left = [BatchKeys(0, n, np.arange(4 * n, 4 * n + 4), None) for n in range(count)]

    def next_batch(self) -> BatchKeys | None:
        return self._left.pop(0) if self._left else None


def test_samples_are_admitted_before_their_batch_is_delivered(tmp_path: Path) -> None:
    """Delivering gives back what was borrowed; a machine that waits would then read them, too."""
    for number in range(16):
        (tmp_path / f"{number}.bin").write_bytes(bytes(100))
    pipeline = ps.from_files(sorted(map(str, tmp_path.iterdir()))).cache("1MB").batch(4)
    stores = SharedStores()
    recipe = Recipe(pipeline, Options(seed=0), stack)
    assembly = Assembly(recipe, Choice("threads", 2, "a test"), stores)
    admitted: list[bool] = []
    delivered = threading.Event()

    def deliver(ready: Ready) -> None:
        # The keeper has decided on all samples of the batches handed out so far.
        admitted.append(not assembly.keepers._handed_out)
        engine.ring.release(ready.value.slot)
        if len(admitted) == 4:
            delivered.set()

    engine = assembly.engine(StagingEngine, staged=True, limit=WorkerLimit(2), deliver=deliver)
    try:
        engine.start(ChosenBatches(Batches(4)))
        while not delivered.is_set():
            ready = engine.next()
            if ready is not None:
                deliver(ready)
            else:
                assert delivered.wait(60.0)
    finally:
        engine.close()
        stores.close()
    assert admitted == [True] * 4
