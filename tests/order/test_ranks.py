"""Which rank is dealt each sample: several machines divide their caches by that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.order import (
    Budget,
    Budgeted,
    Cursor,
    Deal,
    Echoed,
    EchoedBatches,
    EchoSequence,
    MidEpoch,
    Plan,
    Shuffled,
)

SAMPLES = 23


def deal(rank: int, world: int) -> Deal:
    return Deal(Shuffled(), SAMPLES, 5, batch_size=4, rank=rank, world=world)


def budgeted(rank: int, world: int) -> Plan:
    budget = Budget(np.arange(SAMPLES) % 7 + 1, limit=12)
    return Budgeted(Shuffled(), SAMPLES, 5, budget, rank, world)


TWICE = EchoSequence(2, window=4, seed=5)

PLANS: dict[str, Callable[[int, int], Plan]] = {
    "deal": deal,
    "in the middle": lambda rank, world: MidEpoch(deal(rank, world)),
    "echo": lambda rank, world: Echoed(deal(rank, world), TWICE, batch_size=4),
    "echo of batches": lambda rank, world: EchoedBatches(budgeted(rank, world), TWICE),
    "lengths": budgeted,
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_each_sample_belongs_to_a_rank_that_is_dealt_it(kind: str, world: int) -> None:
    made = PLANS[kind]
    dealt: list[set[int]] = [set() for _ in range(world)]
    for rank in range(world):
        for batch in made(rank, world).batches(Cursor()):
            dealt[rank] |= {*batch.indices.tolist()}
    for rank in range(world):
        ranks = made(rank, world).ranks(0)
        assert ranks is not None
        found = ranks.tolist()
        assert [index in dealt[owner] for index, owner in enumerate(found)] == [True] * SAMPLES
